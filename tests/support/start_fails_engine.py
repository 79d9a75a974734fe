"""An engine process that is killed before it is ready. Run by tests as the `entry` of a ProcessClient."""

from __future__ import annotations

import os
import signal

from foreword.engine.engine import Engine
from foreword.engine_client import worker as process


def main(fd: int) -> int:
    return process.main(fd, _kill_self)


def _kill_self(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
