"""Fault injection: parts of an engine raise errors or return wrong results, by call or by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foreword.core.batch import Batch
from foreword.core.images import PromptImage
from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.engine.batch_builder import ModelInput
from foreword.engine.engine import Engine
from foreword.engine.pooler import PoolOutput
from foreword.engine.scheduler import ScheduledRequest
from foreword.speculation.engine_drafter import DraftRequest

ERRORS: Mapping[str, type[Exception]] = {
    "error": RuntimeError,
    "memory": MemoryError,
    "device memory": torch.OutOfMemoryError,
    "device": torch.AcceleratorError,
}
WRONG_RESULTS = ("nan", "infinite", "bad id", "too few", "huge")
FAULT_POINTS = (
    "start", "schedule", "allocate", "assemble", "prepare", "forward", "sample", "halfway", "mask", "run",
    "pool",
    "accept", "commit", "propose", "begin", "finish", "select", "record_step", "encode",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    point: str  # one of FAULT_POINTS
    kind: str = "error"  # one of ERRORS or WRONG_RESULTS
    request: str | None = None  # fails each call with this request, from number `call` on
    call: int = 1  # from 1 on
    times: int = 1  # calls in a row that fail, without a request


class FaultInjector:
    """Wraps the parts of an engine, counts their calls and injects faults."""

    def __init__(self, engine: Engine, *faults: Fault) -> None:
        self.calls: Counter[Any] = Counter()  # by point, and by fault with a request
        self.steps: list[int] = []  # engine steps with an injected fault
        self._engine = engine
        self._faults = faults
        self._scheduled: Sequence[ScheduledRequest] = ()
        self._batch: ModelInput | None = None
        self._install()

    def trigger(self, point: str, ids: Iterable[str] = ()) -> list[Fault]:
        """Count a call, raise its error, or return the faults that change its result."""
        request_ids = frozenset(ids)
        self.calls[point] += 1
        due = [fault for fault in self._faults if fault.point == point and self._is_due(fault, request_ids)]
        if due:
            self.steps.append(self._engine._num_steps)
        for fault in due:
            if fault.kind in ERRORS:
                raise ERRORS[fault.kind](f"injected into {point}")
        return due

    def _is_due(self, fault: Fault, request_ids: frozenset[str]) -> bool:
        if fault.request is None:
            return fault.call <= self.calls[fault.point] < fault.call + fault.times
        if fault.request not in request_ids:
            return False
        self.calls[fault] += 1
        return self.calls[fault] >= fault.call

    def _install(self) -> None:
        engine: Any = self._engine
        scheduler, runner, proposer = engine.scheduler, engine.model_runner, engine.proposer
        self._wrap(scheduler, "add", self._start)
        self._wrap(scheduler, "schedule", self._count_only("schedule"))
        self._wrap(scheduler.pool, "allocate", self._count_only("allocate"))
        self._wrap(scheduler, "_apply_output", self._commit)
        self._wrap(engine.batch_builder, "build", self._build)
        self._wrap(engine.batch_builder, "build_pooling", self._build_pooling)
        self._wrap(runner.grammars, "start_masks", self._start_masks)
        self._wrap(runner, "forward", self._forward)
        self._wrap(runner, "run", self._run)
        runner.sampler = _FaultySampler(self, runner.sampler)
        runner.pooler = _FaultyPooler(self, runner.pooler)
        if engine.encoder._encoder is not None:
            engine.encoder._encoder = _FaultyVisionEncoder(self, engine.encoder._encoder)
        for drafter in (*proposer.drafters, *proposer.model_drafters):
            self._wrap(drafter, "propose", self._propose)
            self._wrap(drafter, "start", self._count_only("begin", lambda state: (state.id,)))
            self._wrap(
                drafter, "finish", self._count_only("finish", lambda request_id, output=(): (request_id,))
            )
        for name in ("select", "record_step"):
            self._wrap(proposer.policy, name, self._count_only(name))

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: around(original, *args, **options))

    def _count_only(
        self, point: str, ids: Callable[..., Iterable[str]] = lambda *_: ()
    ) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            self.trigger(point, ids(*args, **options))
            return original(*args, **options)

        return around

    def _start(self, original: Callable[..., None], state: RequestState) -> None:
        self.trigger("start", (state.id,))
        if state.grammar is not None:
            _break_grammar(state, self)
        original(state)

    def _build(self, original: Callable[..., ModelInput], requests: Sequence[ScheduledRequest]) -> ModelInput:
        self._scheduled = requests
        self.trigger("assemble", _request_ids(requests))
        self._batch = original(requests)
        return self._batch

    def _build_pooling(self, original: Callable[..., Batch], requests: Sequence[ScheduledRequest]) -> Batch:
        self.trigger("assemble", _request_ids(requests))
        return original(requests)

    def _start_masks(self, original: Callable[..., None], rows: Sequence[Any]) -> None:
        original(rows)
        self.trigger("prepare", (row.state.id for row in rows))

    def _forward(self, original: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
        due = self.trigger("forward", _request_ids(self._scheduled))
        logits = original(batch)
        assert self._batch is not None
        for fault in due:
            value = {"nan": torch.nan, "infinite": torch.inf}[fault.kind]
            for row, index in zip(self._batch.sample_rows, self._batch.logits_indices, strict=True):
                if fault.request in (None, row.state.id):
                    logits[index, 7] = value
        return logits

    def _run(self, original: Callable[[ModelInput], tuple[Any, ...]], batch: ModelInput) -> tuple[Any, ...]:
        outputs = original(batch)
        return outputs[1:] if self.trigger("run", _request_ids(batch.requests)) else outputs

    def _commit(self, original: Callable[..., Any], request: ScheduledRequest, output: Any) -> Any:
        events = original(request, output)
        self.trigger("commit", (request.state.id,))
        return events

    def _propose(
        self, original: Callable[..., list[Draft | None]], requests: Sequence[DraftRequest]
    ) -> list[Draft | None]:
        due = self.trigger("propose", (request.state.id for request in requests))
        drafts = original(requests)
        for fault in due:
            wrong = {"bad id": (5, -1, 10**9), "huge": (5,) * 100_000}.get(fault.kind, ())
            drafts = [Draft(wrong, "suffix") for _ in requests] if wrong else drafts[1:]
        return drafts


class _FaultySampler:
    """A sampler with wrong results."""

    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, logits: torch.Tensor, rows: Sequence[Any]) -> Any:
        ids = [row.state.id for row in rows]
        due = self._faults.trigger("sample", ids)
        sampled = self._original(logits, rows)
        self._interrupt(rows)
        for fault in due:
            if fault.kind == "too few":
                return replace(sampled, token_ids=sampled.token_ids[1:])
            wrong = [fault.request in (None, id_) for id_ in ids]
            sampled = replace(
                sampled,
                token_ids=[10**9 if bad else t for t, bad in zip(sampled.token_ids, wrong, strict=True)],
            )
        return sampled

    def _interrupt(self, rows: Sequence[Any]) -> None:
        """Corrupt the penalty states as an error halfway through could."""
        try:
            self._faults.trigger("halfway", (row.state.id for row in rows))
        except Exception:
            for row in rows:
                if row.state.penalty_state is not None:
                    row.state.penalty_state._output_counts._counts -= 1000
            raise


class _FaultyPooler:
    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original

    def __call__(self, requests: Sequence[ScheduledRequest], batch: Batch) -> list[PoolOutput]:
        pooled = self._original(requests, batch)
        return pooled[1:] if self._faults.trigger("pool", _request_ids(requests)) else pooled


class _FaultyVisionEncoder:
    """A vision encoder that fails within an image, or returns wrong features."""

    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original
        self.feature_size = original.feature_size

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        pieces = self._original.encode(image)
        yield next(pieces)
        running = self._faults._engine.scheduler.running
        ids = [s.id for s in running if any(i.digest == image.digest for i in s.request.images)]
        due = self._faults.trigger("encode", ids)
        features: torch.Tensor = yield from pieces
        for fault in due:
            if fault.kind == "too few":
                return features[1:]
            features = features.clone()
            features[-1, 0] = {"nan": torch.nan, "infinite": torch.inf}[fault.kind]
        return features


def _break_grammar(state: RequestState, faults: FaultInjector) -> None:
    """Inject faults into the grammar's methods, by a subclass since it has slots."""
    base: Any = type(state.grammar)
    request_id = state.id

    class Broken(base):  # type: ignore[misc]
        __slots__ = ()

        def mask(self, draft: tuple[int, ...]) -> torch.Tensor | None:
            mask = base.mask(self, draft)
            try:
                faults.trigger("mask", (request_id,))
            except Exception:
                if mask is not None:  # leave the matcher ahead of the output
                    legal = [i for i in range(256) if int(mask[i // 32]) >> i % 32 & 1]
                    self._llg.consume_tokens([max(legal)])
                raise
            return mask

        def accept(self, token_ids: Sequence[int]) -> None:
            faults.trigger("accept", (request_id,))
            base.accept(self, token_ids)

    state.grammar.__class__ = Broken


def _request_ids(scheduled: Iterable[ScheduledRequest]) -> list[str]:
    return [request.state.id for request in scheduled]
