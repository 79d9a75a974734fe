"""Log setup: lines of text or JSON; tracebacks without exception messages, which may quote requests."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeAlias

# As of sys.exc_info().
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


# The model and replica that log lines of this task or callback are about, if the server has several.
log_model: ContextVar[str] = ContextVar("log_model", default="")


def _name_model(record: logging.LogRecord) -> bool:
    """A filter that puts the model's name before the message."""
    if name := log_model.get():
        record.msg = f"{name.replace('%', '%%') if record.args else name}: {record.msg}"
    return True


class RedactingFormatter(logging.Formatter):
    """Omits exception messages: they may quote a prompt, an answer or a key."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # cached by another handler, unredacted
        text = super().format(record)
        record.exc_text = None
        return text

    def formatException(self, ei: ExcInfo) -> str:
        lines = [
            "Traceback (error messages are omitted, they may quote requests; --log-level debug shows them):\n"
        ]
        error = ei[1]
        while error is not None:
            lines += traceback.format_tb(error.__traceback__)
            lines.append(f"{type(error).__qualname__}\n")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "".join(lines).rstrip()


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's `fields` that have a value."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner  # formats exceptions

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, "fields", {}).items():
            if value is not None and value != "":
                entry.setdefault(name, value)
        if record.exc_info:
            entry["exception"] = self._inner.formatException(record.exc_info)
        return json.dumps(entry, default=str)  # ASCII, which every encoding of stderr leaves as it is


def set_up_logging(level: str, line_format: str, log_format: str = "text") -> None:
    """Log to stderr as text of `line_format`, or as "json"; only level debug shows exception messages."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter if level.lower() == "debug" else RedactingFormatter
    text = formatter(line_format)
    handler.addFilter(_name_model)
    handler.setFormatter(JSONFormatter(text) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
