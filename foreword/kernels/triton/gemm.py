"""The matrix product of linear layers: y^T = W x^T, with weights on the M side of tensor core instructions.

One instruction family with one K (m64nNk16 on Hopper, m16n8k16 on Ampere) then serves every number of rows.
Each value of y is one chain of these instructions: block by block within a split of K, then split by split.
The shape of a tile and the split mode change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from foreword.kernels.triton.elementwise import activate
from foreword.kernels.triton.gemm_pack import fp16_from_bits, unpack_word, values_per_word

__all__ = [
    "MAX_TILES",
    "SPLIT_K_MAX_ROWS",
    "TILES",
    "WORKSPACE_VALUES",
    "Tile",
    "gemm_kernel",
    "pick_split_mode",
    "pick_tile",
]


SPLIT_K_MAX_ROWS = 64  # rows; up to here reading weights dominates, and each split of K has its own program
SPLIT_K_MAX_TILES = (
    132  # tiles; fewer leave multiprocessors idle: splits have their own programs for any rows
)
WORKSPACE_VALUES = 1 << 23  # values of partial sums, 32 MiB
MAX_TILES = 2048  # counters of tiles


@dataclass(frozen=True, slots=True)
class Tile:
    bm: int  # rows of the weight: a multiple of 16, at most 64 for four warps
    bn: int  # rows of x
    num_warps: int
    num_stages: int


# By the type of weight and activations, for at most bn rows each; the last one serves more rows.
#
# At least 16 rows of x: for 8, Triton 3.6 uses another instruction family on Hopper. Up to 32 rows, tiles
# have 64 weight rows: gemm_pack.num_splits() counts on that many programs. From 33 rows on, tiles are
# taller, as x is read once per tile of weight rows. With two accumulators (split and total) 128 x 128 values
# are 128 registers of a thread; quantized weights need some to unpack, and float32 (no tensor cores) to hold
# the operands.
TILES = {
    "dense": (Tile(64, 16, 4, 6), Tile(64, 32, 4, 5), Tile(128, 64, 8, 4), Tile(128, 128, 8, 4)),
    "quantized": (Tile(64, 16, 4, 5), Tile(64, 32, 4, 4), Tile(128, 64, 8, 4)),
    "float32": (Tile(32, 16, 4, 2), Tile(32, 32, 8, 2)),
}


@triton.jit(do_not_specialize=["T", "SPLITS"])
def gemm_kernel(
    x, w, scales, bias, add_to, y, partial_sums, tile_counters, T, N, K, BLOCKS, SPLITS,
    FORMAT: tl.constexpr, FLOAT8: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT_MODE: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x [T, K] w^T, times scales [rows of w], plus bias, plus add_to [T, N].

    With ACTIVATION, y [T, N] is activation(first N rows of w) times the other N rows.

    w              in the layout of gemm_pack.py: BLOCKS of BK columns
    FLOAT8         this GPU converts float8_e4m3fn itself; bits are the same
    SPLIT_MODE     "none": one split of K; "serial": a program computes all splits in order; "split_k": each
                   split has its own program_id(1), and the last program of a tile adds them in order
    partial_sums   float32 [tiles, SPLITS, BM, BN], for "split_k"
    tile_counters  int32 [tiles], zeros before and after
    EVEN_K         K is a multiple of BK
    """
    tile = tl.program_id(0)
    M = 2 * N if ACTIVATION is not None else N
    m, n = _pick_tile(tile, tl.cdiv(M, BM), tl.cdiv(T, BN), GROUP_M)
    rows = m * BM + tl.arange(0, BM)
    if ACTIVATION is not None:
        # Eight gate rows, then their eight up rows: one thread has both in its registers.
        rows = tl.minimum(rows // 16 * 8 + rows % 8, N - 1) + rows % 16 // 8 * N
    else:
        rows = tl.minimum(rows, N - 1)
    columns = n * BN + tl.arange(0, BN)
    x += tl.minimum(columns, T - 1).to(tl.int64)[None, :] * K
    if SPLIT_MODE == "split_k":
        split = tl.program_id(1)
        first, last = BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS
        partial = _dot_blocks(x, w, scales, rows, first, last, BLOCKS, K, FORMAT, FLOAT8, EVEN_K, BM, BN, BK)
        places = partial_sums + tile * (SPLITS * BM * BN) + tl.arange(0, BM)[:, None] * BN
        places += tl.arange(0, BN)[None, :]
        tl.store(places + split * (BM * BN), partial)
        tl.debug_barrier()  # all threads store before one of them counts
        if tl.atomic_add(tile_counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(tile_counters + tile, 0)
            total = tl.zeros((BM, BN), tl.float32)
            for each in range(SPLITS):
                # ".cg" reads past the L1 cache, as other multiprocessors wrote these.
                total += tl.load(places + each * (BM * BN), cache_modifier=".cg")
            _store_epilogue(
                total, scales, bias, add_to, y, rows, m, columns, T, N, FORMAT, ACTIVATION, BM, BN
            )
    else:
        if SPLIT_MODE == "none":
            total = _dot_blocks(x, w, scales, rows, 0, BLOCKS, BLOCKS, K, FORMAT, FLOAT8, EVEN_K, BM, BN, BK)
        else:
            total = tl.zeros((BM, BN), tl.float32)
            for each in range(SPLITS):
                first, last = BLOCKS * each // SPLITS, BLOCKS * (each + 1) // SPLITS
                total += _dot_blocks(
                    x, w, scales, rows, first, last, BLOCKS, K, FORMAT, FLOAT8, EVEN_K, BM, BN, BK
                )
        _store_epilogue(total, scales, bias, add_to, y, rows, m, columns, T, N, FORMAT, ACTIVATION, BM, BN)


@triton.jit
def _pick_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Order tiles by groups of GROUP_M weight tiles, each through all tiles of x, for L2 cache reuse."""
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    group_size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % group_size, within // group_size


@triton.jit
def _dot_blocks(
    x, w, scales, rows, first, last, BLOCKS, K,
    FORMAT: tl.constexpr, FLOAT8: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Blocks first to last of w's rows [BM] times x's rows [1, BN] -> float32 [BM, BN], unscaled by row."""
    values: tl.constexpr = values_per_word(FORMAT)
    width: tl.constexpr = BK // values  # words of a row in a block
    grouped: tl.constexpr = FORMAT == "int4" or FORMAT == "q8_0"
    k = tl.arange(0, width)
    start = (rows // 64).to(tl.int64) * BLOCKS + first
    w += (start * (64 * width) + rows % 64 * width)[:, None] + k[None, :]
    x += first * BK + k[:, None]
    if grouped:
        scales += start * (32 * values) + rows % 64
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(first, last):
        words = tl.load(w)
        for j in tl.static_range(values):
            piece = unpack_word(words, j, FORMAT, FLOAT8, x.dtype.element_ty)
            if grouped:
                if j % 2 == 0:
                    pair = tl.load(scales + 32 * j)
                piece = piece.to(tl.float32) * fp16_from_bits(pair, j % 2)[:, None]
            if EVEN_K:
                columns = tl.load(x + width * j)
            else:
                columns = tl.load(x + width * j, mask=(i * BK + width * j + k)[:, None] < K, other=0.0)
            total = tl.dot(piece.to(x.dtype.element_ty), columns, total, input_precision="ieee")
        w += 64 * width
        x += BK
        if grouped:
            scales += 32 * values
    return total


@triton.jit
def _store_epilogue(
    total, scales, bias, add_to, y, rows, m, columns, T, N,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and residual of the sum [BM, BN] in float32; the result is rounded once."""
    if FORMAT == "int8" or FORMAT == "fp8":
        total = total * tl.load(scales + rows)[:, None]
    if bias is not None:
        total = total + tl.load(bias + rows)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(total.reshape(BM // 16, 2, 8, BN).permute(0, 2, 3, 1))
        total = (activate(gate, ACTIVATION) * up).reshape(BM // 2, BN)
        out = m * (BM // 2) + tl.arange(0, BM // 2)
    else:
        out = m * BM + tl.arange(0, BM)
    places = columns.to(tl.int64)[None, :] * N + out[:, None]
    inside = (columns < T)[None, :] & (out < N)[:, None]
    if add_to is not None:
        total = total + tl.load(add_to + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=inside)


def pick_tile(weight_format: str, itemsize: int, num_rows: int) -> Tile:
    """The tile for a format of gemm_pack.py and num_rows activations of `itemsize` bytes."""
    tiles = TILES["float32" if itemsize == 4 else "dense" if weight_format == "dense" else "quantized"]
    return next((tile for tile in tiles if num_rows <= tile.bn), tiles[-1])


def pick_split_mode(num_tiles: int, tile: Tile, num_splits: int, num_rows: int) -> str:
    """SPLIT_MODE of gemm_kernel()."""
    if num_splits == 1:
        return "none"
    fits = num_tiles <= MAX_TILES and num_tiles * num_splits * tile.bm * tile.bn <= WORKSPACE_VALUES
    few = num_rows <= SPLIT_K_MAX_ROWS or num_tiles < SPLIT_K_MAX_TILES
    return "split_k" if fits and few else "serial"
