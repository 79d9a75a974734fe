"""Trace of the scheduler, which has no other input: replayed without the model.

Lines contain token ids: treat a trace like the prompts themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foreword.core.images import PromptImage
from foreword.core.outputs import Draft, ErrorEvent, Event, StepOutput
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.core.states import StateSizes
from foreword.core.structured_output import StructuredOutput
from foreword.engine.scheduler import ScheduleOutput, Scheduler
from foreword.engine.waiting_queue import ComputableUntil
from foreword.errors import ForewordError, InvalidRequest, RequestFailed
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.state_cache import StateCache
from foreword.utils import trace


class RecordingScheduler(Scheduler):
    """A scheduler that writes a trace. Raises OSError if the file cannot be written."""

    def __init__(
        self,
        path: Path,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        computable_until: ComputableUntil = lambda state, start: len(state.tokens),
        states: StateCache | None = None,
    ) -> None:
        # Limits by unencoded images in this schedule(): an input that replay() cannot compute
        self._limits: dict[tuple[str, int], int] = {}

        def recorded(state: RequestState, start: int) -> int:
            until = computable_until(state, start)
            if until < len(state.tokens):
                self._limits[state.id, start] = until
            return until

        options = block_size, max_num_seqs, max_num_batched_tokens, prefix_caching
        super().__init__(pool, *options, recorded, states=states)
        limits = None if states is None else [states.sizes, states.interval]
        self._trace = trace.TraceWriter(path, pool.num_blocks, *options, limits)

    def add(self, state: RequestState) -> None:
        self._trace.write("add", _request_record(state.request), state.arrival, state.max_len)
        super().add(state)

    def remove(self, request_id: str) -> RequestState | None:
        self._trace.write("remove", request_id)
        return super().remove(request_id)

    def set_drafts(self, drafts: Mapping[str, Draft]) -> None:
        if drafts:
            records = {id_: [draft.drafter, *draft.token_ids] for id_, draft in drafts.items()}
            self._trace.write("set_drafts", records)
        super().set_drafts(drafts)

    def schedule(self, used_rows: int = 0) -> ScheduleOutput:
        self._limits.clear()
        scheduled = super().schedule(used_rows)
        limits = [[*key, until] for key, until in self._limits.items()]
        self._trace.write("schedule", used_rows, limits)
        self._trace.write_decision(_schedule_record(scheduled))
        return scheduled

    def update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        self._trace.write("update", [_output_record(output) for output in outputs])
        return super().update(scheduled, outputs)

    def update_pooling(
        self, scheduled: ScheduleOutput, vectors: Sequence[bytes | ForewordError | None]
    ) -> list[Event]:
        records = [_error_record(v) if isinstance(v, ForewordError) else v is not None for v in vectors]
        self._trace.write("update_pooling", records)
        return super().update_pooling(scheduled, vectors)

    def _fail_commit(self, state: RequestState) -> ErrorEvent:
        self._trace.write("fail_commit", state.id)
        return super()._fail_commit(state)


def replay(lines: Iterable[str]) -> Iterator[Any]:
    """See utils.trace.replay(); yields schedules as in the trace: work by request, and preemptions."""
    return trace.replay(lines, _Replayer, _schedule_record)


class _Replayer:
    """A scheduler driven by a trace."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        states: Sequence[Any] | None = None,  # sizes and interval of a StateCache
    ) -> None:
        self._limits: dict[tuple[str, int], int] = {}
        options = block_size, max_num_seqs, max_num_batched_tokens, prefix_caching
        cache = None if states is None else StateCache(StateSizes(*states[0]), states[1], block_size)
        self.scheduler = Scheduler(BlockPool(num_blocks), *options, self._computable_until, states=cache)
        self._scheduled = ScheduleOutput(())
        self._outputs: list[StepOutput] | None = None  # pending update, which may fail for some requests

    def add(self, request: dict[str, Any], arrival: int, max_len: int) -> None:
        self._update()
        self.scheduler.add(RequestState(_parse_request(request), arrival, max_len))

    def remove(self, request_id: str) -> None:
        self._update()
        self.scheduler.remove(request_id)

    def set_drafts(self, drafts: Mapping[str, Sequence[Any]]) -> None:
        self._update()
        self.scheduler.set_drafts(
            {id_: Draft(tuple(token_ids), drafter) for id_, (drafter, *token_ids) in drafts.items()}
        )

    def schedule(self, used_rows: int, limits: Sequence[Any]) -> ScheduleOutput:
        self._update()
        self._limits = {(id_, start): until for id_, start, until in limits}
        self._scheduled = self.scheduler.schedule(used_rows)
        return self._scheduled

    def update(self, outputs: Sequence[dict[str, Any]]) -> None:
        self._outputs = [_parse_output(output) for output in outputs]

    def fail_commit(self, request_id: str) -> None:
        """An error in the update before: replayed as an error of the step."""
        assert self._outputs is not None
        index = [request.state.id for request in self._scheduled.requests].index(request_id)
        self._outputs[index] = StepOutput(error=RequestFailed("lost"))

    def update_pooling(self, vectors: Sequence[bool | list[Any]]) -> None:
        self._update()
        self.scheduler.update_pooling(self._scheduled, [_parse_vector(vector) for vector in vectors])

    def _update(self) -> None:
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            self.scheduler.update(self._scheduled, outputs)

    def _computable_until(self, state: RequestState, start: int) -> int:
        return self._limits.get((state.id, start), len(state.tokens))


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
