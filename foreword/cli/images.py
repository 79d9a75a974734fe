"""Pictures of the command line: files become parts of a message, as a server takes them."""

from __future__ import annotations

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword.cli.answers import Message
from foreword.errors import InvalidRequest

__all__ = ["add_image_option", "user_message"]

DEFAULT_MIME_TYPE = "image/png"  # some servers want to be told a type; ours looks at the bytes


def add_image_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=f"{what}; may be given several times")


def user_message(text: str, images: Sequence[str]) -> Message:
    """What the user says, behind the pictures that are shown. Raises InvalidRequest for a file that cannot be read."""
    return {"role": "user", "content": [*map(_part, images), {"type": "text", "text": text}] if images else text}


def _part(file: str) -> dict[str, Any]:
    try:
        data = Path(file).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"--image {file}: {reason}", "image") from None
    kind = mimetypes.guess_type(file)[0] or DEFAULT_MIME_TYPE
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
