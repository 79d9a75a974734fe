"""Faults in a real engine: each fails its request in the same step, and changes no bit of the others."""

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
from foreword.core.structured_output import StructuredOutput
from foreword.engine.engine import Engine
from foreword.engine.fault_isolation import MAX_FAILED_PASSES
from foreword.engine.scheduler_trace import replay
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.make_client import make_engine_client
from foreword.errors import RequestFailed
from tests.support import faulty_engine
from tests.support.budget import is_full, some_of
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.engines import DEFAULTS, VOCABULARY, load_engine, make_request
from tests.support.fault_injection import Fault, FaultInjector

COMMON = (40, 41, 42, 40, 41, 43, 40, 41, 42, 40, 41, 44, 45, 40, 41, 42, 40)
LONG = tuple(30 + 7 * i % 190 for i in range(60))
JSON = StructuredOutput("json_object")
EventsById = Mapping[str, list[Event]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults") / "model", "llama", seed=5)


OPTIONS: dict[str, Any] = {
    "kv_cache_memory": "600tokens", "max_model_len": 96, "max_num_batched_tokens": 48, "max_num_seqs": 16
}  # fmt: skip


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    engine = load_engine(checkpoint, **{**OPTIONS, **options})
    engine.set_vocabulary(VOCABULARY)
    return engine


def generation(name: str, prompt: Sequence[int] = COMMON, seed: int = 1, **params: Any) -> Request:
    return make_request(name, prompt, seed, **{"max_tokens": 16, **params})


def one_of_each() -> list[Request]:
    """One request of each kind."""
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


def all_requests() -> list[Request]:
    """One more request of the kinds that keep state between steps."""
    penalized = {"temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": 0.2, "dry_multiplier": 0.5}
    return [
        *one_of_each(),
        generation("penalized too", LONG[5:20], seed=7, **penalized),
        generation("json too", LONG[7:20], seed=8, structured=JSON, ignore_eos=False),
        Request("mean too", LONG[9:], SamplingParams(), 0, (EOS,), pooling="mean"),
    ]


def run_requests(
    engine: Engine, requests: Sequence[Request], faults: FaultInjector | None = None
) -> dict[str, list[Event]]:
    """Run the requests; each failure is in a step with an injected fault."""
    for request in requests:
        engine.submit(request)
    events_by_id: dict[str, list[Event]] = {request.id: [] for request in requests}
    while not engine.idle:
        report = engine.step()
        for event in report.events:
            events_by_id[event.request_id].append(event)
            if isinstance(event, ErrorEvent) and faults is not None:
                assert report.stats.step - 1 in faults.steps or "start" in report.stats.faults, (
                    "the failure is in a later step"
                )
        engine.check()
    assert engine.scheduler.pool.num_used == 0 and not engine.proposer._request_drafters
    return events_by_id


def outputs_of(events: Sequence[Event]) -> list[Any]:
    """All that must not depend on the batch: tokens, hashes, logprobs, vectors, finish reasons."""
    actual: list[Any] = []
    for event in events:
        if isinstance(event, TokenEvent):
            actual += zip(
                event.token_ids,
                event.logits_hashes,
                event.logprobs or (None,) * len(event.token_ids),
                strict=True,
            )
            actual += [event.prompt_logprobs] if event.prompt_logprobs else []
            actual += [event.finish_reason] if event.finish_reason else []
        elif isinstance(event, EmbeddingEvent):
            actual.append(event.vector)
    return actual


@pytest.fixture(scope="module")
def faultless(checkpoint: Path) -> EventsById:
    return run_requests(engine_of(checkpoint, speculate="off"), all_requests())


def check_others(events_by_id: EventsById, faultless: EventsById, victims: Sequence[str] = ()) -> None:
    for name, events in events_by_id.items():
        if name not in victims:
            assert not [event for event in events if isinstance(event, ErrorEvent)], name
            assert outputs_of(events) == outputs_of(faultless[name]), name


REQUEST_FAULTS = [
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


# Drafters take turns at the faults; --full: each with each.
WITH_DRAFTS = [
    (fault, speculate)
    for number, fault in enumerate(REQUEST_FAULTS)
    for speculate in (("off", "suffix") if is_full() else ("off", "suffix")[number % 2 :][:1])
]


@pytest.mark.parametrize(
    ("fault", "speculate"),
    WITH_DRAFTS,
    ids=lambda part: part if isinstance(part, str) else f"{part.point}-{part.kind}-{part.request}",
)
def test_fault_fails_its_request_only_and_in_its_step(
    checkpoint: Path, faultless: EventsById, fault: Fault, speculate: str
) -> None:
    engine = engine_of(checkpoint, speculate=speculate)
    faults = FaultInjector(engine, fault)
    victim = str(fault.request)
    events_by_id = run_requests(engine, all_requests(), faults)
    assert faults.steps, "the fault was not triggered"
    check_others(events_by_id, faultless, [victim])
    *before, last = events_by_id[victim]
    assert isinstance(last, ErrorEvent) and isinstance(last.error, RequestFailed)
    assert outputs_of(before) == outputs_of(faultless[victim])[: len(outputs_of(before))], (
        "tokens before the fault are unchanged"
    )
    assert sum(engine.step().stats.faults.values()) == 1


TRANSIENT_FAULTS = [
    Fault(point, kind, call=call)
    for point, kind, call in (
        ("assemble", "error", 3), ("prepare", "memory", 2), ("forward", "error", 2),
        ("forward", "device memory", 4),
        ("sample", "memory", 3), ("sample", "bad id", 5), ("sample", "too few", 2),
        ("halfway", "error", 6), ("mask", "error", 3),
        ("run", "too few", 2),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", TRANSIENT_FAULTS, ids=lambda fault: f"{fault.point}-{fault.kind.replace(' ', '-')}"
)
def test_transient_fault_fails_no_request(checkpoint: Path, faultless: EventsById, fault: Fault) -> None:
    """Like an allocation that is too large for the whole batch."""
    engine = engine_of(checkpoint, speculate="suffix")
    faults = FaultInjector(engine, fault)
    check_others(run_requests(engine, all_requests()), faultless)
    assert faults.steps, "the fault was not triggered"
    assert not engine.step().stats.faults


@pytest.mark.parametrize("kind", ["too few", "error", "memory"])
@pytest.mark.parametrize("call", [1, 2])
def test_failed_pooling_pass_is_retried(
    checkpoint: Path, faultless: EventsById, kind: str, call: int
) -> None:
    """Several prompts share the pass; partial sums are not added twice."""
    engine = engine_of(checkpoint, max_num_batched_tokens=60)
    faults = FaultInjector(engine, Fault("pool", kind, call=call))
    check_others(run_requests(engine, [one for one in all_requests() if one.pooling is not None]), faultless)
    assert faults.steps and not engine.step().stats.faults


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        Fault(point, "error", call=2, times=10**9)
        for point in ("begin", "propose", "finish", "select", "record_step")
    ]
    + [Fault("propose", kind, call=2, times=10**9) for kind in ("bad id", "huge", "too few", "memory")],
    ids=lambda fault: f"{fault.point}-{fault.kind.replace(' ', '-')}",
)
@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_drafter_and_policy_faults_fail_no_request(
    checkpoint: Path, faultless: EventsById, fault: Fault, draft_length: str
) -> None:
    options = {"speculate": "suffix,draft", "draft_model": str(checkpoint), "draft_length": draft_length}
    engine = engine_of(checkpoint, **options)
    faults = FaultInjector(engine, fault)
    for request in all_requests():
        engine.submit(request)
    events_by_id: dict[str, list[Event]] = {request.id: [] for request in all_requests()}
    while not engine.idle:
        for event in engine.step().events:
            events_by_id[event.request_id].append(event)
        engine.scheduler.check()
    assert faults.steps or draft_length == "adaptive", "the fault was not triggered"
    check_others(events_by_id, faultless)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("schedule", "error", call=3),
        Fault("allocate", "memory", call=3),
        Fault("forward", "device", "greedy", call=2),
        Fault("forward", "error", call=4, times=10**9),
        Fault("sample", "bad id", call=4, times=10**9),
        Fault("forward", "nan", call=4, times=10**9),
        Fault("pool", "error", call=1, times=10**9),
    ],
    ids=lambda fault: f"{fault.point}-{fault.kind}",
)
def test_fault_of_no_request_ends_the_engine(checkpoint: Path, fault: Fault) -> None:
    """A lost device, an error of the scheduler, or a dummy request that fails too."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, fault)
    requests = one_of_each()
    for request in requests:
        engine.submit(request)
    failed_ids: list[str] = []
    with pytest.raises((RuntimeError, MemoryError)):
        while not engine.idle:
            failed_ids += [
                event.request_id for event in engine.step().events if isinstance(event, ErrorEvent)
            ]
    assert not failed_ids, "no request fails that the next engine can continue"


def test_engine_survives_consecutive_failing_requests(checkpoint: Path) -> None:
    """Also without other requests, and if all choices fail in one step."""
    engine = engine_of(checkpoint)
    names = [f"bad-{number}" for number in range(MAX_FAILED_PASSES - 1)]
    FaultInjector(engine, *(Fault("sample", "error", name) for name in names))
    for first, second in zip(names[::2], names[1::2], strict=False):
        events_by_id = run_requests(engine, [generation(first), generation(second)])
        assert all(isinstance(events[-1], ErrorEvent) for events in events_by_id.values())


def test_endless_failures_end_the_engine(checkpoint: Path) -> None:
    """The dummy request works, but every real one fails."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, *(Fault("sample", "error", str(number)) for number in range(MAX_FAILED_PASSES)))
    with pytest.raises(RuntimeError, match="all requests failed"):
        for number in range(MAX_FAILED_PASSES):
            run_requests(engine, [generation(str(number))])


def test_failing_embeddings_leave_streams_alone(checkpoint: Path) -> None:
    """One embedding after another fails while a stream generates."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("pool", "error", "bad"))
    engine.submit(generation("stream", max_tokens=2 * MAX_FAILED_PASSES))
    num_failed = 0
    while not engine.idle:
        if not any(state.is_pooling for state in engine.scheduler.states.values()):
            engine.submit(Request("bad", LONG[:4], SamplingParams(), 0, (EOS,), pooling="last"))
        num_failed += sum(isinstance(event, ErrorEvent) for event in engine.step().events)
    assert num_failed >= MAX_FAILED_PASSES


def test_leaked_block_ends_the_engine(checkpoint: Path) -> None:
    """The error of one request has corrupted the block pool."""
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


def test_blocks_of_a_failed_request_are_not_cached(checkpoint: Path, faultless: EventsById) -> None:
    """Its blocks may hold NaN as well."""
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("forward", "nan", "long", call=3))
    run_requests(engine, [request for request in one_of_each() if request.id == "long"])
    again = generation("again", LONG[1:], seed=5, logit_bias={50: 2.0})
    events = run_requests(engine, [again])["again"]
    assert isinstance(events[0], TokenEvent) and events[0].num_cached == 0
    assert outputs_of(events) == outputs_of(faultless["long"])


def test_fault_log_names_request_and_stage(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("sample", "error", "greedy", call=2))
    (last,) = [
        event for event in run_requests(engine, one_of_each())["greedy"] if isinstance(event, ErrorEvent)
    ]
    assert last.error.status == 500 and "stage sample" in last.error.message
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info and "greedy" in record.getMessage() and "injected" not in last.error.message


def test_trace_with_faults_is_replayed(checkpoint: Path, tmp_path: Path) -> None:
    faults = [
        Fault("sample", "error", "penalized", call=2),
        Fault("forward", "nan", "scored", call=3),
        Fault("accept", "error", "json", call=2),
        Fault("commit", "memory", "long", call=3),
        Fault("pool", "error", "mean"),
    ]
    engine = engine_of(
        checkpoint, trace=str(tmp_path / "trace"), speculate="suffix", kv_cache_memory="192tokens"
    )
    FaultInjector(engine, *faults)
    run_requests(engine, all_requests())
    late = [
        Request(f"late {one.id}", one.prompt_ids, one.params, one.seed, (EOS,), pooling=one.pooling)
        for one in all_requests()
    ]
    run_requests(engine, [one for one in late if one.params.structured is None])
    assert len(list(replay((tmp_path / "trace").read_text().splitlines()))) > 20


@pytest.mark.parametrize("seed", some_of(range(12), 3))
def test_random_faults_fail_only_their_requests(checkpoint: Path, faultless: EventsById, seed: int) -> None:
    """Several faults at random points."""
    chance = random.Random(seed)
    requests = all_requests()
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
    faults = [
        Fault(
            point,
            "too few" if point in ("run", "pool") else chance.choice(("error", "memory")),
            chance.choice(requests).id,
            chance.randint(1, 6),
        )
        for point in chance.choices(points, k=3)
    ]
    transient = Fault(
        chance.choice(("assemble", "sample", "forward")), "memory", call=chance.randint(2, 5)
    )  # while all requests run
    method, cache = (
        chance.choice(("off", "suffix", "suffix,draft")),
        chance.choice(("600tokens", "192tokens")),
    )
    options = {"draft_model": str(checkpoint)} if "draft" in method else {}
    engine = engine_of(checkpoint, speculate=method, kv_cache_memory=cache, **options)
    FaultInjector(engine, *faults, transient)
    events_by_id = run_requests(engine, requests)
    victims = [name for name, events in events_by_id.items() if isinstance(events[-1], ErrorEvent)]
    check_others(events_by_id, faultless, victims)
    assert set(victims) <= {fault.request for fault in faults}
    for name in victims:
        before = outputs_of(events_by_id[name][:-1])
        assert before == outputs_of(faultless[name])[: len(before)]


async def test_faults_in_an_engine_process(
    checkpoint: Path, faultless: EventsById, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request keeps the engine, a lost device restarts it; no token is lost."""
    faults = [Fault("sample", "error", "penalized", call=3), Fault("forward", "device", call=22)]
    monkeypatch.setenv(faulty_engine.FAULTS_VARIABLE, json.dumps([asdict(fault) for fault in faults]))
    config, server = Config(model=str(checkpoint), **(DEFAULTS | OPTIONS)), ForkServer(faulty_engine.__name__)
    client = make_engine_client(config, (), lambda: VOCABULARY, fork_server=server)
    restarts: list[str | None] = []
    client.on_restart = restarts.append
    await client.start()

    async def answer(request: Request) -> list[Event]:
        return [event async for event in client.submit(request)]

    answers = await asyncio.gather(*map(answer, all_requests()))
    await client.close()
    await server.close()
    events_by_id = {request.id: events for request, events in zip(all_requests(), answers, strict=True)}
    assert isinstance(events_by_id["penalized"][-1], ErrorEvent) and restarts
    check_others(events_by_id, faultless, ["penalized"])
