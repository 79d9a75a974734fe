"""Sampling rows of logits: log-probabilities, the processor pipeline, and sampling with keyed noise."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import Arrays, SampleRow, download, upload
from foreword.core.outputs import TokenLogprob
from foreword.core.request import RequestState
from foreword.kernels.ops import Ops
from foreword.kernels.reference.sampling import hash_logits
from foreword.sampling.logits_processors import (
    MASKING_PROCESSORS,
    PIPELINE,
    LogitsProcessor,
    active_processors,
    find_runs,
)

NON_FINITE = -1  # instead of a token id: the logits are not finite
ALL_MASKED = -2  # instead of a token id: the request's own parameters mask every id
NUM_PROBED_IDS = 64  # ids checked first for a finite logit


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Result of sampling R rows."""

    token_ids: list[int]  # or NON_FINITE or ALL_MASKED
    logprobs: list[TokenLogprob | None]  # None if not requested, or without a token
    logits_hashes: list[int]  # 64-bit hashes of the raw logits in test mode, else empty


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Rows that the device samples."""

    token_ids: Tensor  # int64 [R], on the device
    read: Callable[[], SamplerOutput]  # waits for the device


@dataclass(frozen=True, slots=True)
class _RawLogits:
    """Rows before the pipeline."""

    logits: Tensor  # [n, V]
    log_sum_exp: Tensor  # float32 [n]
    top_ids: Tensor  # int64 [n, k], most likely first


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """How every row of a request is sampled."""

    processors: tuple[LogitsProcessor, ...]
    seed: int
    is_greedy: bool
    can_mask_all: bool  # a processor may mask every id
    num_top: int | None  # most likely ids whose log-probabilities are wanted; None: no log-probabilities


@dataclass(frozen=True, slots=True)
class _ProcessorCall:
    """One processor for the rows from `start` to `end`, with their parameters."""

    processor: LogitsProcessor
    start: int
    end: int
    gathered: Arrays


@dataclass(frozen=True, slots=True)
class _SamplingInputs:
    """Host inputs of sampling R rows."""

    plans: Sequence[_SamplingPlan]
    calls: Sequence[_ProcessorCall]
    scored: Sequence[int]  # rows whose log-probabilities are wanted
    seeds: array[int]
    positions: array[int]
    greedy: array[int]
    hashes: Tensor | None  # hashes of the raw logits, in test mode


class Sampler:
    """Samples rows; each row's result depends on nothing but the row."""

    def __init__(
        self, ops: Ops, vocab_size: int, never_sampled_ids: Sequence[int], test_mode: bool = False
    ) -> None:
        """never_sampled_ids  ids below vocab_size without a token; no distribution includes them"""
        self._ops = ops
        self._vocab_size = vocab_size
        assert all(0 <= token_id < vocab_size for token_id in never_sampled_ids)
        self.never_sampled_ids = torch.tensor(sorted(never_sampled_ids), dtype=torch.int64)  # [U]
        self.with_hashes = test_mode

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool = True) -> SamplerOutput:
        """Sample logits float32 [R, V], which are overwritten; the host waits for the device once.

        logprobs=False skips requested log-probabilities.
        """
        if not rows:
            return SamplerOutput([], [], [])
        inputs = self._gather(logits, rows, logprobs)
        self._mask_never_sampled(logits)
        if not inputs.calls and not inputs.scored:
            token_ids = self._ops.sample_to_host(logits, inputs.seeds, inputs.positions, inputs.greedy)
            hashes = [] if inputs.hashes is None else inputs.hashes.tolist()
            return SamplerOutput(token_ids, [None] * len(rows), hashes)
        maskable = [r for r, plan in enumerate(inputs.plans) if plan.can_mask_all] if inputs.calls else []
        peaks = _max_logits(logits, maskable) if maskable else None
        output = self._launch(logits, rows, inputs).read()
        token_ids = output.token_ids
        if peaks is not None and min(token_ids) == NON_FINITE:
            for r in maskable:
                was_finite = token_ids[r] == NON_FINITE and float(peaks[r]) > -torch.inf
                if was_finite and float(logits[r].amax()) == -torch.inf:
                    token_ids[r] = ALL_MASKED
        return output

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> PendingSamples:
        """As a call, without a wait for the device. A row without a token is NON_FINITE, never ALL_MASKED."""
        inputs = self._gather(logits, rows, logprobs=True)
        self._mask_never_sampled(logits)
        return self._launch(logits, rows, inputs)

    def _gather(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool) -> _SamplingInputs:
        assert logits.shape == (len(rows), self._vocab_size)
        plans: list[_SamplingPlan] = [row.state.sampling_plan or _make_plan(row.state) for row in rows]
        return _SamplingInputs(
            plans=plans,
            calls=_processor_calls([plan.processors for plan in plans], rows, self._vocab_size),
            scored=[r for r, plan in enumerate(plans) if plan.num_top is not None] if logprobs else [],
            seeds=array("Q", [plan.seed for plan in plans]),
            positions=array("q", [len(state.tokens) + len(draft) for state, draft in rows]),
            greedy=array("B", [plan.is_greedy for plan in plans]),
            hashes=hash_logits(logits) if self.with_hashes else None,
        )

    def _launch(self, logits: Tensor, rows: Sequence[SampleRow], inputs: _SamplingInputs) -> PendingSamples:
        """Sample logits without the never sampled ids."""
        scored = inputs.scored
        arrays = [
            np.frombuffer(inputs.seeds, np.int64),
            np.frombuffer(inputs.positions, np.int64),
            np.frombuffer(inputs.greedy, np.bool_),
            np.array(scored, np.int64),
            *(values for call in inputs.calls for values in call.gathered),
        ]
        seed_bits, position, is_greedy, scored_rows, *gathered = upload(arrays, logits.device)
        raw = None
        if scored:
            max_top = max(inputs.plans[r].num_top or 0 for r in scored)
            raw = self._keep_raw(logits.index_select(0, scored_rows), max_top)
        for call in inputs.calls:
            count = len(call.gathered)
            call.processor.apply(self._ops, logits[call.start : call.end], *gathered[:count])
            gathered = gathered[count:]
        sampled = self._ops.sample(logits, seed_bits, position, is_greedy)
        params = [rows[r].state.params for r in scored]
        num_top, requested_ids = [p.logprobs or 0 for p in params], [p.logprob_token_ids for p in params]
        results = [sampled] if inputs.hashes is None else [sampled, inputs.hashes]
        if raw is not None:
            results.append(_logprob_table(raw, sampled.index_select(0, scored_rows), requested_ids))
        wait = download(results)

        def read() -> SamplerOutput:
            token_ids, *rest = wait()
            row_logprobs: list[TokenLogprob | None] = [None] * len(rows)
            if raw is not None:
                table = rest.pop()
                for r, logprob in zip(scored, _parse_logprobs(table, num_top, requested_ids), strict=True):
                    row_logprobs[r] = logprob if logprob.token_id >= 0 else None
            return SamplerOutput(token_ids.tolist(), row_logprobs, rest[0].tolist() if rest else [])

        return PendingSamples(sampled, read)

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], num_logprobs: int
    ) -> list[TokenLogprob]:
        """Log-probabilities of target_ids[r] after logits [R, V], with the `num_logprobs` most likely ids."""
        self._mask_never_sampled(logits)
        (token_ids,) = upload([np.array(target_ids, np.int64)], logits.device)
        raw = self._keep_raw(logits, num_logprobs)
        table = _logprob_table(raw, token_ids).cpu()
        return _parse_logprobs(table, [num_logprobs] * len(target_ids))

    def _mask_never_sampled(self, logits: Tensor) -> None:
        if self.never_sampled_ids.numel():
            self.never_sampled_ids = self.never_sampled_ids.to(logits.device)
            self._ops.mask_ids(logits, self.never_sampled_ids)

    def _keep_raw(self, logits: Tensor, num_top: int) -> _RawLogits:
        top_ids = self._ops.top_ids(logits, min(num_top, self._vocab_size))
        return _RawLogits(logits, self._ops.log_sum_exp(logits), top_ids)


def _logprob_table(raw: _RawLogits, token_ids: Tensor, requested_ids: Sequence[Sequence[int]] = ()) -> Tensor:
    """Input of _parse_logprobs(), for one id per row, int64 [n]; float64, which is exact here.

    Columns: id, rank, the k most likely ids; log-probabilities of the id and of the k ids; those of the
    requested ids, -inf for an id outside of the vocabulary.
    """
    chosen = token_ids.clamp(min=0)[:, None]
    value = raw.logits.gather(1, chosen)
    ids = torch.cat((token_ids[:, None], _ranks(raw.logits, value, chosen), raw.top_ids), 1)
    values = [value, raw.logits.gather(1, raw.top_ids)]
    if any(requested_ids):
        width = max(map(len, requested_ids))
        padded = [[*row_ids, *[0] * (width - len(row_ids))] for row_ids in requested_ids]
        (columns,) = upload([np.array(padded, np.int64)], raw.logits.device)
        known = (columns >= 0) & (columns < raw.logits.shape[1])
        values.append(raw.logits.gather(1, torch.where(known, columns, 0)).where(known, -torch.inf))
    scores = torch.cat(values, 1) - raw.log_sum_exp[:, None]
    return torch.cat((ids.double(), scores.double()), 1)


def _parse_logprobs(
    table: Tensor, num_top: Sequence[int], requested_ids: Sequence[Sequence[int]] = ()
) -> list[TokenLogprob]:
    """The log-probabilities of each row of a _logprob_table() on the host, with num_top[r] likely ids."""
    num_requested = max(map(len, requested_ids), default=0)
    width = (table.shape[1] - num_requested + 1) // 2  # columns of ids: one more than their log-probabilities
    results = []
    for line, num, requested in zip(table.tolist(), num_top, requested_ids or repeat(()), strict=False):
        token_id, rank, *top_ids = map(int, line[:width])
        logprob, *top = line[width : 2 * width - 1]
        scores = line[2 * width - 1 :]
        pairs = tuple(zip(top_ids[:num], top[:num], strict=True)), tuple(zip(requested, scores, strict=False))
        results.append(TokenLogprob(token_id, logprob, rank, *pairs))
    return results


def _make_plan(state: RequestState) -> _SamplingPlan:
    """The plan of a request, kept in its state: both never change."""
    processors = active_processors(state.request)
    can_mask_all = any(type(step) in MASKING_PROCESSORS for step in processors)
    state.sampling_plan = plan = _SamplingPlan(
        processors, state.request.seed, state.params.greedy, can_mask_all, state.params.logprobs
    )
    return plan


def _processor_calls(
    processors: Sequence[tuple[LogitsProcessor, ...]], rows: Sequence[SampleRow], vocab_size: int
) -> list[_ProcessorCall]:
    """The calls of each processor, in pipeline order, for consecutive rows that use it."""
    used = set(chain.from_iterable(set(processors)))
    calls: list[_ProcessorCall] = []
    for step in PIPELINE:
        if step in used:
            for start, end in find_runs([step in steps for steps in processors]):
                gathered = step.gather(rows[start:end], vocab_size)
                if gathered is not None:
                    calls.append(_ProcessorCall(step, start, end, gathered))
    return calls


def _max_logits(logits: Tensor, row_indices: Sequence[int]) -> Tensor:
    """float32 [R]: -inf for those of the rows that are -inf throughout, else any larger logit or NaN.

    On a CPU a few ids nearly always suffice. On a GPU all ids are cheaper than a host decision.
    """
    if logits.device.type != "cpu":
        return logits.amax(dim=1)
    peaks = logits[:, :NUM_PROBED_IDS].amax(dim=1)
    for r, peak in enumerate(peaks.tolist()):
        if peak == -torch.inf and r in row_indices:
            peaks[r] = logits[r].amax()
    return peaks


def _ranks(logits: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """int64 [n, 1]: 1 + how many ids precede the chosen one by (value descending, id ascending)."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > value) | ((logits == value) & (ids < chosen))
    return 1 + before.sum(dim=1, keepdim=True)
