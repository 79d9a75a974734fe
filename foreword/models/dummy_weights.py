"""Random weights of the shapes that a config asks for: what a model costs does not depend on what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foreword.kernels.ops import Matrix
from foreword.layers.weights import Weights
from foreword.models.weights import PrefixedWeights

__all__ = ["DummyWeights"]

VECTOR_STD = 0.02  # of what is no matrix, around 1 where it scales, around 0 where it is added


class DummyWeights:
    """See `layers.weights.Weights`: made on the device, equal for equal names, shapes, types and devices.

    A matrix [N, K] is normal with a standard deviation of K^-1/2, so that values keep their size from layer to layer: none
    becomes so large that it is not finite, whatever the type.

    dtype  of matrices
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device)
        self._device = device
        self._dtype = dtype
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32: about 1 for norms, about 0 for biases, else as a matrix of the last dimension's size."""
        plain = len(shape) == 1
        values = self._normal(name, shape, torch.float32, VECTOR_STD if plain else shape[-1] ** -0.5)
        return values.add_(1.0) if plain and name.endswith("weight") else values

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """Of `dtype`."""
        yield [
            self._normal(name, (size, in_features), self._dtype, in_features**-0.5)
            for name, size in out_features.items()
        ]

    def prefixed(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return PrefixedWeights(self, prefix)

    def _normal(self, name: str, shape: Sequence[int], dtype: torch.dtype, std: float) -> Tensor:
        seed = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(seed, "little"))
        values = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self.num_parameters += values.numel()
        return values.normal_(0.0, std, generator=self._generator)
