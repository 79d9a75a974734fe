"""Log setup: tracebacks without exception messages, which may quote requests."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import TypeAlias

__all__ = ["RedactingFormatter", "set_up_logging"]

# As of sys.exc_info().
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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


def set_up_logging(level: str, line_format: str) -> None:
    """Log to stderr; only level debug shows exception messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(line_format) if level.lower() == "debug" else RedactingFormatter(line_format)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
