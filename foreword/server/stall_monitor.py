"""Stalls of the event loop, in which the server answers nobody, and the code that caused them."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("foreword.serve")

TICK_S = 0.2  # period of the ticker; a stall is measured up to so much too short
MIN_STALL_S = 0.05  # a later tick is a stall
WARN_S = 0.25  # a stall of which the log has a line
WARN_INTERVAL_S = 60.0
PACKAGE = __name__.partition(".")[0] + "."


class StallMonitor:
    """A ticker in the event loop, and a thread that looks at the loop's stack while the ticker is late.

    Code that keeps the interpreter's lock stops this thread too, which then sees where the lock is next free.
    """

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        self._on_stall = on_stall  # called with the seconds of a stall
        self._due_s = math.inf  # time of the next tick
        self._culprit = (0.0, "")  # time of the tick that was late, and what ran then
        self._next_warning_s = -math.inf

    async def run(self) -> None:
        """Observe this event loop until cancelled."""
        ended = threading.Event()
        task = (asyncio.get_running_loop(), threading.get_ident(), ended)
        threading.Thread(target=self._watch, args=task, name="stall monitor", daemon=True).start()
        try:
            while True:
                self._due_s = time.monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                self._on_tick(self._due_s, time.monotonic())
        finally:
            ended.set()

    def _on_tick(self, due_s: float, now_s: float) -> None:
        stall_s = now_s - due_s
        if stall_s < MIN_STALL_S:
            return
        self._on_stall(stall_s)
        if stall_s >= WARN_S and now_s >= self._next_warning_s:
            self._next_warning_s = now_s + WARN_INTERVAL_S
            seen_s, text = self._culprit
            where = text if seen_s == due_s else "in unknown code"
            logger.warning("the event loop stood still for %.2f s %s", stall_s, where)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, ended: threading.Event) -> None:
        while not ended.wait(TICK_S):
            due_s = self._due_s
            if time.monotonic() - due_s >= WARN_S and self._culprit[0] != due_s:
                self._culprit = due_s, _describe(loop, thread_id)


def _describe(loop: asyncio.AbstractEventLoop, thread_id: int) -> str:
    """ "in POST /v1/x, at foreword.a.b.C.f" of what an event loop runs in its thread."""
    task = asyncio.current_task(loop)
    parts = [] if task is None or task.get_name().startswith("Task-") else [f"in {task.get_name()}"]
    frame = sys._current_frames().get(thread_id)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(PACKAGE):
        frame = frame.f_back
    if frame is not None:
        parts.append(f"at {frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
    return ", ".join(parts) or "outside of a request"
