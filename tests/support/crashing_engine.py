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

from foreword.core.batch import Batch
from foreword.core.outputs import StepOutput
from foreword.core.request import RequestState
from foreword.engine.encoder_runner import FeatureKey
from foreword.engine.engine import Engine
from foreword.engine_client import worker as process

STEP_S: Final = 0.002


def main(fd: int) -> int:
    return process.main(fd, make_crashing)


def make_crashing(engine: Engine) -> None:
    """Wrap the forward pass of an engine that has just been loaded."""
    run = engine.model_runner.run

    def mortal_run(batch: Batch, *args: Any) -> list[StepOutput]:
        for state in engine.scheduler.running:
            trigger_fault(state)
        time.sleep(STEP_S)
        return run(batch, *args)

    engine.model_runner.run = mortal_run  # type: ignore[method-assign]
    piece = engine.encoder._encode_piece

    def mortal_piece(key: FeatureKey, needed: Mapping[FeatureKey, Any]) -> int:
        if engine.encoder._job is not None:  # not with the first piece
            for state in needed[key].states:
                trigger_fault(state, encoding=True)
        return piece(key, needed)

    engine.encoder._encode_piece = mortal_piece  # type: ignore[method-assign]


def trigger_fault(state: RequestState, encoding: bool = False) -> None:
    name, _, rest = state.id.partition("-")
    when, fault = rest.partition("-")[0], FAULTS.get(name)
    if fault is None or (when == "encoding") != encoding:
        return
    struck = (
        state.request.queue_deadline_s is None if encoding else state.request.resume_output_ids
    )  # who ran need not begin in time again
    if struck and name != "poison":
        return
    if encoding or state.num_output >= int(when):
        fault()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    ctypes.string_at(0)


def _exit() -> NoReturn:
    os._exit(3)


def _raise_error() -> NoReturn:
    raise AssertionError("an invariant of the engine is broken")


def _hang_holding_lock() -> None:
    threading.Event().wait()


def _stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: Final[Mapping[str, Callable[[], None]]] = {
    "killed": _kill_self,
    "segfault": _segfault,
    "exit": _exit,
    "broken": _raise_error,
    "locked": _hang_holding_lock,
    "stopped": _stop_self,
    "poison": _kill_self,
}
