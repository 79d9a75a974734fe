"""What goes wrong in one request's work ends that request in the same step, and changes no bit of any other's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.fault_isolation import MAX_FAILED_STEPS
from foreword.engine.loader import load
from foreword.engine.trace import replay
from foreword.engine_client.client import SubprocessClient
from foreword.errors import RequestFailed
from tests.support import faulty_engine
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint
from tests.support.fault_injection import Fault, FaultInjector

COMMON = (40, 41, 42, 40, 41, 43, 40, 41, 42, 40, 41, 44, 45, 40, 41, 42, 40)
LONG = tuple(30 + 7 * i % 190 for i in range(60))
JSON = StructuredOutput("json_object")
VOCABULARY = Vocabulary(
    tuple(bytes([i]) if i < 256 else b"" for i in range(VOCAB_SIZE)), tuple(range(256, VOCAB_SIZE)), (EOS,)
)
Heard = Mapping[str, list[Event]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults") / "model", "llama", seed=5)


def config_of(checkpoint: Path, **options: object) -> Config:
    defaults = {
        "kv_cache_memory": "600tokens", "max_model_len": 96, "max_num_batched_tokens": 48, "max_num_seqs": 16, "threads": 1,
        "test_mode": True, "draft_length": "fixed",
    }  # fmt: skip
    return Config(model=str(checkpoint), **(defaults | options))  # type: ignore[arg-type]


def engine_of(checkpoint: Path, **options: object) -> Engine:
    engine = load(config_of(checkpoint, **options), never_sampled_ids=())
    engine.set_vocabulary(VOCABULARY)
    return engine


def generation(name: str, prompt: Sequence[int] = COMMON, seed: int = 1, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params})
    return Request(name, tuple(prompt), sampling, seed, (EOS,))


def everybody() -> list[Request]:
    """A request of each kind."""
    penalized = {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "top_p": 0.9,
    }
    return [
        generation("greedy", temperature=0.0),
        generation("penalized", seed=2, **penalized),
        generation("json", seed=3, structured=JSON, ignore_eos=False),
        generation("scored", LONG, seed=4, prompt_logprobs=2, logprobs=2),
        generation("long", LONG[1:], seed=5, logit_bias={50: 2.0}),
        Request("mean", LONG[2:], SamplingParams(), 0, (EOS,), pooling="mean"),
        Request("last", LONG, SamplingParams(), 0, (EOS,), pooling="last"),
    ]


def twins() -> list[Request]:
    """Everybody, and one more of the kinds that keep something between steps."""
    penalized = {"temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": 0.2, "dry_multiplier": 0.5}
    return [
        *everybody(),
        generation("penalized too", LONG[5:20], seed=7, **penalized),
        generation("json too", LONG[7:20], seed=8, structured=JSON, ignore_eos=False),
        Request("mean too", LONG[9:], SamplingParams(), 0, (EOS,), pooling="mean"),
    ]


def hear(
    engine: Engine, requests: Sequence[Request], faults: FaultInjector | None = None
) -> dict[str, list[Event]]:
    """Serve the requests. Whoever fails does so in a step in which a fault struck."""
    for request in requests:
        engine.submit(request)
    heard: dict[str, list[Event]] = {request.id: [] for request in requests}
    while not engine.idle:
        report = engine.step()
        for event in report.events:
            heard[event.request_id].append(event)
            if isinstance(event, ErrorEvent) and faults is not None:
                assert report.stats.step - 1 in faults.steps or "start" in report.stats.faults, (
                    "it was told later"
                )
        engine.check()
    assert engine.scheduler.pool.num_used == 0 and not engine.proposer._request_drafters
    return heard


def told(events: Sequence[Event]) -> list[Any]:
    """All that may not depend on others: tokens, hashes of logits, logprobs, vectors, how it ended."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, TokenEvent):
            found += zip(
                event.token_ids,
                event.logits_hashes,
                event.logprobs or (None,) * len(event.token_ids),
                strict=True,
            )
            found += [event.prompt_logprobs] if event.prompt_logprobs else []
            found += [event.finish_reason] if event.finish_reason else []
        elif isinstance(event, EmbeddingEvent):
            found.append(event.vector)
    return found


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> Heard:
    return hear(engine_of(checkpoint, speculate="off"), twins())


def check_neighbours(heard: Heard, undisturbed: Heard, victims: Sequence[str] = ()) -> None:
    for name, events in heard.items():
        if name not in victims:
            assert not [event for event in events if isinstance(event, ErrorEvent)], name
            assert told(events) == told(undisturbed[name]), name


STRUCK = [
    Fault("start", "error", "penalized"),
    Fault("assemble", "error", "greedy", call=3),
    Fault("assemble", "memory", "mean"),
    Fault("prepare", "error", "json", call=2),
    Fault("forward", "error", "long", call=2),
    Fault("forward", "memory", "scored"),
    Fault("forward", "device memory", "penalized", call=3),
    Fault("forward", "nan", "greedy", call=3),
    Fault("forward", "infinite", "json"),
    Fault("sample", "error", "penalized", call=2),
    Fault("sample", "memory", "json"),
    Fault("sample", "bad id", "greedy", call=2),
    Fault("sample", "too few", "scored", call=2),
    Fault("halfway", "error", "penalized", call=4),
    Fault("mask", "error", "json", call=3),
    Fault("run", "too few", "long", call=2),
    Fault("accept", "error", "json", call=2),
    Fault("commit", "memory", "greedy", call=4),
    Fault("pool", "too few", "mean"),
    Fault("pool", "error", "last"),
]


@pytest.mark.parametrize(
    "fault", STRUCK, ids=lambda fault: f"{fault.point}-{fault.kind.replace(' ', '-')}-{fault.request}"
)
@pytest.mark.parametrize("speculate", ["off", "suffix"])
def test_a_fault_ends_its_request_in_its_step_and_nobody_else(
    checkpoint: Path, undisturbed: Heard, fault: Fault, speculate: str
) -> None:
    engine = engine_of(checkpoint, speculate=speculate)
    faults = FaultInjector(engine, fault)
    victim = str(fault.request)
    heard = hear(engine, twins(), faults)
    assert faults.steps, "the fault never struck"
    check_neighbours(heard, undisturbed, [victim])
    *before, last = heard[victim]
    assert isinstance(last, ErrorEvent) and isinstance(last.error, RequestFailed)
    assert told(before) == told(undisturbed[victim])[: len(told(before))], (
        "what it had before is what it would have had"
    )
    assert sum(engine.step().stats.faults.values()) == 1


TRANSIENT = [
    Fault(point, kind, call=call)
    for point, kind, call in (
        ("assemble", "error", 3), ("prepare", "memory", 2), ("forward", "error", 2), ("forward", "device memory", 4),
        ("sample", "memory", 3), ("sample", "bad id", 5), ("sample", "too few", 2), ("halfway", "error", 6), ("mask", "error", 3),
        ("run", "too few", 2),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", TRANSIENT, ids=lambda fault: f"{fault.point}-{fault.kind.replace(' ', '-')}"
)
def test_what_fails_for_the_whole_step_and_not_for_its_parts_ends_nobody(
    checkpoint: Path, undisturbed: Heard, fault: Fault
) -> None:
    """As an allocation does that is too large; and no part of the step has been done twice."""
    engine = engine_of(checkpoint, speculate="suffix")
    faults = FaultInjector(engine, fault)
    check_neighbours(hear(engine, twins()), undisturbed)
    assert faults.steps, "the fault never struck"
    assert not engine.step().stats.faults


@pytest.mark.parametrize("kind", ["too few", "error", "memory"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_pass_over_prompts_is_done_again_too(
    checkpoint: Path, undisturbed: Heard, kind: str, call: int
) -> None:
    """Nobody wants tokens: several prompts share a pass, and the sums of a mean are not added up twice."""
    engine = engine_of(checkpoint, max_num_batched_tokens=60)
    faults = FaultInjector(engine, Fault("pool", kind, call=call))
    check_neighbours(hear(engine, [one for one in twins() if one.pooling is not None]), undisturbed)
    assert faults.steps and not engine.step().stats.faults


@pytest.mark.parametrize(
    "fault",
    [
        Fault(point, "error", call=2, times=10**9)
        for point in ("begin", "propose", "finish", "admit", "measured")
    ]
    + [Fault("propose", kind, call=2, times=10**9) for kind in ("bad id", "huge", "too few", "memory")],
    ids=lambda fault: f"{fault.point}-{fault.kind.replace(' ', '-')}",
)
@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_drafters_and_their_policy_end_nobody(
    checkpoint: Path, undisturbed: Heard, fault: Fault, draft_length: str
) -> None:
    options = {"speculate": "suffix,draft", "draft_model": str(checkpoint), "draft_length": draft_length}
    engine = engine_of(checkpoint, **options)
    faults = FaultInjector(engine, fault)
    for request in twins():
        engine.submit(request)
    heard: dict[str, list[Event]] = {request.id: [] for request in twins()}
    while not engine.idle:
        for event in engine.step().events:
            heard[event.request_id].append(event)
        engine.scheduler.check()
    assert faults.steps or draft_length == "adaptive", "the fault never struck"
    check_neighbours(heard, undisturbed)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("plan", "error", call=3),
        Fault("allocate", "memory", call=3),
        Fault("forward", "device", "greedy", call=2),
        Fault("forward", "error", call=4, times=10**9),
        Fault("sample", "bad id", call=4, times=10**9),
        Fault("forward", "nan", call=4, times=10**9),
        Fault("pool", "error", call=1, times=10**9),
    ],
    ids=lambda fault: f"{fault.point}-{fault.kind}",
)
def test_what_is_nobodys_own_fault_ends_the_engine(checkpoint: Path, fault: Fault) -> None:
    """The device is lost, a plan cannot be made, or a harmless request fails like all others."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, fault)
    requests = everybody()
    for request in requests:
        engine.submit(request)
    ended: list[str] = []
    with pytest.raises((RuntimeError, MemoryError)):
        while not engine.idle:
            ended += [event.request_id for event in engine.step().events if isinstance(event, ErrorEvent)]
    assert not ended, "nobody is told of an end that the next engine makes good"


def test_one_bad_request_after_the_other_does_not_end_the_engine(checkpoint: Path) -> None:
    """Not even if nobody else is there, and with choices that all fail in one step."""
    engine = engine_of(checkpoint)
    names = [f"bad-{number}" for number in range(MAX_FAILED_STEPS - 1)]
    FaultInjector(engine, *(Fault("sample", "error", name) for name in names))
    for first, second in zip(names[::2], names[1::2], strict=False):
        heard = hear(engine, [generation(first), generation(second)])
        assert all(isinstance(events[-1], ErrorEvent) for events in heard.values())


def test_errors_without_end_end_the_engine(checkpoint: Path) -> None:
    """Something is broken that a harmless request does not meet."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, *(Fault("sample", "error", str(number)) for number in range(MAX_FAILED_STEPS)))
    with pytest.raises(RuntimeError, match="nothing but errors"):
        for number in range(MAX_FAILED_STEPS):
            hear(engine, [generation(str(number))])


def test_broken_bookkeeping_ends_the_engine(checkpoint: Path) -> None:
    """The error of one request left its traces in what belongs to all."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("commit", "error", "greedy"))
    fail = engine.scheduler._finish_with_error

    def leak(*args: Any) -> ErrorEvent:
        engine.scheduler.pool.allocate()
        return fail(*args)

    engine.scheduler._finish_with_error = leak  # type: ignore[method-assign]
    engine.submit(generation("greedy"))
    with pytest.raises(AssertionError):
        engine.step()


def test_what_a_failed_request_computed_is_not_found_again(checkpoint: Path, undisturbed: Heard) -> None:
    """Its numbers were none; perhaps those in its blocks are none either."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("forward", "nan", "long", call=3))
    hear(engine, [request for request in everybody() if request.id == "long"])
    again = generation("again", LONG[1:], seed=5, logit_bias={50: 2.0})
    events = hear(engine, [again])["again"]
    assert isinstance(events[0], TokenEvent) and events[0].num_cached == 0
    assert told(events) == told(undisturbed["long"])


def test_the_log_tells_who_and_where_and_no_text(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("sample", "error", "greedy", call=2))
    (last,) = [event for event in hear(engine, everybody())["greedy"] if isinstance(event, ErrorEvent)]
    assert last.error.status == 500 and "(sample)" in last.error.message
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info and "greedy" in record.getMessage() and "injected" not in last.error.message


def test_a_trace_with_faults_is_replayed(checkpoint: Path, tmp_path: Path) -> None:
    struck = [
        Fault("sample", "error", "penalized", call=2),
        Fault("forward", "nan", "scored", call=3),
        Fault("accept", "error", "json", call=2),
        Fault("commit", "memory", "long", call=3),
        Fault("pool", "error", "mean"),
    ]
    engine = engine_of(
        checkpoint, trace=str(tmp_path / "trace"), speculate="suffix", kv_cache_memory="192tokens"
    )
    FaultInjector(engine, *struck)
    hear(engine, twins())
    late = [
        Request(f"late {one.id}", one.prompt_ids, one.params, one.seed, (EOS,), pooling=one.pooling)
        for one in twins()
    ]
    hear(engine, [one for one in late if one.params.structured is None])
    assert len(list(replay((tmp_path / "trace").read_text().splitlines()))) > 20


@pytest.mark.parametrize("seed", range(12))
def test_faults_at_random(checkpoint: Path, undisturbed: Heard, seed: int) -> None:
    """Many at once, at any part: who fails was struck, and everybody else has every token."""
    chance = random.Random(seed)
    requests = twins()
    chance.shuffle(requests)
    points = (
        "assemble",
        "prepare",
        "forward",
        "sample",
        "halfway",
        "mask",
        "accept",
        "commit",
        "run",
        "pool",
    )
    struck = [
        Fault(
            point,
            "too few" if point in ("run", "pool") else chance.choice(("error", "memory")),
            chance.choice(requests).id,
            chance.randint(1, 6),
        )
        for point in chance.choices(points, k=3)
    ]
    passing = Fault(
        chance.choice(("assemble", "sample", "forward")), "memory", call=chance.randint(2, 5)
    )  # all are there yet
    method, cache = (
        chance.choice(("off", "suffix", "suffix,draft")),
        chance.choice(("600tokens", "192tokens")),
    )
    options = {"draft_model": str(checkpoint)} if "draft" in method else {}
    engine = engine_of(checkpoint, speculate=method, kv_cache_memory=cache, **options)
    FaultInjector(engine, *struck, passing)
    heard = hear(engine, requests)
    victims = [name for name, events in heard.items() if isinstance(events[-1], ErrorEvent)]
    check_neighbours(heard, undisturbed, victims)
    assert set(victims) <= {fault.request for fault in struck}
    for name in victims:
        before = told(heard[name][:-1])
        assert before == told(undisturbed[name])[: len(before)]


async def test_in_a_process_of_its_own(
    checkpoint: Path, undisturbed: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fails and the engine goes on; the device is lost and the engine does not, which costs nobody a token."""
    struck = [Fault("sample", "error", "penalized", call=3), Fault("forward", "device", call=22)]
    monkeypatch.setenv(faulty_engine.FAULTS_VARIABLE, json.dumps([asdict(fault) for fault in struck]))
    client = SubprocessClient(
        config_of(checkpoint), (), lambda: VOCABULARY, entry_module=faulty_engine.__name__
    )
    restarts: list[str] = []
    client.on_restart = restarts.append
    await client.start()

    async def answer(request: Request) -> list[Event]:
        return [event async for event in client.submit(request)]

    answers = await asyncio.gather(*map(answer, twins()))
    await client.close()
    heard = {request.id: events for request, events in zip(twins(), answers, strict=True)}
    assert isinstance(heard["penalized"][-1], ErrorEvent) and restarts
    check_neighbours(heard, undisturbed, ["penalized"])
