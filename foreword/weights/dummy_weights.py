"""Weights that are not read from files: random ones, or only their shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foreword.kernels.ops import XIELU_BETA, Matrix
from foreword.kernels.reference.backend import ReferenceOps, ReferenceWeight
from foreword.layers.weights import Weights
from foreword.weights.gguf.gguf_weights import GGUFWeights
from foreword.weights.renamed_weights import PrefixedWeights
from foreword.weights.safetensors_weights import SafetensorsWeights

DUMMY_VECTOR_STD = 0.02  # around 1 for norm weights, around 0 for biases


class MetaOps(ReferenceOps):
    """Builds models of MetaWeights: packing would copy tensors without data."""

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> ReferenceWeight:
        return ReferenceWeight(torch.empty(0), None)


class MetaWeights:
    """Tensors without memory, to count a model's parameters."""

    def __init__(self) -> None:
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Zeros, expanded from one value; constants as of DummyWeights."""
        tensor = torch.tensor(_constant(name)).expand(shape)
        self.num_parameters += tensor.numel()
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        yield [self.tensor(name, size, in_features) for name, size in out_features.items()]

    def has(self, name: str) -> bool:
        return False

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        yield self.tensor(name, *shape[1:])

    def prefixed(self, prefix: str) -> Weights:
        return self


class HeaderWeights(MetaWeights):
    """Tensors without memory, whose names and shapes are checked against other weights' file headers."""

    def __init__(self, files: SafetensorsWeights | GGUFWeights) -> None:
        super().__init__()
        self._files = files

    def tensor(self, name: str, *shape: int) -> Tensor:
        self._files.check_shape(name, shape)
        return super().tensor(name, *shape)

    def has(self, name: str) -> bool:
        return self._files.has(name)

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        self._files.check_shape(name, shape)
        yield super().tensor(name, *shape[1:])

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)


class DummyWeights:
    """Random tensors, see `layers.weights.Weights`; deterministic by name, shape, type and device.

    A matrix [N, K] has standard deviation K^-1/2, so that activations stay finite through all layers.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device)
        self._device = device
        self._dtype = dtype
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32: about 1 for norm weights, about 0 for biases, 0 for constants, else normal as a matrix."""
        if not shape:
            self.num_parameters += 1
            return torch.tensor(_constant(name), device=self._device)
        is_vector = len(shape) == 1
        std = DUMMY_VECTOR_STD if is_vector else shape[-1] ** -0.5
        values = self._normal(name, shape, torch.float32, std)
        return values.add_(1.0) if is_vector and name.endswith("weight") else values

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        yield [
            self._normal(name, (size, in_features), self._dtype, in_features**-0.5)
            for name, size in out_features.items()
        ]

    def has(self, name: str) -> bool:
        return False

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        yield self._normal(f"{name}.{index}", shape[1:], self._dtype, shape[-1] ** -0.5)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def _normal(self, name: str, shape: Sequence[int], dtype: torch.dtype, std: float) -> Tensor:
        seed = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(seed, "little"))
        values = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self.num_parameters += values.numel()
        return values.normal_(0.0, std, generator=self._generator)


def _constant(name: str) -> float:
    return XIELU_BETA if name.endswith("act_fn.beta") else 0.0  # a model checks it
