"""Exceptions become OpenAI's error envelope, or Anthropic's on its routes, with status and headers."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from foreword.errors import (
    MAX_SHOWN_CHARS,
    ContextLengthExceeded,
    ForewordError,
    InvalidRequest,
    Unauthorized,
    Unsupported,
    safe_message,
    shown,
)
from foreword.server.apis.body import REFUSED
from foreword.server.http.responses import CLIENT_CLOSED, EVENT_STREAM, JSONResponse, is_messages_path

logger = logging.getLogger("foreword.serve")
# The SDKs of OpenAI and Anthropic wait no longer than this (later versions: 120 s): they ignore a longer
# Retry-After and retry at once, unless x-should-retry says that it is in vain.
MAX_CLIENT_WAIT_S = 60.0
PYDANTIC_SUBJECT = re.compile(r"^[A-Z]\w+ should\b")  # "Input should be ...", "String should have ..."
PYDANTIC_AT_LEAST = ("greater than or equal to", "at least")
# What pydantic expected, by the type of its error, in the words of the other errors.
EXPECTED: Mapping[str, str] = {
    "string_type": "a text",
    "string_unicode": "valid Unicode",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
MAX_KEY_DIGITS = 10  # longest key of logit_bias in a path
MAX_NAME_CHARS = 64  # longest name in a path
MAX_SUGGESTED_CHARS = 64  # length of a path up to which similar routes are searched
# Routes of other servers, and what serves their clients here.
CHAT_ROUTE, COMPLETION_ROUTE, EMBEDDING_ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES_ROUTE = "/v1/responses"
FIRST_STEPS = "clients take the server's address and /v1 as their base URL; /docs lists the routes"
OTHER_APIS: Mapping[str, str] = {
    "/v1": FIRST_STEPS,
    "/v1/messages/batches": "batches of messages are not served; see `foreword run-batch`",
    "/api/chat": f"Ollama's API is not served; use {CHAT_ROUTE}",
    "/api/generate": f"Ollama's API is not served; use {COMPLETION_ROUTE}",
    "/api/embed": f"Ollama's API is not served; use {EMBEDDING_ROUTE}",
    "/api/embeddings": f"Ollama's API is not served; use {EMBEDDING_ROUTE}",
    "/api/tags": "Ollama's API is not served; use GET /v1/models",
    "/api/show": "Ollama's API is not served; use GET /v1/models",
    "/completion": f"llama-server's own API is not served; use {COMPLETION_ROUTE}",
    "/infill": f"llama-server's own API is not served; use {COMPLETION_ROUTE}",
    "/embedding": f"llama-server's own API is not served; use {EMBEDDING_ROUTE}",
    "/apply-template": "llama-server's own API is not served; use POST /tokenize",
    "/props": "llama-server's own API is not served; use GET /v1/models",
    "/pooling": f"vLLM's pooling is not served; use {EMBEDDING_ROUTE}",
    "/classify": "classifiers are not served; use /v1/score or /v1/rerank",
    "/tokenizer_info": "the tokenizer is not sent; name its directory to the client (lm-eval: tokenizer=)",
    "/load": "see /metrics",
    "/invocations": f"SageMaker's API is not served; use {CHAT_ROUTE} or {COMPLETION_ROUTE}",
    "/ping": "SageMaker's API is not served; use GET /health",
    "/v2/embed": f"Cohere's embeddings are not served; use {EMBEDDING_ROUTE}",
    "/generate": f"SGLang's own API is not served; use {COMPLETION_ROUTE}",
    "/get_model_info": "SGLang's own API is not served; use GET /v1/models",
}

# Why a field is missing: (the missing field, one that was given).
MISPLACED_FIELDS: Mapping[tuple[str, str], str] = {
    ("messages", "prompt"): f"prompt belongs to {COMPLETION_ROUTE}",
    ("messages", "input"): f"input belongs to {RESPONSES_ROUTE} and {EMBEDDING_ROUTE}",
    ("prompt", "messages"): f"messages belong to {CHAT_ROUTE}",
    ("prompt", "input"): f"input belongs to {EMBEDDING_ROUTE}",
    ("input", "prompt"): f"it holds the texts to embed; prompt belongs to {COMPLETION_ROUTE}",
}


# Anthropic's `error.type`, by status.
MESSAGES_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# On which Anthropic's SDK goes on without a conversation kept by the server.
NO_THREADS: Mapping[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": []}
PROMPT_LENGTHS = re.compile(r"has (\d+) tokens.*at most (\d+)")


def error_body(error: ForewordError, scope: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`{"error": {...}}` in the form of the API that the request of this scope is for."""
    message = str(error)
    is_too_long = isinstance(error, ContextLengthExceeded) and _is_for_messages(scope)
    if is_too_long and (lengths := PROMPT_LENGTHS.search(message)):
        # Claude Code compacts the conversation when it reads this sentence.
        message = f"prompt is too long: {lengths[1]} tokens > {lengths[2]} maximum"
    return _envelope(scope, error.status, message, error.error_type, error.param, error.code)


def _envelope(
    scope: Mapping[str, Any] | None,
    status: int,
    message: str,
    error_type: str,
    param: str | None,
    code: str | None,
) -> dict[str, Any]:
    """OpenAI's envelope; on the paths of Anthropic's API that one, with OpenAI's `param` and `code` too."""
    error: dict[str, Any] = {"message": message, "type": error_type, "param": param, "code": code}
    if scope is None or not _is_for_messages(scope):
        return {"error": error}
    error["type"] = MESSAGES_ERROR_TYPES.get(status, "api_error")
    if param == "thread":
        error["details"] = NO_THREADS
    request_id = scope.get("state", {}).get("request_id")
    return {"type": "error", "error": error, "request_id": request_id}


def _is_for_messages(scope: Mapping[str, Any] | None) -> bool:
    return scope is not None and is_messages_path(scope["path"])


def error_response(error: ForewordError, scope: Mapping[str, Any] | None = None) -> Response:
    """The response to the request of this scope; without one in OpenAI's form.

    It is the last event of a stream that has begun with comments.
    """
    early = None if scope is None else scope.get("state", {}).get("early_stream")
    if early is not None and early.is_started:
        return Response(early.error_event(error), media_type=EVENT_STREAM)
    return JSONResponse(error_body(error, scope), status_code=error.status, headers=error_headers(error))


def error_headers(error: ForewordError) -> dict[str, str]:
    """WWW-Authenticate, Retry-After (whole seconds) and x-should-retry, where they apply."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
        if error.retry_after_s > MAX_CLIENT_WAIT_S:
            headers["x-should-retry"] = "false"
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


def add_error_handlers(app: FastAPI, paths: Collection[str] = ()) -> None:
    """`paths` are the routes that a 404 may suggest."""
    app.add_exception_handler(ForewordError, _on_foreword_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, partial(_on_http_error, paths=paths))


async def _on_foreword_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForewordError)
    if error.status >= 500 and error.status != 503:  # a 503 is a line of the request log
        logger.warning("%s %s: %s", request.method, request.url.path, safe_message(error))
    return error_response(error, request.scope)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()), request.scope)


async def _on_http_error(request: Request, error: Exception, paths: Collection[str]) -> Response:
    """The framework's own errors: 404, 405, and unreadable bodies."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message, code = {
        404: (f"there is no route {request.method} {path}{_suggest_route(path, paths)}", "not_found"),
        405: (f"{path} does not take {request.method}{_allowed_methods(error)}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), None))
    body = _envelope(request.scope, error.status_code, message, "invalid_request_error", None, code)
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))


def _allowed_methods(error: HTTPException) -> str:
    allowed = (error.headers or {}).get("Allow")
    return f"; use {allowed}" if allowed else ""


def _suggest_route(path: str, known: Collection[str]) -> str:
    """A hint at the route to use instead; "" if nothing is similar."""
    path = path.rstrip("/")
    hint = OTHER_APIS.get(path) or OTHER_APIS.get(path.rstrip("/0123456789"))  # llama-server: /slots/0
    if hint is not None:
        return f": {hint}"
    similar = [f"/v1{path}"] if f"/v1{path}" in known else []
    if not similar and len(path) <= MAX_SUGGESTED_CHARS:
        similar = difflib.get_close_matches(path, known, 1, 0.8)
    return f"; did you mean {similar[0]}?" if similar and similar[0] != path else ""


def validation_error(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """An error for the first invalid field, with every reason that pydantic gives for it.

    errors  pydantic's, whose locations begin with "body"
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {first['ctx']['error'].removesuffix(' at')} "
            f"at character {first['loc'][-1]}"
        )
    if not _error_path(first):
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    first, path = _innermost_error(errors)
    if first["type"] in REFUSED:
        error_class = Unsupported if first["type"] == "unsupported" else InvalidRequest
        return error_class(f"{path} {first['ctx']['text']}", path)
    if first["type"] == "missing":
        hints = (MISPLACED_FIELDS.get((path, given)) for given in first["input"] or ())
        hint = next((f": {hint}" for hint in hints if hint), "")
        return InvalidRequest(f"{path} is required{hint}", path)
    same = [error for error in errors if _error_path(error) == path]
    expected = [EXPECTED[error["type"]] for error in same if error["type"] in EXPECTED]
    others = (PYDANTIC_SUBJECT.sub("must", error["msg"]) for error in same if error["type"] not in EXPECTED)
    reasons = [f"must be {' or '.join(dict.fromkeys(expected))}"] if expected else []
    reasons += [
        text.replace("Value error, ", "").replace(*PYDANTIC_AT_LEAST) for text in dict.fromkeys(others)
    ]
    value = shown(first["input"], MAX_SHOWN_CHARS + 1)
    if len(value) > MAX_SHOWN_CHARS:
        value = value[:MAX_SHOWN_CHARS] + "..."
    return InvalidRequest(f"{path} {' or '.join(reasons)}, got {value}", path)


def _innermost_error(errors: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The deepest error inside the first invalid field: of a union of text and list, the list's item."""
    paths = [_error_path(error) for error in errors]
    inner = (f"{paths[0]}.", f"{paths[0]}[")
    depths = [path.count(".") + path.count("[") if path.startswith(inner) else -1 for path in paths]
    index = depths.index(max(depths))
    return (errors[index], paths[index]) if depths[index] >= 0 else (errors[0], paths[0])


def _error_path(error: Mapping[str, Any]) -> str:
    """("body", "messages", 0, "role") -> "messages[0].role"; "" for the body itself.

    Fields have lower-case names; pydantic's names of the types in a union are left out, and names that are
    longer than any field's.
    """
    path = ""
    for part in error["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif len(part) > MAX_NAME_CHARS:
            continue
        elif part.isdigit() and len(part) <= MAX_KEY_DIGITS:
            path += f".{part}"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    if error["type"] in REFUSED:
        field = error["ctx"]["field"][:MAX_NAME_CHARS]
        path += f".{field}" if path else field
    return path
