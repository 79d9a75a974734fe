"""Batch files in OpenAI's format: one request, and one result, per line.

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

An invalid line becomes a result with an `error`, the line's number, and no response.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from foreword.errors import ConfigError, shown

SUPPORTED_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid request."""

    line_number: int  # 1-based
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidLine:
    line_number: int
    custom_id: str | None
    reason: str


def read_lines(path: Path) -> Iterator[BatchLine | InvalidLine]:
    """The lines of a batch file, without empty ones. Raises ConfigError if it cannot be read."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _parse_line(number, raw, seen)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", "input") from None


def check_files(source: Path, target: Path) -> None:
    """Raises ConfigError for an input that cannot be read, or an output that is the input."""
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError("--output must be another file than --input", "output")
    try:
        source.open("rb").close()
    except OSError as error:
        raise ConfigError(f"--input {source}: {error.strerror or error}", "input") from None


def _parse_line(number: int, raw: bytes, seen: set[str]) -> BatchLine | InvalidLine:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return InvalidLine(number, None, f"not JSON: {error}")
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return InvalidLine(number, None, "a line must be an object with a custom_id, which is a text")
    if custom_id in seen:
        return InvalidLine(number, custom_id, f"custom_id {shown(custom_id)} is used by an earlier line")
    seen.add(custom_id)
    if (reason := _invalid_reason(line)) is not None:
        return InvalidLine(number, custom_id, reason)
    return BatchLine(number, custom_id, line["url"], line["body"])


def _invalid_reason(line: Mapping[str, Any]) -> str | None:
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    if method != "POST":
        return f"method must be 'POST', got {shown(method)}"
    if url not in SUPPORTED_URLS:
        return f"url must be one of {', '.join(SUPPORTED_URLS)}, got {shown(url)}"
    if not isinstance(body, dict):
        return f"body must be an object, got {shown(body)}"
    if body.get("stream"):
        return "body.stream must be false or left out: each result is a whole answer"
    return None


def success_line(line: BatchLine, status: int, request_id: str | None, body: Any) -> dict[str, Any]:
    """Result of an answered request, whatever its status.

    Missing choices are an error, which the next run retries.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    message = missing_choices(line, body) if status == 200 else None
    error = None
    if message is not None:
        error = {"code": "missing_choices", "message": message, "line": line.line_number}
    return _result_line(line.custom_id, response, error)


def missing_choices(line: BatchLine, body: Any) -> str | None:
    """Message if the answer has fewer than `n` choices, as some servers return, else None."""
    n, choices = line.body.get("n"), body.get("choices") if isinstance(body, dict) else None
    if not isinstance(n, int) or not isinstance(choices, list) or len(choices) >= n:
        return None
    return f"line {line.line_number}: {len(choices)} choices were returned, of {n}"


def error_line(line: InvalidLine) -> dict[str, Any]:
    """Result of an invalid line."""
    message = f"line {line.line_number}: {line.reason}"
    error = {"code": "invalid_line", "message": message, "line": line.line_number}
    return _result_line(line.custom_id, None, error)


def _result_line(custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    id_ = f"batch_req_{uuid.uuid4().hex}"
    return {"id": id_, "custom_id": custom_id, "response": response, "error": error}


class BatchOutput:
    """The output file, open to append and locked; `num_errors` counts final errors of earlier runs.

    Earlier results stay; a torn last line, server errors (408, 429, 5xx) and missing choices are retried.
    Raises ConfigError if the file cannot be opened or holds other data.
    """

    def __init__(self, path: Path) -> None:
        self.num_errors = 0
        self._path = path
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

    def __exit__(self, *exc_info: object) -> None:
        with suppress(OSError):  # a result that write() could not store
            self._file.close()

    def contains(self, item: BatchLine | InvalidLine) -> bool:
        """Whether this line has a final result."""
        if isinstance(item, BatchLine):
            return item.custom_id in self._answered_ids
        return item.line_number in self._invalid_lines

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a result and flush it. Raises ConfigError, such as for a full disk."""
        try:
            self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            problem = f"{self._path} cannot be written: {error.strerror or error}"
            raise ConfigError(f"{problem}; the same command continues the run", "output") from None

    def _is_final(self, raw: bytes) -> bool:
        try:
            record = json.loads(raw)
            response, error = record["response"], record["error"]
            if response is None:
                self._invalid_lines.add(error["line"])
            elif error is not None or response["status_code"] in (408, 429) or response["status_code"] >= 500:
                return False
            else:
                self._answered_ids.add(record["custom_id"])
            self.num_errors += response is None or response["status_code"] != 200
            return True
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"the output holds a line that is not a batch result: {raw[:80]!r}", "output"
            ) from None


def _open_locked(path: Path) -> IO[bytes]:
    """The file, open to read and append. Raises BlockingIOError while another process has it locked."""
    with ExitStack() as closing:
        file = closing.enter_context(path.open("a+b"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # replaced after open()
            raise BlockingIOError
        closing.pop_all()
    file.seek(0)
    return file


def _drop_unwanted_lines(path: Path, old: IO[bytes], keep: Callable[[bytes], bool]) -> IO[bytes]:
    """The file without torn and unwanted lines, replaced atomically if there are any."""
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
            os.unlink(name)
            with suppress(OSError):  # the disk is full
                new.close()
            raise
    return new
