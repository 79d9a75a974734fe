"""Exceptions become OpenAI's error envelope, with the status and headers that clients act on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from foreword.errors import ForewordError, InvalidRequest, Unauthorized, safe_message
from foreword.server.http import CLIENT_CLOSED, JSONResponse

__all__ = ["add_error_handlers", "error_body", "error_headers", "error_response", "rename_field"]

logger = logging.getLogger("foreword.serve")
MAX_SHOWN_CHARS = 80  # characters of an invalid value in a message


def error_body(error: ForewordError) -> dict[str, Any]:
    """`{"error": {...}}`"""
    return {
        "error": {"message": str(error), "type": error.error_type, "param": error.param, "code": error.code}
    }


def error_response(error: ForewordError) -> Response:
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


def error_headers(error: ForewordError) -> dict[str, str]:
    """WWW-Authenticate and Retry-After (whole seconds), where they apply."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    return headers


@contextmanager
def rename_field(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field in errors: `names` maps the engine's name to the route's."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        rest = error.message.removeprefix(error.param)
        name = names[error.param]
        raise type(error)(error.message if rest == error.message else name + rest, name) from None


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ForewordError, _on_foreword_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_foreword_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForewordError)
    if error.status >= 500:
        logger.warning("%s %s: %s", request.method, request.url.path, safe_message(error))
    return error_response(error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_invalid_request(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors: 404, 405, and unreadable bodies."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: (f"there is no route {request.method} {request.url.path}", "not_found"),
        405: (f"{request.url.path} does not take {request.method}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), None))
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))


def _invalid_request(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first invalid field, with every reason pydantic gives for it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        )
    if _field_path(first["loc"]) is None:
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    first, path = _innermost_error(errors)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {path!r}", path)
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is required", path)
    messages = (error["msg"] for error in errors if _field_path(error["loc"]) == path)
    reasons = dict.fromkeys(
        text.replace("Input should be", "must be").replace("Value error, ", "") for text in messages
    )
    value = repr(first["input"])
    shown = value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "..."
    return InvalidRequest(f"{path} {' or '.join(reasons)}, got {shown}", path)


def _innermost_error(errors: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The deepest error inside the first invalid field: of a union of text and list, the list's item."""
    paths = [_field_path(error["loc"]) or "" for error in errors]
    inner = (f"{paths[0]}.", f"{paths[0]}[")
    index = max(range(len(paths)), key=lambda i: len(paths[i]) if paths[i].startswith(inner) else 0)
    return (errors[index], paths[index]) if paths[index].startswith(inner) else (errors[0], paths[0])


def _field_path(location: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "role") -> "messages[0].role"; type names of unions are left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or None
