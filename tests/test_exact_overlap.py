"""Running ahead changes no token: whatever comes, goes, ends or fails while rounds are under way.

Rounds are computed by the twin (tests/support/decode_loops.py). Every request is answered once by an engine that decodes plainly, one
request at a time; then crowds of them come and go in engines that run ahead, with drafters, small caches and faults.
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
from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine.overlap import OverlapLoop
from foreword.speculation.control.cost_model import MeasuredCosts
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint
from tests.support.decode_loops import TwinForward, use_overlap
from tests.support.graph_capture_fake import GraphCapturableOps

MAX_MODEL_LEN = 63
SHARED = tuple(40 + i % 7 for i in range(34))
JSON = StructuredOutput("json_object")
VOCABULARY = Vocabulary(
    tuple(bytes([i]) if i < 256 else b"" for i in range(VOCAB_SIZE)), tuple(range(256, VOCAB_SIZE)), (EOS,)
)
STOPS = tuple(range(60, 90))
OFF, TWO = Speculation("off"), Speculation("auto", 2)
ROUNDS: tuple[dict[str, Any], ...] = (  # what rounds can sample
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
OTHERS: tuple[dict[str, Any], ...] = (  # what only the host can do
    {"temperature": 0.9, "presence_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logprobs": 2, "max_tokens": 6},
    {"temperature": 0.9, "min_tokens": 5, "stop_token_ids": STOPS},
    {"temperature": 1.0, "structured": JSON, "ignore_eos": False},
    {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 5},
    {"logit_bias": {65: 5.0}, "max_tokens": 8},
    {"allowed_token_ids": (EOS,), "min_tokens": 3, "ignore_eos": False},
)


def prompt_of(number: int) -> tuple[int, ...]:
    """Some share their beginnings."""
    own = (100 + number, 40, 41, 100 + number, 40)
    return own if number % 3 else SHARED[: 17 + number % 5] + own


def request_of(number: int) -> Request:
    params = {
        "max_tokens": 20,
        "ignore_eos": True,
        "on_runaway": "off",
        **(ROUNDS + OTHERS)[number % len(ROUNDS + OTHERS)],
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


EVERYBODY = (*(request_of(number) for number in range(36)), *(vector_of(number) for number in range(36, 39)))
SAMPLED_IN_ROUNDS = [n for n in range(36) if n % len(ROUNDS + OTHERS) < len(ROUNDS)]


@dataclass(frozen=True)
class House:
    """A target, a drafter that is nearly as good, one that reads less, what machines are timed at, and what everybody is
    answered plainly."""

    model: Path
    drafter: Path
    short: Path
    timings: MeasuredCosts | None
    plain: Mapping[str, list[Any]]

    def engine(self, short: bool = False, **options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "kv_cache_memory": "2000tokens", "max_model_len": MAX_MODEL_LEN, "threads": 1, "test_mode": True, "speculate": "off",
        }  # fmt: skip
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
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    path = tmp_path_factory.mktemp("ahead")
    model = write_checkpoint(path / "model", "llama", seed=5)
    drafter = write_checkpoint(path / "drafter", "llama", seed=5, dtype="bfloat16")
    short = write_checkpoint(path / "short", "llama", seed=5, dtype="bfloat16", max_position_embeddings=32)
    house = House(model, drafter, short, None, {})
    heard = serve(
        house.engine(max_num_seqs=1, prefix_caching=False), [Visit(request) for request in EVERYBODY]
    )
    timings = house.engine(speculate="auto").proposer.timings
    return replace(house, timings=timings, plain={name: told(events) for name, events in heard.items()})


@dataclass(frozen=True)
class Visit:
    """A request comes before step `comes`; if it is still there before step `goes`, it is not wanted any more."""

    request: Request
    comes: int = 0
    goes: int | None = None


def serve(engine: Engine, visits: Sequence[Visit]) -> dict[str, list[Event]]:
    """The events of each request; all bookkeeping is looked at after every step."""
    heard: dict[str, list[Event]] = {visit.request.id: [] for visit in visits}
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
            assert event.request_id not in over, "it was over"
            heard[event.request_id].append(event)
            if not isinstance(event, TokenEvent) or event.finish_reason is not None:
                over.add(event.request_id)
        engine.check()
        step += 1
    assert over == set(heard), "somebody was forgotten"
    assert engine.scheduler.pool.num_used == 0
    return heard


def told(events: Sequence[Event]) -> list[Any]:
    """All that may not depend on how it was computed: tokens with their places and hashes, scores, and how it ended."""
    tokens: list[Any] = []
    found: list[Any] = []
    for event in events:
        if isinstance(event, TokenEvent):
            places = range(event.index, event.index + len(event.token_ids))
            scores = event.logprobs or (None,) * len(places)
            tokens += zip(places, event.token_ids, event.logits_hashes, scores, strict=True)
            found += [event.prompt_logprobs] if event.prompt_logprobs else []
            found += (
                [("repeats", event.index + event.repetition.num_tokens, event.repetition.pattern_len)]
                if event.repetition
                else []
            )
            found += [("end", event.finish_reason, event.stop_id)] if event.finish_reason else []
        else:
            found.append(event.vector if isinstance(event, EmbeddingEvent) else type(event.error).__name__)
    return [*tokens, *found]


def check_answers(house: House, visits: Sequence[Visit], heard: Mapping[str, list[Event]]) -> None:
    for visit in visits:
        found, expected = told(heard[visit.request.id]), house.plain[visit.request.id]
        if visit.goes is None:
            assert found == expected, visit.request.id
        else:  # what was told before it went
            assert all(one in expected for one in found), visit.request.id
            assert found[:1] == expected[: len(found[:1])], visit.request.id


def check_crowd(house: House, engine: Engine, crowd: Sequence[Visit], fault: tuple[str, int] | None) -> None:
    """Nothing goes wrong but what is injected."""
    ahead = use_overlap(engine, *([] if fault is None else [fails(*fault)]))
    check_answers(house, crowd, serve(engine, crowd))
    assert ahead.num_errors <= (fault is not None) and not engine.proposer.errors


def fails(verb: str, call: int, error: type[Exception] = RuntimeError) -> Callable[[str, TwinForward], None]:
    """Strike at one call of a verb."""
    calls: Counter[str] = Counter()

    def strike(now: str, twin: TwinForward) -> None:
        calls[now] += 1
        if now == verb and calls[now] == call:
            raise error(f"injected into {verb}")

    return strike


def visit(numbers: Sequence[int]) -> st.SearchStrategy[Visit]:
    comes = st.integers(0, 25)
    return st.builds(
        lambda n, c, stays: Visit(EVERYBODY[n], c, None if stays is None else c + stays),
        st.sampled_from(numbers),
        comes,
        st.one_of(st.none(), st.none(), st.integers(1, 20)),
    )


def visits(numbers: Sequence[int]) -> st.SearchStrategy[list[Visit]]:
    return st.lists(visit(numbers), min_size=1, max_size=9, unique_by=lambda one: one.request.id)


OPTIONS = st.fixed_dictionaries(
    {
        "speculate": st.sampled_from(("off", "draft", "draft", "suffix", "ngram,draft", "auto")),
        "draft_length": st.sampled_from(("fixed", "fixed", "adaptive")),
        "num_speculative_tokens": st.sampled_from((1, 3, 6)),
        "prefix_caching": st.booleans(),
        "max_num_seqs": st.sampled_from((2, 4, 16)),
        "kv_cache_memory": st.sampled_from(("2000tokens", "128tokens", "192tokens")),
        "max_num_batched_tokens": st.sampled_from((256, 16)),
        "short": st.booleans(),
    }
)
FAULTS = st.one_of(st.none(), st.tuples(st.sampled_from(("begin", "launch", "collect")), st.integers(1, 6)))


@settings(max_examples=40, deadline=None)
@given(options=OPTIONS, crowd=visits(range(len(EVERYBODY))), fault=FAULTS)
def test_equal_whoever_comes_and_goes(
    house: House, options: dict[str, Any], crowd: list[Visit], fault: tuple[str, int] | None
) -> None:
    check_crowd(house, house.engine(**options), crowd, fault)


@settings(max_examples=40, deadline=None)
@given(options=OPTIONS, crowd=visits(SAMPLED_IN_ROUNDS), fault=FAULTS)
def test_equal_where_rounds_can_serve_all(
    house: House, options: dict[str, Any], crowd: list[Visit], fault: tuple[str, int] | None
) -> None:
    options |= {"speculate": "draft" if options["num_speculative_tokens"] > 1 else "off"}
    check_crowd(house, house.engine(**options), crowd, fault)


def crowd_of(numbers: Sequence[int]) -> list[Visit]:
    return [Visit(EVERYBODY[number]) for number in numbers]


def running_ahead(house: House, **options: Any) -> tuple[Engine, OverlapLoop]:
    engine = house.engine(**options)
    return engine, use_overlap(engine)


@pytest.mark.parametrize("speculate", ["off", "draft"])
def test_most_steps_are_rounds(house: House, speculate: str) -> None:
    """All but the first, where nobody comes to the end of the context."""
    engine, ahead = running_ahead(house, speculate=speculate, draft_length="fixed", num_speculative_tokens=1)
    crowd = crowd_of([n for n in SAMPLED_IN_ROUNDS if EVERYBODY[n].params.max_tokens and n % 3][:9])
    heard = serve(engine, crowd)
    check_answers(house, crowd, heard)
    assert ahead.num_runs == 1 and ahead.num_errors == 0
    assert ahead.num_device_steps >= max(len(events) for events in heard.values()) - 1, heard


def drafted(events: Sequence[Event]) -> Counter[str]:
    """Figures of speculation, as the metrics count them."""
    uses = [event.draft for event in events if isinstance(event, TokenEvent) and event.draft is not None]
    found = Counter(
        {
            "drafts": len(uses),
            "drafted": sum(u.num_drafted for u in uses),
            "accepted": sum(u.num_accepted for u in uses),
        }
    )
    assert all(use.drafter == "draft" and 0 <= use.num_accepted <= use.num_drafted for use in uses)
    return found


def test_speculation_is_counted_as_ever(house: House) -> None:
    """As in the plain loop, event by event, but that the last draft may be longer than the answer has room for one."""
    crowd = crowd_of([n for n in SAMPLED_IN_ROUNDS if EVERYBODY[n].params.speculation.max_tokens is None][:7])
    crowd = [one for one in crowd if one.request.params.speculation.method == "auto"]
    options = {"speculate": "draft", "draft_length": "fixed", "num_speculative_tokens": 3}
    plain = serve(house.engine(**options), crowd)
    engine, ahead = running_ahead(house, **options)
    found = serve(engine, crowd)
    assert ahead.num_device_steps > 4
    for name, events in plain.items():
        mine, theirs = drafted(found[name]), drafted(events)
        assert mine["drafts"] in (theirs["drafts"], theirs["drafts"] + 1)
        assert mine["accepted"] in (theirs["accepted"], theirs["accepted"] + 1)
        assert [e.token_ids for e in found[name] if isinstance(e, TokenEvent)] == [
            e.token_ids for e in events if isinstance(e, TokenEvent)
        ]
        assert 0 <= mine["drafted"] - theirs["drafted"] <= 3
    lengths = engine.proposer.stats().draft_length_counts["draft"]
    assert sum(lengths.values()) >= sum(drafted(events)["drafts"] for events in found.values())


@pytest.mark.parametrize("verb", ["begin", "launch", "collect"])
@pytest.mark.parametrize("speculate", ["off", "draft"])
def test_an_error_of_a_round_costs_nobody_a_token(house: House, verb: str, speculate: str) -> None:
    engine = house.engine(speculate=speculate, draft_length="fixed")
    ahead = use_overlap(engine, fails(verb, 1 if verb == "begin" else 3))
    crowd = crowd_of(SAMPLED_IN_ROUNDS[:9])
    heard = serve(engine, crowd)
    check_answers(house, crowd, heard)
    assert ahead.num_errors == 1 and ahead.num_runs >= 1, "it is tried again after a while"
    assert not any(isinstance(event, ErrorEvent) for events in heard.values() for event in events)


def test_a_repetition_is_found_at_the_same_token(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.core.repetition.PATTERN_LIMITS", ((2, 2),))
    crowd = [
        Visit(
            replace(
                request, params=replace(request.params, on_runaway=what, max_tokens=None, stop_token_ids=())
            )
        )
        for request, what in zip(
            [EVERYBODY[n] for n in SAMPLED_IN_ROUNDS], ("warn", "stop") * 20, strict=False
        )
    ]
    plain = serve(house.engine(), crowd)
    for speculate in ("off", "draft"):
        engine, ahead = running_ahead(house, speculate=speculate, draft_length="fixed")
        found = serve(engine, crowd)
        assert {name: told(events) for name, events in found.items()} == {
            name: told(events) for name, events in plain.items()
        }
        assert ahead.num_device_steps > 2
    reasons = {
        event.finish_reason for events in plain.values() for event in events if isinstance(event, TokenEvent)
    }
    assert "repetition" in reasons


@pytest.mark.parametrize(
    "options",
    [{"speculate": "off"}, {"speculate": "draft"}, {"speculate": "suffix", "draft_length": "adaptive"}],
)
def test_equal_on_recorded_passes(
    house: House, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The rounds of a device, as far as a CPU can compute them, beside the same engine without them."""
    monkeypatch.setattr("foreword.engine.loader.select_backend", lambda *_: GraphCapturableOps())
    small = {
        "draft_length": "fixed",
        "num_speculative_tokens": 2,
        "max_num_seqs": 3,
        "kv_cache_memory": "128tokens",
        **options,
    }
    crowd = [
        Visit(EVERYBODY[n], 3 * i, 3 * i + 9 if i == 2 else None)
        for i, n in enumerate((0, 7, 3, 6, 4, 11, 8))
    ]
    off, on = house.engine(**small, overlap=False), house.engine(**small)
    assert off.overlap is None and on.overlap is not None
    plain, found = serve(off, crowd), serve(on, crowd)
    for one in crowd:
        if one.goes is None:
            assert told(found[one.request.id]) == told(plain[one.request.id])
    assert on.overlap.num_device_steps > 0 or "suffix" in small["speculate"]
    assert on.overlap.num_errors == 0
