"""Where the patches of a picture stand, and which of them see each other, in the towers of Qwen's models.

A cell is a square of patches that become one token, as `merge` says: 2 x 2. The rows of a tower are patches in order of their
cells, and within a cell line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["PatchGrid", "extract_patches", "partition_windows"]


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """rows, columns  of cells
    merge          patches of a cell's side
    """

    rows: int
    columns: int
    merge_size: int

    @property
    def num_patches(self) -> int:
        """N"""
        return self.rows * self.columns * self.merge_size**2

    def patch_positions(self) -> Tensor:
        """int64 [N, 3]: 0, row and column of each patch."""
        merge = self.merge_size
        rows = torch.arange(self.rows * merge).view(self.rows, 1, merge, 1)
        columns = torch.arange(self.columns * merge).view(1, self.columns, 1, merge)
        shape = (self.rows, self.columns, merge, merge)
        return torch.stack(
            [one.expand(shape).flatten() for one in (torch.zeros_like(rows), rows, columns)], 1
        )


def extract_patches(pixels: Tensor, patch_size: int, grid: PatchGrid) -> Tensor:
    """[3, height, width] -> [N, 3 * size * size]"""
    squares = pixels.view(
        3, grid.rows, grid.merge_size, patch_size, grid.columns, grid.merge_size, patch_size
    )
    return squares.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid.num_patches, -1)


def partition_windows(grid: PatchGrid, side_cells: int) -> tuple[Tensor, Sequence[int]]:
    """Windows of `side` x `side` cells, fewer at the right and below.

    Returns the cells in order of their windows, int64 [rows * columns], and where windows begin among the patches, and the end.
    """
    numbers = torch.arange(grid.rows * grid.columns).view(grid.rows, grid.columns)
    windows = [
        window.flatten()
        for band in torch.split(numbers, side_cells)
        for window in torch.split(band, side_cells, 1)
    ]
    starts = accumulate((len(window) * grid.merge_size**2 for window in windows), initial=0)
    return torch.cat(windows), tuple(starts)
