"""Faults for tests: parts of a built engine fail on purpose, at their k-th call or when they work for one request.

Nothing of this is in the product. A fault is named by the part (POINTS) and by what happens there: an error is raised
(ERRORS), or something wrong is returned (WRONG).
"""

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
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput
from foreword.speculation.base import DraftRequest

__all__ = ["ERRORS", "FAULT_POINTS", "WRONG_RESULTS", "Fault", "FaultInjector"]

ERRORS: Mapping[str, type[Exception]] = {
    "error": RuntimeError,
    "memory": MemoryError,
    "device memory": torch.OutOfMemoryError,
    "device": torch.AcceleratorError,
}
WRONG_RESULTS = ("nan", "infinite", "bad id", "too few", "huge")
FAULT_POINTS = (
    "start", "plan", "allocate", "assemble", "prepare", "forward", "sample", "halfway", "mask", "run", "pool", "accept",
    "commit", "propose", "begin", "finish", "admit", "measured", "encode",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong where: at call number `call` (from 1 on), or from there on at each call that is about `request`.

    Without a request it happens `times` times in a row.
    """

    point: str
    kind: str = "error"
    request: str | None = None
    call: int = 1
    times: int = 1


class FaultInjector:
    """Installed in an engine; counts calls, and remembers in which steps something went wrong.

    calls  by part; where a fault is about a request, those that are about it
    steps  numbers of the engine's steps in which a fault struck
    """

    def __init__(self, engine: Engine, *faults: Fault) -> None:
        self.calls: Counter[Any] = Counter()
        self.steps: list[int] = []
        self._engine = engine
        self._faults = faults
        self._scheduled: Sequence[ScheduledRequest] = ()
        self._batch: ModelInput | None = None
        self._install()

    def _trigger(self, point: str, ids: Iterable[str] = ()) -> list[Fault]:
        """Count a call, raise what is to be raised, and return the other faults that are due."""
        about = frozenset(ids)
        self.calls[point] += 1
        due = [fault for fault in self._faults if fault.point == point and self._is_due(fault, about)]
        if due:
            self.steps.append(self._engine._num_steps)
        for fault in due:
            if fault.kind in ERRORS:
                raise ERRORS[fault.kind](f"injected into {point}")
        return due

    def _is_due(self, fault: Fault, about: frozenset[str]) -> bool:
        if fault.request is None:
            return fault.call <= self.calls[fault.point] < fault.call + fault.times
        if fault.request not in about:
            return False
        self.calls[fault] += 1
        return self.calls[fault] >= fault.call

    # Where the parts are

    def _install(self) -> None:
        engine: Any = self._engine
        scheduler, runner, drafting = engine.scheduler, engine.runner, engine.drafting
        self._wrap(scheduler, "add", self._start)
        self._wrap(scheduler, "plan", self._count_only("plan"))
        self._wrap(scheduler.pool, "allocate", self._count_only("allocate"))
        self._wrap(scheduler, "_advance", self._commit)
        self._wrap(engine.assembler, "build", self._assemble)
        self._wrap(engine.assembler, "pooled", self._assemble_pooled)
        self._wrap(runner.grammars, "prepare", self._prepare)
        self._wrap(runner, "_forward", self._forward)
        self._wrap(runner, "run", self._run)
        runner.sampler = _FaultySampler(self, runner.sampler)
        runner.pooler = _FaultyPooler(self, runner.pooler)
        engine.encoder._tower = engine.encoder._tower and _FaultyTower(self, engine.encoder._tower)
        for drafter in (*drafting.drafters, *drafting.passes):
            self._wrap(drafter, "propose", self._propose)
            self._wrap(drafter, "start", self._count_only("begin", lambda state: (state.id,)))
            self._wrap(
                drafter, "finish", self._count_only("finish", lambda request_id, output=(): (request_id,))
            )
        for name in ("admit", "measured"):
            self._wrap(drafting.policy, name, self._count_only(name))

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: around(original, *args, **options))

    def _count_only(
        self, point: str, ids: Callable[..., Iterable[str]] = lambda *_: ()
    ) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            self._trigger(point, ids(*args, **options))
            return original(*args, **options)

        return around

    def _start(self, original: Callable[..., None], state: RequestState) -> None:
        self._trigger("start", (state.id,))
        if state.grammar is not None:
            _break_grammar(state, self)
        original(state)

    # What goes wrong there

    def _assemble(self, original: Callable[[ScheduleOutput], ModelInput], plan: ScheduleOutput) -> ModelInput:
        self._scheduled = plan.requests
        self._trigger("assemble", _request_ids(plan.requests))
        self._batch = original(plan)
        return self._batch

    def _assemble_pooled(self, original: Callable[[ScheduleOutput], Batch], plan: ScheduleOutput) -> Batch:
        self._trigger("assemble", _request_ids(plan.pooling_requests))
        return original(plan)

    def _prepare(self, original: Callable[..., None], rows: Sequence[Any]) -> None:
        original(rows)
        self._trigger("prepare", (row.state.id for row in rows))

    def _forward(self, original: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
        due = self._trigger("forward", _request_ids(self._scheduled))
        logits = original(batch)
        assert self._batch is not None
        for fault in due:
            value = {"nan": torch.nan, "infinite": torch.inf}[fault.kind]
            for row, line in zip(self._batch.sample_rows, self._batch.logits_indices, strict=True):
                if fault.request in (None, row.state.id):
                    logits[line, 7] = value
        return logits

    def _run(self, original: Callable[[ModelInput], tuple[Any, ...]], batch: ModelInput) -> tuple[Any, ...]:
        outcomes = original(batch)
        return outcomes[1:] if self._trigger("run", _request_ids(batch.scheduled.requests)) else outcomes

    def _commit(self, original: Callable[..., Any], work: ScheduledRequest, outcome: Any) -> Any:
        events = original(work, outcome)
        self._trigger("commit", (work.state.id,))
        return events

    def _propose(
        self, original: Callable[..., list[Draft | None]], requests: Sequence[DraftRequest]
    ) -> list[Draft | None]:
        due = self._trigger("propose", (ask.state.id for ask in requests))
        drafts = original(requests)
        for fault in due:
            wrong = {"bad id": (5, -1, 10**9), "huge": (5,) * 100_000}.get(fault.kind, ())
            drafts = [Draft(wrong, "suffix") for _ in requests] if wrong else drafts[1:]
        return drafts


class _FaultySampler:
    """A sampler whose results, or rows, may be wrong."""

    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, logits: torch.Tensor, rows: Sequence[Any]) -> Any:
        ids = [row.state.id for row in rows]
        due = self._faults._trigger("sample", ids)
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
        """Leave every ledger as an error in the middle of its work could leave it."""
        try:
            self._faults._trigger("halfway", (row.state.id for row in rows))
        except Exception:
            for row in rows:
                if row.state.ledger is not None:
                    row.state.ledger._output._counts -= 1000
            raise


class _FaultyPooler:
    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original

    def __call__(self, works: Sequence[ScheduledRequest], batch: Batch) -> list[PoolOutput]:
        pooled = self._original(works, batch)
        return pooled[1:] if self._faults._trigger("pool", _request_ids(works)) else pooled


class _FaultyTower:
    """A tower that fails in the middle of a picture, or whose features are wrong; about the running requests that show it."""

    def __init__(self, faults: FaultInjector, original: Any) -> None:
        self._faults, self._original = faults, original
        self.feature_size = original.width

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        pieces = self._original.encode(image)
        yield next(pieces)
        running = self._faults._engine.scheduler.running
        about = [s.id for s in running if any(one.digest == image.digest for one in s.request.images)]
        due = self._faults._trigger("encode", about)
        features: torch.Tensor = yield from pieces
        for fault in due:
            if fault.kind == "too few":
                return features[1:]
            features = features.clone()
            features[-1, 0] = {"nan": torch.nan, "infinite": torch.inf}[fault.kind]
        return features


def _break_grammar(state: RequestState, faults: FaultInjector) -> None:
    """Let the grammar's own methods fail. Its class is replaced, for it has no room for more."""
    known: Any = type(state.grammar)
    request_id = state.id

    class Broken(known):  # type: ignore[misc]
        __slots__ = ()

        def mask(self, draft: tuple[int, ...]) -> torch.Tensor | None:
            found = known.mask(self, draft)
            try:
                faults._trigger("mask", (request_id,))
            except Exception:
                if found is not None:  # it looks beyond the output, and does not come back
                    self._llg.consume_tokens(
                        [max(i for i in range(256) if int(found[i // 32]) >> i % 32 & 1)]
                    )
                raise
            return found

        def accept(self, token_ids: Sequence[int]) -> None:
            faults._trigger("accept", (request_id,))
            known.accept(self, token_ids)

    state.grammar.__class__ = Broken


def _request_ids(scheduled: Iterable[ScheduledRequest]) -> list[str]:
    return [work.state.id for work in scheduled]
