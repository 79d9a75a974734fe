"""Requests with a grammar in the engine: they wait for its compilation beside the others, and end alone where it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foreword.core.batch import SampleRow
from foreword.core.outputs import ErrorEvent, TokenEvent
from foreword.core.request import Request
from foreword.core.structured import RequestGrammar, StructuredOutput, Vocabulary
from foreword.engine.engine import Engine
from foreword.errors import InvalidRequest, Unsatisfiable
from tests.engine.test_engine import engine_of, make_request, run, tokens_of
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint

JSON = StructuredOutput("json_object")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "model", "llama", seed=5)


class Alternating:
    """Even and odd ids in turn, then, after `length` tokens, the end; or nothing more, with an error."""

    def __init__(self, length: int, broken: bool = False) -> None:
        self.error: str | None = None
        self._length, self._broken = length, broken
        self._seen = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        self._seen += len(token_ids)
        if self._broken and self._seen >= self._length:
            self.error = "the grammar became too complex"

    def num_legal(self, draft: Sequence[int]) -> int:
        return next(
            (i for i, token_id in enumerate(draft) if token_id not in self._allowed(self._seen + i)),
            len(draft),
        )

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        return (EOS,) if self.must_end(()) else ()

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        words = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int64)
        for token_id in self._allowed(self._seen + len(draft)):
            words[token_id // 32] += 1 << token_id % 32
        return words.to(torch.int32)

    def must_end(self, draft: tuple[int, ...]) -> bool:
        return self._seen + len(draft) >= self._length

    def _allowed(self, index: int) -> Sequence[int]:
        if self.error is not None:
            return ()
        return range(index % 2, 256, 2) if index < self._length else (EOS,)


class Compiler:
    """In place of Grammars: a compilation ends when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[str, Future[RequestGrammar]] = {}
        self.prepared: list[int] = []

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, request: Request) -> Future[RequestGrammar]:
        self.begun[request.id] = Future()
        return self.begun[request.id]

    def start_masks(self, rows: Sequence[SampleRow]) -> None:
        self.prepared.append(len(rows))

    def close(self) -> None: ...


def engine_with(checkpoint: Path, **options: object) -> tuple[Engine, Compiler]:
    engine, compiler = engine_of(checkpoint, **options), Compiler()
    engine.grammars = engine.model_runner.grammars = compiler  # type: ignore[assignment]
    return engine, compiler


def test_who_waits_for_a_grammar_delays_nobody(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    engine.submit(make_request("waiting", structured=JSON))
    engine.submit(make_request("plain"))
    plain: list[int] = []
    while len(plain) < 20:
        report = engine.step()
        plain += tokens_of([event for event in report.events if event.request_id == "plain"])
        engine.check()
    assert report.stats.requests_waiting == 1 and not engine.idle
    assert engine.step().events == (), "nothing to do but to wait"
    compiler.begun["waiting"].set_result(Alternating(9))
    found = tokens_of(run(engine)["waiting"])
    assert [token_id % 2 for token_id in found[:-1]] == [0, 1, 0, 1, 0, 1, 0, 1, 0] and found[-1] == EOS
    assert compiler.prepared, "masks were asked for before the model ran"


def test_a_grammar_that_is_refused_ends_its_request_alone(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    engine.submit(make_request("bad", structured=JSON))
    engine.submit(make_request("good"))
    compiler.begun["bad"].set_exception(InvalidRequest("no such rule", "grammar"))
    events = run(engine)
    (failed,) = events["bad"]
    assert isinstance(failed, ErrorEvent) and failed.error.param == "grammar"
    assert len(tokens_of(events["good"])) == 20


def test_a_compiler_that_fails_costs_one_request(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    engine.submit(make_request("bad", structured=JSON))
    engine.submit(make_request("good"))
    compiler.begun["bad"].set_exception(RuntimeError("a bug"))
    events = run(engine)
    (failed,) = events["bad"]
    assert isinstance(failed, ErrorEvent) and failed.error.status == 500 and "bug" not in failed.error.message
    assert len(tokens_of(events["good"])) == 20


def test_an_abort_while_the_grammar_compiles(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    engine.submit(make_request("a", structured=JSON))
    engine.step()
    engine.remove("a")
    assert engine.idle and compiler.begun["a"].cancelled(), "nobody compiles for those who left"
    engine.submit(make_request("a", structured=JSON))
    assert compiler.begun["a"].set_running_or_notify_cancel()
    engine.remove("a")
    assert engine.idle
    compiler.begun["a"].set_result(Alternating(3))
    assert engine.step().events == ()
    engine.submit(make_request("a", structured=JSON))
    engine.submit(make_request("a"))
    (event,) = engine.step().events
    assert isinstance(event, ErrorEvent) and event.error.param == "id", (
        "the name is taken while its grammar compiles"
    )


def test_a_grammar_that_gives_up_ends_its_request_alone(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    engine.submit(make_request("good"))
    expected = tokens_of(run(engine)["good"])
    engine.submit(make_request("bad", structured=JSON))
    engine.submit(make_request("good"))
    compiler.begun["bad"].set_result(Alternating(5, broken=True))
    events = run(engine)
    assert tokens_of(events["good"]) == expected
    assert len(tokens_of(events["bad"])) == 5
    last = events["bad"][-1]
    assert (
        isinstance(last, ErrorEvent)
        and isinstance(last.error, Unsatisfiable)
        and "too complex" in last.error.message
    )


class Shy(Alternating):
    """One sequence of tokens, which it forces; its masks give up behind more than one drafted token."""

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        return tuple(
            self._allowed(self._seen + i)[0] for i in range(min(max_tokens, self._length - self._seen + 1))
        )

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        mask = super().mask(draft)
        assert mask is not None
        return mask if len(draft) < 2 else torch.zeros_like(mask)

    def _allowed(self, index: int) -> Sequence[int]:
        return (30 + index,) if index < self._length else (EOS,)


def test_a_mask_that_gives_up_behind_a_draft_fails_nobody(checkpoint: Path) -> None:
    """Whether a request fails is told by a row that no draft has touched, and so the same without drafts."""
    engine, compiler = engine_with(
        checkpoint, speculate="grammar", draft_length="fixed", num_speculative_tokens=4
    )
    engine.submit(make_request("a", structured=JSON))
    compiler.begun["a"].set_result(Shy(9))
    events = run(engine)["a"]
    assert tokens_of(events) == [*range(30, 39), EOS]
    assert max(len(event.token_ids) for event in events if isinstance(event, TokenEvent)) == 2


def answer(engine: Engine, compiler: Compiler, delivered: Sequence[int] = (), **params: object) -> list[int]:
    """The tokens of a request whose grammar has 9 tokens; those delivered before are its beginning."""
    engine.submit(make_request("a", structured=JSON, delivered=delivered, **params))
    grammar = Alternating(9)
    grammar.accept(delivered)
    compiler.begun["a"].set_result(grammar)
    events = run(engine)["a"]
    assert isinstance(events[-1], TokenEvent) and events[-1].finish_reason == "stop", (
        "the end of the grammar ends the answer"
    )
    return [*delivered, *tokens_of(events)]


def test_the_end_of_a_grammar_ends_the_answer(checkpoint: Path) -> None:
    """Also where EOS shall be ignored, and more tokens are wanted."""
    expected = answer(*engine_with(checkpoint, speculate="off"))
    assert expected[-1] == EOS and len(expected) == 10
    assert answer(*engine_with(checkpoint)) == expected
    assert answer(*engine_with(checkpoint), ignore_eos=False) == expected
    assert answer(*engine_with(checkpoint), min_tokens=15) == expected


def test_what_was_delivered_counts_for_the_grammar(checkpoint: Path) -> None:
    expected = answer(*engine_with(checkpoint))
    for count in (1, 4, 9):
        assert answer(*engine_with(checkpoint), delivered=expected[:count]) == expected


def test_preempted_requests_keep_their_place_in_the_grammar(checkpoint: Path) -> None:
    engine, compiler = engine_with(checkpoint)
    alone = {
        name: answer(engine, compiler, seed=number, temperature=1.0) for number, name in enumerate("abcdefgh")
    }
    engine, compiler = engine_with(checkpoint, kv_cache_memory="80tokens", block_size=4)
    for number, name in enumerate(alone):
        engine.submit(make_request(name, seed=number, temperature=1.0, structured=JSON))
        compiler.begun[name].set_result(Alternating(9))
    events = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert {name: tokens_of(events[name]) for name in alone} == alone
