"""Source of the tensors of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from foreword.kernels.ops import Matrix


class Weights(Protocol):
    """Tensors of a checkpoint, by their names in Hugging Face's format."""

    @property
    def num_parameters(self) -> int:
        """Parameters loaded so far."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape: float32, on the engine's device, in its own memory."""

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        """The matrices named in out_features (name -> rows) in the file's format, on the engine's device.

        They may lie in a mapped file that is released at the end of the `with` block: copy before.
        """

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor under this very name; False if there are no files."""

    def stacked(self, name: str, index: int, *shape: int) -> AbstractContextManager[Matrix]:
        """Matrix `index` of the tensor of this name and shape [E, N, K], like one of weights()."""

    def prefixed(self, prefix: str) -> Weights:
        """The same tensors; names are completed by the prefix."""
