"""Where layers get their tensors from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from foreword.kernels.ops import Matrix

__all__ = ["Weights"]


class Weights(Protocol):
    """Tensors of a checkpoint, by the names that they have in Hugging Face's format."""

    @property
    def num_parameters(self) -> int:
        """Values taken so far."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape: float32, on the engine's device, in memory of its own."""

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        """The matrices of these names and numbers of rows as they stand in the file, on the engine's device.

        They may lie in a mapped file, whose pages are given back at the end of the `with` block: what is kept must be
        copied before.
        """

    def prefixed(self, prefix: str) -> Weights:
        """The same tensors; names are to be completed by the prefix."""
