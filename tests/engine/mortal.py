"""An engine process that dies, hangs or errs in the step that a request names: its id is "FAULT-NUMBER-ANYTHING", or
"FAULT-encoding-ANYTHING" where that is to be while a picture of it is encoded.

Run by tests as the `entry` of a ProcessClient. The fault strikes when NUMBER tokens of the answer are there, unless the engine
already replaces one that it struck. "poison" strikes always. Every step takes a moment, so that tests can strike too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from foreword.cache.features import Key
from foreword.core.batch import Batch
from foreword.core.draft import Outcome
from foreword.core.request import RequestState
from foreword.engine import process
from foreword.engine.engine import Engine

STEP_S: Final = 0.002


def main(fd: int) -> int:
    return process.main(fd, mortal)


def mortal(engine: Engine) -> None:
    """Wrap the forward pass of an engine that has just been loaded."""
    run = engine.runner.run

    def mortal_run(batch: Batch, *args: Any) -> list[Outcome]:
        for state in engine.scheduler.running:
            strike(state)
        time.sleep(STEP_S)
        return run(batch, *args)

    engine.runner.run = mortal_run  # type: ignore[method-assign]
    piece = engine.encoder._piece

    def mortal_piece(key: Key, needed: Mapping[Key, Any]) -> int:
        if engine.encoder._job is not None:  # not with the first piece
            for state in needed[key].states:
                strike(state, encoding=True)
        return piece(key, needed)

    engine.encoder._piece = mortal_piece  # type: ignore[method-assign]


def strike(state: RequestState, encoding: bool = False) -> None:
    name, _, rest = state.id.partition("-")
    when, fault = rest.partition("-")[0], FAULTS.get(name)
    if fault is None or (when == "encoding") != encoding:
        return
    struck = state.request.start_by_s is None if encoding else state.request.delivered_ids  # who ran need not begin in time again
    if struck and name != "poison":
        return
    if encoding or state.num_output >= int(when):
        fault()


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    ctypes.string_at(0)


def _exit() -> NoReturn:
    os._exit(3)


def _broken() -> NoReturn:
    raise AssertionError("an invariant of the engine is broken")


def _locked() -> None:
    threading.Event().wait()


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: Final[Mapping[str, Callable[[], None]]] = {
    "killed": _killed,
    "segfault": _segfault,
    "exit": _exit,
    "broken": _broken,
    "locked": _locked,
    "stopped": _stopped,
    "poison": _killed,
}
