"""When the engine runs ahead, when it stops, and what becomes of what is under way; that tokens are equal is tested in
tests/test_exact_overlap.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.core.outputs import ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine.overlap import OverlapLoop
from foreword.errors import DeadlineExceeded, RequestFailed
from foreword.executor.decode_loop import DecodeResult
from foreword.speculation.drafters.draft_model import ModelDrafter
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.decode_loops import TwinDecodeLoop, TwinForward, use_overlap
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint

LONG = 40  # tokens of an answer that is not over soon


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("ahead")
    model = write_checkpoint(path / "model", "llama", seed=5)
    return model, write_checkpoint(path / "drafter", "llama", seed=5, dtype="bfloat16")


@pytest.fixture
def engine_of(checkpoints: tuple[Path, Path]) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "kv_cache_memory": "1000tokens", "max_model_len": 96, "threads": 1, "test_mode": True, "speculate": "off",
            "draft_length": "fixed",
        }  # fmt: skip
        if options.get("speculate") == "draft":
            defaults["draft_model"] = str(checkpoints[1])
        return load(Config(model=str(checkpoints[0]), **(defaults | options)), never_sampled_ids=())

    return make


def request(
    name: str, max_tokens: int = LONG, prompt: Sequence[int] = (40, 41, 42), priority: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **params})
    return Request(name, tuple(prompt), sampling, 3, (EOS,), priority=priority)


class Verbs:
    """What was called, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, verb: str, twin: TwinForward) -> None:
        self.called.append(verb)

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


def test_a_round_is_launched_before_the_one_before_is_collected(engine_of: Callable[..., Engine]) -> None:
    engine, verbs = engine_of(), Verbs()
    use_overlap(engine, verbs)
    engine.submit(request("a", 6))
    steps(engine, 1)
    assert verbs.take() == [], "a prompt is no round"
    steps(engine, 1)
    assert verbs.take() == ["begin", "launch", "launch", "collect"]
    steps(engine, 2)
    assert verbs.take() == ["launch", "collect"] * 2
    steps(engine, 2)
    assert verbs.take() == ["launch", "collect", "collect"], "the sixth token is the last, and known to be"
    assert engine.idle


def test_who_arrives_waits_for_what_is_under_way_and_no_more(engine_of: Callable[..., Engine]) -> None:
    engine, verbs = engine_of(), Verbs()
    use_overlap(engine, verbs)
    engine.submit(request("a"))
    steps(engine, 4)
    verbs.take()
    engine.submit(request("b", 5))
    steps(engine, 1)
    assert verbs.take() == ["collect"]
    events = steps(engine, 1)
    assert {event.request_id for event in events} == {"a", "b"} and verbs.take() == []
    steps(engine, 1)
    assert verbs.take() == ["begin", "launch", "launch", "collect"]
    finish(engine)


def test_who_cannot_start_stops_nobody(engine_of: Callable[..., Engine]) -> None:
    engine, verbs = engine_of(max_num_seqs=1), Verbs()
    use_overlap(engine, verbs)
    engine.submit(request("a"))
    steps(engine, 3)
    engine.submit(request("b", 5))
    verbs.take()
    steps(engine, 2)
    assert verbs.take() == ["launch", "collect"] * 2
    engine.submit(request("urgent", 5, priority=-1))
    assert {event.request_id for event in steps(engine, 2)} == {"a", "urgent"}, "it would preempt"
    assert engine.scheduler.num_preemptions == 1
    finish(engine)


def test_an_abort_drops_what_is_under_way(engine_of: Callable[..., Engine]) -> None:
    """Also if all is gone with it, and if the same id comes again while its old round is under way."""
    plain, again = answer(engine_of(), request("a")), request("a", 9, (50, 51))
    expected = answer(engine_of(), again)
    engine = engine_of()
    ahead = use_overlap(engine)
    engine.submit(request("a"))
    assert tokens_of(steps(engine, 4)) == plain[:4]
    engine.remove("a")
    assert engine.idle
    engine.check()
    engine.submit(again)
    assert tokens_of(finish(engine)) == expected
    engine.submit(request("a"))
    engine.submit(request("b"))
    steps(engine, 4)
    engine.remove("a")
    engine.submit(again)
    events = finish(engine)
    assert tokens_of(events) == expected and len(tokens_of(events, "b")) == LONG - 4
    assert ahead.num_errors == 0


def test_what_is_late_ends_in_the_middle_of_a_run(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    use_overlap(engine)
    engine.submit(replace(request("late"), deadline_s=engine._clock() + 1000.0))
    engine.submit(request("a"))
    steps(engine, 4)
    engine._last_housekeeping_s -= 1.0
    engine._clock = lambda: 1e12
    (failed,) = [event for event in steps(engine, 1) if isinstance(event, ErrorEvent)]
    assert failed.request_id == "late" and isinstance(failed.error, DeadlineExceeded)
    assert tokens_of(finish(engine))[-1:] == answer(engine_of(), request("a"))[-1:]


def test_a_broken_row_is_the_plain_loops_to_tell(engine_of: Callable[..., Engine]) -> None:
    """Rounds say no more than that there is no token; tokens before it are told, and neighbours lose none."""
    plain = answer(engine_of(), request("a"))
    for speculate in ("off", "draft"):
        engine = engine_of(speculate=speculate)
        ahead = use_overlap(engine)
        forward = engine.model_runner._forward
        assert isinstance(forward, TwinForward)
        inner, broken = forward.forward, len(request("a").prompt_ids) + 11

        def logits(
            batch: Any, inner: Any = inner, broken: int = broken, engine: Engine = engine
        ) -> torch.Tensor:
            found = inner(batch).clone()
            rows = batch.sample_rows
            bad = (batch.positions[rows] == broken) & torch.isin(
                batch.slots[rows], torch.tensor(own_slots(engine))
            )
            found[bad] = torch.nan
            return found

        forward.forward = logits
        engine.submit(request("a"))
        engine.submit(request("b", seed=None, prompt=(90, 91, 92)))
        events = finish(engine)
        assert tokens_of(events) == plain[: broken + 1 - 3]
        failed = [event for event in events if isinstance(event, ErrorEvent)]
        assert [event.request_id for event in failed] == ["a"] and isinstance(failed[0].error, RequestFailed)
        assert len(tokens_of(events, "b")) == LONG and ahead.num_device_steps > 3 and ahead.num_errors == 0
        assert engine.step().stats.faults == {"nonfinite": 1}


def own_slots(engine: Engine) -> list[int]:
    state = engine.scheduler.states.get("a")
    size = engine.scheduler.block_size
    return [] if state is None else [block * size + i for block in state.blocks for i in range(size)]


def test_a_lost_device_ends_the_engine(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()

    def strike(verb: str, twin: TwinForward) -> None:
        if verb == "collect":
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    use_overlap(engine, strike)
    engine.submit(request("a"))
    steps(engine, 1)
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_after_errors_it_is_tried_again_ever_more_seldom(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(max_model_len=96)
    tried: list[int] = []

    def strike(verb: str, twin: TwinForward) -> None:
        if verb == "launch":
            tried.append(engine._num_steps)
            raise RuntimeError("no")

    ahead = use_overlap(engine, strike)
    engine.submit(request("a", 90))
    finish(engine)
    waits = [b - a for a, b in pairwise(tried)]
    assert ahead.num_errors == len(tried) and waits == [2**n + 1 for n in range(1, len(waits) + 1)]


WRONG = [
    DecodeResult((10**6,)),
    DecodeResult((-2,)),
    DecodeResult((5, 6)),
    DecodeResult((5, 6), (4,)),
    DecodeResult((), ()),
    DecodeResult((4,), (10**6,)),
    DecodeResult((4, 5), (4, 4)),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_right_is_not_taken(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, wrong: DecodeResult
) -> None:
    plain = answer(engine_of(), request("a"))
    engine = engine_of(speculate="draft", num_speculative_tokens=1)
    ahead = use_overlap(engine)
    collect = TwinDecodeLoop.collect

    def collected(rounds: TwinDecodeLoop) -> dict[int, DecodeResult]:
        found = collect(rounds)
        return {0: wrong} if rounds.collected == 3 else found

    monkeypatch.setattr(TwinDecodeLoop, "collect", collected)
    assert answer(engine, request("a")) == plain
    assert ahead.num_errors == 1


def test_who_needs_the_host_ends_the_run(engine_of: Callable[..., Engine]) -> None:
    for params in (
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"min_tokens": 4},
        {"logit_bias": {5: 1.0}},
        {"prompt_logprobs": 0},
    ):
        engine = engine_of()
        ahead = use_overlap(engine)
        engine.submit(request("a", **params))
        engine.submit(request("b"))
        finish(engine)
        assert ahead.num_device_steps == 0, params
        engine.submit(request("a", 5, **params))
        engine.submit(request("b", 20))
        finish(engine)
        assert ahead.num_device_steps > 10, "alone again"


def test_a_run_lasts_as_long_as_a_rest_of_the_drafters(engine_of: Callable[..., Engine]) -> None:
    engine, plain = engine_of(speculate="suffix"), engine_of(speculate="suffix")
    told: dict[Engine, list[tuple[int, int]]] = {engine: [], plain: []}
    for one in (engine, plain):
        one.proposer.policy.num_steps_to_skip = lambda: 12  # type: ignore[method-assign]
        one.proposer.policy.record_skipped = lambda n, asks, one=one: told[one].append((n, asks))  # type: ignore[misc, method-assign]
    ahead = use_overlap(engine)
    assert answer(engine, request("a", 60)) == answer(plain, request("a", 60))
    assert told[engine] == told[plain] and (12, 12) in told[engine]
    assert ahead.num_device_steps > 40 and ahead.num_runs > 3


@pytest.mark.parametrize(
    "others", [{"speculation": Speculation("auto", 2)}, {"speculation": Speculation("off")}]
)
def test_drafts_of_several_lengths_are_planned(
    engine_of: Callable[..., Engine], others: dict[str, Any]
) -> None:
    engine = engine_of(speculate="draft")
    ahead = use_overlap(engine)
    engine.submit(request("a"))
    engine.submit(request("b", **others))
    steps(engine, 4)
    assert len(engine.scheduler.running) == 2 and ahead.num_device_steps == 0
    finish(engine)
    assert answer(engine, request("c")) and ahead.num_device_steps > 2


def test_drafts_take_nothing_from_those_that_wait_nor_rows_that_there_are_not(
    engine_of: Callable[..., Engine],
) -> None:
    for options, others in (({"max_num_seqs": 2}, 3), ({"max_num_batched_tokens": 6, "max_num_seqs": 4}, 2)):
        engine = engine_of(speculate="draft", num_speculative_tokens=2, **options)
        ahead = use_overlap(engine)
        for name in "abc"[:others]:
            engine.submit(request(name, 30))
        steps(engine, 4)
        fits = options["max_num_seqs"] == 4
        assert (ahead.num_device_steps > 0) == fits, "with six rows two requests have three each"
        engine.submit(request("d", 30))
        rounds = ahead.num_device_steps
        steps(engine, 6)
        assert ahead.num_device_steps <= rounds + 1
        finish(engine)


def test_adaptive_drafts_are_planned(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(speculate="draft", draft_length="adaptive")
    ahead = use_overlap(engine)
    engine.proposer.policy.num_steps_to_skip = lambda: 0  # type: ignore[method-assign]
    answer(engine, request("a"))
    assert ahead.num_device_steps == 0


def test_the_draft_model_knows_what_rounds_drafted(engine_of: Callable[..., Engine]) -> None:
    """Behind a run it computes again no more than two tokens, and guesses what it would have guessed in the plain loop."""
    guessed: list[dict[int, tuple[int, ...]]] = []
    for one in (engine_of(speculate="draft", num_speculative_tokens=2) for _ in range(2)):
        own: dict[int, tuple[int, ...]] = {}
        ahead = use_overlap(one) if guessed else None
        drafter = one.proposer.model_drafters[0]
        assert isinstance(drafter, ModelDrafter)
        guess = drafter._draft

        def noted(runs: Any, guess: Any = guess, own: dict[int, tuple[int, ...]] = own) -> Any:
            for run, found in guess(runs):
                if run.ask.state.id == "a":
                    assert len(run.lane.token_ids) <= 2 or not own, "it was known"
                    own[run.ask.length] = found.token_ids
                yield run, found

        drafter._draft = noted  # type: ignore[method-assign]
        one.submit(request("a", 60))
        steps(one, 5)
        one.submit(request("b", 1, (60,)))
        steps(one, 4)
        one.submit(request("c", 6, (61,), logprobs=0))
        finish(one)
        guessed.append(own)
        assert ahead is None or ahead.num_runs >= 2
    plain, found = guessed
    assert 2 < len(found) < len(plain) and found.items() <= plain.items()


def test_blocks_are_held_for_all_or_for_nobody(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(kv_cache_memory="96tokens")
    scheduler = engine.scheduler
    engine.submit(request("a"))
    engine.submit(request("b"))
    steps(engine, 1)
    a, b = scheduler.states["a"], scheduler.states["b"]
    free, held = scheduler.pool.num_free, len(a.blocks)
    assert not scheduler.reserve_ahead([(a, 40), (b, 80)])
    assert scheduler.pool.num_free == free and len(a.blocks) == held
    assert scheduler.reserve_ahead([(a, 40), (b, 20)])
    engine.check()
    engine.remove("a")
    engine.check()
    scheduler.release_reserved()
    assert scheduler.pool.num_used == 1
    engine.check()


def test_without_blocks_the_plain_loop_goes_on(engine_of: Callable[..., Engine]) -> None:
    """It may preempt; rounds never do."""
    many = [request(str(n), 60, (40 + n, 41)) for n in range(4)]
    plain = {one.id: answer(engine_of(), one) for one in many}
    engine = engine_of(kv_cache_memory="128tokens")
    ahead = use_overlap(engine)
    for one in many:
        engine.submit(one)
    events = finish(engine)
    assert {one.id: tokens_of(events, one.id) for one in many} == plain
    assert engine.scheduler.num_preemptions > 0 and ahead.num_device_steps > 20 and ahead.num_errors == 0


def test_it_can_be_switched_off(
    checkpoints: tuple[Path, Path], engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    assert engine_of().overlap is None, "this backend has no rounds"
    with pytest.raises(AssertionError):
        use_overlap(engine_of(overlap=False))


def test_stages_say_where_the_time_goes(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    ahead: OverlapLoop = use_overlap(engine)
    engine.submit(request("a"))
    steps(engine, 4)
    assert ahead.num_device_steps == 4
    assert set(engine.step().stats.stage_seconds) == {"schedule", "assemble", "forward", "sample", "commit"}


@pytest.mark.parametrize("rows", [16, 64])
def test_a_prompt_that_ends_with_a_picture_is_seen_to_its_end(tmp_path: Path, rows: int) -> None:
    """Its last token alone is left where the prefix cache knows the others, or where they went into the steps before."""
    path = write_vision_checkpoint(tmp_path / "model", "llava", seed=5)
    shown = random_image(path, 1)
    text = [40 + i % 7 for i in range(32 + (1 - shown.num_tokens) % 16)]

    def told(ahead: bool) -> list[list[Any]]:
        options: dict[str, Any] = {
            "max_num_batched_tokens": rows,
            "image_cache_memory": "0",
            "prefix_caching": ahead,
        }
        defaults = {
            "kv_cache_memory": "1000tokens",
            "max_model_len": 160,
            "max_num_seqs": 4,
            "threads": 1,
            "test_mode": True,
        }
        engine = load(
            Config(model=str(path), speculate="off", **defaults, **options),
            never_sampled_ids=(IMAGE_TOKEN_ID,),
        )
        overlapped = use_overlap(engine) if ahead else None
        answers = []
        prompt, pictures = expand_placeholders([*text, IMAGE_TOKEN_ID], IMAGE_TOKEN_ID, [shown])
        assert len(prompt) % engine.scheduler.block_size == 1
        for number in range(2):
            engine.submit(replace(request(str(number), 6), prompt_ids=prompt, pictures=pictures))
            events = [event for event in finish(engine) if isinstance(event, TokenEvent)]
            answers.append(
                [pair for event in events for pair in zip(event.token_ids, event.logits_hashes, strict=True)]
            )
        assert overlapped is None or (overlapped.num_device_steps > 3 and overlapped.num_errors == 0)
        return answers

    assert told(ahead=True) == told(ahead=False)
