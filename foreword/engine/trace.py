"""A record of everything that enters the scheduler, and a replay that checks its plans against it.

The scheduler depends on nothing else: a trace from the field reproduces every plan on any machine,
without the model. Lines are JSON. They hold token ids: treat a trace like the prompts themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foreword.cache.blocks import BlockPool
from foreword.core.draft import Draft, Outcome
from foreword.core.events import Event, Failed
from foreword.core.params import SamplingParams, Speculation
from foreword.core.pictures import Picture
from foreword.core.request import Request, RequestState
from foreword.core.structured import StructuredOutput
from foreword.engine.plan import Plan
from foreword.engine.scheduler import Scheduler
from foreword.errors import ForewordError, InvalidRequest, RequestFailed

__all__ = ["TracedScheduler", "replay"]

LOST = Outcome(error=RequestFailed("lost"))


class TracedScheduler(Scheduler):
    """A scheduler that writes down what it is told and what it plans; each line is on disk before it goes on.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, path: Path, pool: BlockPool, *args: Any, **options: Any) -> None:
        super().__init__(pool, *args, **options)
        self._path = path
        self._reaches: dict[tuple[str, int], int] = {}
        self._everywhere, self.reach = self.reach, self._noted_reach
        path.write_text("")
        self._write(
            "setup",
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.prefixes.enabled,
        )

    def add(self, state: RequestState) -> None:
        self._write("add", request=_request_record(state.request), arrival=state.arrival, limit=state.limit)
        super().add(state)

    def remove(self, request_id: str) -> RequestState | None:
        self._write("remove", id=request_id)
        return super().remove(request_id)

    def draft(self, drafts: Mapping[str, Draft]) -> None:
        if drafts:
            self._write("draft", drafts={id_: [draft.drafter, *draft.token_ids] for id_, draft in drafts.items()})
        super().draft(drafts)

    def plan(self, taken: int = 0) -> Plan:
        self._reaches.clear()
        plan = super().plan(taken)
        reaches = [[*where, reach] for where, reach in self._reaches.items()]
        self._write("plan", **_plan_record(plan), taken=taken, reaches=reaches)
        return plan

    def _noted_reach(self, state: RequestState, start: int) -> int:
        """Where a request waits for pictures is none of the scheduler's knowledge."""
        reach = self._everywhere(state, start)
        if reach < len(state.tokens):
            self._reaches[state.id, start] = reach
        return reach

    def commit(self, plan: Plan, outcomes: Sequence[Outcome]) -> list[Event]:
        shown = [asdict(replace(o, logprobs=(), prompt_logprobs=(), hashes=(), error=None)) for o in outcomes]
        for record, outcome in zip(shown, outcomes, strict=True):
            record["error"] = None if outcome.error is None else _error_record(outcome.error)
        self._write("commit", outcomes=shown)
        return super().commit(plan, outcomes)

    def commit_pooled(self, plan: Plan, vectors: Sequence[bytes | ForewordError | None]) -> list[Event]:
        self._write("commit_pooled", vectors=[_vector_record(vector) for vector in vectors])
        return super().commit_pooled(plan, vectors)

    def _lose(self, state: RequestState) -> Failed:
        self._write("lost", id=state.id)
        return super()._lose(state)

    def _write(self, what: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")


def replay(lines: Iterable[str]) -> Iterator[Plan]:
    """Drive a fresh scheduler by a trace and yield its plans, each equal to the recorded one (asserted)."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup.pop("what") == "setup", "a trace begins with its setup"
    reaches: dict[tuple[str, int], int] = {}

    def reach(state: RequestState, start: int) -> int:
        return reaches.get((state.id, start), len(state.tokens))

    scheduler = Scheduler(BlockPool(setup.pop("num_blocks")), **setup, reach=reach)
    plan = Plan(())
    for record in _with_lost(records):
        what = record.pop("what")
        if what == "add":
            scheduler.add(RequestState(_request(record["request"]), record["arrival"], record["limit"]))
        elif what == "remove":
            scheduler.remove(record["id"])
        elif what == "draft":
            scheduler.draft({id_: Draft(tuple(ids), drafter) for id_, (drafter, *ids) in record["drafts"].items()})
        elif what == "plan":
            reaches.clear()
            reaches.update({(id_, start): end for id_, start, end in record.pop("reaches")})
            plan = scheduler.plan(record.pop("taken"))
            assert _plan_record(plan) == record, f"planned {_plan_record(plan)}, recorded {record}"
            yield plan
        elif what == "commit_pooled":
            scheduler.commit_pooled(plan, [_vector(one) for one in record["vectors"]])
        else:
            outcomes = map(_outcome, record["outcomes"])
            lost = record.get("lost", ())
            scheduler.commit(plan, [LOST if work.state.id in lost else o for work, o in zip(plan.work, outcomes, strict=True)])


def _with_lost(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records, where a commit says who was lost in it: that is written behind it."""
    last: dict[str, Any] | None = None
    for record in records:
        if record["what"] == "lost":
            assert last is not None
            last.setdefault("lost", []).append(record["id"])
            continue
        if last is not None:
            yield last
        last = record
    if last is not None:
        yield last


def _plan_record(plan: Plan) -> dict[str, Any]:
    work = [[w.state.id, w.start, w.num_tokens, w.num_draft] for w in (*plan.work, *plan.pooled)]
    return {"work": work, "preempted": list(plan.preempted)}


def _error_record(error: ForewordError) -> list[Any]:
    """Whose fault it was decides what becomes of the request's blocks."""
    return [isinstance(error, RequestFailed), error.message]


def _error(record: Sequence[Any]) -> ForewordError:
    ours, message = record
    return RequestFailed(message) if ours else InvalidRequest(message)


def _vector_record(vector: bytes | ForewordError | None) -> bool | list[Any]:
    """Whether there is a vector, or why there is none."""
    return _error_record(vector) if isinstance(vector, ForewordError) else vector is not None


def _vector(record: bool | list[Any]) -> bytes | ForewordError | None:
    if isinstance(record, list):
        return _error(record)
    return b"" if record else None


def _outcome(record: dict[str, Any]) -> Outcome:
    error = None if record["error"] is None else _error(record["error"])
    return Outcome(**{**record, "token_ids": tuple(record["token_ids"]), "error": error})


def _request_record(request: Request) -> dict[str, Any]:
    """Without the pixels, which no plan depends on."""
    record = asdict(replace(request, pictures=()))
    record["pictures"] = [{**asdict(picture.bare()), "digest": picture.digest.hex()} for picture in request.pictures]
    return record


def _picture(record: dict[str, Any]) -> Picture:
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Picture(**{**fixed, "digest": bytes.fromhex(record["digest"])})


def _request(record: dict[str, Any]) -> Request:
    params = record.pop("params")
    params["speculation"] = Speculation(**params["speculation"])
    params["structured"] = params["structured"] and StructuredOutput(**params["structured"])
    record["pictures"] = [_picture(picture) for picture in record["pictures"]]
    params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Request(**fixed, params=SamplingParams(**params))
