"""Overlap scheduling: starts, ends and errors of runs; test_exact_overlap.py compares tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.core.batch import SampleRow
from foreword.core.images import expand_placeholders
from foreword.core.outputs import ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput
from foreword.cuda_graphs.decode_loop import DecodeResult
from foreword.engine.engine import Engine
from foreword.engine.overlap_scheduling import OverlapLoop
from foreword.errors import DeadlineExceeded, RequestFailed
from foreword.grammar.matcher import Matcher
from foreword.sampling.penalties import TokenCounts
from foreword.sampling.sampler import PendingSamples, SamplerOutput
from foreword.speculation.drafters.draft_model import ModelDrafter
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.decode_loops import TwinDecodeLoop, TwinForward, use_overlap
from tests.support.engines import VOCABULARY, load_engine, token_hashes
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint

LONG = 40  # output tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("ahead")
    model = write_checkpoint(path / "model", "llama", seed=5)
    return model, write_checkpoint(path / "drafter", "llama", seed=5, dtype="bfloat16")


@pytest.fixture(scope="module")
def engine_of(checkpoints: tuple[Path, Path]) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"max_model_len": 96, "speculate": "off"}
        if options.get("speculate") == "draft":
            defaults["draft_model"] = str(checkpoints[1])
        return load_engine(checkpoints[0], **(defaults | options))

    return make


@pytest.fixture(scope="module")
def expected(engine_of: Callable[..., Engine]) -> list[int]:
    """The tokens of request("a")."""
    return answer(engine_of(), request("a"))


def request(
    name: str, max_tokens: int = LONG, prompt: Sequence[int] = (40, 41, 42), priority: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **params})
    return Request(name, tuple(prompt), sampling, 3, (EOS,), priority=priority)


class CallLog:
    """Calls of the decode loop in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, call: str, twin: TwinForward) -> None:
        self.called.append(call)

    def take(self) -> list[str]:
        called, self.called = self.called, []
        return called


def steps(engine: Engine, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        events += engine.step().events
        engine.check()
    return events


def finish(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += steps(engine, 1)
    assert engine.scheduler.pool.num_used == 0
    return events


def tokens_of(events: Sequence[Event], name: str = "a") -> list[int]:
    return [
        i
        for event in events
        if isinstance(event, TokenEvent) and event.request_id == name
        for i in event.token_ids
    ]


def answer(engine: Engine, one: Request) -> list[int]:
    engine.submit(one)
    return tokens_of(finish(engine), one.id)


def test_step_is_launched_before_the_last_is_collected(engine_of: Callable[..., Engine]) -> None:
    engine, log = engine_of(), CallLog()
    use_overlap(engine, log)
    engine.submit(request("a", 6))
    steps(engine, 1)
    assert log.take() == [], "a prefill is no device step"
    steps(engine, 1)
    assert log.take() == ["begin", "launch", "launch", "collect"]
    steps(engine, 2)
    assert log.take() == ["launch", "collect"] * 2
    steps(engine, 2)
    assert log.take() == ["launch", "collect", "collect"], "the sixth token is the last by max_tokens"
    assert engine.idle


def test_new_request_waits_for_steps_in_flight_only(engine_of: Callable[..., Engine]) -> None:
    engine, log = engine_of(), CallLog()
    use_overlap(engine, log)
    engine.submit(request("a"))
    steps(engine, 4)
    log.take()
    engine.submit(request("b", 5))
    steps(engine, 1)
    assert log.take() == ["collect"]
    events = steps(engine, 1)
    assert {event.request_id for event in events} == {"a", "b"} and log.take() == []
    steps(engine, 1)
    assert log.take() == ["begin", "launch", "launch", "collect"]
    finish(engine)


def test_request_that_cannot_start_does_not_end_the_run(engine_of: Callable[..., Engine]) -> None:
    engine, log = engine_of(max_num_seqs=1), CallLog()
    use_overlap(engine, log)
    engine.submit(request("a"))
    steps(engine, 3)
    engine.submit(request("b", 5))
    log.take()
    steps(engine, 2)
    assert log.take() == ["launch", "collect"] * 2
    engine.submit(request("urgent", 5, priority=-1))
    assert {event.request_id for event in steps(engine, 2)} == {"a", "urgent"}, "the urgent request preempts"
    assert engine.scheduler.num_preemptions == 1
    finish(engine)


def test_abort_drops_steps_in_flight(engine_of: Callable[..., Engine], expected: list[int]) -> None:
    """Also for the only request, and if its id is reused while its old step is in flight."""
    again = request("a", 9, (50, 51))
    other = answer(engine_of(), again)
    engine = engine_of()
    overlap = use_overlap(engine)
    engine.submit(request("a"))
    assert tokens_of(steps(engine, 4)) == expected[:4]
    engine.remove("a")
    assert engine.idle
    engine.check()
    engine.submit(again)
    assert tokens_of(finish(engine)) == other
    engine.submit(request("a"))
    engine.submit(request("b"))
    steps(engine, 4)
    engine.remove("a")
    engine.submit(again)
    events = finish(engine)
    assert tokens_of(events) == other and len(tokens_of(events, "b")) == LONG - 4
    assert overlap.num_errors == 0


def test_deadline_ends_a_request_during_a_run(engine_of: Callable[..., Engine], expected: list[int]) -> None:
    engine = engine_of()
    use_overlap(engine)
    engine.submit(replace(request("late"), deadline_s=engine._clock() + 1000.0))
    engine.submit(request("a"))
    steps(engine, 4)
    engine._last_housekeeping_s -= 1.0
    engine._clock = lambda: 1e12
    (failed,) = [event for event in steps(engine, 1) if isinstance(event, ErrorEvent)]
    assert failed.request_id == "late" and isinstance(failed.error, DeadlineExceeded)
    assert tokens_of(finish(engine))[-1:] == expected[-1:]


@pytest.mark.parametrize("other", [{}, {"logprobs": 1}], ids=["on the device", "by the host"])
def test_nonfinite_row_is_reported_by_the_synchronous_loop(
    engine_of: Callable[..., Engine], expected: list[int], other: dict[str, Any]
) -> None:
    """The loop reports only that a token is missing; earlier tokens and other requests are unaffected."""
    for speculate in ("off", "draft"):
        engine = engine_of(speculate=speculate)
        overlap = use_overlap(engine)
        forward = engine.model_runner.forward
        assert isinstance(forward, TwinForward)
        inner, bad_position = forward.forward, len(request("a").prompt_ids) + 11

        def logits(
            batch: Any, inner: Any = inner, bad_position: int = bad_position, engine: Engine = engine
        ) -> torch.Tensor:
            actual = inner(batch).clone()
            rows = batch.sample_rows
            bad = (batch.positions[rows] == bad_position) & torch.isin(
                batch.slots[rows], torch.tensor(slots_of_a(engine))
            )
            actual[bad] = torch.nan
            return actual

        forward.forward = logits
        engine.submit(request("a"))
        engine.submit(request("b", seed=None, prompt=(90, 91, 92), **other))
        events = finish(engine)
        assert tokens_of(events) == expected[: bad_position + 1 - 3]
        failed = [event for event in events if isinstance(event, ErrorEvent)]
        assert [event.request_id for event in failed] == ["a"] and isinstance(failed[0].error, RequestFailed)
        assert (
            len(tokens_of(events, "b")) == LONG and overlap.num_device_steps > 3 and overlap.num_errors == 0
        )
        assert engine.step().stats.faults == {"nonfinite": 1}


def slots_of_a(engine: Engine) -> list[int]:
    state = engine.scheduler.states.get("a")
    size = engine.scheduler.block_size
    return [] if state is None else [block * size + i for block in state.blocks for i in range(size)]


def test_lost_device_during_a_run_ends_the_engine(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()

    def fail(call: str, twin: TwinForward) -> None:
        if call == "collect":
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    use_overlap(engine, fail)
    engine.submit(request("a"))
    steps(engine, 1)
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_errors_back_off_exponentially(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(max_model_len=96)
    launched_at: list[int] = []

    def fail(call: str, twin: TwinForward) -> None:
        if call == "launch":
            launched_at.append(engine._num_steps)
            raise RuntimeError("no")

    overlap = use_overlap(engine, fail)
    engine.submit(request("a", 90))
    finish(engine)
    waits = [b - a for a, b in pairwise(launched_at)]
    assert overlap.num_errors == len(launched_at) and waits == [2**n + 1 for n in range(1, len(waits) + 1)]


INVALID_RESULTS = [
    DecodeResult((10**6,)),
    DecodeResult((-2,)),
    DecodeResult((5, 6)),
    DecodeResult((5, 6), (4,)),
    DecodeResult((), ()),
    DecodeResult((4,), (10**6,)),
    DecodeResult((4, 5), (4, 4)),
]


@pytest.mark.parametrize("invalid", INVALID_RESULTS)
def test_invalid_results_are_rejected(
    engine_of: Callable[..., Engine],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    invalid: DecodeResult,
) -> None:
    engine = engine_of(speculate="draft", num_speculative_tokens=1)
    overlap = use_overlap(engine)
    collect = TwinDecodeLoop.collect

    def collect_invalid(loop: TwinDecodeLoop) -> dict[int, DecodeResult]:
        actual = collect(loop)
        return {0: invalid} if loop.collected == 3 else actual

    monkeypatch.setattr(TwinDecodeLoop, "collect", collect_invalid)
    assert answer(engine, request("a")) == expected
    assert overlap.num_errors == 1


@pytest.mark.parametrize("method", ["acquire_device", "reserve_device", "release_device"])
def test_device_drafter_errors_are_counted(
    engine_of: Callable[..., Engine], expected: list[int], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """They are errors of a drafter: no step in flight is dropped, and overlap does not back off."""
    engine = engine_of(speculate="draft", num_speculative_tokens=1)
    overlap = use_overlap(engine)

    def fail(drafter: ModelDrafter, *args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ModelDrafter, method, fail)
    engine.submit(request("a"))
    events = steps(engine, 4)
    engine.submit(request("b", 5))
    events += finish(engine)
    assert tokens_of(events) == expected
    assert engine.proposer.errors["draft"] > 0 and overlap.num_errors == 0


HOST_PARAMS: list[dict[str, Any]] = [
    {"logprobs": 1, "logprob_token_ids": (3, 200)},
    {"presence_penalty": 0.5, "dry_multiplier": 0.8},
    {"min_tokens": 4, "stop_token_ids": tuple(range(60, 90))},
    {"logit_bias": {5: 1.0}, "typical_p": 0.9},
    {"prompt_logprobs": 0, "repetition_penalty": 1.3},
    {"structured": StructuredOutput.regex("[a-z ]{30}")},
]


def with_vocabulary(engine: Engine) -> Engine:
    engine.set_vocabulary(VOCABULARY)
    return engine


def seen(events: Sequence[Event], name: str) -> list[Any]:
    """What a client sees of one request, token by token."""
    mine = [event for event in events if isinstance(event, TokenEvent) and event.request_id == name]
    scores = [score for event in mine for score in event.logprobs]
    hashes = [value for event in mine for value in event.logits_hashes]
    return [tokens_of(mine, name), scores, hashes, mine[0].prompt_logprobs, mine[-1].finish_reason]


@pytest.mark.parametrize("speculate", ["off", "draft"])
@pytest.mark.parametrize("params", HOST_PARAMS, ids=lambda params: next(iter(params)))
def test_host_sampled_request_does_not_prevent_a_run(
    engine_of: Callable[..., Engine], params: dict[str, Any], speculate: str
) -> None:
    """All requests of the run are sampled by the host until the last that needs it ends."""
    many = [request("a", 20, **params), request("b", 30), request("c", prompt=(50, 51), temperature=0.0)]
    answers = []
    for runs in (False, True):
        engine, log = with_vocabulary(engine_of(speculate=speculate, num_speculative_tokens=2)), CallLog()
        overlap = use_overlap(engine, log) if runs else None
        engine.submit(many[0])
        events: list[Event] = []
        while not engine.scheduler.running:
            events += steps(engine, 1)  # alone, it waits for its grammar
        for one in many[1:]:
            engine.submit(one)
        events += finish(engine)
        answers.append([seen(events, one.id) for one in many])
    assert answers[0] == answers[1]
    assert overlap is not None and overlap.num_errors == 0 and not engine.proposer.errors
    calls = log.take()
    assert calls[:5] == ["begin", "launch", "commit", "launch", "commit"]
    if speculate == "off":
        assert "commit" not in calls[calls.index("collect") :], "two runs"
        num_steps = sum(len(event.token_ids) > 0 for event in events if event.request_id == "c")  # type: ignore[union-attr]
        assert overlap.num_device_steps >= num_steps - 4, "all but prefills and one step between two runs"
        assert overlap.num_runs == 2


def test_forward_pass_is_launched_before_its_step_is_sampled(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads the samples of a step while the next forward pass is computed."""
    engine, log = engine_of(), CallLog()
    use_overlap(engine, log)
    launch = engine.model_runner.sampler.launch

    def recording(*args: Any) -> PendingSamples:
        pending, number = launch(*args), log.called.count("commit") + 1

        def read() -> SamplerOutput:
            log.called.append(f"read {number}")
            return pending.read()

        return PendingSamples(pending.token_ids, read)

    monkeypatch.setattr(engine.model_runner.sampler, "launch", recording)
    engine.submit(request("a", 5, presence_penalty=0.5))
    finish(engine)
    assert log.take() == [
        *("begin", "launch", "commit", "launch", "read 1", "commit", "launch", "read 2"),
        *("commit", "launch", "read 3", "commit", "read 4"),
    ]


def test_rows_of_refused_drafts_are_not_sampled(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model on the device knows no grammar."""
    engine = with_vocabulary(engine_of(speculate="draft", num_speculative_tokens=3))
    use_overlap(engine)
    start_masks, lengths = engine.grammars.start_masks, set[int]()

    def checking(rows: Sequence[SampleRow]) -> None:
        for row in rows:
            assert row.grammar is not None and row.grammar.num_legal(row.draft) == len(row.draft)
        lengths.add(len(rows[-1].draft))
        start_masks(rows)

    monkeypatch.setattr(engine.grammars, "start_masks", checking)
    finished = answer(engine, request("a", structured=StructuredOutput.regex("[ -~]{60}")))
    assert len(finished) == LONG and {0, 3} < lengths, "some drafts are cut"
    assert engine.overlap is not None and engine.overlap.num_errors == 0


def test_refused_draft_token_that_the_mask_allows_ends_the_run(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device accepts more than the host, if the mask is computed again after an error of the grammar."""
    one = request("a", structured=StructuredOutput.regex("(.|\n)*"))
    expected = answer(with_vocabulary(engine_of()), one)
    engine = with_vocabulary(engine_of(speculate="draft", num_speculative_tokens=3))
    overlap = use_overlap(engine)
    num_legal = Matcher.num_legal
    monkeypatch.setattr(Matcher, "num_legal", lambda matcher, draft: min(num_legal(matcher, draft), 1))
    assert answer(engine, one) == expected
    assert overlap.num_errors == 0 and overlap.num_runs > 1


def test_sampling_error_in_a_run_fails_no_request(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted penalty state is rebuilt by the synchronous loop."""
    many = [request("a", 20, frequency_penalty=0.7), request("b", 20, repetition_penalty=1.4)]
    expected = [answer(engine_of(), one) for one in many]
    engine = engine_of()
    overlap = use_overlap(engine)
    update, calls = TokenCounts.update, list[int]()

    def interrupted(counts: TokenCounts, tokens: Sequence[int]) -> None:
        calls.append(len(tokens))
        update(counts, tokens)
        if len(calls) == 9:
            update(counts, [*tokens, *expected[0] * 9, *expected[1] * 9])
            raise RuntimeError("interrupted")

    monkeypatch.setattr(TokenCounts, "update", interrupted)
    for one in many:
        engine.submit(one)
    events = finish(engine)
    assert [tokens_of(events, one.id) for one in many] == expected
    assert overlap.num_errors == 1 and overlap.num_runs > 1


def test_run_lasts_as_long_as_drafting_is_skipped(engine_of: Callable[..., Engine]) -> None:
    engine, expected = engine_of(speculate="suffix"), engine_of(speculate="suffix")
    outputs_of: dict[Engine, list[tuple[int, int]]] = {engine: [], expected: []}
    for one in (engine, expected):
        one.proposer.policy.num_steps_to_skip = lambda: 12  # type: ignore[method-assign]
        one.proposer.policy.record_skipped = lambda n, asks, one=one: outputs_of[one].append((n, asks))  # type: ignore[misc, method-assign]
    overlap = use_overlap(engine)
    assert answer(engine, request("a", 60)) == answer(expected, request("a", 60))
    assert outputs_of[engine] == outputs_of[expected] and (12, 12) in outputs_of[engine]
    assert overlap.num_device_steps > 40 and overlap.num_runs > 3


@pytest.mark.parametrize("steps_before", range(4))
def test_short_run_has_a_sample_of_plain_decoding(
    engine_of: Callable[..., Engine], steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps follow a baseline, wherever it comes."""
    engine = engine_of(speculate="suffix")
    engine.proposer.policy.num_steps_to_skip = lambda: 4  # type: ignore[method-assign]
    samples: list[int] = []
    monkeypatch.setattr(engine.proposer, "record_plain_step", lambda record: samples.append(1))
    overlap = use_overlap(engine)
    overlap.num_device_steps = steps_before
    answer(engine, request("a", 40))
    assert len(samples) >= overlap.num_runs - 1 > 3


@pytest.mark.parametrize(
    "others", [{"speculation": Speculation("auto", 2)}, {"speculation": Speculation("off")}]
)
def test_different_draft_lengths_prevent_a_run(
    engine_of: Callable[..., Engine], others: dict[str, Any]
) -> None:
    engine = engine_of(speculate="draft")
    overlap = use_overlap(engine)
    engine.submit(request("a"))
    engine.submit(request("b", **others))
    steps(engine, 4)
    assert len(engine.scheduler.running) == 2 and overlap.num_device_steps == 0
    finish(engine)
    assert answer(engine, request("c")) and overlap.num_device_steps > 2


def test_drafts_take_no_rows_or_blocks_of_waiting_requests(engine_of: Callable[..., Engine]) -> None:
    for options, others in (({"max_num_seqs": 2}, 3), ({"max_num_batched_tokens": 6, "max_num_seqs": 4}, 2)):
        engine = engine_of(speculate="draft", num_speculative_tokens=2, **options)
        overlap = use_overlap(engine)
        for name in "abc"[:others]:
            engine.submit(request(name, 30))
        steps(engine, 4)
        fits = options["max_num_seqs"] == 4
        assert (overlap.num_device_steps > 0) == fits, "six rows fit two requests of three rows"
        engine.submit(request("d", 30))
        loop = overlap.num_device_steps
        steps(engine, 6)
        assert overlap.num_device_steps <= loop + 1
        finish(engine)


def test_adaptive_draft_lengths_prevent_a_run(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(speculate="draft", draft_length="adaptive")
    overlap = use_overlap(engine)
    engine.proposer.policy.num_steps_to_skip = lambda: 0  # type: ignore[method-assign]
    answer(engine, request("a"))
    assert overlap.num_device_steps == 0


def test_draft_model_keeps_the_kv_of_device_drafts(engine_of: Callable[..., Engine]) -> None:
    """After a run it recomputes at most two tokens, and drafts as in the synchronous loop."""
    drafts: list[dict[int, tuple[int, ...]]] = []
    for one in (engine_of(speculate="draft", num_speculative_tokens=2) for _ in range(2)):
        by_length: dict[int, tuple[int, ...]] = {}
        overlap = use_overlap(one) if drafts else None
        drafter = one.proposer.model_drafters[0]
        assert isinstance(drafter, ModelDrafter)
        draft = drafter._draft

        def recording(
            runs: Any, draft: Any = draft, by_length: dict[int, tuple[int, ...]] = by_length
        ) -> Any:
            for run, actual in draft(runs):
                if run.request.state.id == "a":
                    assert len(run.job.token_ids) <= 2 or not by_length, "at most two tokens are recomputed"
                    by_length[run.request.num_tokens] = actual.token_ids
                yield run, actual

        drafter._draft = recording  # type: ignore[method-assign]
        one.submit(request("a", 60))
        steps(one, 5)
        one.submit(request("b", 1, (60,)))
        steps(one, 4)
        one.submit(request("c", 6, (61,), logprobs=0))
        finish(one)
        drafts.append(by_length)
        assert overlap is None or overlap.num_runs >= 2
    expected, actual = drafts
    assert 2 < len(actual) < len(expected) and actual.items() <= expected.items()


def test_blocks_are_reserved_for_all_or_none(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(kv_cache_memory="96tokens")
    scheduler = engine.scheduler
    engine.submit(request("a"))
    engine.submit(request("b"))
    steps(engine, 1)
    a, b = scheduler.states["a"], scheduler.states["b"]
    num_free, num_blocks = scheduler.pool.num_free, len(a.blocks)
    assert not scheduler.block_manager.reserve([(a, 40), (b, 80)])
    assert scheduler.pool.num_free == num_free and len(a.blocks) == num_blocks
    assert scheduler.block_manager.reserve([(a, 40), (b, 20)])
    engine.check()
    engine.remove("a")
    engine.check()
    scheduler.block_manager.release_reserved()
    assert scheduler.pool.num_used == 1
    engine.check()


def test_missing_blocks_end_the_run(engine_of: Callable[..., Engine]) -> None:
    """The synchronous loop may preempt, a run never does."""
    many = [request(str(n), 60, (40 + n, 41)) for n in range(4)]
    expected = {one.id: answer(engine_of(), one) for one in many}
    engine = engine_of(kv_cache_memory="128tokens")
    overlap = use_overlap(engine)
    for one in many:
        engine.submit(one)
    events = finish(engine)
    assert {one.id: tokens_of(events, one.id) for one in many} == expected
    assert engine.scheduler.num_preemptions > 0 and overlap.num_device_steps > 20 and overlap.num_errors == 0


def test_overlap_can_be_disabled(engine_of: Callable[..., Engine]) -> None:
    assert engine_of().overlap is None, "this backend has no decode loop"
    with pytest.raises(AssertionError):
        use_overlap(engine_of(overlap=False))


def test_run_reports_stage_seconds(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    overlap: OverlapLoop = use_overlap(engine)
    engine.submit(request("a"))
    steps(engine, 4)
    assert overlap.num_device_steps == 4
    assert set(engine.step().stats.stage_seconds) == {"schedule", "assemble", "forward", "sample", "commit"}


@pytest.mark.parametrize("rows", [16, 64])
def test_prompt_ending_with_an_image_is_exact(tmp_path: Path, rows: int) -> None:
    """Only its last token is left after a prefix hit or earlier chunks."""
    path = write_vision_checkpoint(tmp_path / "model", "llava", seed=5)
    shown = random_image(path, 1)
    text = [40 + i % 7 for i in range(32 + (1 - shown.num_tokens) % 16)]

    def outputs_of(overlap: bool) -> list[list[Any]]:
        options = {"image_cache_memory": "0", "prefix_caching": overlap, "speculate": "off"}
        engine = load_engine(path, max_num_batched_tokens=rows, max_num_seqs=4, **options)
        overlap_loop = use_overlap(engine) if overlap else None
        answers = []
        prompt, images = expand_placeholders([*text, IMAGE_TOKEN_ID], IMAGE_TOKEN_ID, [shown])
        assert len(prompt) % engine.scheduler.block_size == 1
        for number in range(2):
            engine.submit(replace(request(str(number), 6), prompt_ids=prompt, images=images))
            answers.append(token_hashes(finish(engine)))
        assert overlap_loop is None or (overlap_loop.num_device_steps > 3 and overlap_loop.num_errors == 0)
        return answers

    assert outputs_of(overlap=True) == outputs_of(overlap=False)
