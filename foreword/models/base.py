"""What the engine sees of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from foreword.config import ModelFacts
from foreword.core.batch import Batch
from foreword.kernels.ops import Ops

__all__ = ["KV", "Model"]


class KV(Protocol):
    """The KV cache as a model sees it."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [S, Hk, D]."""


class Model(Protocol):
    """A loaded model.

    vocab_size  V: width of its logits
    kv_layers   (heads, head dimension) of each layer's KV cache
    """

    ops: Ops
    facts: ModelFacts
    vocab_size: int
    kv_layers: tuple[tuple[int, int], ...]

    def forward(self, batch: Batch, kv: KV) -> Tensor:
        """Hidden states [T, H] of every row; K and V of every row are written to the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]"""
