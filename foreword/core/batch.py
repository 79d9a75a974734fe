"""The flat batch of one forward pass, and the letters that every shape in this package uses.

T  rows of the forward pass (one token each, padded to the backend's row tile)
R  sampled rows (rows whose logits are needed)
B  requests in the step
M  longest block table in the step
D  dimension of one head
H  hidden size
V  vocabulary size
Hq, Hk  query heads, key/value heads
S  slots of the KV cache (blocks x block_size); a slot holds one token

The KV cache as kernels see it.

What the host knows of a step goes to the device by one copy that nobody waits for.

What the sampler must know of one row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.core.images import MRopePositions
from foreword.core.request import RequestState
from foreword.core.structured import RequestGrammar
from foreword.sampling.penalties import Floats, Ids, PenaltyState

__all__ = [
    "NULL_BLOCK",
    "Array",
    "Arrays",
    "Batch",
    "Chunk",
    "ImageFeatures",
    "KVLayer",
    "SampleRow",
    "build_batch",
    "request_index_of",
    "upload",
]

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]

ALIGNMENT = 16  # bytes: kernels compiled for such addresses are the ones that load widely


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device; on a CPU they share the arrays' memory.

    Elsewhere they are parts of one tensor. Its pinned twin is kept by torch until the copy has read it.
    """
    here = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return here
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for part, start in zip(here, starts, strict=False):
        _view_at(pinned, start, part).copy_(part)
    there = pinned.to(device, non_blocking=True)
    return [_view_at(there, start, part) for part, start in zip(here, starts, strict=False)]


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from `start` on, as a tensor of this type and shape."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


Ints = NDArray[np.int64]

TEXT_ONLY_POSITIONS = MRopePositions(())  # of a request without pictures
NULL_BLOCK = 0  # never given to a request: rows of padding write and read here


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one request: tokens [start, start + len(token_ids)) and where their KV lives.

    num_sampled  how many of the last rows are sampled
    positions    for models that know positions in several directions, of a request with pictures; None: they are the indices
    features     of pictures: (index of the first row within the chunk, [rows, width])
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_sampled: int
    mrope_positions: MRopePositions | None = None
    image_features: Sequence[tuple[int, Tensor]] = ()


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Rows whose input is not the embedding of a token but a piece of a picture.

    rows    int64 [N]
    values  [N, width]: what stands for the embedding [H], and where width is more, what is added behind the first layers
    """

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass.

    token_ids     int64 [T]
    positions     int64 [T]     absolute index of the token within its request
    slots         int64 [T]     where its K and V are written
    block_tables  int64 [B+1, M] block ids by request, scratch beyond; the last line is the padding's
    row_starts    B+1 ints      rows of request b are row_starts[b] to row_starts[b+1]; rows beyond are padding
    ends          B ints        position after the last row of request b
    sample_rows   int64 [R]     rows whose logits are wanted, in order of request and position
    block_size    tokens a block
    rope_positions  int64 [T, 3]: time, row and column, for models that know positions in several directions; else None
    features      of pictures, or None: no row is part of one
    owners        int64 [T]: request of each row, B of padding, for backends that plan attention on the device; else None
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    sample_rows: Tensor
    block_size: int
    mrope_positions: Tensor | None = None
    image_features: ImageFeatures | None = None
    request_index: Tensor | None = None


def build_batch(
    chunks: Sequence[Chunk],
    block_size: int,
    row_tile: int,
    device: str,
    mrope: bool = False,
    with_request_index: bool = False,
) -> Batch:
    """Lay the chunks out as one flat batch, padded to a multiple of `row_tile` rows.

    directions  the model knows positions in several directions
    owners      the backend asks whose each row is
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    sampled: list[int] = []
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.blocks) * block_size >= end, "a row without a slot"
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        slots.extend(
            chunk.blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)
        )
        starts.append(len(token_ids))
        sampled.extend(range(len(token_ids) - chunk.num_sampled, len(token_ids)))
    padding = -len(token_ids) % row_tile
    for values in (token_ids, positions, slots):
        values.extend([0] * padding)
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    tables = [[*chunk.blocks, *[NULL_BLOCK] * (width - len(chunk.blocks))] for chunk in chunks]
    tables.append([NULL_BLOCK] * width)
    columns = [np.array(values, np.int64) for values in (token_ids, positions, slots, tables, sampled)]
    if mrope:
        columns.append(_mrope_positions(chunks, padding))
    if with_request_index:
        columns.append(_request_index(starts, len(token_ids)))
    placed = iter(upload(columns, torch.device(device)))
    return Batch(
        token_ids=next(placed),
        positions=next(placed),
        slots=next(placed),
        block_tables=next(placed),
        query_start_loc=tuple(starts),
        seq_lens=tuple(chunk.start + len(chunk.token_ids) for chunk in chunks),
        sample_rows=next(placed),
        block_size=block_size,
        mrope_positions=next(placed) if mrope else None,
        image_features=_image_features(chunks, starts, device),
        request_index=next(placed) if with_request_index else None,
    )


def request_index_of(batch: Batch) -> Tensor:
    """int64 [T]: request of each row, B of padding"""
    return upload([_request_index(batch.query_start_loc, len(batch.token_ids))], batch.token_ids.device)[0]


def _request_index(starts: Sequence[int], num_rows: int) -> Ints:
    """[T]"""
    sizes = np.diff(np.array([*starts, num_rows]))
    return np.repeat(np.arange(len(starts)), sizes)


def _mrope_positions(chunks: Sequence[Chunk], padding: int) -> Ints:
    """[T, 3]"""
    parts = [
        (chunk.mrope_positions or TEXT_ONLY_POSITIONS).rows(chunk.start, chunk.start + len(chunk.token_ids))
        for chunk in chunks
    ]
    parts.append(np.zeros((padding, 3), np.int64))
    return np.concatenate(parts)


def _image_features(chunks: Sequence[Chunk], starts: Sequence[int], device: str) -> ImageFeatures | None:
    """Those of all chunks."""
    found = [
        (first + row, values)
        for chunk, first in zip(chunks, starts, strict=False)
        for row, values in chunk.image_features
    ]
    if not found:
        return None
    rows = torch.cat([torch.arange(row, row + len(values)) for row, values in found])
    return ImageFeatures(rows.to(device), torch.cat([values for _, values in found]))


@dataclass(frozen=True, slots=True)
class KVLayer:
    """K and V of one layer, each [S, Hk, D].

    k_scale, v_scale  float32 [S, Hk] where K and V are int8 or float8_e4m3fn: the largest magnitude of that slot's and
                      head's vector / 127 or / 448, written once with it; else None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.k.shape == self.v.shape and self.k.dtype == self.v.dtype
        assert (self.k_scale is None) == (self.v_scale is None)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that samples the token after `state.tokens + draft`.

    draft  the drafted tokens before the row; its history is prompt, output and these
    """

    state: RequestState
    draft: tuple[int, ...] = ()

    @property
    def grammar(self) -> RequestGrammar | None:
        return self.state.grammar

    @property
    def position(self) -> int:
        """Absolute index of the token that the row samples: the counter of its noise."""
        return len(self.state.tokens) + len(self.draft)

    @property
    def num_output(self) -> int:
        """Output tokens before the one that the row samples."""
        return self.state.num_output + len(self.draft)

    def last_tokens(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the history, fewer at its beginning."""
        kept = max(count - len(self.draft), 0)
        older = self.state.tokens[max(len(self.state.tokens) - kept, 0) :]
        return (*older, *self.draft[max(len(self.draft) - count, 0) :])

    @property
    def penalty_state(self) -> PenaltyState:
        """What is kept of the request between steps; one for all its rows."""
        if self.state.penalty_state is None:
            self.state.penalty_state = PenaltyState(self.state.request)
        return self.state.penalty_state

    def seen_ids(self) -> Ids:
        """Every id of the history, once."""
        return self.penalty_state.seen_ids(self.state.tokens, self.draft)

    def output_counts(self) -> tuple[Ids, Ids]:
        """Ids of the output and the drafted tokens, and how often each stands there."""
        return self.penalty_state.output_counts(self.state.tokens, self.draft)

    def dry_penalties(self) -> tuple[Ids, Floats]:
        """Ids that would go on with a repeat in the history, and what that takes off their logits."""
        return self.penalty_state.dry_penalties(self.state.tokens, self.draft)
