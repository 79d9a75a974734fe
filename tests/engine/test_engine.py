"""The engine with real weights: isolated errors, stop conditions, choices, resumption, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword import SamplingParams, Speculation
from foreword.core.batch import Batch
from foreword.core.outputs import Draft, ErrorEvent, TokenEvent
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput
from foreword.engine.engine import Engine
from foreword.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    Unsatisfiable,
)
from foreword.speculation.draft_length.policy import StepRecord
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint
from tests.support.engines import load_engine, make_request, run, tokens_of

PROMPT = (40, 41, 42, 40, 41)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "model", "llama", seed=5)


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    return load_engine(checkpoint, max_model_len=64, **options)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    """An idle engine for tests that leave it idle."""
    return engine_of(checkpoint)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[int]:
    """The tokens of make_request() without speculation."""
    return tokens_of(run(engine_of(checkpoint, speculate="off"), [make_request("a")])["a"])


class Broken(EngineDrafter):
    """A drafter that raises in every method, or returns a wrong draft."""

    name = "ngram"

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def start(self, state: object) -> None:
        self._fail()

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._fail()

    def check(self, live: object) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self._fail()
        return [Draft(self.answer, self.name) for _ in requests]  # type: ignore[arg-type]

    def _fail(self) -> None:
        if self.answer is None:
            raise RuntimeError("no")


@pytest.mark.parametrize("answer", [None, (-1, 5), (10**9,), (5,) * 1000, ()])
def test_broken_drafter_changes_no_output(
    engine: Engine, plain: list[int], monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(engine.proposer, "drafters", (Broken(answer),))
    before = engine.proposer.errors["ngram"]
    assert tokens_of(run(engine, [make_request("a")])["a"]) == plain
    assert (engine.proposer.errors["ngram"] > before) == (answer is None)


def test_skipped_steps_are_samples_of_plain_decoding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[StepRecord] = []
    monkeypatch.setattr(engine.proposer.policy, "num_steps_to_skip", lambda: 4)
    monkeypatch.setattr(engine.proposer.policy, "record_plain_step", samples.append)
    run(engine, [make_request("a", max_tokens=12)])
    assert len(samples) == 2, "the prefill, a proposal and four skipped steps, a proposal and four"
    assert all(len(sample.requests) == 1 and sample.seconds_by_stage["forward"] > 0.0 for sample in samples)


def test_nonfinite_logits_fail_their_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the rows of one request leaves the batch unchanged otherwise."""
    expected = tokens_of(run(engine, [make_request("good")])["good"])
    forward, build = engine.model_runner.forward, engine.batch_builder.build
    sampled_ids: list[str] = []

    def remember(requests: Any) -> Any:
        batch = build(requests)
        sampled_ids[:] = [row.state.id for row in batch.sample_rows]
        return batch

    def logits(batch: Batch) -> Tensor:
        lines = forward(batch)
        for line, row in enumerate(sampled_ids):
            if row == "bad":
                lines[line, 99] = torch.nan
        return lines

    monkeypatch.setattr(engine.batch_builder, "build", remember)
    monkeypatch.setattr(engine.model_runner, "forward", logits)
    events = run(engine, [make_request("bad"), make_request("good")])
    (failed,) = events["bad"]
    assert isinstance(failed, ErrorEvent) and isinstance(failed.error, RequestFailed)
    assert "not finite" in failed.error.message
    assert tokens_of(events["good"]) == expected


def test_request_with_all_tokens_masked_fails_alone(engine: Engine) -> None:
    masked = make_request("masked", allowed_token_ids=(EOS,), ignore_eos=False, min_tokens=3)
    events = run(engine, [masked, make_request("good")])
    failed = events["masked"][-1]
    assert isinstance(failed, ErrorEvent) and isinstance(failed.error, Unsatisfiable)
    assert failed.error.param == "allowed_token_ids"
    assert failed.error.message == (
        "allowed_token_ids and min_tokens contradict each other: together they leave no token that could "
        "follow the first 0 tokens of the answer"
    )
    assert len(tokens_of(events["good"])) == 20


def test_invalid_request_gets_an_error_event(engine: Engine) -> None:
    for request_, error, text in [
        (make_request("a", prompt=[40] * 64), ContextLengthExceeded, "64 tokens"),
        (make_request("a", prompt=[40] * 60, delivered=[1] * 4), ContextLengthExceeded, "64 tokens"),
        (make_request("a", delivered=[1] * 20), InvalidRequest, "max_tokens 20"),
        (make_request("a", prompt=[]), InvalidRequest, "no tokens"),
        (make_request("a", prompt=[10**6]), InvalidRequest, "1000000"),
        (make_request("a", prompt=[-1]), InvalidRequest, "-1"),
        (make_request("a", delivered=[VOCAB_SIZE]), InvalidRequest, f"prompt: token id {VOCAB_SIZE}"),
        (replace(make_request("a", min_tokens=2), eos_token_ids=(-200000000,)), InvalidRequest, "-200000000"),
        (
            replace(make_request("a"), bad_words_ids=((3, 4), (5, -1))),
            InvalidRequest,
            "bad_words: token id -1",
        ),
        (replace(make_request("a"), dry_breakers=((-1,),)), InvalidRequest, "dry_sequence_breakers"),
        (replace(make_request("a"), reasoning_end_ids=((1 << 70,),)), InvalidRequest, "structured_outputs"),
        (make_request("a", logit_bias={VOCAB_SIZE: 1.0}), InvalidRequest, "logit_bias"),
        (make_request("a", allowed_token_ids=(1, 1 << 70)), InvalidRequest, "allowed_token_ids"),
        (make_request("a", stop_token_ids=(1 << 40,)), InvalidRequest, "stop_token_ids"),
        (make_request("a", logprob_token_ids=(1 << 40,)), InvalidRequest, "logprob_token_ids"),
        (make_request("a", speculation=Speculation("draft")), InvalidRequest, "suffix"),
    ]:
        (event,) = run(engine, [request_])["a"]
        assert (
            isinstance(event, ErrorEvent) and isinstance(event.error, error) and text in event.error.message
        )


@pytest.mark.parametrize("delivered", [1, 7, 16, 19])
def test_resumed_request_continues_exactly(engine: Engine, delivered: int) -> None:
    """Delivered tokens count as output: penalties, positions and limits are those of the whole request."""
    params = {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 18}
    expected = tokens_of(run(engine, [make_request("whole", **params)])["whole"])
    events = run(engine, [make_request("rest", delivered=expected[:delivered], **params)])["rest"]
    assert isinstance(events[0], TokenEvent) and events[0].index == delivered
    assert tokens_of(events) == expected[delivered:]


def test_eos_inside_an_accepted_draft_ends_the_output(
    checkpoint: Path, plain: list[int], tmp_path: Path
) -> None:
    """A correct draft runs past EOS: tokens after EOS are neither delivered nor counted."""
    stop = plain[9]
    first = plain.index(stop)
    recording = tmp_path / "recording.jsonl"
    recording.write_text(f'{{"prompt_token_ids": {list(PROMPT)}, "token_ids": {plain}}}')
    options = {"replay_file": str(recording), "num_speculative_tokens": 16}
    speculating = engine_of(checkpoint, speculate="replay", **options)
    for request in (
        Request("eos", PROMPT, SamplingParams(max_tokens=20), 1, (stop,)),
        make_request("id", stop_token_ids=(stop,)),
    ):
        events = run(speculating, [request])[request.id]
        last = events[-1]
        assert tokens_of(events) == plain[: first + 1]
        assert isinstance(last, TokenEvent) and (last.finish_reason, last.stop_id) == ("stop", stop)
        assert last.draft is not None and last.draft.num_drafted == 16
        assert last.draft.num_accepted == len(last.token_ids) == first, "tokens after EOS are not counted"


def test_remove_frees_all_resources(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, speculate="draft", draft_model=str(checkpoint))
    for name in "abc":
        engine.submit(make_request(name, max_tokens=50))
    engine.step()
    engine.step()
    for name in "abc":
        engine.remove(name)
        engine.check()
    assert engine.idle and engine.scheduler.pool.num_used == 0
    (drafter,) = engine.proposer.model_drafters
    drafter.check(())
    assert not drafter._states  # type: ignore[attr-defined]
    engine.remove("unknown")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine_with_clock(checkpoint: Path, **options: object) -> tuple[Engine, Clock]:
    engine, clock = engine_of(checkpoint, **options), Clock()
    engine._clock = clock
    engine._last_housekeeping_s = clock.now_s
    return engine, clock


def deadline_request(
    name: str, start_by_s: float | None = None, deadline_s: float | None = None, **fields: Any
) -> Request:
    return replace(
        make_request(name, **fields), arrival_s=100.0, queue_deadline_s=start_by_s, deadline_s=deadline_s
    )


def test_queue_deadline_fails_with_retry_after(checkpoint: Path) -> None:
    """A resumed request has no queue deadline: it has run before."""
    engine, clock = engine_with_clock(checkpoint, max_num_seqs=1)
    engine.submit(deadline_request("runs", start_by_s=102.0, max_tokens=40))
    engine.submit(deadline_request("waits", start_by_s=102.0))
    engine.submit(deadline_request("resumed", start_by_s=102.0, delivered=[5, 6, 7]))
    for second in range(4):
        clock.now_s = 100.0 + second
        for event in engine.step().events:
            if isinstance(event, ErrorEvent):
                assert second == 2 and event.request_id == "waits"
                assert isinstance(event.error, Overloaded) and event.error.retry_after_s == 2.0
                assert event.error.message == "the request waited 2 s in the queue without starting"
        engine.check()
    assert "waits" not in engine.scheduler.states
    events = run(engine)
    assert len(tokens_of(events["resumed"])) == 17


@pytest.mark.parametrize("name", ["runs", "waits", "embeds", "compiles"])
def test_deadline_ends_a_request_in_any_state(checkpoint: Path, name: str) -> None:
    engine, clock = engine_with_clock(checkpoint, max_num_seqs=2, max_num_batched_tokens=8)
    requests = {
        "runs": deadline_request("runs", max_tokens=50),
        "embeds": replace(deadline_request("embeds", prompt=[40] * 60), pooling="mean"),
        "waits": deadline_request("waits"),
        "compiles": deadline_request(
            "compiles", structured=StructuredOutput("json_object")
        ),  # never done: the vocabulary is missing
    }
    for request in requests.values():
        engine.submit(replace(request, deadline_s=101.5) if request.id == name else request)
    before = [event for _ in range(3) for event in engine.step().events]
    assert not [event for event in before if isinstance(event, ErrorEvent)]
    clock.now_s = 101.6
    (failed,) = [event for event in engine.step().events if isinstance(event, ErrorEvent)]
    assert failed.request_id == name and isinstance(failed.error, DeadlineExceeded)
    assert failed.error.message == "the request exceeded its deadline of 1.5 s"
    engine.check()
    for other in requests:
        engine.remove(other)
    assert engine.idle and engine.scheduler.pool.num_used == 0
    engine.close()  # a pending compilation would keep the process alive


def test_deadlines_are_checked_periodically(checkpoint: Path) -> None:
    engine, clock = engine_with_clock(checkpoint)
    engine.submit(deadline_request("a", deadline_s=100.1, max_tokens=50))
    clock.now_s = 100.15
    assert not [event for event in engine.step().events if isinstance(event, ErrorEvent)]
    clock.now_s = 100.2
    assert [event for event in engine.step().events if isinstance(event, ErrorEvent)]
