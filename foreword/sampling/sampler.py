"""From rows of logits to tokens: log-probabilities, the pipeline, keyed noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import Arrays, SampleRow, upload
from foreword.core.outputs import TokenLogprob
from foreword.core.request import RequestState
from foreword.executor.decode_slots import hash_logits
from foreword.kernels.ops import Ops
from foreword.sampling.logits_processors import (
    PIPELINE,
    LogitsProcessor,
    active_processors,
    find_runs,
    may_mask_all,
    rng_keys,
)

__all__ = ["ALL_MASKED", "NON_FINITE", "Sampler", "SamplerOutput"]

NON_FINITE = -1  # in place of a token: the logits are not finite
ALL_MASKED = -2  # in place of a token: what the request asks for masks every one
NUM_PROBED_IDS = 64  # ids that nearly always tell whether a row holds any value


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What R rows yielded.

    token_ids  BROKEN or NOTHING_LEGAL where there is none
    logprobs   None for rows that did not ask, or have no token
    hashes     64-bit hashes of the raw logits in test mode, else empty
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    logits_hashes: list[int]


@dataclass(frozen=True, slots=True)
class _RawLogits:
    """Rows before the pipeline: logits [n, V], log of their sum float32 [n], likeliest ids int64 [n, k]."""

    logits: Tensor
    log_sum_exp: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class _ProcessorCall:
    """A step for the rows from `line` to `end`, and what it must know of them."""

    processor: LogitsProcessor
    start: int
    end: int
    gathered: Arrays


class Sampler:
    """Samples rows; holds no state of any request.

    unused_ids  ids below vocab_size that no token has; they are never sampled, and not part of any distribution
    """

    def __init__(
        self, ops: Ops, vocab_size: int, never_sampled_ids: Sequence[int], test_mode: bool = False
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._never_sampled_ids = torch.tensor(sorted(never_sampled_ids), dtype=torch.int64)
        self._test_mode = test_mode
        self._processor_cache: dict[RequestState, tuple[LogitsProcessor, ...]] = {}

    @property
    def with_hashes(self) -> bool:
        """Whether rows are hashed, as in test mode."""
        return self._test_mode

    @property
    def never_sampled_ids(self) -> Tensor:
        """int64 [U], ascending."""
        return self._never_sampled_ids

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool = True) -> SamplerOutput:
        """Sample logits float32 [R, V], which are overwritten; rows[r] says what line r is for.

        logprobs=False leaves log-probabilities out even where requests ask for them. Where nobody gets any, the host waits for
        the device once: for the ids.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        if not rows:
            return SamplerOutput([], [], [])
        wanted = self._processors_of(rows)
        params = [row.state.params for row in rows]
        asked = [r for r, one in enumerate(params) if one.logprobs is not None] if logprobs else []
        limited = [r for r, steps in enumerate(wanted) if may_mask_all(steps)]
        tasks = _processor_calls(wanted, rows, self._vocab_size)
        greedy = np.array([one.greedy for one in params], np.bool_)
        arrays = [
            *rng_keys(rows),
            greedy,
            np.array(asked, np.int64),
            *(array for task in tasks for array in task.gathered),
        ]
        seeds, positions, greedy_rows, asked_rows, *gathered = upload(arrays, logits.device)

        hashes = [hash_logits(line) for line in logits] if self._test_mode else []
        self._mask_never_sampled(logits)
        wishes = [params[r] for r in asked]
        raw = (
            self._keep_raw(logits.index_select(0, asked_rows), max(one.logprobs or 0 for one in wishes))
            if asked
            else None
        )
        peaks = _max_logits(logits, limited) if limited else None
        for task in tasks:
            count = len(task.gathered)
            task.processor.apply(self._ops, logits[task.start : task.end], *gathered[:count])
            gathered = gathered[count:]
        sampled = self._ops.sample(logits, seeds, positions, greedy_rows)
        found: list[TokenLogprob | None] = [None] * len(rows)
        if raw is not None:
            scored = self._compute_logprobs(raw, sampled[asked_rows], [one.logprobs or 0 for one in wishes])
            chosen = _requested_logprobs(raw, [one.logprob_token_ids for one in wishes])
            for r, logprob, scores in zip(asked, scored, chosen, strict=True):
                if logprob.token_id >= 0:
                    found[r] = replace(logprob, requested=scores) if scores else logprob
        token_ids: list[int] = sampled.tolist()
        if peaks is not None and min(token_ids) == NON_FINITE:
            for r in limited:
                if (
                    token_ids[r] == NON_FINITE
                    and float(peaks[r]) > -torch.inf
                    and float(logits[r].amax()) == -torch.inf
                ):
                    token_ids[r] = ALL_MASKED
        return SamplerOutput(token_ids, found, hashes)

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], num_logprobs: int
    ) -> list[TokenLogprob]:
        """Log-probabilities of the tokens targets[r] that follow logits [R, V], and of the `num` likeliest."""
        self._mask_never_sampled(logits)
        (token_ids,) = upload([np.array(target_ids, np.int64)], logits.device)
        return self._compute_logprobs(
            self._keep_raw(logits, num_logprobs), token_ids, [num_logprobs] * len(target_ids)
        )

    def _processors_of(self, rows: Sequence[SampleRow]) -> list[tuple[LogitsProcessor, ...]]:
        """The steps of each row. Those of requests that were sampled last are known."""
        before, self._processor_cache = self._processor_cache, {}
        for state in (row.state for row in rows):
            if state not in self._processor_cache:
                steps = before.get(state)
                self._processor_cache[state] = active_processors(state.request) if steps is None else steps
        return [self._processor_cache[row.state] for row in rows]

    def _mask_never_sampled(self, logits: Tensor) -> None:
        if self._never_sampled_ids.numel():
            self._never_sampled_ids = self._never_sampled_ids.to(logits.device)
            logits.index_fill_(1, self._never_sampled_ids, -torch.inf)

    def _keep_raw(self, logits: Tensor, num_top: int) -> _RawLogits:
        return _RawLogits(
            logits, self._ops.log_sum_exp(logits), self._ops.top_ids(logits, min(num_top, self._vocab_size))
        )

    def _compute_logprobs(
        self, raw: _RawLogits, token_ids: Tensor, num_top: Sequence[int]
    ) -> list[TokenLogprob]:
        """Log-probabilities of one id a row, int64 [n] (any id where it is -1), with the nums[r] likeliest."""
        chosen = token_ids.clamp(min=0)[:, None]
        value = raw.logits.gather(1, chosen)
        log_sum = raw.log_sum_exp[:, None]
        whole = torch.cat((token_ids[:, None], _ranks(raw.logits, value, chosen), raw.top_ids), 1)
        scores = torch.cat((value, raw.logits.gather(1, raw.top_ids)), 1) - log_sum
        width = whole.shape[1]
        found = torch.cat((whole.double(), scores.double()), 1).tolist()  # exact, and read at once
        lines = [([int(value) for value in line[:width]], line[width:]) for line in found]
        return [
            TokenLogprob(token_id, own, rank, tuple(zip(top_ids[:num], top[:num], strict=True)))
            for ((token_id, rank, *top_ids), (own, *top)), num in zip(lines, num_top, strict=True)
        ]


def _requested_logprobs(
    raw: _RawLogits, requested_ids: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, float], ...]]:
    """(id, logprob) of ids[r] in row r. An id beyond the vocabulary is as unlikely as can be."""
    if not any(requested_ids):
        return [()] * len(requested_ids)
    width = max(map(len, requested_ids))
    (columns,) = upload(
        [np.array([[*own, *[0] * (width - len(own))] for own in requested_ids], np.int64)], raw.logits.device
    )
    known = columns < raw.logits.shape[1]
    values = raw.logits.gather(1, torch.where(known, columns, 0)) - raw.log_sum_exp[:, None]
    scores = torch.where(known, values, -torch.inf).tolist()
    return [tuple(zip(own, line, strict=False)) for own, line in zip(requested_ids, scores, strict=True)]


def _processor_calls(
    processors: Sequence[tuple[LogitsProcessor, ...]], rows: Sequence[SampleRow], vocab_size: int
) -> list[_ProcessorCall]:
    """What is to be done, in the pipeline's order, for consecutive rows that asked for it."""
    asked = set(chain.from_iterable(set(processors)))
    tasks: list[_ProcessorCall] = []
    for step in PIPELINE:
        if step in asked:
            for line, end in find_runs([step in steps for steps in processors]):
                gathered = step.gather(rows[line:end], vocab_size)
                if gathered is not None:
                    tasks.append(_ProcessorCall(step, line, end, gathered))
    return tasks


def _max_logits(logits: Tensor, row_indices: Sequence[int]) -> Tensor:
    """float32 [R]: -inf of those of the lines that are -inf throughout; of the others, any value of theirs or NaN.

    On a CPU a few ids nearly always tell it. A GPU has looked at all of them before the host has looked at a few.
    """
    if logits.device.type != "cpu":
        return logits.amax(dim=1)
    peaks = logits[:, :NUM_PROBED_IDS].amax(dim=1)
    for line, peak in enumerate(peaks.tolist()):
        if peak == -torch.inf and line in row_indices:
            peaks[line] = logits[line].amax()
    return peaks


def _ranks(logits: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """int64 [n, 1]: 1 + how many ids come before the chosen one by (value descending, id ascending)."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > value) | ((logits == value) & (ids < chosen))
    return 1 + before.sum(dim=1, keepdim=True)
