"""Requests of a draft as C++ takes them (csrc/draft.h), and what it says of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from torch import Tensor

from foreword.kernels.cpu.library import Draft
from foreword.kernels.ops import DraftLane, Guess

__all__ = ["DraftCall"]

LANE = struct.Struct("=6qQ2q4d")  # struct Lane


class DraftCall:
    """One call, and the memory that it reads and writes: as many columns of guesses as any lane wants."""

    def __init__(self, lanes: Sequence[DraftLane], block_size: int) -> None:
        self._count = len(lanes)
        self._columns = max((lane.max_tokens for lane in lanes), default=0)
        self._lanes = array("q", bytes(LANE.size * self._count))
        self._token_ids = array("q")
        self._blocks = array("q")
        self._guesses = array("q", bytes(8 * self._count * self._columns))
        self._logprobs = array("d", bytes(8 * self._count * self._columns))
        self._counts = array("q", bytes(8 * self._count))
        for number, lane in enumerate(lanes):
            rows = len(lane.token_ids) + lane.max_tokens - (lane.max_tokens > 0)
            assert len(lane.blocks) * block_size >= lane.start + rows, "a row without a slot"
            self._pack(number, lane)

    @property
    def num_rows(self) -> int:
        """Of the first pass, which has the most."""
        return len(self._token_ids)

    def structure(self, unused: Tensor, width: int) -> Draft:
        """Points into this object. unused int64 [U]; width of a row of logits."""
        return Draft(
            lanes=_address(self._lanes),
            num_lanes=self._count,
            token_ids=_address(self._token_ids),
            blocks=_address(self._blocks),
            unused=unused.data_ptr(),
            num_unused=unused.numel(),
            width=width,
            columns=self._columns,
            guesses=_address(self._guesses),
            logprobs=_address(self._logprobs),
            counts=_address(self._counts),
        )

    def guesses(self) -> list[Guess]:
        """After the call."""
        found: list[Guess] = []
        for number, count in enumerate(self._counts):
            first = number * self._columns
            found.append(Guess(tuple(self._guesses[first : first + count]), tuple(self._logprobs[first : first + count])))
        return found

    def _pack(self, number: int, lane: DraftLane) -> None:
        sampling = lane.sampling
        self._token_ids.extend(lane.token_ids)
        self._blocks.extend(lane.blocks)
        LANE.pack_into(
            self._lanes,
            number * LANE.size,
            len(lane.token_ids),
            lane.start,
            len(lane.blocks),
            lane.shift,
            lane.first,
            lane.max_tokens,
            sampling.seed,
            sampling.greedy,
            sampling.top_k,
            lane.floor,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
        )


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
