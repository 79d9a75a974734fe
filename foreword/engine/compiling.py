"""Requests whose grammar is being compiled; they hold nothing of the scheduler, and delay nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from foreword.core.grammar import RequestGrammar
from foreword.core.request import Request

__all__ = ["PendingGrammar", "PendingGrammars"]

IDLE_WAIT_S: Final = 0.01  # a step that has nothing to do but to wait for a grammar takes so long


@dataclass(frozen=True, slots=True)
class PendingGrammar:
    """arrival: the request's number among all. grammar: what comes of it, or why there is none."""

    request: Request
    arrival: int
    grammar: Future[RequestGrammar]


class PendingGrammars:
    """By id. Iterated over, it yields the requests."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingGrammar] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __iter__(self) -> Iterator[Request]:
        return (one.request for one in self._pending.values())

    def add(self, pending: PendingGrammar) -> None:
        self._pending[pending.request.id] = pending

    def cancel(self, request_id: str) -> bool:
        """Whether it was here."""
        one = self._pending.pop(request_id, None)
        if one is not None:
            one.grammar.cancel()
        return one is not None

    def running_arrivals(self) -> list[int]:
        """Numbers of the requests whose grammar is worked on just now."""
        return [one.arrival for one in self._pending.values() if one.grammar.running()]

    def pop_ready(self, block: bool) -> list[PendingGrammar]:
        """Those that are done. patient: there is nothing else to do, so that one may be waited for, a moment long."""
        if block:
            wait([one.grammar for one in self._pending.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        done = [one for one in self._pending.values() if one.grammar.done()]
        for one in done:
            del self._pending[one.request.id]
        return done
