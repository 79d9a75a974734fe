"""A `foreword serve` in a process of its own, for measurements and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from foreword.cli.configuration import to_environment
from foreword.config.options import Config
from foreword.errors import ForewordError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


class ServerProcess:
    """Started on entering, on a free port; ended with SIGTERM on leaving.

    `flags` beat the options of the config. Raises ForewordError with its last log lines if it does not
    start.
    """

    def __init__(self, config: Config, flags: Sequence[str] = ()) -> None:
        self.url = ""
        self.banner_lines: list[str] = []  # log lines until it was ready
        self._config = replace(config, host="127.0.0.1", port=0)
        self._command = [sys.executable, "-m", "foreword", "serve", *flags]
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.NamedTemporaryFile()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
        environ |= to_environment(self._config)
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=environ)
        try:
            self._await_address()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        assert self._log is not None
        self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def read_log(self) -> list[str]:
        """Lines of its output so far."""
        assert self._log is not None
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace").splitlines()

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Send SIGTERM, unless it has ended already; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _await_address(self) -> None:
        """Wait for the banner's last line, and read the address from the banner."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.banner_lines = self.read_log()
            if any(line.startswith("try: ") for line in self.banner_lines):
                self.url = next(line.split()[1] for line in self.banner_lines if line.startswith("address: "))
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise ForewordError("the server did not start: " + " / ".join(self.read_log()[-3:]))
