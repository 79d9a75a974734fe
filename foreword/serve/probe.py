"""Whether an idle engine still computes: it is asked for one token."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from foreword.core.events import ErrorEvent
from foreword.core.request import Request
from foreword.engine.client import EngineClient

__all__ = ["EngineProbe"]

logger = logging.getLogger("foreword.serve")
PROBE_TIMEOUT_S = 5.0


class EngineProbe:
    """Asks the engine for a token where nothing else has shown for a while that it computes.

    request_of  the question, of a given id
    idle_s      no step for so long makes it necessary; 0: it is never asked
    limit_s     an answer may take; later ones are waited for in the background
    """

    __slots__ = ("_pending", "_client", "_failed", "_idle_s", "_timeout_s", "_counter", "_make_request", "_last_step_s")

    def __init__(
        self, client: EngineClient, make_request: Callable[[str], Request], idle_s: float, timeout_s: float = PROBE_TIMEOUT_S
    ) -> None:
        self._client = client
        self._make_request = make_request
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._counter = itertools.count()
        self._last_step_s = time.monotonic()
        self._failed = False
        self._pending: asyncio.Task[bool] | None = None

    def on_step(self) -> None:
        """The engine has done a step."""
        self._last_step_s = time.monotonic()

    async def is_responsive(self) -> bool:
        """Whether the engine computes: it did lately, or does so now. Once it did not, only an answer counts."""
        if not self._idle_s or (not self._failed and time.monotonic() - self._last_step_s < self._idle_s):
            return True
        if self._pending is None or self._pending.done():
            self._pending = asyncio.create_task(self._send_probe(), name="health-probe")
        elif self._failed:
            return False  # it is late already
        done, _ = await asyncio.wait((self._pending,), timeout=self._timeout_s)
        self._failed = not (done and self._pending.result())
        return not self._failed

    async def _send_probe(self) -> bool:
        """True for a token; a refusal of the engine counts as an answer, its failure does not."""
        request = self._make_request(f"health-probe-{next(self._counter)}")
        try:
            events: Any = self._client.submit(request)
            async with aclosing(events):
                event = await anext(events)
        except Exception as error:
            logger.warning("the engine failed on a request for one token (%s)", type(error).__name__)
            return False
        answered = not isinstance(event, ErrorEvent) or event.error.status < 500
        self._failed = self._failed and not answered
        return answered
