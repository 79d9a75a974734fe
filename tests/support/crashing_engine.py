"""An engine process that crashes or hangs where a request id says; an `entry_module` of ForkServer.

"FAULT-NUMBER-ANYTHING" triggers the fault once the answer has NUMBER tokens, "FAULT-encoding-ANYTHING" while
an image of the request is encoded. A resumed request triggers no fault again, except "poison". Every step
takes a moment, so tests can kill the engine within one.
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
from foreword.engine_client import engine_main as worker

STEP_S: Final = 0.002


def main(fd: int) -> int:
    return worker.main(fd, make_crashing)


def make_crashing(engine: Engine) -> None:
    """Wrap the forward pass and the image encoder of a loaded engine."""
    run = engine.model_runner.run

    def crashing_run(batch: Batch, *args: Any) -> list[StepOutput]:
        for state in engine.scheduler.running:
            trigger_fault(state)
        time.sleep(STEP_S)
        return run(batch, *args)

    engine.model_runner.run = crashing_run  # type: ignore[method-assign]
    encode_piece = engine.encoder._encode_piece

    def crashing_piece(key: FeatureKey, needed: Mapping[FeatureKey, Any]) -> int:
        if engine.encoder._job is not None:  # after the first piece
            for state in needed[key].states:
                trigger_fault(state, encoding=True)
        return encode_piece(key, needed)

    engine.encoder._encode_piece = crashing_piece  # type: ignore[method-assign]


def trigger_fault(state: RequestState, encoding: bool = False) -> None:
    name, _, rest = state.id.partition("-")
    when, fault = rest.partition("-")[0], FAULTS.get(name)
    if fault is None or (when == "encoding") != encoding:
        return
    # A request that ran before a crash has no queue deadline.
    is_resumed = state.request.queue_deadline_s is None if encoding else state.request.resume_output_ids
    if is_resumed and name != "poison":
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
