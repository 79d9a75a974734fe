"""Which tile of the product serves how many rows. No choice here changes a bit: see product.py."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_TILES", "SPLIT_K_MAX_ROWS", "TILES", "WORKSPACE_VALUES", "Tile", "pick_split_mode", "pick_tile"]

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
