"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KVStorage"]


class KVStorage:
    """K and V of every layer, in blocks. Block 0 is scratch: padding writes and reads there.

    num_blocks  usable blocks; their ids are 1..num_blocks
    layers      (heads, head dimension) of each layer
    dtype       "float32", "bfloat16" or "float16"
    """

    def __init__(
        self, num_blocks: int, block_size: int, layers: Sequence[tuple[int, int]], dtype: str, device: str = "cpu"
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        slots = (num_blocks + 1) * block_size
        kind: torch.dtype = getattr(torch, dtype)
        self._layers = tuple(
            (torch.zeros(slots, *shape, dtype=kind, device=device), torch.zeros(slots, *shape, dtype=kind, device=device))
            for shape in layers
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [S, Hk, D]."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self._layers)
