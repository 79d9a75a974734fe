"""Device memory of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.utils.mapped_memory import HugePages

SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)


class KVStorage:
    """K and V of every layer in blocks 1..num_blocks; padding rows read and write block 0."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[tuple[int, int]],  # (heads, head dimension) of each layer
        dtype: str,  # "float32", "bfloat16", "float16", "int8" or "fp8" (float8_e4m3fn)
        device: str = "cpu",
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._memory = HugePages()
        slots = (num_blocks + 1) * block_size
        stored = torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)
        self._layers = tuple(self._make_layer((slots, *shape), stored) for shape in layers)

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        tensors = (t for layer in self._layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _make_layer(self, shape: tuple[int, int, int], dtype: torch.dtype) -> KVLayer:
        """shape  (S, Hk, D): slots, KV heads, head dimension"""
        k, v = self._zeros(shape, dtype), self._zeros(shape, dtype)
        if dtype not in SCALED_DTYPES:
            return KVLayer(k, v)
        return KVLayer(k, v, self._zeros(shape[:2], torch.float32), self._zeros(shape[:2], torch.float32))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self._memory.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
