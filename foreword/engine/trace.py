"""Scheduler traces: record every input of the scheduler, and replay them without the model.

The scheduler depends on nothing else, so a trace from the field reproduces every schedule on any machine.
Lines are JSON. They hold token ids: treat a trace like the prompts themselves.
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
from foreword.core.structured_output import StructuredOutput
from foreword.engine.schedule_output import ScheduleOutput
from foreword.engine.scheduler import Scheduler
from foreword.engine.waiting_queue import ComputableUntil
from foreword.errors import ForewordError, InvalidRequest, RequestFailed
from foreword.kv_cache.block_pool import BlockPool


class RecordingScheduler(Scheduler):
    """A scheduler that appends its inputs and schedules to a file, each line before it acts on it.

    Raises OSError if the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        computable_until: ComputableUntil = lambda state, start: len(state.tokens),
    ) -> None:
        self._path = path
        # Limits by unencoded images in this schedule(): an input that replay() cannot compute
        self._limits: dict[tuple[str, int], int] = {}

        def recorded(state: RequestState, start: int) -> int:
            until = computable_until(state, start)
            if until < len(state.tokens):
                self._limits[state.id, start] = until
            return until

        super().__init__(pool, block_size, max_num_seqs, max_num_batched_tokens, prefix_caching, recorded)
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
            records = {id_: [draft.drafter, *draft.token_ids] for id_, draft in drafts.items()}
            self._write("draft", drafts=records)
        super().set_drafts(drafts)

    def schedule(self, used_rows: int = 0) -> ScheduleOutput:
        self._limits.clear()
        scheduled = super().schedule(used_rows)
        reaches = [[*key, until] for key, until in self._limits.items()]
        self._write("plan", **_schedule_record(scheduled), taken=used_rows, reaches=reaches)
        return scheduled

    def update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        self._write("commit", outcomes=[_output_record(output) for output in outputs])
        return super().update(scheduled, outputs)

    def update_pooling(
        self, scheduled: ScheduleOutput, vectors: Sequence[bytes | ForewordError | None]
    ) -> list[Event]:
        records = [_error_record(v) if isinstance(v, ForewordError) else v is not None for v in vectors]
        self._write("commit_pooled", vectors=records)
        return super().update_pooling(scheduled, vectors)

    def _fail_commit(self, state: RequestState) -> ErrorEvent:
        self._write("lost", id=state.id)
        return super()._fail_commit(state)

    def _write(self, what: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")


def replay(lines: Iterable[str]) -> Iterator[ScheduleOutput]:
    """Feed a trace to a new scheduler; yield its schedules, and assert that each equals the recorded one."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup.pop("what") == "setup", "a trace begins with its setup line"
    limits: dict[tuple[str, int], int] = {}
    pool = BlockPool(setup.pop("num_blocks"))
    scheduler = Scheduler(pool, **setup, computable_until=lambda s, n: limits.get((s.id, n), len(s.tokens)))
    scheduled = ScheduleOutput(())
    for record in _merge_lost(records):
        what = record.pop("what")
        if what == "add":
            scheduler.add(RequestState(_parse_request(record["request"]), record["arrival"], record["limit"]))
        elif what == "remove":
            scheduler.remove(record["id"])
        elif what == "draft":
            drafts = record["drafts"].items()
            scheduler.set_drafts({id_: Draft(tuple(ids), drafter) for id_, (drafter, *ids) in drafts})
        elif what == "plan":
            limits.clear()
            limits.update({(id_, start): end for id_, start, end in record.pop("reaches")})
            scheduled = scheduler.schedule(record.pop("taken"))
            replayed = _schedule_record(scheduled)
            assert replayed == record, f"replayed schedule {replayed}, recorded {record}"
            yield scheduled
        elif what == "commit_pooled":
            scheduler.update_pooling(scheduled, [_parse_vector(vector) for vector in record["vectors"]])
        else:
            outputs = [_parse_output(output) for output in record["outcomes"]]
            lost = StepOutput(error=RequestFailed("lost"))
            for index, request in enumerate(scheduled.requests):
                if request.state.id in record.get("lost", ()):
                    outputs[index] = lost
            scheduler.update(scheduled, outputs)


def _merge_lost(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Move the ids of "lost" lines into the commit line before them."""
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
    requests = (*scheduled.requests, *scheduled.pooling_requests)
    work = [[r.state.id, r.start, r.num_tokens, r.num_draft_tokens] for r in requests]
    return {"work": work, "preempted": list(scheduled.preempted_ids)}


def _error_record(error: ForewordError) -> list[Any]:
    """An internal error also drops the request's blocks from the prefix cache."""
    return [isinstance(error, RequestFailed), error.message]


def _parse_error(record: Sequence[Any]) -> ForewordError:
    is_internal, message = record
    return RequestFailed(message) if is_internal else InvalidRequest(message)


def _parse_vector(record: bool | list[Any]) -> bytes | ForewordError | None:
    if isinstance(record, list):
        return _parse_error(record)
    return b"" if record else None


def _output_record(output: StepOutput) -> dict[str, Any]:
    """Without logprobs and hashes, which no schedule depends on."""
    record = output._replace(logprobs=(), prompt_logprobs=(), logits_hashes=())._asdict()
    record["repetition"] = output.repetition and asdict(output.repetition)
    return {**record, "error": None if output.error is None else _error_record(output.error)}


def _parse_output(record: dict[str, Any]) -> StepOutput:
    error = None if record["error"] is None else _parse_error(record["error"])
    return StepOutput(**{**record, "token_ids": tuple(record["token_ids"]), "error": error})


def _request_record(request: Request) -> dict[str, Any]:
    """Without pixels, which no schedule depends on."""
    record = asdict(replace(request, images=()))
    record["images"] = [
        {**asdict(image.without_pixels()), "digest": image.digest.hex()} for image in request.images
    ]
    return record


def _parse_request(record: dict[str, Any]) -> Request:
    params = record.pop("params")
    params["speculation"] = Speculation(**params["speculation"])
    params["structured"] = params["structured"] and StructuredOutput(**params["structured"])
    params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    images = [{**image, "digest": bytes.fromhex(image["digest"])} for image in record["images"]]
    record["images"] = [PromptImage(**_tuples(image)) for image in images]
    return Request(**_tuples(record), params=SamplingParams(**params))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
