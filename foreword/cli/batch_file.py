"""Batch files in OpenAI's format: lines of requests, and lines of what became of them.

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

What is no request becomes a line with an `error` and no response; its `line` is the place in the file of requests.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from foreword.errors import ConfigError

__all__ = [
    "SUPPORTED_URLS",
    "BatchLine",
    "BatchOutput",
    "InvalidLine",
    "error_line",
    "missing_choices",
    "read_lines",
    "success_line",
]

SUPPORTED_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request, and its line in the file, from 1."""

    line_number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is no request."""

    line_number: int
    custom_id: str | None
    reason: str


def read_lines(path: Path) -> Iterator[BatchLine | InvalidLine]:
    """The lines of a batch file, in order; empty ones are passed over. Raises ConfigError if it cannot be read."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _parse_line(number, raw, seen)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", "input") from None


def _parse_line(number: int, raw: bytes, seen: set[str]) -> BatchLine | InvalidLine:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return InvalidLine(number, None, f"not JSON: {error}")
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return InvalidLine(number, None, "a line must be an object with a custom_id, which is a text")
    if custom_id in seen:
        return InvalidLine(
            number, custom_id, f"custom_id {custom_id!r:.80} stands in an earlier line already"
        )
    seen.add(custom_id)
    reason = _invalid_reason(line)
    return (
        BatchLine(number, custom_id, line["url"], line["body"])
        if reason is None
        else InvalidLine(number, custom_id, reason)
    )


def _invalid_reason(line: Mapping[str, Any]) -> str | None:
    """Why a line cannot be asked, or None."""
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    if method != "POST":
        return f"method must be 'POST', got {method!r:.80}"
    if url not in SUPPORTED_URLS:
        return f"url must be one of {', '.join(SUPPORTED_URLS)}, got {url!r:.80}"
    if not isinstance(body, dict):
        return f"body must be an object, got {body!r:.80}"
    if body.get("stream"):
        return "body.stream must be false or left out: a line of a file is a whole answer"
    return None


def success_line(line: BatchLine, status: int, request_id: str | None, body: Any) -> dict[str, Any]:
    """The line of a request that the server has answered, with an error too.

    Fewer choices than were asked for are an error, and are asked for again by the next run.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    short = missing_choices(line, body) if status == 200 else None
    error = None if short is None else {"code": "missing_choices", "message": short, "line": line.line_number}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def missing_choices(line: BatchLine, body: Any) -> str | None:
    """What is missing of an answer, in words, or None: some servers return fewer choices than they were asked for."""
    asked, choices = line.body.get("n"), body.get("choices") if isinstance(body, dict) else None
    if not isinstance(asked, int) or not isinstance(choices, list) or len(choices) >= asked:
        return None
    return f"line {line.line_number}: {len(choices)} choices were returned, of {asked}"


def error_line(line: InvalidLine) -> dict[str, Any]:
    """The line of what is no request."""
    error = {
        "code": "invalid_line",
        "message": f"line {line.line_number}: {line.reason}",
        "line": line.line_number,
    }
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": error,
    }


class BatchOutput:
    """The file of answers, open for more; one process at a time. `errors` counts those of an earlier run that are none.

    What is there already is kept, except for a torn last line and for answers that were an error of the server's
    (status 429, 500 and above) or short of choices: those will be asked again.

    Raises ConfigError for a file that cannot be had, or that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.num_errors = 0
        self._answered_ids: set[str] = set()
        self._invalid_lines: set[int] = set()
        try:
            self._file = _drop_unwanted_lines(path, _open_locked(path), self._is_final)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another run", "output") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}", "output") from None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def contains(self, item: BatchLine | InvalidLine) -> bool:
        """Whether this line has its answer already."""
        return (
            item.custom_id in self._answered_ids
            if isinstance(item, BatchLine)
            else item.line_number in self._invalid_lines
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, at once."""
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def _is_final(self, raw: bytes) -> bool:
        try:
            record = json.loads(raw)
            response, error = record["response"], record["error"]
            if response is None:
                self._invalid_lines.add(error["line"])
            elif error is not None:
                return False
            elif response["status_code"] != 429 and response["status_code"] < 500:
                self._answered_ids.add(record["custom_id"])
            else:
                return False
            self.num_errors += response is None or response["status_code"] != 200
            return True
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"the output holds a line that is no answer of a batch: {raw[:80]!r}", "output"
            ) from None


def _open_locked(path: Path) -> IO[bytes]:
    """The file, open to read and append. Raises BlockingIOError while another process has it."""
    with ExitStack() as closing:
        file = closing.enter_context(path.open("a+b"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # replaced since it was opened
            raise BlockingIOError
        closing.pop_all()
    file.seek(0)
    return file


def _drop_unwanted_lines(path: Path, old: IO[bytes], keep: Callable[[bytes], bool]) -> IO[bytes]:
    """The file without torn and unwanted lines; it is replaced in one go, and only if there are any."""
    with ExitStack() as closing:
        closing.enter_context(old)
        wanted = [raw.endswith(b"\n") and keep(raw) for raw in old]
        if all(wanted):
            closing.pop_all()
            return old
        old.seek(0)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        new = os.fdopen(handle, "a+b")
        try:
            new.writelines(raw for raw, kept in zip(old, wanted, strict=True) if kept)
            new.flush()
            fcntl.flock(new, fcntl.LOCK_EX)
            os.chmod(name, path.stat().st_mode & 0o777)
            os.replace(name, path)
        except BaseException:
            new.close()
            os.unlink(name)
            raise
    return new
