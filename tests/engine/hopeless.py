"""An engine process that comes to life and is killed by its first step. Run by tests as the `entry` of a ProcessClient."""

from __future__ import annotations

import os
import signal
from typing import Any

from foreword.engine import process
from foreword.engine.engine import Engine


def main(fd: int) -> int:
    return process.main(fd, _broken)


def _broken(engine: Engine) -> None:
    engine.runner.run = _killed  # type: ignore[method-assign]


def _killed(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
