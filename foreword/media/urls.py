"""Pictures whose address holds them, or names a file of this machine."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from foreword.errors import InvalidRequest

__all__ = ["check_bytes", "read_data_url", "read_file_url"]

MB = 1_000_000


def check_bytes(num_bytes: int, max_bytes: int, where: str) -> None:
    """Raises InvalidRequest for a file that is too large."""
    if num_bytes > max_bytes:
        raise InvalidRequest(f"{where}: the picture's file is larger than {max_bytes / MB:g} MB (--max-image-mb)", where)


def read_data_url(url: str, max_bytes: int, where: str) -> bytes:
    """Bytes of a data: URL; its media type is not looked at. Raises InvalidRequest."""
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{where}: a data: URL must hold a comma before the data", where)
    if not head.lower().endswith(";base64"):
        data = _decode_percent(body, where)
    else:
        text = "".join((unquote(body) if "%" in body else body).split())
        check_bytes(len(text) // 4 * 3 - 2, max_bytes, where)  # at least: two bytes may be padding
        data = _decode_base64(text, where)
    check_bytes(len(data), max_bytes, where)
    return data


def _decode_percent(body: str, where: str) -> bytes:
    try:
        return unquote_to_bytes(body)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise InvalidRequest(f"{where}: the data of the data: URL is not Unicode", where) from None


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        raise InvalidRequest(f"{where}: the data of the data: URL is not base64", where) from None


def read_file_url(url: str, root: Path | None, max_bytes: int, where: str) -> bytes:
    """A file below `root`, which has no symbolic links in it. InvalidRequest is the same for what lies elsewhere or nowhere."""
    if root is None:
        raise InvalidRequest(f"{where}: file: URLs are not allowed here (--allowed-local-media-path)", where)
    refusal = InvalidRequest(f"{where}: there is no such file below the directory of --allowed-local-media-path", where)
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(root):
            raise refusal
        return _read_file(path, max_bytes, where)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle; ValueError: a zero byte
        raise refusal from None


def _read_file(path: Path, max_bytes: int, where: str) -> bytes:
    """Raises OSError for what is no regular file, or became a link in the meantime."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError
        check_bytes(facts.st_size, max_bytes, where)
        data = file.read(max_bytes + 1)
    check_bytes(len(data), max_bytes, where)
    return data
