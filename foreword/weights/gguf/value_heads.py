"""The order of a Gated DeltaNet's value heads in GGUF files of Qwen3.5."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.states import StateShape
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS

DELTA_NET_TENSOR = re.compile(r".+\.linear_attn\.(\w+?)(?:\.weight)?")
CHANNELS, VALUES, HEADS = (
    ("in_proj_qkv", "conv1d"),  # rows of q and k, then those of values
    ("in_proj_z",),
    ("in_proj_a", "in_proj_b", "A", "dt_bias"),
)


class TiledValueHeads:
    """Undoes the order of files: the first value head of each key head, then the second of each, and so on.

    Checkpoints keep the value heads of a key head together.
    """

    def __init__(self, shape: StateShape) -> None:
        self._shape = shape
        group = shape.value_heads // shape.key_heads
        self._heads = torch.arange(shape.value_heads).view(group, shape.key_heads).t().flatten()

    def restore_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows [N, ...] of the tensor called `name`, in the order of checkpoints."""
        match, shape = DELTA_NET_TENSOR.fullmatch(name), self._shape
        if match is None or match[1] not in (*CHANNELS, *VALUES, *HEADS):
            return rows
        order = self._heads
        if match[1] not in HEADS:
            order = self._order(shape.value_dim)
        if match[1] in CHANNELS:
            num_keys = shape.channels - len(order)
            order = torch.cat((torch.arange(num_keys), order + num_keys))
        return rows[order.to(rows.device)]

    def restore_columns(self, name: str, matrix: Matrix) -> Matrix:
        """Columns of out_proj. Heads that do not fill blocks stay, and inputs get an order."""
        match, size = DELTA_NET_TENSOR.fullmatch(name), self._shape.value_dim
        if match is None or match[1] != "out_proj":
            return matrix
        if isinstance(matrix, Tensor):
            return matrix[:, self._order(size).to(matrix.device)]
        assert isinstance(matrix, QuantizedBlocks)
        block = QUANT_BLOCKS[matrix.format]
        if size % block.num_values:
            return replace(matrix, input_order=self._order(size).argsort().to(matrix.data.device))
        order = self._order(size // block.num_values * block.num_bytes)
        return replace(matrix, data=matrix.data[:, order.to(matrix.data.device)])

    def _order(self, size: int) -> Tensor:
        """The place in files of each of our values, int64 [heads * size]; size: of a head."""
        return (self._heads[:, None] * size + torch.arange(size)).flatten()
