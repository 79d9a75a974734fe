"""The result files of benchmarks and scripts. Imports only the standard library."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError, ForewordError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class ResultFile:
    """A file that takes its place once there is a result. Raises ConfigError where it cannot be written.

    The result is written to a temporary file and renamed, so that a failed write keeps the earlier result. A
    device or a pipe is written directly.
    """

    def __init__(self, flag: str, path: str) -> None:
        self.flag, self.name = flag, path
        target = Path(path)
        try:
            self._target = target.resolve()
            self._is_regular = not target.exists() or target.is_file() or target.is_dir()
            self._partial = self._target
            if self._is_regular:
                if target.exists():
                    target.open("ab").close()
                self._partial = self._target.with_name(f".{self._target.name}.{os.getpid()}.part")
                self._partial.open("wb").close()
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{flag} {path}: {reason}", flag.lstrip("-")) from None

    def write(self, save: Callable[[Path], object]) -> None:
        """Let `save` write the result. Raises what it raises."""
        save(self._partial)
        if self._is_regular:
            os.replace(self._partial, self._target)

    def discard(self) -> None:
        """Remove what has not become a result."""
        if self._is_regular:
            self._partial.unlink(missing_ok=True)


def write_result(file: ResultFile, save: Callable[[Path], object]) -> int:
    """Write a result; returns an exit code. An error is one line on stderr."""
    try:
        file.write(save)
    except Exception as error:  # a full disk or a plot's error must not cost the rest
        print(f"{file.flag} {file.name} was not written: {describe_error(error)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def describe_error(error: Exception) -> str:
    """Type and message in one line; a ForewordError's message says all."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ForewordError) else f"{type(error).__name__}: {text}"


def without_nan(value: Any) -> Any:
    """JSON has no nan and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
