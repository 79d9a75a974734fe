"""Grammars in the engine: compilation does not delay other requests, errors fail one request."""

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
from foreword.core.structured_output import RequestGrammar, StructuredOutput, Vocabulary
from foreword.engine.engine import Engine
from foreword.errors import GrammarFailed, InvalidRequest
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint
from tests.support.engines import load_engine, make_request, run, tokens_of

JSON = StructuredOutput("json_object")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "model", "llama", seed=5)


class Alternating:
    """A grammar of even and odd ids in turn, and EOS, or an error, after `length` tokens."""

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

    def is_open(self, draft: Sequence[int]) -> bool:
        return True

    def must_end(self, draft: tuple[int, ...]) -> bool:
        return self._seen + len(draft) >= self._length

    def _allowed(self, index: int) -> Sequence[int]:
        if self.error is not None:
            return ()
        return range(index % 2, 256, 2) if index < self._length else (EOS,)


class FakeGrammarManager:
    """A GrammarManager whose compilations end when the test sets their result."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[RequestGrammar]] = {}
        self.masked_rows: list[int] = []

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, request: Request) -> Future[RequestGrammar]:
        self.futures[request.id] = Future()
        return self.futures[request.id]

    def start_masks(self, rows: Sequence[SampleRow]) -> None:
        self.masked_rows.append(len(rows))

    def close(self) -> None: ...


def engine_with(checkpoint: Path, **options: object) -> tuple[Engine, FakeGrammarManager]:
    engine, manager = load_engine(checkpoint, max_model_len=64, **options), FakeGrammarManager()
    engine.grammars = engine.model_runner.grammars = manager  # type: ignore[assignment]
    return engine, manager


def test_grammar_compilation_delays_no_other_request(checkpoint: Path) -> None:
    engine, manager = engine_with(checkpoint)
    engine.submit(make_request("waiting", structured=JSON))
    engine.submit(make_request("plain"))
    plain: list[int] = []
    while len(plain) < 20:
        report = engine.step()
        plain += tokens_of([event for event in report.events if event.request_id == "plain"])
        engine.check()
    assert report.stats.requests_waiting == 1 and not engine.idle
    assert engine.step().events == (), "the engine waits for the grammar"
    manager.futures["waiting"].set_result(Alternating(9))
    actual = tokens_of(run(engine)["waiting"])
    assert [token_id % 2 for token_id in actual[:-1]] == [0, 1, 0, 1, 0, 1, 0, 1, 0] and actual[-1] == EOS
    assert manager.masked_rows, "masks are started before the forward pass"


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("no such rule", "grammar"), 400), (RuntimeError("a bug"), 500)]
)
def test_compilation_error_fails_its_request_only(checkpoint: Path, error: Exception, status: int) -> None:
    engine, manager = engine_with(checkpoint)
    for name, structured in (("bad", JSON), ("good", None)):
        engine.submit(make_request(name, structured=structured))
    manager.futures["bad"].set_exception(error)
    events = run(engine)
    (failed,) = events["bad"]
    assert isinstance(failed, ErrorEvent) and failed.error.status == status
    assert ("no such rule" in failed.error.message) == (status == 400) and "bug" not in failed.error.message
    assert len(tokens_of(events["good"])) == 20


def test_abort_during_grammar_compilation(checkpoint: Path) -> None:
    engine, manager = engine_with(checkpoint)
    engine.submit(make_request("a", structured=JSON))
    engine.step()
    engine.remove("a")
    assert engine.idle and manager.futures["a"].cancelled(), "an aborted compilation is cancelled"
    engine.submit(make_request("a", structured=JSON))
    assert manager.futures["a"].set_running_or_notify_cancel()
    engine.remove("a")
    assert engine.idle
    manager.futures["a"].set_result(Alternating(3))
    assert engine.step().events == ()
    engine.submit(make_request("a", structured=JSON))
    engine.submit(make_request("a"))
    (event,) = engine.step().events
    assert isinstance(event, ErrorEvent) and event.error.param == "id", (
        "the id is in use while its grammar compiles"
    )


def test_matcher_error_fails_its_request_only(checkpoint: Path) -> None:
    engine, manager = engine_with(checkpoint)
    engine.submit(make_request("good"))
    expected = tokens_of(run(engine)["good"])
    engine.submit(make_request("bad", structured=JSON))
    engine.submit(make_request("good"))
    manager.futures["bad"].set_result(Alternating(5, broken=True))
    events = run(engine)
    assert tokens_of(events["good"]) == expected
    assert len(tokens_of(events["bad"])) == 5
    last = events["bad"][-1]
    assert (
        isinstance(last, ErrorEvent)
        and isinstance(last.error, GrammarFailed)
        and last.error.status == 500
        and "too complex" in last.error.message
    )


class FailingMask(Alternating):
    """A grammar of one sequence, whose masks fail after more than one draft token."""

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


def test_mask_error_after_a_draft_fails_no_request(checkpoint: Path) -> None:
    """Only a row without draft tokens fails a request, so drafts change no result."""
    engine, manager = engine_with(
        checkpoint, speculate="grammar", draft_length="fixed", num_speculative_tokens=4
    )
    engine.submit(make_request("a", structured=JSON))
    manager.futures["a"].set_result(FailingMask(9))
    events = run(engine)["a"]
    assert tokens_of(events) == [*range(30, 39), EOS]
    assert max(len(event.token_ids) for event in events if isinstance(event, TokenEvent)) == 2


@pytest.mark.parametrize("speculate", ["off", "grammar"])
def test_contradiction_is_no_failure_of_the_grammar(checkpoint: Path, speculate: str) -> None:
    """The grammar has a mask at the output's end; it failed behind a draft alone."""
    engine, manager = engine_with(
        checkpoint, speculate=speculate, draft_length="fixed", num_speculative_tokens=4
    )
    engine.submit(make_request("a", structured=JSON, allowed_token_ids=(30, 31, 32)))
    manager.futures["a"].set_result(FailingMask(9))
    events = run(engine)["a"]
    assert tokens_of(events) == [30, 31, 32]
    last = events[-1]
    assert isinstance(last, ErrorEvent) and last.error.status == 400
    assert "contradict each other" in last.error.message and "first 3 tokens" in last.error.message


def answer(
    engine: Engine, manager: FakeGrammarManager, delivered: Sequence[int] = (), **params: object
) -> list[int]:
    """The output of a request whose grammar has 9 tokens, after the delivered ones."""
    engine.submit(make_request("a", structured=JSON, delivered=delivered, **params))
    grammar = Alternating(9)
    grammar.accept(delivered)
    manager.futures["a"].set_result(grammar)
    events = run(engine)["a"]
    assert isinstance(events[-1], TokenEvent) and events[-1].finish_reason == "stop", (
        "the end of the grammar ends the output"
    )
    return [*delivered, *tokens_of(events)]


def test_end_of_grammar_ends_the_output(checkpoint: Path) -> None:
    """Also with ignore_eos and min_tokens, and in a resumed request."""
    expected = answer(*engine_with(checkpoint, speculate="off"))
    assert expected[-1] == EOS and len(expected) == 10
    engine, manager = engine_with(checkpoint)
    for params in ({}, {"ignore_eos": False}, {"min_tokens": 15}):
        assert answer(engine, manager, **params) == expected
    for count in (1, 4, 9):
        assert answer(engine, manager, delivered=expected[:count]) == expected


def test_preempted_requests_continue_their_grammar(checkpoint: Path) -> None:
    engine, manager = engine_with(checkpoint)
    alone = {
        name: answer(engine, manager, seed=number, temperature=1.0) for number, name in enumerate("abcdefgh")
    }
    engine, manager = engine_with(checkpoint, kv_cache_memory="80tokens", block_size=4)
    for number, name in enumerate(alone):
        engine.submit(make_request(name, seed=number, temperature=1.0, structured=JSON))
        manager.futures[name].set_result(Alternating(9))
    events = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert {name: tokens_of(events[name]) for name in alone} == alone
