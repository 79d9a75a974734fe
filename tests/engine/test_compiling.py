"""Requests that wait for a grammar."""

from __future__ import annotations

from concurrent.futures import Future

from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured import RequestGrammar
from foreword.engine.queue import PendingGrammar, PendingGrammars


def waiting(name: str, arrival: int) -> PendingGrammar:
    grammar: Future[RequestGrammar] = Future()
    return PendingGrammar(Request(name, (1,), SamplingParams(), 0), arrival, grammar)


def test_those_that_are_done_are_taken_once() -> None:
    compiling, a, b, c = PendingGrammars(), waiting("a", 0), waiting("b", 1), waiting("c", 2)
    for one in (a, b, c):
        compiling.add(one)
    assert compiling.pop_ready(block=True) == [] and len(compiling) == 3
    assert a.grammar.set_running_or_notify_cancel() and compiling.running_arrivals() == [0]
    a.grammar.set_exception(ValueError())
    assert compiling.cancel("b") and b.grammar.cancelled() and not compiling.cancel("b")
    assert compiling.pop_ready(block=False) == [a]
    assert [request.id for request in compiling] == ["c"] and "c" in compiling and "a" not in compiling
