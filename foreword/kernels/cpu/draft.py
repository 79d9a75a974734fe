"""Requests of a draft as C++ takes them (csrc/draft.h), and what it says of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from torch import Tensor

from foreword.kernels.cpu.library import DraftArgs
from foreword.kernels.ops import DraftJob, DraftTokens

__all__ = ["DraftCall"]

JOB_STRUCT = struct.Struct("=6qQ2q4d")  # struct Lane


class DraftCall:
    """One call, and the memory that it reads and writes: as many columns of guesses as any lane wants."""

    def __init__(self, jobs: Sequence[DraftJob], block_size: int) -> None:
        self._num_jobs = len(jobs)
        self._max_tokens = max((lane.max_tokens for lane in jobs), default=0)
        self._jobs = array("q", bytes(JOB_STRUCT.size * self._num_jobs))
        self._token_ids = array("q")
        self._block_tables = array("q")
        self._draft_ids = array("q", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_logprobs = array("d", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_lengths = array("q", bytes(8 * self._num_jobs))
        for number, lane in enumerate(jobs):
            rows = len(lane.token_ids) + lane.max_tokens - (lane.max_tokens > 0)
            assert len(lane.block_table) * block_size >= lane.start_position + rows, "a row without a slot"
            self._pack(number, lane)

    @property
    def num_rows(self) -> int:
        """Of the first pass, which has the most."""
        return len(self._token_ids)

    def build_args(self, never_sampled_ids: Tensor, vocab_size: int) -> DraftArgs:
        """Points into this object. unused int64 [U]; width of a row of logits."""
        return DraftArgs(
            lanes=_address(self._jobs),
            num_lanes=self._num_jobs,
            token_ids=_address(self._token_ids),
            blocks=_address(self._block_tables),
            unused=never_sampled_ids.data_ptr(),
            num_unused=never_sampled_ids.numel(),
            width=vocab_size,
            columns=self._max_tokens,
            guesses=_address(self._draft_ids),
            logprobs=_address(self._draft_logprobs),
            counts=_address(self._draft_lengths),
        )

    def read_drafts(self) -> list[DraftTokens]:
        """After the call."""
        found: list[DraftTokens] = []
        for number, count in enumerate(self._draft_lengths):
            first = number * self._max_tokens
            found.append(
                DraftTokens(
                    tuple(self._draft_ids[first : first + count]),
                    tuple(self._draft_logprobs[first : first + count]),
                )
            )
        return found

    def _pack(self, index: int, job: DraftJob) -> None:
        sampling = job.sampling
        self._token_ids.extend(job.token_ids)
        self._block_tables.extend(job.block_table)
        JOB_STRUCT.pack_into(
            self._jobs,
            index * JOB_STRUCT.size,
            len(job.token_ids),
            job.start_position,
            len(job.block_table),
            job.mrope_offset,
            job.first_draft_index,
            job.max_tokens,
            sampling.seed,
            sampling.greedy,
            sampling.top_k,
            job.min_logprob_sum,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
        )


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
