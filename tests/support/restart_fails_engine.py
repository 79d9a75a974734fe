"""An engine process that is killed in its first step; an `entry_module` of ForkServer."""

from __future__ import annotations

import os
import signal
from typing import Any

from foreword.engine.engine import Engine
from foreword.engine_client import engine_main as worker


def main(fd: int) -> int:
    return worker.main(fd, _kill_in_forward)


def _kill_in_forward(engine: Engine) -> None:
    engine.model_runner.run = _kill_self  # type: ignore[method-assign]


def _kill_self(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
