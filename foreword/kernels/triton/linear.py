"""Linear layers and the embedding on Triton: gemm_pack.py lays weights out, gemm.py multiplies.

Kernels run in order on one stream, so they share one workspace for partial sums, and counters that each
launch resets to zero. Both are allocated when the first weight is packed, never during graph capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.kernels.ops import Matrix, PackedLinear
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.elementwise import embed_kernel
from foreword.kernels.triton.gemm import (
    MAX_TILES,
    WORKSPACE_VALUES,
    Tile,
    device_tiles,
    gemm_kernel,
    pick_split_mode,
    pick_tile,
)
from foreword.kernels.triton.gemm_pack import PackedWeight, columns_per_block, pack
from foreword.kernels.triton.variants import launches_dependents

GROUP_M = 8  # weight tiles of a group in gemm_kernel()
BLOCKS_PER_PROGRAM = 16  # for embed_kernel()


@dataclass(frozen=True, slots=True)
class Workspace:
    partial_sums: Tensor  # float32: sums over splits of K
    tile_counters: Tensor  # int32: programs done with a tile; zeros between launches
    tiles: Mapping[str, Sequence[Tile]]  # the device's
    pdl: bool  # see launches_dependents()


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a result that have weights of different experts: see gemm_kernel()."""

    num_rows: int
    rows_per_expert: int  # on average: chooses the tile
    row_tiles: Mapping[int, Tensor]  # by BN
    input_rows: Tensor | None


class TritonLinear(ReferenceOps):
    """Mixin of TritonOps."""

    def __init__(self, row_tile: int = 1) -> None:
        super().__init__(row_tile)
        self._workspaces: dict[torch.device, Workspace] = {}

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        weight = pack(parts, weight_format, bias)
        if weight.data.device not in self._workspaces:
            device = weight.data.device
            partial_sums = torch.empty(WORKSPACE_VALUES, dtype=torch.float32, device=device)
            counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
            self._workspaces[device] = Workspace(
                partial_sums, counters, device_tiles(device), launches_dependents(device)
            )
        return weight

    def first_rows(self, weight: PackedLinear, count: int) -> PackedLinear:
        return weight.first_rows(count)

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """Ops.linear; bias and add_to are added in float32, and the result is rounded once."""
        return self._launch_gemm(x, weight, weight.rows, dtype or x.dtype, None, add_to)

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """Ops.linear_gated_act in float32, rounded once."""
        return self._launch_gemm(x, weight, weight.rows // 2, x.dtype, activation, None)

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        out = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
        if len(token_ids):
            operands = token_ids, weight.data, weight.scales, out, weight.columns, weight.blocks, scale
            embed_kernel[(len(token_ids), -(-weight.blocks // BLOCKS_PER_PROGRAM))](
                *operands,
                FORMAT=weight.format,
                BK=columns_per_block(weight.format),
                BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM,
                enable_fp_fusion=False,
            )
        return out

    def _pick_tile(self, x: Tensor, weight: PackedWeight, num_rows: int) -> Tile:
        tiles = self._workspaces[x.device].tiles
        return pick_tile(weight.format, x.itemsize, num_rows, weight.splits, tiles)

    def _launch_gemm(
        self,
        x: Tensor,
        weight: PackedWeight,
        out_features: int,
        dtype: torch.dtype,
        activation: str | None,
        add_to: Tensor | None,
        groups: RowGroups | None = None,
    ) -> Tensor:
        """Rows of x times weight; with `groups`, rows of the result times the weights of their experts."""
        rows = x.shape[0] if groups is None else groups.num_rows
        assert x.shape[1] == weight.columns
        y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
        if rows == 0:
            return y
        if weight.input_order is not None:
            x = x.index_select(1, weight.input_order)
        workspace = self._workspaces[x.device]
        rows_per_weight = rows if groups is None else groups.rows_per_expert
        tile = self._pick_tile(x, weight, rows_per_weight)
        row_tiles = None if groups is None else groups.row_tiles[tile.bn]
        num_row_tiles = -(-rows // tile.bn) if row_tiles is None else len(row_tiles)
        num_tiles = -(-weight.rows // tile.bm) * num_row_tiles
        split_mode = pick_split_mode(num_tiles, tile, weight.splits, rows_per_weight)
        block = columns_per_block(weight.format)
        packed = weight.data, weight.scales, weight.bias
        residual = None if add_to is None else add_to.contiguous()
        sizes = rows, out_features, weight.columns, weight.blocks, weight.splits
        gemm_kernel[(num_tiles, weight.splits if split_mode == "split_k" else 1)](
            *(x.contiguous(), *packed, residual, y, workspace.partial_sums, workspace.tile_counters),
            *(row_tiles, None if groups is None else groups.input_rows, *sizes),
            FORMAT=weight.format,
            ACTIVATION=activation,
            SPLIT_MODE=split_mode,
            EVEN_K=weight.columns % block == 0,
            BM=tile.bm,
            BN=tile.bn,
            DOT_N=tile.dot_n,
            BK=block,
            GROUP_M=GROUP_M,
            PDL=workspace.pdl,
            PREFETCH=tile.num_stages,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
            enable_fp_fusion=False,
            launch_pdl=workspace.pdl,
        )
        return y
