"""Linear layers and the embedding on Triton: `packing.py` lays weights out, `product.py` multiplies, `tiles.py` chooses tiles.

The kernels run one after the other, on one stream: they share one workspace for partial sums, and counters that each launch
leaves at zero. Both are allocated when the first weight is packed, never within a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.kernels.ops import Matrix, PackedLinear
from foreword.kernels.reference import Reference
from foreword.kernels.triton.embed import embed
from foreword.kernels.triton.packing import PackedWeight, block_of, pack
from foreword.kernels.triton.product import product
from foreword.kernels.triton.tiles import MAX_TILES, WORKSPACE, parts_of, tile_of

__all__ = ["TritonLinear"]

TILES_ABREAST = 8
BLOCKS_TOGETHER = 16
NATIVE_FLOAT8 = (8, 9)  # compute capability from which on the hardware converts float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Workspace:
    """partial  float32: sums over parts of K
    arrived  int32: programs that have come to a tile; zeros between launches
    float8   the hardware converts float8_e4m3fn
    """

    partial: Tensor
    arrived: Tensor
    float8: bool


class TritonLinear(Reference):
    """Mixin of TritonOps."""

    def __init__(self, row_tile: int = 1) -> None:
        super().__init__(row_tile)
        self._workspaces: dict[torch.device, Workspace] = {}

    def pack_linear(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None = None) -> PackedLinear:
        """See packing.pack()"""
        weight = pack(parts, kind, bias)
        if weight.data.device not in self._workspaces:
            self._workspaces[weight.data.device] = _workspace(weight.data.device)
        return weight

    def linear(self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] of `dtype`; bias and add_to are added in float32, and all is rounded once."""
        return self._multiply(x, weight, weight.rows, dtype or x.dtype, None, add_to)

    def linear_gated(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K], weight [2I, K] -> [T, I], in float32 up to its one rounding"""
        return self._multiply(x, weight, weight.rows // 2, x.dtype, activation, None)

    def embedding(self, ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """ids [T], weight [V, H] -> [T, H], scaled in float32"""
        out = torch.empty(len(ids), weight.columns, dtype=dtype, device=ids.device)
        if len(ids):
            embed[(len(ids), -(-weight.blocks // BLOCKS_TOGETHER))](
                ids,
                weight.data,
                weight.scales,
                out,
                weight.columns,
                weight.blocks,
                scale,
                FORMAT=weight.format,
                FLOAT8=self._workspaces[ids.device].float8,
                BK=block_of(weight.format),
                TOGETHER=BLOCKS_TOGETHER,
                enable_fp_fusion=False,
            )
        return out

    def _multiply(
        self, x: Tensor, weight: PackedWeight, outputs: int, dtype: torch.dtype, activation: str | None, add_to: Tensor | None
    ) -> Tensor:
        rows = x.shape[0]
        assert x.shape[1] == weight.columns
        y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        if rows == 0:
            return y
        workspace = self._workspaces[x.device]
        tile = tile_of(weight.format, x.itemsize, rows)
        tiles = -(-weight.rows // tile.bm) * -(-rows // tile.bn)
        parts = parts_of(tiles, tile, weight.splits, rows)
        block = block_of(weight.format)
        product[(tiles, weight.splits if parts == "apart" else 1)](
            x.contiguous(),
            weight.data,
            weight.scales,
            weight.bias,
            None if add_to is None else add_to.contiguous(),
            y,
            workspace.partial,
            workspace.arrived,
            rows,
            outputs,
            weight.columns,
            weight.blocks,
            weight.splits,
            FORMAT=weight.format,
            FLOAT8=workspace.float8,
            ACTIVATION=activation,
            PARTS=parts,
            EVEN=weight.columns % block == 0,
            BM=tile.bm,
            BN=tile.bn,
            BK=block,
            TILES_ABREAST=TILES_ABREAST,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return y


def _workspace(device: torch.device) -> Workspace:
    float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE_FLOAT8
    partial = torch.empty(WORKSPACE, dtype=torch.float32, device=device)
    return Workspace(partial, torch.zeros(MAX_TILES, dtype=torch.int32, device=device), float8)
