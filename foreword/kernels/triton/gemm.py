"""The kernel of the linear layer: y^T = W x^T, with weights on the M side of the tensor cores' instruction.

One instruction family with one K (m64nNk16 on Hopper, m16n8k16 on Ampere) serves every number of rows then, and each value
of y is one chain of them: block after block within a part of K, part after part. A tile has fixed blocks and any number of
rows, so its shape changes no bit.

Which tile of the product serves how many rows. No choice here changes a bit: see product.py.
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


@triton.jit(do_not_specialize=["T", "SPLITS"])
def gemm_kernel(
    x,
    w,
    scales,
    bias,
    add_to,
    y,
    partial_sums,
    tile_counters,
    T,
    N,
    K,
    BLOCKS,
    SPLITS,
    FORMAT: tl.constexpr,
    FLOAT8: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT_MODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """y [T, N] = x [T, K] w^T, times scales [rows of w], plus bias, plus add_to [T, N]. With ACTIVATION y [T, N] is
    activation(first N rows of w) times the other N.

    w          packed as `packing.py` says, BLOCKS of BK columns
    FLOAT8     this card converts float8_e4m3fn itself; bits are the same
    PARTS      of K. "one": there is no other. "within": one after the other in a program. "apart": each has its own,
               program_id(1), and whoever comes last to a tile adds the parts up, in their order
    partial    float32 [tiles, SPLITS, BM, BN], where they are apart
    arrived    int32 [tiles], zeros before and after
    EVEN       K is a multiple of BK
    """
    tile = tl.program_id(0)
    M = 2 * N if ACTIVATION is not None else N
    m, n = _pick_tile(tile, tl.cdiv(M, BM), tl.cdiv(T, BN), GROUP_M)
    rows = m * BM + tl.arange(0, BM)
    if ACTIVATION is not None:
        # Eight rows of the gate, then the eight of `up` that belong to them: one thread has both in its registers.
        rows = tl.minimum(rows // 16 * 8 + rows % 8, N - 1) + rows % 16 // 8 * N
    else:
        rows = tl.minimum(rows, N - 1)
    columns = n * BN + tl.arange(0, BN)
    x += tl.minimum(columns, T - 1).to(tl.int64)[None, :] * K
    if SPLIT_MODE == "apart":
        part = tl.program_id(1)
        own = _dot_blocks(
            x,
            w,
            scales,
            rows,
            BLOCKS * part // SPLITS,
            BLOCKS * (part + 1) // SPLITS,
            BLOCKS,
            K,
            FORMAT,
            FLOAT8,
            EVEN_K,
            BM,
            BN,
            BK,
        )
        places = (
            partial_sums
            + tile * (SPLITS * BM * BN)
            + tl.arange(0, BM)[:, None] * BN
            + tl.arange(0, BN)[None, :]
        )
        tl.store(places + part * (BM * BN), own)
        tl.debug_barrier()  # all threads' values are there before one of them says so
        if tl.atomic_add(tile_counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(tile_counters + tile, 0)
            total = tl.zeros((BM, BN), tl.float32)
            for each in range(SPLITS):
                total += tl.load(
                    places + each * (BM * BN), cache_modifier=".cg"
                )  # what other multiprocessors wrote
            _store_epilogue(
                total, scales, bias, add_to, y, rows, m, columns, T, N, FORMAT, ACTIVATION, BM, BN
            )
    else:
        if SPLIT_MODE == "one":
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
    """Tiles run ABREAST tiles of weights at a time through all tiles of rows: what they read stays in the L2 cache."""
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    abreast = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % abreast, within // abreast


@triton.jit
def _dot_blocks(
    x,
    w,
    scales,
    rows,
    first,
    last,
    BLOCKS,
    K,
    FORMAT: tl.constexpr,
    FLOAT8: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Blocks `first` to `last` of w's rows [BM] times x's rows [1, BN] -> float32 [BM, BN], not yet scaled by row."""
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
    total,
    scales,
    bias,
    add_to,
    y,
    rows,
    m,
    columns,
    T,
    N,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """What follows the sum [BM, BN], in float32, rounded once."""
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


SPLIT_K_MAX_ROWS = 64  # rows; up to here weights are what is read, and each part of K has its own program
SPLIT_K_MAX_TILES = 132  # programs that leave a card idle: parts of K have their own then, whatever the rows
WORKSPACE_VALUES = 1 << 23  # values of partial sums, 32 MiB
MAX_TILES = 2048  # that can be counted at once


@dataclass(frozen=True, slots=True)
class Tile:
    """bm rows of the weight (a multiple of 16, at most 64 without a second group of four warps) by bn rows of x."""

    bm: int
    bn: int
    num_warps: int
    num_stages: int


# By the kind of weight and activations, for at most bn rows each; the last one serves the rest.
#
# Never fewer than 16 rows of x: for 8 of them Triton 3.6 takes another family of instructions on Hopper. Up to 32 rows, tiles of
# 64 rows of the weight: as many programs as packing.py counts on. From 33 on x is read as often as there are tiles, and half as
# many halve that. With two accumulators (one for the part, one for the total) 128 by 128 values are 128 registers of a thread;
# quantized weights need some of them to widen values. Without tensor cores (float32) the registers also hold what is multiplied.
TILES = {
    "dense": (Tile(64, 16, 4, 6), Tile(64, 32, 4, 5), Tile(128, 64, 8, 4), Tile(128, 128, 8, 4)),
    "quantized": (Tile(64, 16, 4, 5), Tile(64, 32, 4, 4), Tile(128, 64, 8, 4)),
    "float32": (Tile(32, 16, 4, 2), Tile(32, 32, 8, 2)),
}


def pick_tile(weight_format: str, itemsize: int, num_rows: int) -> Tile:
    """For a format of packing.py, activations of so many bytes and `rows` of them."""
    tiles = TILES["float32" if itemsize == 4 else "dense" if weight_format == "dense" else "quantized"]
    return next((tile for tile in tiles if num_rows <= tile.bn), tiles[-1])


def pick_split_mode(num_tiles: int, tile: Tile, num_splits: int, num_rows: int) -> str:
    """Where the parts of K are summed, as product() says."""
    if num_splits == 1:
        return "one"
    fits = num_tiles <= MAX_TILES and num_tiles * num_splits * tile.bm * tile.bn <= WORKSPACE_VALUES
    return "apart" if fits and (num_rows <= SPLIT_K_MAX_ROWS or num_tiles < SPLIT_K_MAX_TILES) else "within"
