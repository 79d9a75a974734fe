"""Requests whose grammar is being compiled; they hold nothing of the scheduler, and delay nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from foreword.core.grammar import RequestGrammar
from foreword.core.request import Request

__all__ = ["Compiled", "Compiling"]

WAIT_S: Final = 0.01  # a step that has nothing to do but to wait for a grammar takes so long


@dataclass(frozen=True, slots=True)
class Compiled:
    """arrival: the request's number among all. grammar: what comes of it, or why there is none."""

    request: Request
    arrival: int
    grammar: Future[RequestGrammar]


class Compiling:
    """By id. Iterated over, it yields the requests."""

    def __init__(self) -> None:
        self._all: dict[str, Compiled] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __iter__(self) -> Iterator[Request]:
        return (one.request for one in self._all.values())

    def add(self, one: Compiled) -> None:
        self._all[one.request.id] = one

    def cancel(self, request_id: str) -> bool:
        """Whether it was here."""
        one = self._all.pop(request_id, None)
        if one is not None:
            one.grammar.cancel()
        return one is not None

    def at_work(self) -> list[int]:
        """Numbers of the requests whose grammar is worked on just now."""
        return [one.arrival for one in self._all.values() if one.grammar.running()]

    def take(self, patient: bool) -> list[Compiled]:
        """Those that are done. patient: there is nothing else to do, so that one may be waited for, a moment long."""
        if patient:
            wait([one.grammar for one in self._all.values()], WAIT_S, FIRST_COMPLETED)
        done = [one for one in self._all.values() if one.grammar.done()]
        for one in done:
            del self._all[one.request.id]
        return done
