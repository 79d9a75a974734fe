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
from foreword.kernels.triton.variants import is_enabled, launches_dependents

SPLIT = 256  # positions: the least that a program reads of a long context
BLOCK_KV = 64  # positions of a KV tile: the M side of one warp group; half of them for wide heads
MAX_DIM = 256  # largest head that is not wide
MIN_COLUMNS = 16  # rows x heads of a tile
MAX_COLUMNS = 32  # limit by accumulator registers
MAX_COLUMNS_FLOAT32 = 16  # without tensor cores
FIXED_N_CAPABILITIES = (9, 10)  # major compute capabilities whose instruction has the columns of the tile
FLOAT8_CAPABILITY = (8, 9)  # compute capability with hardware conversion of float8_e4m3fn
TARGET_NUM_PROGRAMS = 264  # two for each of 132 multiprocessors, which run at once
WORKSPACE_DIVISOR, MAX_WORKSPACE_BYTES = 64, 1 << 30  # share of the GPU's memory, and its limit
ALIGNMENT = 16  # values
# Shared memory for K and V tiles: on data center GPUs two programs share 227 KiB, others allow 99 KiB for
# one.
LARGE_SHARED_MEMORY_BYTES = 110 << 10
SMALL_SHARED_MEMORY_BYTES = 64 << 10
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class TileShape:
    min_columns: int  # rows x heads, padded to a power of two
    max_columns: int
    num_warps: int
    block_kv: int  # positions of a KV tile


@dataclass(frozen=True, slots=True)
class AttnLaunch:
    """The row tiles of one launch."""

    tiles: Tensor  # int32 [tiles, 2]: first row and number of rows, of one request each
    num_columns: int  # rows x heads of the largest tile
    padded_columns: int  # columns of every tile, padded
    num_programs: int  # that share the splits of a tile; 1: partial results stay in registers


@dataclass(frozen=True, slots=True)
class TritonAttnMetadata:
    """Launches that all layers with one window share in a forward pass."""

    batch: Batch
    window: int | None
    last_seen: Tensor  # int64 [T]: the last position that each row sees
    # By arguments of plan_launches(); built by the first layer, which knows the number of heads.
    launches: dict[tuple[TileShape, int, int, int], tuple[AttnLaunch, ...]] = field(default_factory=dict)

    @property
    def max_splits(self) -> int:
        """Upper bound on the splits that the rows of a tile attend to."""
        longest = max(self.batch.seq_lens, default=self.batch.block_tables.shape[1] * self.batch.block_size)
        splits = -(-longest // SPLIT)
        return splits if self.window is None else min(splits, (self.window + MAX_COLUMNS) // SPLIT + 2)

    def get_launches(self, tile: TileShape, heads: int, head_tiles: int, dim: int) -> tuple[AttnLaunch, ...]:
        key = tile, heads, head_tiles, dim
        if key not in self.launches:
            self.launches[key] = plan_launches(self.batch, *key, self.max_splits)
        return self.launches[key]


class TritonAttention:
    """Mixin of TritonOps. Launches of an instance run in order on one stream: they share counters."""

    _counters: Tensor | None = None
    _workspace: Tensor | None = None  # float32

    def build_attention_metadata(
        self, batch: Batch, window: int | None = None, first: int = 0, causal: bool = True
    ) -> AttentionMetadata:
        return _build_metadata(batch, window, causal)

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: AttentionMetadata | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
        causal: bool = True,
    ) -> Tensor:
        """See Ops.attention; a head of a row that attends to a non-finite value is NaN."""
        metadata = metadata or _build_metadata(batch, window, causal)
        assert q.stride(-1) == 1 and batch.block_tables.is_contiguous()
        assert cache.k.is_contiguous() and (cache.is_latent or cache.v.is_contiguous())
        _, num_heads, _ = q.shape
        _, kv_heads, dim = cache.v.shape
        rest = q.shape[2] - dim  # values of K that are none of V
        group = num_heads // kv_heads
        block_d, block_rest = (max(triton.next_power_of_2(size), 16) for size in (dim, rest))
        tile = tile_shape(q.device, q.dtype, block_d)
        heads = min(group, tile.max_columns)
        head_tiles = kv_heads * -(-group // heads)
        out = torch.empty(*q.shape[:2], dim, dtype=q.dtype, device=q.device)
        tile_values = tile.block_kv * (block_d + block_rest if rest else 2 * block_d)
        factor, cap = (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)
        k, v = cache.k, cache.v
        has_float8 = False
        if k.dtype == torch.float8_e4m3fn:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
            has_float8 = k.is_cuda and torch.cuda.get_device_capability(k.device) >= FLOAT8_CAPABILITY
        pdl = launches_dependents(q.device)
        for launch in metadata.get_launches(tile, heads, head_tiles, dim):
            pairs = launch.tiles.shape[0] * head_tiles
            whole = launch.num_programs == 1
            partials = split_stats = counters = None
            if not whole:
                most = TARGET_NUM_PROGRAMS * metadata.max_splits * tile.max_columns
                partials, split_stats = self._get_workspace(q.device, most, dim)
                counters = self._get_counters(q.device)
            tables = batch.block_tables
            attend[pairs, launch.num_programs](
                *(q, k, v, cache.k_scale, cache.v_scale, sinks),
                *(out, partials, split_stats, counters, launch.tiles, batch.request_index),
                *(metadata.last_seen, tables, tables.shape[0] - 1, tables.shape[1]),
                *(metadata.max_splits, launch.num_columns, q.stride(0), q.stride(1), factor, cap),
                KV_HEADS=kv_heads,
                GROUP=group,
                HEADS=heads,
                D=dim,
                REST=rest,
                BLOCK_SIZE=batch.block_size,
                WINDOW=window or 0,
                FIRST=first,
                SOFTCAP=softcap is not None,
                SPLIT=SPLIT,
                BLOCK_KV=tile.block_kv,
                BLOCK_D=block_d,
                BLOCK_REST=block_rest,
                NQ=launch.padded_columns,
                FLOAT8=has_float8,
                WHOLE=whole,
                STAGES=num_stages(q.device, tile_values * k.itemsize),
                PDL=pdl,
                num_warps=tile.num_warps,
                enable_fp_fusion=False,
                launch_pdl=pdl,
            )
        return out

    def _get_counters(self, device: torch.device) -> Tensor:
        """int32 [most pairs of a launch that shares splits among programs]"""
        if self._counters is None:
            self._counters = torch.zeros(TARGET_NUM_PROGRAMS, dtype=torch.int32, device=device)
        return self._counters

    def _get_workspace(self, device: torch.device, num_columns: int, dim: int) -> tuple[Tensor, Tensor]:
        """Values [num_columns, dim] and stats [num_columns, 2] of splits, at most of max_split_columns().

        All layers and graphs share one buffer. It grows in the first pass, whose block tables are the
        longest, before a graph is captured.
        """
        num_columns = min(num_columns, max_split_columns(device, dim))
        size = num_columns * (dim + 2)
        if self._workspace is None or self._workspace.numel() < size:
            assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            self._workspace = None
            self._workspace = torch.empty(size, dtype=torch.float32, device=device)
        return self._workspace[: num_columns * dim], self._workspace[num_columns * dim : size]


def _build_metadata(batch: Batch, window: int | None, causal: bool) -> TritonAttnMetadata:
    assert batch.request_index is not None
    if causal:
        return TritonAttnMetadata(batch, window, batch.positions)
    last_rows = batch.request_index.new_tensor([*(max(end - 1, 0) for end in batch.query_start_loc[1:]), 0])
    return TritonAttnMetadata(batch, window, batch.positions[last_rows[batch.request_index]])


def plan_launches(
    batch: Batch, tile: TileShape, heads: int, head_tiles: int, dim: int, max_splits: int
) -> tuple[AttnLaunch, ...]:
    """Separate launches for requests that fit into one tile, and for longer ones.

    heads: of a group in one tile; head_tiles: such tiles over all groups. If all requests have equally many
    rows, as in CUDA graphs, nothing is copied from the host.
    """
    device, num_rows = batch.positions.device, batch.positions.shape[0]
    rows_per_tile = tile.max_columns // heads
    sections = [
        (start, end - start) for start, end in pairwise((*batch.query_start_loc, num_rows)) if end > start
    ]
    if not sections:
        return ()
    most = max(size for _, size in sections)
    if num_rows == most * len(sections):
        tiles = _equal_tiles(len(sections), most, rows_per_tile, device)
        num_columns = min(most, rows_per_tile) * heads
        return (_make_launch(tiles, num_columns, tile, head_tiles, dim, max_splits),)
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
            num_columns = max(size for _, size in section_tiles) * heads
            launches.append(_make_launch(tiles, num_columns, tile, head_tiles, dim, max_splits))
    return tuple(launches)


def _equal_tiles(sections: int, size: int, rows_per_tile: int, device: torch.device) -> Tensor:
    """Tiles of sections of equal size, last rows first: they read most."""
    offsets = torch.arange(0, size, rows_per_tile, dtype=torch.int32, device=device).flip(0)
    first = torch.arange(0, sections * size, size, dtype=torch.int32, device=device)[:, None] + offsets
    rows = (size - offsets).clamp(max=rows_per_tile).expand_as(first)
    return torch.stack((first, rows), -1).view(-1, 2)


def _make_launch(
    tiles: Tensor, num_columns: int, tile: TileShape, head_tiles: int, dim: int, max_splits: int
) -> AttnLaunch:
    padded_columns = max(triton.next_power_of_2(num_columns), tile.min_columns)
    pairs = tiles.shape[0] * head_tiles
    programs = min(-(-TARGET_NUM_PROGRAMS // pairs), max_splits)
    if pairs * max_splits * num_columns > max_split_columns(tiles.device, dim):
        programs = 1
    return AttnLaunch(tiles, num_columns, padded_columns, programs)


def max_split_columns(device: torch.device, dim: int) -> int:
    """Columns of splits that the workspace has room for."""
    limit = MAX_WORKSPACE_BYTES
    if device.type == "cuda":
        limit = min(torch.cuda.get_device_properties(device).total_memory // WORKSPACE_DIVISOR, limit)
    return limit // (4 * (dim + 2)) // ALIGNMENT * ALIGNMENT


def tile_shape(device: torch.device, dtype: torch.dtype, block_d: int) -> TileShape:
    """Equal warps for all columns, so sums over positions have one layout.

    Where the columns are part of the tensor core instruction, all tiles have as many, as no document says
    that another instruction gives the same bits.
    """
    is_wide = block_d > MAX_DIM
    launch = 8 if block_d > 128 else 4, BLOCK_KV // 2 if is_wide else BLOCK_KV
    if dtype == torch.float32:
        return TileShape(MAX_COLUMNS_FLOAT32, MAX_COLUMNS_FLOAT32, *launch)
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    padded = major in FIXED_N_CAPABILITIES and not is_enabled("attention_unpadded")
    max_columns = MIN_COLUMNS if is_wide and not _has_large_shared_memory(device) else MAX_COLUMNS
    return TileShape(max_columns if padded else MIN_COLUMNS, max_columns, *launch)


def _has_large_shared_memory(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0))


def num_stages(device: torch.device, tile_bytes: int) -> int:
    """Stages of software pipelining; no bit depends on it.

    Block tables are read one stage before keys and values: n tiles, one of them in use, take 2n - 1 stages.
    """
    large = _has_large_shared_memory(device)
    room = LARGE_SHARED_MEMORY_BYTES if large else SMALL_SHARED_MEMORY_BYTES
    tiles = max(min(room // tile_bytes, 3), 2 if large else 1)
    return 2 * tiles - 1
