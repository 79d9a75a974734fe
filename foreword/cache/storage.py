"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreword.core.kv import KVLayer

__all__ = ["KVStorage"]


class KVStorage:
    """K and V of every layer, in blocks. Block 0 is scratch: padding writes and reads there.

    num_blocks  usable blocks; their ids are 1..num_blocks
    layers      (heads, head dimension) of each layer
    dtype       "float32", "bfloat16", "float16" or "int8"
    """

    def __init__(
        self, num_blocks: int, block_size: int, layers: Sequence[tuple[int, int]], dtype: str, device: str = "cpu"
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        slots = (num_blocks + 1) * block_size
        self._layers = tuple(_layer((slots, *shape), getattr(torch, dtype), device) for shape in layers)

    def layer(self, index: int) -> KVLayer:
        """K and V of one layer."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        tensors = [tensor for layer in self._layers for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _layer(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> KVLayer:
    """shape (S, Hk, D)"""
    k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    if dtype != torch.int8:
        return KVLayer(k, v)
    return KVLayer(k, v, *(torch.zeros(shape[:2], dtype=torch.float32, device=device) for _ in range(2)))
