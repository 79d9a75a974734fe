"""Launches of paged attention: how rows and splits are divided among programs. No bit depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import triton
from torch import Tensor

from foreword.core.batch import Batch, KVLayer
from foreword.kernels.ops import AttentionMetadata
from foreword.kernels.triton.attention_kernel import attend

__all__ = [
    "BLOCK_KV",
    "SPLIT",
    "AttnLaunch",
    "TritonAttention",
    "TritonAttnMetadata",
    "num_stages",
    "plan_launches",
    "tile_shape",
]

SPLIT = 256  # positions: the least that a program reads of a long context
BLOCK_KV = 64  # positions of a KV tile: the M side of one warp group
MIN_COLUMNS = 16  # rows x heads of a tile
MAX_COLUMNS = 32  # limit by accumulator registers
MAX_COLUMNS_HOPPER = 64  # on Hopper a second warp group has half of them
MAX_COLUMNS_FLOAT32 = 16  # without tensor cores
TARGET_NUM_PROGRAMS = 528  # four for each of 132 multiprocessors
MAX_WORKSPACE_BYTES = 128 << 20  # bytes
# Shared memory for K and V tiles: on data center GPUs two programs share 227 KiB, others allow 99 KiB for
# one.
LARGE_SHARED_MEMORY_BYTES = 110 << 10
SMALL_SHARED_MEMORY_BYTES = 64 << 10
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttnLaunch:
    """The row tiles of one launch."""

    tiles: Tensor  # int32 [tiles, 2]: first row and number of rows, of one request each
    columns: int  # rows x heads of a tile, padded to a power of two
    num_programs: int  # that share the splits of a tile; 1: partial results stay in registers


@dataclass(frozen=True, slots=True)
class TritonAttnMetadata:
    """Launches that all layers with one window share in a forward pass."""

    batch: Batch
    window: int | None
    # By arguments of plan_launches(); built by the first layer, which knows the number of heads.
    launches: dict[tuple[int, ...], tuple[AttnLaunch, ...]] = field(default_factory=dict)

    @property
    def max_splits(self) -> int:
        """Upper bound on the splits that the rows of a tile attend to."""
        longest = max(self.batch.seq_lens, default=self.batch.block_tables.shape[1] * self.batch.block_size)
        splits = -(-longest // SPLIT)
        return splits if self.window is None else min(splits, (self.window + MAX_COLUMNS_HOPPER) // SPLIT + 2)

    def get_launches(self, columns: int, heads: int, head_tiles: int, dim: int) -> tuple[AttnLaunch, ...]:
        shape = columns, heads, head_tiles, dim
        if shape not in self.launches:
            self.launches[shape] = plan_launches(self.batch, columns, heads, head_tiles, dim, self.max_splits)
        return self.launches[shape]


class TritonAttention:
    """Mixin of TritonOps. Launches of an instance run in order on one stream: they share counters."""

    _counters: Tensor | None = None

    def build_attention_metadata(self, batch: Batch, window: int | None = None) -> AttentionMetadata:
        assert batch.request_index is not None
        return TritonAttnMetadata(batch, window)

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """See Ops.attention; a head of a row that attends to a non-finite value is NaN."""
        metadata = metadata or TritonAttnMetadata(batch, window)
        assert q.stride(-1) == 1 and batch.block_tables.is_contiguous()
        assert cache.k.is_contiguous() and cache.v.is_contiguous()
        _, num_heads, dim = q.shape
        kv_heads = cache.k.shape[1]
        group = num_heads // kv_heads
        block_d = max(triton.next_power_of_2(dim), 16)
        columns, num_warps = tile_shape(q.device, q.dtype, block_d)
        heads = min(group, columns)
        head_tiles = kv_heads * -(-group // heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        factor, cap = (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)
        k, v = cache.k, cache.v
        if k.dtype == torch.float8_e4m3fn:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        for launch in metadata.get_launches(columns, heads, head_tiles, dim):
            pairs = launch.tiles.shape[0] * head_tiles
            whole = launch.num_programs == 1
            partials = split_stats = counters = None
            if not whole:
                shape = pairs, metadata.max_splits
                partials = q.new_empty((*shape, dim, launch.columns), dtype=torch.float32)
                split_stats = q.new_empty((*shape, 2, launch.columns), dtype=torch.float32)
                counters = self._get_counters(q.device)
            tables = batch.block_tables
            attend[pairs, launch.num_programs](
                *(q, k, v, cache.k_scale, cache.v_scale, out, partials, split_stats, counters, launch.tiles),
                *(batch.request_index, batch.positions, tables, tables.shape[0] - 1, tables.shape[1]),
                *(metadata.max_splits, q.stride(0), q.stride(1), factor, cap),
                KV_HEADS=kv_heads,
                GROUP=group,
                HEADS=heads,
                D=dim,
                BLOCK_SIZE=batch.block_size,
                WINDOW=window or 0,
                SOFTCAP=softcap is not None,
                SPLIT=SPLIT,
                BLOCK_KV=BLOCK_KV,
                BLOCK_D=block_d,
                NQ=launch.columns,
                WHOLE=whole,
                STAGES=num_stages(q.device, 2 * BLOCK_KV * block_d * k.itemsize),
                num_warps=num_warps,
                enable_fp_fusion=False,
            )
        return out

    def _get_counters(self, device: torch.device) -> Tensor:
        """int32 [most pairs of a launch that shares splits among programs]"""
        if self._counters is None:
            self._counters = torch.zeros(TARGET_NUM_PROGRAMS, dtype=torch.int32, device=device)
        return self._counters


def plan_launches(
    batch: Batch, columns: int, heads: int, head_tiles: int, dim: int, max_splits: int
) -> tuple[AttnLaunch, ...]:
    """Separate launches for requests that fit into one tile of `columns` (rows x heads), and for longer ones.

    heads: of a group in one tile; head_tiles: such tiles over all groups. If all requests have equally many
    rows, as in CUDA graphs, nothing is copied from the host.
    """
    device, num_rows, rows_per_tile = batch.positions.device, batch.positions.shape[0], columns // heads
    sections = [
        (start, end - start) for start, end in pairwise((*batch.query_start_loc, num_rows)) if end > start
    ]
    if not sections:
        return ()
    most = max(size for _, size in sections)
    if num_rows == most * len(sections):
        tiles = _equal_tiles(len(sections), most, rows_per_tile, device)
        return (_make_launch(tiles, min(most, rows_per_tile) * heads, head_tiles, dim, max_splits),)
    long = [
        (row, min(rows_per_tile, start + size - row))
        for start, size in sections
        if size > rows_per_tile
        for row in reversed(range(start, start + size, rows_per_tile))
    ]
    short = [section for section in sections if section[1] <= rows_per_tile]
    launches: list[AttnLaunch] = []
    for section_tiles in (long, short):
        if section_tiles:
            tiles = torch.tensor(section_tiles, dtype=torch.int32, device=device)
            used_columns = max(size for _, size in section_tiles) * heads
            launches.append(_make_launch(tiles, used_columns, head_tiles, dim, max_splits))
    return tuple(launches)


def _equal_tiles(sections: int, size: int, rows_per_tile: int, device: torch.device) -> Tensor:
    """Tiles of sections of equal size, last rows first: they read most."""
    offsets = torch.arange(0, size, rows_per_tile, dtype=torch.int32, device=device).flip(0)
    first = torch.arange(0, sections * size, size, dtype=torch.int32, device=device)[:, None] + offsets
    rows = (size - offsets).clamp(max=rows_per_tile).expand_as(first)
    return torch.stack((first, rows), -1).view(-1, 2)


def _make_launch(tiles: Tensor, used_columns: int, head_tiles: int, dim: int, max_splits: int) -> AttnLaunch:
    columns = max(triton.next_power_of_2(used_columns), MIN_COLUMNS)
    pairs = tiles.shape[0] * head_tiles
    programs = min(-(-TARGET_NUM_PROGRAMS // pairs), max_splits)
    if pairs * max_splits * columns * (dim + 2) * 4 > MAX_WORKSPACE_BYTES:
        programs = 1
    return AttnLaunch(tiles, columns, programs)


def tile_shape(device: torch.device, dtype: torch.dtype, block_d: int) -> tuple[int, int]:
    """Maximum columns of a tile, and warps: equal for all columns, so sums over positions have one layout."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    wide = block_d > 128
    columns = MAX_COLUMNS_HOPPER if hopper and not wide else MAX_COLUMNS
    return (MAX_COLUMNS_FLOAT32 if dtype == torch.float32 else columns), (8 if hopper or wide else 4)


def num_stages(device: torch.device, tile_bytes: int) -> int:
    """Stages of software pipelining; no bit depends on it.

    Block tables are read one stage before keys and values: n tiles, one of them in use, take 2n - 1 stages.
    """
    large = device.type == "cpu" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0))
    room = LARGE_SHARED_MEMORY_BYTES if large else SMALL_SHARED_MEMORY_BYTES
    tiles = max(min(room // tile_bytes, 3), 2 if large else 1)
    return 2 * tiles - 1
