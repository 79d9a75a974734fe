"""A `foreword serve` of our own, for measurements."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from foreword.cli.options import engine_fields, flag
from foreword.config import Config
from foreword.errors import ForewordError

__all__ = ["ServerProcess"]

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


class ServerProcess:
    """Started on entering, on a free port; ended with SIGTERM on leaving.

    url    its base URL
    lines  what it said until it was ready
    Raises ForewordError with its last words if it does not start.
    """

    def __init__(self, config: Config) -> None:
        self.url = ""
        self.lines: list[str] = []
        fields = {**engine_fields(config), "port": 0, "host": "127.0.0.1"}
        self._command = [sys.executable, "-m", "foreword", "serve", *_flags(fields)]
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.NamedTemporaryFile()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=environ)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _wait(self) -> None:
        """Until the line with the address is there: it comes last but for warnings."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.lines = self._read()
            found = re.search(r"^address: (\S+)", "\n".join(self.lines), re.MULTILINE)
            if found:
                self.url = found[1]
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise ForewordError("the server did not start: " + " / ".join(self._read()[-3:]))

    def _read(self) -> list[str]:
        assert self._log is not None
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace").splitlines()

    def _stop(self) -> None:
        assert self._process is not None and self._log is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _flags(fields: dict[str, object]) -> list[str]:
    """Command-line flags that say the same as the fields."""
    words: list[str] = []
    for name, value in fields.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else "--no-" + flag(name).removeprefix("--"))
        else:
            words += [flag(name), str(value)]
    return words
