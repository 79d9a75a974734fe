"""Jobs of a draft in the layout of C++ (csrc/drafting/draft_loop.h), and their results."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from torch import Tensor

from foreword.kernels.cpu.library import DraftArgs
from foreword.kernels.ops import DraftJob, DraftTokens

JOB_STRUCT = struct.Struct("=6qQ2q4d")  # struct DraftJob


class DraftCall:
    """The memory that one call reads and writes; draft rows are as wide as the largest max_tokens."""

    def __init__(self, jobs: Sequence[DraftJob], block_size: int) -> None:
        self._num_jobs = len(jobs)
        self._max_tokens = max((job.max_tokens for job in jobs), default=0)
        self._jobs = array("q", bytes(JOB_STRUCT.size * self._num_jobs))
        self._token_ids = array("q")
        self._block_tables = array("q")
        self._draft_ids = array("q", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_logprobs = array("d", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_lengths = array("q", bytes(8 * self._num_jobs))
        for index, job in enumerate(jobs):
            rows = len(job.token_ids) + job.max_tokens - (job.max_tokens > 0)
            assert len(job.block_table) * block_size >= job.start_position + rows, "a row without a slot"
            self._pack(index, job)

    @property
    def num_rows(self) -> int:
        """Rows of the first pass, which has the most."""
        return len(self._token_ids)

    def build_args(self, never_sampled_ids: Tensor, vocab_size: int) -> DraftArgs:
        """Pointers into this object, which must outlive the call; never_sampled_ids int64 [U]."""
        return DraftArgs(
            jobs=_address(self._jobs),
            num_jobs=self._num_jobs,
            token_ids=_address(self._token_ids),
            block_tables=_address(self._block_tables),
            never_sampled_ids=never_sampled_ids.data_ptr(),
            num_never_sampled=never_sampled_ids.numel(),
            vocab_size=vocab_size,
            max_tokens=self._max_tokens,
            draft_ids=_address(self._draft_ids),
            draft_logprobs=_address(self._draft_logprobs),
            draft_lengths=_address(self._draft_lengths),
        )

    def read_drafts(self) -> list[DraftTokens]:
        """The results, after the call."""
        drafts: list[DraftTokens] = []
        for index, count in enumerate(self._draft_lengths):
            row = slice(index * self._max_tokens, index * self._max_tokens + count)
            drafts.append(DraftTokens(tuple(self._draft_ids[row]), tuple(self._draft_logprobs[row])))
        return drafts

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
