"""Log lines as JSON: one object each, with the fields of the record, and no exception messages."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from foreword.utils.logging import JSONFormatter, RedactingFormatter


def format_record(formatter: logging.Formatter, message: str = "a line", **extra: Any) -> dict[str, Any]:
    record = logging.makeLogRecord(
        {"name": "foreword.test", "levelname": "WARNING", "msg": message, "created": 1.5, **extra}
    )
    (line,) = formatter.format(record).splitlines()
    entry: dict[str, Any] = json.loads(line)
    return entry


@pytest.fixture
def formatter() -> logging.Formatter:
    return JSONFormatter(RedactingFormatter())


def test_line_has_time_level_logger_and_message(formatter: logging.Formatter) -> None:
    entry = format_record(formatter, 'two\nlines, \u00fc and "quotes"')
    assert entry == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "foreword.test",
        "message": 'two\nlines, \u00fc and "quotes"',
    }
    assert datetime.fromisoformat(entry["time"]).tzinfo == UTC


def test_fields_are_added_but_replace_nothing(formatter: logging.Formatter) -> None:
    fields = {"status": 400, "code": None, "key": "", "count": 0, "message": "another"}
    entry = format_record(formatter, fields=fields)
    assert entry["status"] == 400 and entry["count"] == 0 and entry["message"] == "a line"
    assert "code" not in entry and "key" not in entry


def test_line_is_valid_in_any_encoding_of_stderr(formatter: logging.Formatter) -> None:
    """Python writes characters that the encoding lacks as escapes that JSON does not have."""
    line = formatter.format(logging.makeLogRecord({"msg": "\u00fc \U0001f600 \ud800"}))
    written = line.encode("ascii", "backslashreplace")
    assert json.loads(written)["message"] == "\u00fc \U0001f600 \ud800"


@pytest.mark.parametrize("shown", [False, True])
def test_exception_has_no_message_above_debug(shown: bool) -> None:
    message = "a secret"[::-1]  # which the source line of the traceback does not hold
    try:
        raise ValueError(message[::-1])
    except ValueError:
        exc_info = sys.exc_info()
    inner = logging.Formatter() if shown else RedactingFormatter()
    entry = format_record(JSONFormatter(inner), exc_info=exc_info)
    assert "ValueError" in entry["exception"] and "test_logging.py" in entry["exception"]
    assert ("a secret" in entry["exception"].splitlines()[-1]) == shown
