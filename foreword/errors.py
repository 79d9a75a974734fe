"""The exception tree. Every error that a user can meet has its HTTP status here.

ForewordError                 500
├── ConfigError               a flag or a config file is wrong (start-up)
├── CheckpointError           a model directory cannot be served (start-up)
├── InvalidRequest            400  names the field in `param`
│   ├── ContextLengthExceeded 400
│   ├── Unsupported           400  known elsewhere, not available here
│   └── Unsatisfiable         400  what was asked for leaves no token that could come next
├── Unauthorized              401
│   └── ExpiredKey            401
├── Forbidden                 403
│   └── Aborted               403  ended by an operator
├── ModelNotFound             404
├── DeadlineExceeded          408
├── PayloadTooLarge           413
├── Overloaded                429  the queue is full
│   └── RateLimited           429  this caller's limits are reached
├── RequestFailed             500  one request ended by an error of ours
├── EngineDead                503
└── ShuttingDown              503
"""

from typing import Any

__all__ = [
    "Aborted",
    "CheckpointError",
    "ConfigError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EngineDead",
    "ExpiredKey",
    "Forbidden",
    "ForewordError",
    "InvalidRequest",
    "ModelNotFound",
    "Overloaded",
    "PayloadTooLarge",
    "RateLimited",
    "RequestFailed",
    "ShuttingDown",
    "Unauthorized",
    "Unsatisfiable",
    "Unsupported",
    "safe_message",
]


class ForewordError(Exception):
    """Base of all errors raised on purpose.

    status  HTTP status code that the server answers with
    kind    OpenAI's `error.type`
    code    OpenAI's `error.code`, or None
    param   name of the offending field, or None
    retry_after_s  after so many seconds another try has a chance; None: nothing is known of that
    """

    status = 500
    error_type = "server_error"
    code: str | None = None
    retry_after_s: float | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param)


class ConfigError(ForewordError):
    """A flag, an environment variable or a config file holds an impossible value."""


class CheckpointError(ForewordError):
    """A checkpoint cannot be served: a missing file, an unknown architecture or option."""


class InvalidRequest(ForewordError):
    """The request itself is wrong; `param` names the field, the message its limit."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"


class Unsupported(InvalidRequest):
    """A parameter that others know and this server does not have (yet)."""

    code = "unsupported_parameter"


class Unsatisfiable(InvalidRequest):
    """What the request asks of its answer contradicts itself: no token could come next."""

    code = "unsatisfiable"


class Unauthorized(ForewordError):
    """No API key, or a wrong one."""

    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class ExpiredKey(Unauthorized):
    """The API key was known until its time was over."""

    code = "expired_api_key"


class Forbidden(ForewordError):
    """The API key is known, and may not do this."""

    status = 403
    error_type = "permission_error"
    code = "forbidden"


class Aborted(Forbidden):
    """An operator ended the request; clients must not try again by themselves, as they do after a 5xx."""

    code = "aborted"


class ModelNotFound(ForewordError):
    """The `model` field names a model that is not served here."""

    status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class PayloadTooLarge(ForewordError):
    """The body is larger than the server's limit."""

    status = 413
    error_type = "invalid_request_error"
    code = "payload_too_large"


class DeadlineExceeded(ForewordError):
    """The request took longer than it may."""

    status = 408
    error_type = "timeout_error"
    code = "deadline_exceeded"


class Overloaded(ForewordError):
    """The queue is full, or the request waited too long in it; try again later."""

    status = 429
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.retry_after_s)


class RateLimited(Overloaded):
    """The caller's own limit of requests, tokens or concurrency is reached."""

    code = "rate_limit_exceeded"


class RequestFailed(ForewordError):
    """One request was ended by an error inside the engine; others go on."""


class EngineDead(ForewordError):
    """The engine process is gone."""

    status = 503
    code = "engine_dead"


class ShuttingDown(ForewordError):
    """The server is about to end and takes nothing new."""

    status = 503
    code = "shutting_down"
    retry_after_s = 1.0


def safe_message(error: ForewordError) -> str:
    """What a log may say of an error: what was wrong with a request may quote it, what was wrong with us does not."""
    if error.status >= 500:
        return error.message
    return " ".join(part for part in (type(error).__name__, error.code, error.param) if part)
