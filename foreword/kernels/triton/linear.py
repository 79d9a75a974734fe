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
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.elementwise import embed_kernel
from foreword.kernels.triton.gemm import MAX_TILES, WORKSPACE_VALUES, gemm_kernel, pick_split_mode, pick_tile
from foreword.kernels.triton.gemm_pack import PackedWeight, columns_per_block, pack

__all__ = ["TritonLinear"]

GROUP_M = 8
BLOCKS_PER_PROGRAM = 16
FLOAT8_CAPABILITY = (8, 9)  # compute capability from which on the hardware converts float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Workspace:
    """partial  float32: sums over parts of K
    arrived  int32: programs that have come to a tile; zeros between launches
    float8   the hardware converts float8_e4m3fn
    """

    partial_sums: Tensor
    tile_counters: Tensor
    has_float8: bool


class TritonLinear(ReferenceOps):
    """Mixin of TritonOps."""

    def __init__(self, row_tile: int = 1) -> None:
        super().__init__(row_tile)
        self._workspaces: dict[torch.device, Workspace] = {}

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        """See packing.pack()"""
        weight = pack(parts, weight_format, bias)
        if weight.data.device not in self._workspaces:
            self._workspaces[weight.data.device] = _allocate_workspace(weight.data.device)
        return weight

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N] of `dtype`; bias and add_to are added in float32, and all is rounded once."""
        return self._launch_gemm(x, weight, weight.rows, dtype or x.dtype, None, add_to)

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K], weight [2I, K] -> [T, I], in float32 up to its one rounding"""
        return self._launch_gemm(x, weight, weight.rows // 2, x.dtype, activation, None)

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        """ids [T], weight [V, H] -> [T, H], scaled in float32"""
        out = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
        if len(token_ids):
            embed_kernel[(len(token_ids), -(-weight.blocks // BLOCKS_PER_PROGRAM))](
                token_ids,
                weight.data,
                weight.scales,
                out,
                weight.columns,
                weight.blocks,
                scale,
                FORMAT=weight.format,
                FLOAT8=self._workspaces[token_ids.device].has_float8,
                BK=columns_per_block(weight.format),
                BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM,
                enable_fp_fusion=False,
            )
        return out

    def _launch_gemm(
        self,
        x: Tensor,
        weight: PackedWeight,
        out_features: int,
        dtype: torch.dtype,
        activation: str | None,
        add_to: Tensor | None,
    ) -> Tensor:
        rows = x.shape[0]
        assert x.shape[1] == weight.columns
        y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
        if rows == 0:
            return y
        workspace = self._workspaces[x.device]
        tile = pick_tile(weight.format, x.itemsize, rows)
        tiles = -(-weight.rows // tile.bm) * -(-rows // tile.bn)
        parts = pick_split_mode(tiles, tile, weight.splits, rows)
        block = columns_per_block(weight.format)
        gemm_kernel[(tiles, weight.splits if parts == "apart" else 1)](
            x.contiguous(),
            weight.data,
            weight.scales,
            weight.bias,
            None if add_to is None else add_to.contiguous(),
            y,
            workspace.partial_sums,
            workspace.tile_counters,
            rows,
            out_features,
            weight.columns,
            weight.blocks,
            weight.splits,
            FORMAT=weight.format,
            FLOAT8=workspace.has_float8,
            ACTIVATION=activation,
            SPLIT_MODE=parts,
            EVEN_K=weight.columns % block == 0,
            BM=tile.bm,
            BN=tile.bn,
            BK=block,
            GROUP_M=GROUP_M,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )
        return y


def _allocate_workspace(device: torch.device) -> Workspace:
    float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
    partial = torch.empty(WORKSPACE_VALUES, dtype=torch.float32, device=device)
    return Workspace(partial, torch.zeros(MAX_TILES, dtype=torch.int32, device=device), float8)
