"""An engine process that is killed before it is ready; an `entry_module` of ForkServer."""

from __future__ import annotations

import os
import signal

from foreword.engine_client import engine_main as worker


def main(fd: int) -> int:
    return worker.main(fd, lambda engine: os.kill(os.getpid(), signal.SIGKILL))
