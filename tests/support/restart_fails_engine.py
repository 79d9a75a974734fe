"""An engine process that comes to life and is killed by its first step. Run by tests as the `entry` of a ProcessClient."""

from __future__ import annotations

import os
import signal
from typing import Any

from foreword.engine.engine import Engine
from foreword.engine_client import worker as process


def main(fd: int) -> int:
    return process.main(fd, _fail_forward)


def _fail_forward(engine: Engine) -> None:
    engine.model_runner.run = _kill_self  # type: ignore[method-assign]


def _kill_self(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
