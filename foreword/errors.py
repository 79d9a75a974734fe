"""The exceptions, with HTTP status, and error type and code as in OpenAI's API."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, Final

MAX_SHOWN_CHARS: Final = 80  # characters of an invalid value in a message


class Terminated(SystemExit):
    """SIGTERM ends the process; a drafter's own sys.exit() does not."""


class ForewordError(Exception):
    """Base of all errors raised on purpose."""

    status = 500  # HTTP status
    error_type = "server_error"  # OpenAI's `error.type`
    code: str | None = None  # OpenAI's `error.code`
    retry_after_s: float | None = None  # seconds until a retry may succeed; None: unknown

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # name of the offending field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param)


class ConfigError(ForewordError):
    """A flag, an environment variable or a config file has an invalid value."""


class CheckpointError(ForewordError):
    """A checkpoint cannot be loaded: a missing file, an unsupported architecture or option."""


class InvalidRequest(ForewordError):
    """The request is invalid; `param` names the field, the message its limit."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit into the context."""

    code = "context_length_exceeded"


class OverBudget(InvalidRequest):
    """Reading the request takes more CPU time or memory than its size allows."""

    code = "over_budget"


class Unsupported(InvalidRequest):
    """A parameter of OpenAI's API that this server does not support."""

    code = "unsupported_parameter"


class Unsatisfiable(InvalidRequest):
    """The request's constraints contradict each other: no token is allowed next."""

    code = "unsatisfiable"


class Unauthorized(ForewordError):
    """The API key is missing or unknown."""

    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class ExpiredKey(Unauthorized):
    """The API key has expired."""

    code = "expired_api_key"


class Forbidden(ForewordError):
    """The API key lacks permission."""

    status = 403
    error_type = "permission_error"
    code = "forbidden"


class Aborted(Forbidden):
    """An operator aborted the request. Not a 5xx, because clients retry those automatically."""

    code = "aborted"


class ModelNotFound(ForewordError):
    """The `model` field names a model that is not served."""

    status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class AdapterConflict(ForewordError):
    """The adapters that are loaded, or in use, do not allow this."""

    status = 409
    error_type = "invalid_request_error"
    code = "adapter_conflict"


class ResponseNotFound(ForewordError):
    """A response or item is not in the store of the Responses API, or belongs to another key."""

    status = 404
    error_type = "not_found_error"
    code = "response_not_found"


class PayloadTooLarge(ForewordError):
    """The request body is larger than the limit."""

    status = 413
    error_type = "invalid_request_error"
    code = "payload_too_large"


class DeadlineExceeded(ForewordError):
    """The request exceeded its time limit."""

    status = 408
    error_type = "timeout_error"
    code = "deadline_exceeded"


class Overloaded(ForewordError):
    """The queue is full, or the request waited too long in it."""

    status = 429
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.retry_after_s)


class RateLimited(Overloaded):
    """The API key's limit of requests, tokens or concurrency is reached."""

    code = "rate_limit_exceeded"


class QuotaExceeded(RateLimited):
    """The API key's tokens of the day are used up."""

    error_type = "insufficient_quota"
    code = "insufficient_quota"


class RequestFailed(ForewordError):
    """One request failed by an engine error; others continue."""


class GrammarFailed(ForewordError):
    """The grammar of an answer has no way on from its middle, or exceeds a limit there."""

    code = "grammar_failed"


class EngineDead(ForewordError):
    """The engine process is gone for good."""

    status = 503
    code = "engine_dead"


class NoReplica(EngineDead):
    """No replica was ready for a request within --replica-timeout."""

    code = "no_replica"
    retry_after_s = 1.0


class ModelLoading(ForewordError):
    """The model is still loading, at the start or after a crash; a retry will succeed."""

    status = 503
    code = "model_loading"
    retry_after_s = 1.0


class ModelLoadFailed(ForewordError):
    """The model could not be loaded, or its engine is gone; others are served."""

    status = 503
    code = "model_load_failed"
    retry_after_s = 1.0


class ShuttingDown(ForewordError):
    """The server is shutting down and accepts no requests."""

    status = 503
    code = "shutting_down"
    retry_after_s = 1.0


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean port?" for the nearest known name, or "" if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: object, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The first characters of repr(value), of which no more is made: a request's value may have megabytes."""
    text = ""
    for piece in _repr_pieces(value, max_chars):
        text += piece
        if len(text) >= max_chars:
            break
    return text[:max_chars]


def _repr_pieces(value: object, max_chars: int) -> Iterator[str]:
    if type(value) is str:
        yield repr(value[:max_chars])
    elif type(value) is dict and value:
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _repr_pieces(key, max_chars)
            yield ": "
            yield from _repr_pieces(item, max_chars)
        yield "}"
    elif type(value) is list and value:
        for number, item in enumerate(value):
            yield ", " if number else "["
            yield from _repr_pieces(item, max_chars)
        yield "]"
    else:
        yield repr(value)


def safe_message(error: ForewordError) -> str:
    """The error as text for logs: messages of 4xx errors are omitted, because they may quote the request."""
    if error.status >= 500:
        return error.message
    return " ".join(part for part in (type(error).__name__, error.code, error.param) if part)
