"""Whether an idle engine still computes: it is asked for one token."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from foreword.core.events import Failed
from foreword.core.request import Request
from foreword.engine.client import EngineClient

__all__ = ["Probe"]

logger = logging.getLogger("foreword.serve")
LIMIT_S = 5.0


class Probe:
    """Asks the engine for a token where nothing else has shown for a while that it computes.

    request_of  the question, of a given id
    idle_s      no step for so long makes it necessary; 0: it is never asked
    limit_s     an answer may take; later ones are waited for in the background
    """

    __slots__ = ("_asking", "_client", "_failed", "_idle_s", "_limit_s", "_numbers", "_request_of", "_seen_s")

    def __init__(
        self, client: EngineClient, request_of: Callable[[str], Request], idle_s: float, limit_s: float = LIMIT_S
    ) -> None:
        self._client = client
        self._request_of = request_of
        self._idle_s = idle_s
        self._limit_s = limit_s
        self._numbers = itertools.count()
        self._seen_s = time.monotonic()
        self._failed = False
        self._asking: asyncio.Task[bool] | None = None

    def stepped(self) -> None:
        """The engine has done a step."""
        self._seen_s = time.monotonic()

    async def answers(self) -> bool:
        """Whether the engine computes: it did lately, or does so now. Once it did not, only an answer counts."""
        if not self._idle_s or (not self._failed and time.monotonic() - self._seen_s < self._idle_s):
            return True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="health-probe")
        elif self._failed:
            return False  # it is late already
        done, _ = await asyncio.wait((self._asking,), timeout=self._limit_s)
        self._failed = not (done and self._asking.result())
        return not self._failed

    async def _ask(self) -> bool:
        """True for a token; a refusal of the engine counts as an answer, its failure does not."""
        request = self._request_of(f"health-probe-{next(self._numbers)}")
        try:
            events: Any = self._client.submit(request)
            async with aclosing(events):
                event = await anext(events)
        except Exception as error:
            logger.warning("the engine failed on a request for one token (%s)", type(error).__name__)
            return False
        answered = not isinstance(event, Failed) or event.error.status < 500
        self._failed = self._failed and not answered
        return answered
