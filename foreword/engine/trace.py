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

from foreword.core.images import PromptImage
from foreword.core.outputs import Draft, ErrorEvent, Event, StepOutput
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.core.structured import StructuredOutput
from foreword.engine.schedule import ScheduleOutput
from foreword.engine.scheduler import Scheduler
from foreword.errors import ForewordError, InvalidRequest, RequestFailed
from foreword.kv_cache.block_pool import BlockPool

__all__ = ["RecordingScheduler", "replay"]

LOST_OUTPUT = StepOutput(error=RequestFailed("lost"))


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what it is told and what it plans; each line is on disk before it goes on.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, path: Path, pool: BlockPool, *args: Any, **options: Any) -> None:
        super().__init__(pool, *args, **options)
        self._path = path
        self._limits: dict[tuple[str, int], int] = {}
        self._base_computable_until, self.computable_until = (
            self.computable_until,
            self._record_computable_until,
        )
        path.write_text("")
        self._write(
            "setup",
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.prefix_cache.enabled,
        )

    def add(self, state: RequestState) -> None:
        self._write("add", request=_request_record(state.request), arrival=state.arrival, limit=state.max_len)
        super().add(state)

    def remove(self, request_id: str) -> RequestState | None:
        self._write("remove", id=request_id)
        return super().remove(request_id)

    def set_drafts(self, drafts: Mapping[str, Draft]) -> None:
        if drafts:
            self._write(
                "draft", drafts={id_: [draft.drafter, *draft.token_ids] for id_, draft in drafts.items()}
            )
        super().set_drafts(drafts)

    def schedule(self, used_rows: int = 0) -> ScheduleOutput:
        self._limits.clear()
        plan = super().schedule(used_rows)
        reaches = [[*where, reach] for where, reach in self._limits.items()]
        self._write("plan", **_schedule_record(plan), taken=used_rows, reaches=reaches)
        return plan

    def _record_computable_until(self, state: RequestState, start: int) -> int:
        """Where a request waits for pictures is none of the scheduler's knowledge."""
        reach = self._base_computable_until(state, start)
        if reach < len(state.tokens):
            self._limits[state.id, start] = reach
        return reach

    def update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        shown = [
            asdict(replace(o, logprobs=(), prompt_logprobs=(), logits_hashes=(), error=None)) for o in outputs
        ]
        for record, outcome in zip(shown, outputs, strict=True):
            record["error"] = None if outcome.error is None else _error_record(outcome.error)
        self._write("commit", outcomes=shown)
        return super().update(scheduled, outputs)

    def update_pooling(
        self, scheduled: ScheduleOutput, vectors: Sequence[bytes | ForewordError | None]
    ) -> list[Event]:
        self._write("commit_pooled", vectors=[_vector_record(vector) for vector in vectors])
        return super().update_pooling(scheduled, vectors)

    def _fail_commit(self, state: RequestState) -> ErrorEvent:
        self._write("lost", id=state.id)
        return super()._fail_commit(state)

    def _write(self, what: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")


def replay(lines: Iterable[str]) -> Iterator[ScheduleOutput]:
    """Drive a fresh scheduler by a trace and yield its plans, each equal to the recorded one (asserted)."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup.pop("what") == "setup", "a trace begins with its setup"
    reaches: dict[tuple[str, int], int] = {}

    def reach(state: RequestState, start: int) -> int:
        return reaches.get((state.id, start), len(state.tokens))

    scheduler = Scheduler(BlockPool(setup.pop("num_blocks")), **setup, computable_until=reach)
    plan = ScheduleOutput(())
    for record in _attach_lost(records):
        what = record.pop("what")
        if what == "add":
            scheduler.add(RequestState(_parse_request(record["request"]), record["arrival"], record["limit"]))
        elif what == "remove":
            scheduler.remove(record["id"])
        elif what == "draft":
            scheduler.set_drafts(
                {id_: Draft(tuple(ids), drafter) for id_, (drafter, *ids) in record["drafts"].items()}
            )
        elif what == "plan":
            reaches.clear()
            reaches.update({(id_, start): end for id_, start, end in record.pop("reaches")})
            plan = scheduler.schedule(record.pop("taken"))
            assert _schedule_record(plan) == record, f"planned {_schedule_record(plan)}, recorded {record}"
            yield plan
        elif what == "commit_pooled":
            scheduler.update_pooling(plan, [_parse_vector(one) for one in record["vectors"]])
        else:
            outcomes = map(_parse_output, record["outcomes"])
            lost = record.get("lost", ())
            scheduler.update(
                plan,
                [
                    LOST_OUTPUT if work.state.id in lost else o
                    for work, o in zip(plan.requests, outcomes, strict=True)
                ],
            )


def _attach_lost(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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


def _schedule_record(scheduled: ScheduleOutput) -> dict[str, Any]:
    work = [
        [w.state.id, w.start, w.num_tokens, w.num_draft_tokens]
        for w in (*scheduled.requests, *scheduled.pooling_requests)
    ]
    return {"work": work, "preempted": list(scheduled.preempted_ids)}


def _error_record(error: ForewordError) -> list[Any]:
    """Whose fault it was decides what becomes of the request's blocks."""
    return [isinstance(error, RequestFailed), error.message]


def _parse_error(record: Sequence[Any]) -> ForewordError:
    ours, message = record
    return RequestFailed(message) if ours else InvalidRequest(message)


def _vector_record(vector: bytes | ForewordError | None) -> bool | list[Any]:
    """Whether there is a vector, or why there is none."""
    return _error_record(vector) if isinstance(vector, ForewordError) else vector is not None


def _parse_vector(record: bool | list[Any]) -> bytes | ForewordError | None:
    if isinstance(record, list):
        return _parse_error(record)
    return b"" if record else None


def _parse_output(record: dict[str, Any]) -> StepOutput:
    error = None if record["error"] is None else _parse_error(record["error"])
    return StepOutput(**{**record, "token_ids": tuple(record["token_ids"]), "error": error})


def _request_record(request: Request) -> dict[str, Any]:
    """Without the pixels, which no plan depends on."""
    record = asdict(replace(request, images=()))
    record["images"] = [
        {**asdict(picture.without_pixels()), "digest": picture.digest.hex()} for picture in request.images
    ]
    return record


def _parse_image(record: dict[str, Any]) -> PromptImage:
    fixed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return PromptImage(**{**fixed, "digest": bytes.fromhex(record["digest"])})


def _parse_request(record: dict[str, Any]) -> Request:
    params = record.pop("params")
    params["speculation"] = Speculation(**params["speculation"])
    params["structured"] = params["structured"] and StructuredOutput(**params["structured"])
    record["images"] = [_parse_image(picture) for picture in record["images"]]
    params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    fixed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Request(**fixed, params=SamplingParams(**params))
