"""Attention over a paged KV cache: how the work is divided. What is computed does not depend on it."""

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

SPLIT = 256  # positions: what one program reads of a long context at least, and what one stream's latency is made of
BLOCK_KV = 64  # what one warp group takes as the M side of a product
MIN_COLUMNS = 16  # of a tile: rows x heads
MAX_COLUMNS = 32  # what accumulators have room for
MAX_COLUMNS_HOPPER = 64  # there, a second warp group has half of them
MAX_COLUMNS_FLOAT32 = 16  # no tensor core
TARGET_NUM_PROGRAMS = 528  # four for each of 132 multiprocessors; a constant, though no bit depends on it
MAX_WORKSPACE_BYTES = 128 << 20  # bytes
LARGE_SHARED_MEMORY_BYTES = (
    110 << 10
)  # bytes for tiles of keys and values on data center cards, where two programs share 227 KiB
SMALL_SHARED_MEMORY_BYTES = 64 << 10  # on others, where one program may have 99 KiB
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttnLaunch:
    """Tiles of rows that one launch computes.

    tiles     int32 [tiles, 2]: first row and number of rows, of one request each
    columns   rows x heads of a tile, padded to a power of two
    programs  that share the splits of one tile; 1: they stay in registers
    """

    tiles: Tensor
    columns: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class TritonAttnMetadata:
    """What all layers with one window share in one forward pass.

    launches  by the arguments of plan_launches: made when the first layer says how many heads it has
    """

    batch: Batch
    window: int | None
    launches: dict[tuple[int, ...], tuple[AttnLaunch, ...]] = field(default_factory=dict)

    @property
    def max_splits(self) -> int:
        """That the rows of a tile see at most; they stand next to each other."""
        longest = max(self.batch.seq_lens, default=self.batch.block_tables.shape[1] * self.batch.block_size)
        splits = -(-longest // SPLIT)
        return splits if self.window is None else min(splits, (self.window + MAX_COLUMNS_HOPPER) // SPLIT + 2)

    def get_launches(self, columns: int, heads: int, head_tiles: int, dim: int) -> tuple[AttnLaunch, ...]:
        """As plan_launches() says."""
        shape = columns, heads, head_tiles, dim
        if shape not in self.launches:
            self.launches[shape] = plan_launches(self.batch, columns, heads, head_tiles, dim, self.max_splits)
        return self.launches[shape]


class TritonAttention:
    """Mixin of TritonOps. Launches of one instance follow each other on one stream: they share their counters."""

    _counters: Tensor | None = None

    def build_attention_metadata(self, batch: Batch, window: int | None = None) -> AttentionMetadata:
        """See Plan."""
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
        """q [T, Hq, D] -> [T, Hq, D]; see attention_kernel. A head of a row that sees a value that is not finite becomes NaN."""
        metadata = metadata or TritonAttnMetadata(batch, window)
        assert (
            q.stride(-1) == 1
            and cache.k.is_contiguous()
            and cache.v.is_contiguous()
            and batch.block_tables.is_contiguous()
        )
        _, num_heads, dim = q.shape
        kv_heads = cache.k.shape[1]
        group = num_heads // kv_heads
        block_d = max(triton.next_power_of_2(dim), 16)
        columns, num_warps = tile_shape(q.device, q.dtype, block_d)
        heads = min(group, columns)
        head_tiles = kv_heads * -(-group // heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if softcap is None:
            factor, cap = scale * LOG2_E, 0.0
        else:
            factor, cap = scale / softcap, softcap * LOG2_E
        k, v = (
            part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
            for part in (cache.k, cache.v)
        )
        for launch in metadata.get_launches(columns, heads, head_tiles, dim):
            pairs = launch.tiles.shape[0] * head_tiles
            whole = launch.num_programs == 1
            partials, tops = (
                (None, None)
                if whole
                else _allocate_workspace(pairs, metadata.max_splits, dim, launch.columns, q.device)
            )
            attend[pairs, launch.num_programs](
                q,
                k,
                v,
                cache.k_scale,
                cache.v_scale,
                out,
                partials,
                tops,
                None if whole else self._get_counters(q.device),
                launch.tiles,
                batch.request_index,
                batch.positions,
                batch.block_tables,
                batch.block_tables.shape[0] - 1,
                batch.block_tables.shape[1],
                metadata.max_splits,
                q.stride(0),
                q.stride(1),
                factor,
                cap,
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
        """int32 [pairs at most]; fewer pairs than enough programs are what shares splits among programs."""
        if self._counters is None:
            self._counters = torch.zeros(TARGET_NUM_PROGRAMS, dtype=torch.int32, device=device)
        return self._counters


def plan_launches(
    batch: Batch, columns: int, heads: int, head_tiles: int, dim: int, max_splits: int
) -> tuple[AttnLaunch, ...]:
    """Requests whose rows and heads fit into one tile of so many columns, and those with more rows, apart from each other.

    heads: of a group in one tile; head_tiles: such tiles, in all groups together. Where all requests have equally many
    rows, as in graphs, nothing is copied from the host.
    """
    device, num_rows, rows_a_tile = batch.positions.device, batch.positions.shape[0], columns // heads
    sections = [
        (start, end - start) for start, end in pairwise((*batch.query_start_loc, num_rows)) if end > start
    ]
    if not sections:
        return ()
    most = max(size for _, size in sections)
    if num_rows == most * len(sections):
        tiles = _equal_tiles(len(sections), most, rows_a_tile, device)
        return (_make_launch(tiles, min(most, rows_a_tile), heads, head_tiles, dim, max_splits),)
    long = [
        (row, min(rows_a_tile, start + size - row))
        for start, size in sections
        if size > rows_a_tile
        for row in reversed(range(start, start + size, rows_a_tile))
    ]
    short = [section for section in sections if section[1] <= rows_a_tile]
    return tuple(
        _make_launch(
            torch.tensor(tiles, dtype=torch.int32, device=device),
            max(size for _, size in tiles),
            heads,
            head_tiles,
            dim,
            max_splits,
        )
        for tiles in (long, short)
        if tiles
    )


def _equal_tiles(sections: int, size: int, rows_per_tile: int, device: torch.device) -> Tensor:
    """Of each section, what comes last comes first: it reads most."""
    offsets = torch.arange(0, size, rows_per_tile, dtype=torch.int32, device=device).flip(0)
    first = torch.arange(0, sections * size, size, dtype=torch.int32, device=device)[:, None] + offsets
    rows = (size - offsets).clamp(max=rows_per_tile).expand_as(first)
    return torch.stack((first, rows), -1).view(-1, 2)


def _make_launch(
    tiles: Tensor, rows: int, heads: int, head_tiles: int, dim: int, max_splits: int
) -> AttnLaunch:
    columns = max(triton.next_power_of_2(rows * heads), MIN_COLUMNS)
    pairs = tiles.shape[0] * head_tiles
    programs = min(-(-TARGET_NUM_PROGRAMS // pairs), max_splits)
    if pairs * max_splits * columns * (dim + 2) * 4 > MAX_WORKSPACE_BYTES:
        programs = 1
    return AttnLaunch(tiles, columns, programs)


def _allocate_workspace(
    num_pairs: int, num_splits: int, dim: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Partial values and, of each, maximum and sum."""
    shape = num_pairs, num_splits
    return (
        torch.empty((*shape, dim, columns), dtype=torch.float32, device=device),
        torch.empty((*shape, 2, columns), dtype=torch.float32, device=device),
    )


def tile_shape(device: torch.device, dtype: torch.dtype, block_d: int) -> tuple[int, int]:
    """Most columns of one tile, and warps: as many for fewer columns, so that the sum over positions is laid out alike."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    wide = block_d > 128
    columns = MAX_COLUMNS_HOPPER if hopper and not wide else MAX_COLUMNS
    return (MAX_COLUMNS_FLOAT32 if dtype == torch.float32 else columns), (8 if hopper or wide else 4)


def num_stages(device: torch.device, tile_bytes: int) -> int:
    """Of software pipelining; no bit depends on it. Block tables are read one stage before keys and values, so that n tiles of
    these, of which one is in use, take 2n - 1 stages."""
    large = device.type == "cpu" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0))
    room = LARGE_SHARED_MEMORY_BYTES if large else SMALL_SHARED_MEMORY_BYTES
    tiles = max(min(room // tile_bytes, 3), 2 if large else 1)
    return 2 * tiles - 1
