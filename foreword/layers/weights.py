"""Where layers get their tensors from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

__all__ = ["Weights"]


class Weights(Protocol):
    """Tensors of a checkpoint by name, in the engine's data type and on its device."""

    @property
    def parameters(self) -> int:
        """Values taken so far."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape."""

    def take_rows(self, rows: Mapping[str, int], *shape: int) -> Tensor:
        """The tensors of these names and numbers of rows, of this shape each row, one below the other."""

    def within(self, prefix: str) -> Weights:
        """The same tensors; names are to be completed by the prefix."""
