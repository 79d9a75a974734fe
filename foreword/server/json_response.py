"""JSON responses: compact UTF-8, never a NaN."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response

__all__ = ["JSONResponse", "json_bytes"]


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate out of a request that is quoted in an error becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace")


class JSONResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
