"""Overlap scheduling changes no token: requests arrive, leave, end or fail while device steps are in flight.

A twin (tests/support/) computes device steps. A plain engine answers every request once, alone; then
batches of them come and go in overlapping engines with drafters, small caches and faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput
from foreword.cuda_graphs.decode_loop import DeviceDecodeLoop
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine.overlap_scheduling import OverlapLoop
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from tests.support.budget import examples
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.decode_loops import TwinForward, use_overlap
from tests.support.engines import VOCABULARY
from tests.support.graph_capture_fake import GraphCapturableOps

MAX_MODEL_LEN = 63
SHARED = tuple(40 + i % 7 for i in range(34))
JSON = StructuredOutput("json_object")
STOPS = tuple(range(60, 90))
OFF, TWO = Speculation("off"), Speculation("auto", 2)
DEVICE_PARAMS: tuple[dict[str, Any], ...] = (  # sampled on the device
    {"temperature": 0.0},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": 2},
    {"temperature": 1.0, "max_tokens": None},
    {"temperature": 0.7, "top_k": 9, "max_tokens": 13},
    {"temperature": 1.2, "top_p": 0.8, "max_tokens": 7},
    {"temperature": 0.9, "min_p": 0.05, "ignore_eos": False, "max_tokens": None},
    {"temperature": 1.0, "stop_token_ids": STOPS},
    {"temperature": 0.6, "stop_token_ids": STOPS[:6], "max_tokens": None},
    {"temperature": 0.8, "speculation": OFF},
    {"temperature": 0.8, "speculation": TWO, "max_tokens": 9},
)
HOST_PARAMS: tuple[dict[str, Any], ...] = (  # sampled by the host
    {"temperature": 0.9, "presence_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logprobs": 2, "max_tokens": 6},
    {"temperature": 0.9, "min_tokens": 5, "stop_token_ids": STOPS},
    {"temperature": 1.0, "structured": JSON, "ignore_eos": False},
    {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 5},
    {"logit_bias": {65: 5.0}, "max_tokens": 8},
    {"allowed_token_ids": (EOS,), "min_tokens": 3, "ignore_eos": False},
)


def prompt_of(number: int) -> tuple[int, ...]:
    """Some prompts share a prefix."""
    own = (100 + number, 40, 41, 100 + number, 40)
    return own if number % 3 else SHARED[: 17 + number % 5] + own


def request_of(number: int) -> Request:
    params = {
        "max_tokens": 20,
        "ignore_eos": True,
        "on_runaway": "off",
        **(DEVICE_PARAMS + HOST_PARAMS)[number % len(DEVICE_PARAMS + HOST_PARAMS)],
    }
    return Request(
        str(number),
        prompt_of(number),
        SamplingParams(**params),
        1000 + number,
        (EOS,),
        priority=number % 5 == 4,
    )


def vector_of(number: int) -> Request:
    return Request(
        str(number), prompt_of(number), SamplingParams(), 0, (EOS,), pooling="last" if number % 2 else "mean"
    )


REQUESTS = (*(request_of(number) for number in range(36)), *(vector_of(number) for number in range(36, 39)))
DEVICE_REQUESTS = [n for n in range(36) if n % len(DEVICE_PARAMS + HOST_PARAMS) < len(DEVICE_PARAMS)]


@dataclass(frozen=True)
class Checkpoints:
    model: Path
    drafter: Path  # nearly as good as the target
    short: Path  # a drafter with a short context
    timings: MeasuredCosts | None
    plain: Mapping[str, list[Any]]  # observations of the plain engine by request id

    def engine(self, short: bool = False, **options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "kv_cache_memory": "2000tokens",
            "max_model_len": MAX_MODEL_LEN,
            "threads": 1,
            "test_mode": True,
            "speculate": "off",
        }
        if "draft" in options.get("speculate", "") or options.get("speculate") == "auto":
            defaults["draft_model"] = str(self.short if short else self.drafter)
        engine = load(
            Config(model=str(self.model), **(defaults | options)),
            never_sampled_ids=(7, 8),
            timings=self.timings,
        )
        engine.set_vocabulary(VOCABULARY)
        return engine


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("ahead")
    model = write_checkpoint(path / "model", "llama", seed=5)
    drafter = write_checkpoint(path / "drafter", "llama", seed=5, dtype="bfloat16")
    short = write_checkpoint(path / "short", "llama", seed=5, dtype="bfloat16", max_position_embeddings=32)
    checkpoints = Checkpoints(model, drafter, short, None, {})
    events_by_id = serve(
        checkpoints.engine(max_num_seqs=1, prefix_caching=False), [Visit(request) for request in REQUESTS]
    )
    timings = checkpoints.engine(speculate="auto").proposer.timings
    return replace(
        checkpoints, timings=timings, plain={name: observe(events) for name, events in events_by_id.items()}
    )


@dataclass(frozen=True)
class Visit:
    """A request that arrives before step `comes` and, if still running, is aborted before step `goes`."""

    request: Request
    comes: int = 0
    goes: int | None = None


def serve(engine: Engine, visits: Sequence[Visit]) -> dict[str, list[Event]]:
    """Events by request id; the engine's bookkeeping is checked after every step."""
    events_by_id: dict[str, list[Event]] = {visit.request.id: [] for visit in visits}
    over: set[str] = set()
    step = 0
    while not engine.idle or any(visit.comes >= step for visit in visits):
        for visit in visits:
            if visit.comes == step:
                engine.submit(visit.request)
            elif visit.goes == step and visit.request.id not in over:
                engine.remove(visit.request.id)
                over.add(visit.request.id)
        for event in engine.step().events if not engine.idle else ():
            assert event.request_id not in over, "event after the end"
            events_by_id[event.request_id].append(event)
            if not isinstance(event, TokenEvent) or event.finish_reason is not None:
                over.add(event.request_id)
        engine.check()
        step += 1
    assert over == set(events_by_id), "a request never ended"
    assert engine.scheduler.pool.num_used == 0
    return events_by_id


def observe(events: Sequence[Event]) -> list[Any]:
    """Everything a client can see: tokens with index, hash and logprobs, and the end."""
    tokens: list[Any] = []
    other: list[Any] = []
    for event in events:
        if isinstance(event, TokenEvent):
            places = range(event.index, event.index + len(event.token_ids))
            scores = event.logprobs or (None,) * len(places)
            tokens += zip(places, event.token_ids, event.logits_hashes, scores, strict=True)
            other += [event.prompt_logprobs] if event.prompt_logprobs else []
            other += (
                [("repeats", event.index + event.repetition.num_tokens, event.repetition.pattern_len)]
                if event.repetition
                else []
            )
            other += [("end", event.finish_reason, event.stop_id)] if event.finish_reason else []
        else:
            other.append(event.vector if isinstance(event, EmbeddingEvent) else type(event.error).__name__)
    return [*tokens, *other]


def check_answers(
    checkpoints: Checkpoints, visits: Sequence[Visit], events_by_id: Mapping[str, list[Event]]
) -> None:
    for visit in visits:
        actual, expected = observe(events_by_id[visit.request.id]), checkpoints.plain[visit.request.id]
        if visit.goes is None:
            assert actual == expected, visit.request.id
        else:  # observed before the abort
            assert all(item in expected for item in actual), visit.request.id
            assert actual[:1] == expected[: len(actual[:1])], visit.request.id


def check_batch(
    checkpoints: Checkpoints, engine: Engine, visits_: Sequence[Visit], fault: tuple[str, int] | None
) -> None:
    """All answers are equal, and only injected faults occur."""
    overlap = use_overlap(engine, *([] if fault is None else [fails(*fault)]))
    check_answers(checkpoints, visits_, serve(engine, visits_))
    assert overlap.num_errors <= (fault is not None) and not engine.proposer.errors


def fails(verb: str, call: int, error: type[Exception] = RuntimeError) -> Callable[[str, TwinForward], None]:
    """Raise at one call of a verb."""
    calls: Counter[str] = Counter()

    def strike(now: str, twin: TwinForward) -> None:
        calls[now] += 1
        if now == verb and calls[now] == call:
            raise error(f"injected into {verb}")

    return strike


def visit(numbers: Sequence[int]) -> st.SearchStrategy[Visit]:
    comes = st.integers(0, 25)
    return st.builds(
        lambda n, c, stays: Visit(REQUESTS[n], c, None if stays is None else c + stays),
        st.sampled_from(numbers),
        comes,
        st.one_of(st.none(), st.none(), st.integers(1, 20)),
    )


def visits(numbers: Sequence[int]) -> st.SearchStrategy[list[Visit]]:
    return st.lists(visit(numbers), min_size=1, max_size=9, unique_by=lambda visit: visit.request.id)


OPTIONS = st.fixed_dictionaries(
    {
        "speculate": st.sampled_from(("off", "draft", "draft", "suffix", "text", "ngram,draft", "auto")),
        "draft_length": st.sampled_from(("fixed", "fixed", "adaptive")),
        "num_speculative_tokens": st.sampled_from((1, 3, 6)),
        "prefix_caching": st.booleans(),
        "max_num_seqs": st.sampled_from((2, 4, 16)),
        "kv_cache_memory": st.sampled_from(("2000tokens", "128tokens", "192tokens")),
        "max_num_batched_tokens": st.sampled_from((256, 16)),
        "short": st.booleans(),
    }
)
VERBS = ("begin", "launch", "collect", "commit")
FAULTS = st.one_of(st.none(), st.tuples(st.sampled_from(VERBS), st.integers(1, 6)))


@settings(max_examples=examples(40))
@given(options=OPTIONS, visits_=visits(range(len(REQUESTS))), fault=FAULTS)
def test_equal_while_requests_come_and_go(
    checkpoints: Checkpoints, options: dict[str, Any], visits_: list[Visit], fault: tuple[str, int] | None
) -> None:
    check_batch(checkpoints, checkpoints.engine(**options), visits_, fault)


@settings(max_examples=examples(40))
@given(options=OPTIONS, visits_=visits(DEVICE_REQUESTS), fault=FAULTS)
def test_equal_for_device_sampled_requests(
    checkpoints: Checkpoints, options: dict[str, Any], visits_: list[Visit], fault: tuple[str, int] | None
) -> None:
    options |= {"speculate": "draft" if options["num_speculative_tokens"] > 1 else "off"}
    check_batch(checkpoints, checkpoints.engine(**options), visits_, fault)


def visits_of(numbers: Sequence[int]) -> list[Visit]:
    return [Visit(REQUESTS[number]) for number in numbers]


def overlapping(checkpoints: Checkpoints, **options: Any) -> tuple[Engine, OverlapLoop]:
    engine = checkpoints.engine(**options)
    return engine, use_overlap(engine)


@pytest.mark.parametrize("speculate", ["off", "draft"])
def test_most_steps_run_on_the_device(checkpoints: Checkpoints, speculate: str) -> None:
    """All steps but the first, if no request reaches the context limit."""
    engine, overlap = overlapping(
        checkpoints, speculate=speculate, draft_length="fixed", num_speculative_tokens=1
    )
    visits_ = visits_of([n for n in DEVICE_REQUESTS if REQUESTS[n].params.max_tokens and n % 3][:9])
    events_by_id = serve(engine, visits_)
    check_answers(checkpoints, visits_, events_by_id)
    assert overlap.num_runs == 1 and overlap.num_errors == 0
    assert overlap.num_device_steps >= max(len(events) for events in events_by_id.values()) - 1, events_by_id


def drafted(events: Sequence[Event]) -> Counter[str]:
    """Draft counts, as the metrics count them."""
    uses = [event.draft for event in events if isinstance(event, TokenEvent) and event.draft is not None]
    actual = Counter(
        {
            "drafts": len(uses),
            "drafted": sum(u.num_drafted for u in uses),
            "accepted": sum(u.num_accepted for u in uses),
        }
    )
    assert all(use.drafter == "draft" and 0 <= use.num_accepted <= use.num_drafted for use in uses)
    return actual


def test_draft_counts_equal_the_plain_loop(checkpoints: Checkpoints) -> None:
    """Event by event; only the last draft may exceed the remaining tokens."""
    visits_ = visits_of(
        [n for n in DEVICE_REQUESTS if REQUESTS[n].params.speculation.max_draft_tokens is None][:7]
    )
    visits_ = [v for v in visits_ if v.request.params.speculation.method == "auto"]
    options = {"speculate": "draft", "draft_length": "fixed", "num_speculative_tokens": 3}
    plain = serve(checkpoints.engine(**options), visits_)
    engine, overlap = overlapping(checkpoints, **options)
    actual = serve(engine, visits_)
    assert overlap.num_device_steps > 4
    for name, events in plain.items():
        ours, plain_counts = drafted(actual[name]), drafted(events)
        assert ours["drafts"] in (plain_counts["drafts"], plain_counts["drafts"] + 1)
        assert ours["accepted"] in (plain_counts["accepted"], plain_counts["accepted"] + 1)
        assert [e.token_ids for e in actual[name] if isinstance(e, TokenEvent)] == [
            e.token_ids for e in events if isinstance(e, TokenEvent)
        ]
        assert 0 <= ours["drafted"] - plain_counts["drafted"] <= 3
    lengths = engine.proposer.stats().draft_length_counts["draft"]
    assert sum(lengths.values()) >= sum(drafted(events)["drafts"] for events in actual.values())


@pytest.mark.parametrize("speculate", ["off", "draft"])
def test_most_steps_overlap_with_host_sampled_requests(checkpoints: Checkpoints, speculate: str) -> None:
    """All kinds of requests at once."""
    engine, overlap = overlapping(
        checkpoints, speculate=speculate, draft_length="fixed", num_speculative_tokens=3
    )
    visits_ = [Visit(request) for request in REQUESTS[:18] if request.params.speculation.method == "auto"]
    visits_ = [v for v in visits_ if v.request.params.speculation.max_draft_tokens is None]
    events_by_id = serve(engine, visits_)
    check_answers(checkpoints, visits_, events_by_id)
    assert overlap.num_device_steps > 4 and overlap.num_errors == 0 and not engine.proposer.errors
    num_drafts = sum(drafted(events)["drafts"] for events in events_by_id.values())
    assert (num_drafts > 20) == (speculate == "draft")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("speculate", ["off", "draft"])
def test_device_step_error_loses_no_token(checkpoints: Checkpoints, verb: str, speculate: str) -> None:
    engine = checkpoints.engine(speculate=speculate, draft_length="fixed")
    overlap = use_overlap(engine, fails(verb, 1 if verb == "begin" else 3))
    visits_ = visits_of([*DEVICE_REQUESTS[:9], *([11] if verb == "commit" else [])])
    events_by_id = serve(engine, visits_)
    check_answers(checkpoints, visits_, events_by_id)
    assert overlap.num_errors == 1 and overlap.num_runs >= 1, "overlap is retried later"
    assert not any(isinstance(event, ErrorEvent) for events in events_by_id.values() for event in events)


def test_repetition_is_detected_at_the_same_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.core.finish.PATTERN_LIMITS", ((2, 2),))
    visits_ = [
        Visit(
            replace(
                request, params=replace(request.params, on_runaway=what, max_tokens=None, stop_token_ids=())
            )
        )
        for request, what in zip([REQUESTS[n] for n in DEVICE_REQUESTS], ("warn", "stop") * 20, strict=False)
    ]
    plain = serve(checkpoints.engine(), visits_)
    for speculate in ("off", "draft"):
        engine, overlap = overlapping(checkpoints, speculate=speculate, draft_length="fixed")
        actual = serve(engine, visits_)
        assert {name: observe(events) for name, events in actual.items()} == {
            name: observe(events) for name, events in plain.items()
        }
        assert overlap.num_device_steps > 2
    reasons = {
        event.finish_reason for events in plain.values() for event in events if isinstance(event, TokenEvent)
    }
    assert "repetition" in reasons


def test_equal_on_captured_graphs(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device decode loop on a CPU, with and without drafts, compared with an engine without either."""
    monkeypatch.setattr("foreword.engine.loader.select_backend", lambda *_, **__: GraphCapturableOps())
    launched: list[int] = []
    launch = DeviceDecodeLoop.launch

    def recording(loop: DeviceDecodeLoop, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        launched.append(num_draft_tokens)
        launch(loop, active_slots, num_draft_tokens)

    monkeypatch.setattr(DeviceDecodeLoop, "launch", recording)
    small = {"num_speculative_tokens": 2, "max_num_seqs": 3, "kv_cache_memory": "128tokens"}
    visits_ = [
        Visit(REQUESTS[n], 3 * i, 3 * i + 9 if i == 2 else None)
        for i, n in enumerate((0, 7, 3, 6, 4, 11, 8, 12, 14, 17))
    ]
    plain = serve(checkpoints.engine(**small, overlap=False), visits_)
    for speculate, draft_length in (("off", "fixed"), ("draft", "fixed"), ("suffix", "adaptive")):
        engine = checkpoints.engine(**small, speculate=speculate, draft_length=draft_length)
        actual = serve(engine, visits_)
        assert engine.overlap is not None and engine.overlap.num_errors == 0
        assert speculate == "suffix" or set(launched) == {2 if speculate == "draft" else 0}
        launched.clear()
        for v in visits_:
            if v.goes is None:
                assert observe(actual[v.request.id]) == observe(plain[v.request.id]), speculate
