"""The matrix product of linear layers: y^T = W x^T, with weights on the M side of tensor core instructions.

Each value of y is one chain of additions: block by block within a split of K, then split by split; where
some columns share a scale, the products of these are summed first and then scaled in float32. The shape of a
tile and the split mode change no bit, as one instruction serves every number of rows: m16n8k16 up to Ampere
and Ada; on Hopper m64nNk16 with one N for each weight format, because no document says that sums are the same
for another N. There x is padded with zeros, which are never read from memory.

Cost of the padding at one row on an H200, in cycles of a multiprocessor for a block of 64 weight rows of
8 KiB (int4: 4.5 KiB), for N = 16, 32, 64, from clock rates and compiled code, not measured:

| | memory | tensor cores | shared memory | instructions | chosen N |
|---|---|---|---|---|---|
| dense | 431 | 32, 64, 128 | 160, 192, 256 | 90, 90, 111 | 64 |
| int8 | 431 | 64, 128, 256 | 192, 256, 384 | 231, 225, 254 | 32 |
| int4 | 242 | 64, 128, 256 | 128, 192, 320 | 249, 290, 357 | 32 |

Dense weights take 64: with 32, operands in shared memory limit prompts to two thirds of the tensor cores.
Quantized weights are unpacked into registers, so 32 suffices for prompts, and 64 would cost a third of a
step with int4. All but int4 remain limited by memory (on an H100 int4 too: memory takes 354 cycles). An H20
has a quarter of the tensor cores: dense weights with N = 64 would take 524 cycles there, memory 303. But
prompts need no more than N = 16 there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.kernels.triton.elementwise import activate_gate
from foreword.kernels.triton.gemm_pack import (
    get_scale,
    get_zero,
    has_zeros,
    runs_per_scale,
    scale_words,
    unpack_word,
    values_per_word,
)
from foreword.kernels.triton.variants import is_enabled

SPLIT_K_MAX_ROWS = 64  # rows; up to here reading weights dominates, and each split of K has its own program
SPLIT_K_MAX_TILES = (
    132  # tiles; fewer leave multiprocessors idle: splits have their own programs for any rows
)
WORKSPACE_VALUES = 1 << 23  # values of partial sums, 32 MiB
MAX_TILES = 2048  # counters of tiles
WGMMA_MAJORS = (9, 10)  # compute capability: instructions whose N is that of the operand
SLOW_TENSOR_CORES = re.compile(r"\bH20\b")  # names of GPUs
SLOW_DOT_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    max_rows: int | None  # rows of x up to which it is picked
    bm: int  # rows of the weight: a multiple of 16, at most 64 for four warps
    bn: int  # rows of x
    dot_n: int  # rows of x of one instruction on Hopper
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # limit of a thread; others are spilled
    one_split: bool = False  # only for weights with one split of K: registers for one accumulator


# By the type of weight and activations.
#
# At least 16 rows of x: for 8, Triton 3.6 uses another instruction family on Hopper. Up to 32 rows, tiles
# have 64 weight rows: gemm_pack.num_splits() counts on that many programs. From 33 rows on, tiles are
# taller, as x is read once per tile of weight rows. With two accumulators (split and total) 128 x 128 values
# are 128 registers of a thread; quantized weights need some to unpack, and float32 (no tensor cores) to hold
# the operands.
TILES: Mapping[str, Sequence[Tile]] = {
    "dense": (
        Tile(16, 64, 16, 16, 4, 6),
        Tile(32, 64, 32, 32, 4, 5),
        Tile(64, 128, 64, 64, 8, 4),
        Tile(None, 128, 128, 128, 8, 4),
    ),
    "quantized": (Tile(16, 64, 16, 16, 4, 5), Tile(32, 64, 32, 32, 4, 4), Tile(None, 128, 64, 64, 8, 4)),
    "float32": (Tile(16, 32, 16, 16, 4, 2), Tile(None, 32, 32, 32, 8, 2)),
}
HOPPER_TILES: Mapping[str, Sequence[Tile]] = {
    "dense": (Tile(32, 64, 64, 64, 4, 5), Tile(64, 128, 64, 64, 8, 4), Tile(None, 128, 128, 64, 8, 4)),
    "quantized": (Tile(32, 64, 32, 32, 4, 4), Tile(None, 128, 64, 32, 8, 4)),
    "float32": TILES["float32"],
}
WIDE_TILES = (Tile(128, 128, 128, 64, 8, 4), Tile(None, 128, 256, 64, 8, 3, one_split=True))


@triton.jit(do_not_specialize=["T", "SPLITS"])
def gemm_kernel(
    x, w, scales, bias, add_to, y, partial_sums, tile_counters, row_tiles, input_rows,
    T, N, K, BLOCKS, SPLITS,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT_MODE: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DOT_N: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x [T, K] w^T, times scales [rows of w], plus bias, plus add_to [T, N].

    With ACTIVATION, y [T, N] is activation(first N rows of w) times the other N rows.

    w              in the layout of gemm_pack.py: BLOCKS of BK columns
    row_tiles      int32 [tiles, 3]: the expert of BN rows of y from the second number on, and the end of its
                   rows; expert -1: no rows. Weights of experts are stacked. None: one weight for all rows
    input_rows     int32 [T]: the row of x of each row of y; None: the same row
    SPLIT_MODE     "none": one split of K; "serial": a program computes all splits in order; "split_k": each
                   split has its own program_id(1), and the last program of a tile adds them in order
    partial_sums   float32 [tiles, SPLITS, BN, BM], for "split_k"
    tile_counters  int32 [tiles], zeros before and after
    EVEN_K         K is a multiple of BK
    DOT_N          rows of x of one product; BN is a multiple
    PDL            see launches_dependents(): the first PREFETCH blocks are brought to the L2 cache while the
                   kernel before still runs. Only after it, other memory is read or written.
    """
    tile = tl.program_id(0)
    M = 2 * N if ACTIVATION is not None else N
    if row_tiles is None:
        m, n = _pick_tile(tile, tl.cdiv(M, BM), tl.cdiv(T, BN), GROUP_M)
        column = n * BN
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        m, n = _pick_tile(tile, tl.cdiv(M, BM), tl.num_programs(0) // tl.cdiv(M, BM), GROUP_M)
        expert = tl.load(row_tiles + 3 * n)
        if expert < 0:
            return
        column = tl.load(row_tiles + 3 * n + 1)
        T = tl.load(row_tiles + 3 * n + 2)
    rows = m * BM + tl.arange(0, BM)
    if ACTIVATION is not None:
        # Eight gate rows, then their eight up rows: one thread has both in its registers.
        rows = tl.minimum(rows // 16 * 8 + rows % 8, N - 1) + rows % 16 // 8 * N
    else:
        rows = tl.minimum(rows, N - 1)
    if row_tiles is not None:
        rows += expert * (tl.cdiv(M, 64) * 64)
    if SPLIT_MODE == "split_k":
        split = tl.program_id(1)
        first, last = BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS
    else:
        first, last = 0, BLOCKS
    if PDL and row_tiles is None:
        _prefetch_blocks(w, rows, first, last, BLOCKS, FORMAT, BK, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    if SPLIT_MODE == "split_k":
        sums = _dot_blocks(
            x, w, scales, input_rows, rows, column, first, last, T, BLOCKS, K,
            FORMAT, EVEN_K, BM, BN, DOT_N, BK,
        )  # fmt: skip
        places = partial_sums + tile * (SPLITS * BN * BM) + tl.arange(0, BM)[:, None]
        places += tl.arange(0, DOT_N)[None, :] * BM
        columns = column + tl.arange(0, DOT_N)[None, :]
        for c in tl.static_range(BN // DOT_N):
            place = places + split * (BN * BM) + c * (DOT_N * BM)
            tl.store(place, sums[c], mask=columns < T - c * DOT_N)
        tl.debug_barrier()  # all threads store before one of them counts
        if tl.atomic_add(tile_counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(tile_counters + tile, 0)
            for c in tl.static_range(BN // DOT_N):
                total = tl.zeros((BM, DOT_N), tl.float32)
                for each in range(SPLITS):
                    # ".cg" reads past the L1 cache, as other multiprocessors wrote these.
                    place = places + each * (BN * BM) + c * (DOT_N * BM)
                    inside = columns < T - c * DOT_N
                    total += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
                _store_epilogue(
                    total, scales, bias, add_to, y, rows, m, column + c * DOT_N, T, N,
                    FORMAT, ACTIVATION, BM, DOT_N,
                )  # fmt: skip
    else:
        if SPLIT_MODE == "none":
            sums = _dot_blocks(
                x, w, scales, input_rows, rows, column, 0, BLOCKS, T, BLOCKS, K,
                FORMAT, EVEN_K, BM, BN, DOT_N, BK,
            )  # fmt: skip
        else:
            sums = _zeros(BM, BN, DOT_N)
            for each in range(SPLITS):
                first, last = BLOCKS * each // SPLITS, BLOCKS * (each + 1) // SPLITS
                parts = _dot_blocks(
                    x, w, scales, input_rows, rows, column, first, last, T, BLOCKS, K,
                    FORMAT, EVEN_K, BM, BN, DOT_N, BK,
                )  # fmt: skip
                totals = ()
                for c in tl.static_range(BN // DOT_N):
                    totals = totals + (sums[c] + parts[c],)  # noqa: RUF005
                sums = totals
        for c in tl.static_range(BN // DOT_N):
            _store_epilogue(
                sums[c], scales, bias, add_to, y, rows, m, column + c * DOT_N, T, N,
                FORMAT, ACTIVATION, BM, DOT_N,
            )  # fmt: skip


@triton.jit
def _pick_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Order tiles by groups of GROUP_M weight tiles, each through all tiles of x, for L2 cache reuse."""
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    group_size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % group_size, within // group_size


@triton.jit
def _prefetch_blocks(
    w, rows, first, last, BLOCKS, FORMAT: tl.constexpr, BK: tl.constexpr, PREFETCH: tl.constexpr
):
    """Bring blocks first to first + PREFETCH of w's rows to the L2 cache; waits for nothing."""
    width: tl.constexpr = BK // values_per_word(FORMAT)
    places = w + ((rows // 64).to(tl.int64) * BLOCKS + first) * (64 * width) + rows % 64 * width
    num_bytes = tl.full(rows.shape, 2 * width, tl.int32)
    for i in tl.static_range(PREFETCH):
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [places + tl.minimum(i, last - first - 1) * (64 * width), num_bytes],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _zeros(BM: tl.constexpr, BN: tl.constexpr, DOT_N: tl.constexpr):
    """BN // DOT_N accumulators [BM, DOT_N]"""
    sums = ()
    for _ in tl.static_range(BN // DOT_N):
        sums = sums + (tl.zeros((BM, DOT_N), tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def _dot_blocks(
    x, w, scales, input_rows, rows, column, first, last, T, BLOCKS, K,
    FORMAT: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DOT_N: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Blocks first to last of w's rows [BM] times rows column to column + BN of y, unscaled by row.

    Returns float32 [BM, DOT_N] for each DOT_N rows of y.
    """
    values: tl.constexpr = values_per_word(FORMAT)
    width: tl.constexpr = BK // values  # words of a row in a block
    count: tl.constexpr = scale_words(FORMAT)
    runs: tl.constexpr = runs_per_scale(FORMAT)
    k = tl.arange(0, width)
    columns = column + tl.arange(0, DOT_N)
    start = (rows // 64).to(tl.int64) * BLOCKS + first
    w += (start * (64 * width) + rows % 64 * width)[:, None] + k[None, :]
    offsets = ()  # offsets of the inputs of each DOT_N rows
    if input_rows is None:
        x += columns.to(tl.int64)[None, :] * K + (first * BK + k)[:, None]
        for c in tl.static_range(BN // DOT_N):
            offsets = offsets + (c * DOT_N * K,)  # noqa: RUF005 (Triton has no unpacking)
    else:
        x += (first * BK + k)[:, None]
        for c in tl.static_range(BN // DOT_N):
            row = tl.load(input_rows + c * DOT_N + columns, mask=columns < T - c * DOT_N, other=0)
            offsets = offsets + ((row.to(tl.int64) * K)[None, :],)  # noqa: RUF005
    if count > 0:
        scales += start * (64 * count) + rows % 64
        block_scales = _load_scales(scales, count)
    sums = _zeros(BM, BN, DOT_N)
    tl.assume(first < last)  # a loop that may be skipped makes ptxas serialize the instructions (C7515)
    for i in range(first, last):
        words = tl.load(w)
        if count > 0:
            # Triton pipelines loads of operands alone: load the next block's scales one block ahead.
            scales += tl.where(i + 1 < last, 64 * count, 0)
            next_scales = _load_scales(scales, count)
        products = sums
        for j in tl.static_range(values):
            if has_zeros(FORMAT):
                zero = get_zero(block_scales, j, FORMAT)[:, None]
                piece = unpack_word(words, j, FORMAT, x.dtype.element_ty, zero)
            else:
                piece = unpack_word(words, j, FORMAT, x.dtype.element_ty)
            previous = products
            products = ()
            for c in tl.static_range(BN // DOT_N):
                inside = (columns < T - c * DOT_N)[None, :]
                if not EVEN_K:
                    inside = inside & (i * BK + width * j + k < K)[:, None]
                part = tl.load(x + offsets[c] + width * j, mask=inside, other=0.0)
                if count > 0 and j % runs == 0:
                    product = tl.dot(piece, part, input_precision="ieee")
                else:
                    product = tl.dot(piece, part, previous[c], input_precision="ieee")
                products = products + (product,)  # noqa: RUF005
            if count == 0:
                sums = products
            elif j % runs == runs - 1:
                scale = get_scale(block_scales, j, FORMAT)[:, None].broadcast_to(BM, DOT_N)
                scaled = ()
                for c in tl.static_range(BN // DOT_N):
                    scaled = scaled + (tl.fma(products[c], scale, sums[c]),)  # noqa: RUF005
                sums = scaled
        w += 64 * width
        x += BK
        if count > 0:
            block_scales = next_scales
    return sums


@triton.jit
def _load_scales(scales, COUNT: tl.constexpr):
    """Words of scales of a block, int32 [BM] each."""
    words = ()
    for i in tl.static_range(COUNT):
        words = words + (tl.load(scales + 64 * i),)  # noqa: RUF005
    return words


@triton.jit
def _store_epilogue(
    total, scales, bias, add_to, y, rows, m, column, T, N,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and residual of the sum [BM, BN] in float32; the result is rounded once."""
    columns = column + tl.arange(0, BN)
    if FORMAT == "int8" or FORMAT == "fp8":
        total = total * tl.load(scales + rows)[:, None]
    if bias is not None:
        total = total + tl.load(bias + rows)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(total.reshape(BM // 16, 2, 8, BN).permute(0, 2, 3, 1))
        total = activate_gate(gate, up, ACTIVATION).reshape(BM // 2, BN)
        out = m * (BM // 2) + tl.arange(0, BM // 2)
    else:
        out = m * BM + tl.arange(0, BM)
    places = columns.to(tl.int64)[None, :] * N + out[:, None]
    inside = (columns < T)[None, :] & (out < N)[:, None]
    if add_to is not None:
        total = total + tl.load(add_to + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=inside)


@cache
def device_tiles(device: torch.device) -> Mapping[str, Sequence[Tile]]:
    """TILES of the device: on Hopper and datacenter Blackwell with one DOT_N for each weight format."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in WGMMA_MAJORS:
        return TILES
    if is_enabled("linear_unpadded"):
        return TILES
    if SLOW_TENSOR_CORES.search(torch.cuda.get_device_name(device)):
        return {
            kind: tuple(replace(tile, dot_n=SLOW_DOT_COLUMNS) for tile in tiles)
            for kind, tiles in TILES.items()
        }
    dense, quantized = HOPPER_TILES["dense"], HOPPER_TILES["quantized"]
    if is_enabled("linear_wide_tiles"):
        dense = (*dense[:-1], *WIDE_TILES, dense[-1])
    if is_enabled("linear_two_programs"):
        quantized = (*quantized[:-1], replace(quantized[-1], max_registers=128))
    return {**HOPPER_TILES, "dense": dense, "quantized": quantized}


def pick_tile(
    weight_format: str,
    itemsize: int,
    num_rows: int,
    num_splits: int,
    tiles: Mapping[str, Sequence[Tile]] = TILES,
) -> Tile:
    """The tile for a format of gemm_pack.py and num_rows activations of `itemsize` bytes."""
    kind = "float32" if itemsize == 4 else "dense" if weight_format == "dense" else "quantized"
    return next(
        tile
        for tile in tiles[kind]
        if (tile.max_rows is None or num_rows <= tile.max_rows) and (num_splits == 1 or not tile.one_split)
    )


def pick_split_mode(num_tiles: int, tile: Tile, num_splits: int, num_rows: int) -> str:
    """SPLIT_MODE of gemm_kernel()."""
    if num_splits == 1:
        return "none"
    fits = num_tiles <= MAX_TILES and num_tiles * num_splits * tile.bm * tile.bn <= WORKSPACE_VALUES
    few = num_rows <= SPLIT_K_MAX_ROWS or num_tiles < SPLIT_K_MAX_TILES
    return "split_k" if fits and few else "serial"
