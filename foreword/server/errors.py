"""Errors as OpenAI's clients expect them, whatever went wrong and wherever."""

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
from foreword.server.disconnect import CLIENT_CLOSED
from foreword.server.json_response import JSONResponse

__all__ = ["add_error_handlers", "error_body", "error_headers", "error_response", "rename_field"]

logger = logging.getLogger("foreword.serve")
MAX_SHOWN_CHARS = 80  # characters of an offending value


def error_body(error: ForewordError) -> dict[str, Any]:
    """`{"error": {...}}` of one error."""
    return {
        "error": {"message": str(error), "type": error.error_type, "param": error.param, "code": error.code}
    }


def error_response(error: ForewordError) -> Response:
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


def error_headers(error: ForewordError) -> dict[str, str]:
    """What a client that tries again must know: with which credentials, and after how many whole seconds."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    return headers


@contextmanager
def rename_field(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the field as this route knows it: `names` maps the inner name to the outer."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param not in names:
            raise
        rest = error.message.removeprefix(error.param)
        outer = names[error.param]
        raise type(error)(error.message if rest == error.message else outer + rest, outer) from None


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
    """What the framework raises: 404, 405, and bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: (f"there is no route {request.method} {request.url.path}", "not_found"),
        405: (f"{request.url.path} does not take {request.method}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), None))
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))


def _invalid_request(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first field that is wrong, with all that is said about it."""
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
    reasons = dict.fromkeys(
        _reason_text(error["msg"]) for error in errors if _field_path(error["loc"]) == path
    )
    return InvalidRequest(f"{path} {' or '.join(reasons)}, got {_shorten(first['input'])}", path)


def _innermost_error(errors: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The error deepest within the first field that is wrong: of a text or a list, the item of the list that was given."""
    paths = [_field_path(error["loc"]) or "" for error in errors]
    inside = (f"{paths[0]}.", f"{paths[0]}[")
    place = max(
        range(len(paths)), key=lambda place: len(paths[place]) if paths[place].startswith(inside) else 0
    )
    return (errors[place], paths[place]) if paths[place].startswith(inside) else (errors[0], paths[0])


def _field_path(location: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "role") becomes "messages[0].role"; names of types, which unions add, are left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or None


def _reason_text(message: str) -> str:
    return message.replace("Input should be", "must be").replace("Value error, ", "")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
