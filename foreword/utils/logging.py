"""Log lines that quote nobody: a traceback tells where it went wrong, and not with what."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import TypeAlias

__all__ = ["RedactingFormatter", "set_up_logging"]

ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[None, None, None]  # as of sys.exc_info()
)


class RedactingFormatter(logging.Formatter):
    """Leaves out what exceptions say: it may quote a prompt, an answer or a key."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's, which may say more; nor is ours for others
        text = super().format(record)
        record.exc_text = None
        return text

    def formatException(self, ei: ExcInfo) -> str:
        lines = [
            "Traceback (what the errors say is left out: it may quote requests; --log-level debug shows it):\n"
        ]
        error = ei[1]
        while error is not None:
            lines += traceback.format_tb(error.__traceback__)
            lines.append(f"{type(error).__qualname__}\n")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "".join(lines).rstrip()


def set_up_logging(level: str, line_format: str) -> None:
    """Lines of that form on stderr; on level debug whatever helps, below it nothing that requests or answers say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(line_format) if level.lower() == "debug" else RedactingFormatter(line_format)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
