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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.core.positions import RopePositions
from foreword.core.uploads import uploaded

__all__ = ["SCRATCH_BLOCK", "Batch", "Chunk", "Features", "build_batch", "owners_of"]

Ints = NDArray[np.int64]

EVERYWHERE_ALIKE = RopePositions(())  # of a request without pictures
SCRATCH_BLOCK = 0  # never given to a request: rows of padding write and read here


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
    positions: RopePositions | None = None
    features: Sequence[tuple[int, Tensor]] = ()


@dataclass(frozen=True, slots=True)
class Features:
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
    row_starts: tuple[int, ...]
    ends: tuple[int, ...]
    sample_rows: Tensor
    block_size: int
    rope_positions: Tensor | None = None
    features: Features | None = None
    owners: Tensor | None = None


def build_batch(
    chunks: Sequence[Chunk], block_size: int, row_tile: int, device: str, directions: bool = False, owners: bool = False
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
        slots.extend(chunk.blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, end))
        starts.append(len(token_ids))
        sampled.extend(range(len(token_ids) - chunk.num_sampled, len(token_ids)))
    padding = -len(token_ids) % row_tile
    for values in (token_ids, positions, slots):
        values.extend([0] * padding)
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    tables = [[*chunk.blocks, *[SCRATCH_BLOCK] * (width - len(chunk.blocks))] for chunk in chunks]
    tables.append([SCRATCH_BLOCK] * width)
    columns = [np.array(values, np.int64) for values in (token_ids, positions, slots, tables, sampled)]
    if directions:
        columns.append(_rope_positions(chunks, padding))
    if owners:
        columns.append(_owners(starts, len(token_ids)))
    placed = iter(uploaded(columns, torch.device(device)))
    return Batch(
        token_ids=next(placed),
        positions=next(placed),
        slots=next(placed),
        block_tables=next(placed),
        row_starts=tuple(starts),
        ends=tuple(chunk.start + len(chunk.token_ids) for chunk in chunks),
        sample_rows=next(placed),
        block_size=block_size,
        rope_positions=next(placed) if directions else None,
        features=_features(chunks, starts, device),
        owners=next(placed) if owners else None,
    )


def owners_of(batch: Batch) -> Tensor:
    """int64 [T]: request of each row, B of padding"""
    return uploaded([_owners(batch.row_starts, len(batch.token_ids))], batch.token_ids.device)[0]


def _owners(starts: Sequence[int], num_rows: int) -> Ints:
    """[T]"""
    sizes = np.diff(np.array([*starts, num_rows]))
    return np.repeat(np.arange(len(starts)), sizes)


def _rope_positions(chunks: Sequence[Chunk], padding: int) -> Ints:
    """[T, 3]"""
    parts = [(chunk.positions or EVERYWHERE_ALIKE).rows(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
    parts.append(np.zeros((padding, 3), np.int64))
    return np.concatenate(parts)


def _features(chunks: Sequence[Chunk], starts: Sequence[int], device: str) -> Features | None:
    """Those of all chunks."""
    found = [(first + row, values) for chunk, first in zip(chunks, starts, strict=False) for row, values in chunk.features]
    if not found:
        return None
    rows = torch.cat([torch.arange(row, row + len(values)) for row, values in found])
    return Features(rows.to(device), torch.cat([values for _, values in found]))
