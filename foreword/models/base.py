"""What the engine sees of a model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foreword.config.resolve import ModelInfo
from foreword.core.batch import Batch, KVLayer
from foreword.core.images import PromptImage
from foreword.kernels.ops import Ops

__all__ = ["KVCache", "Model", "Precision", "VisionEncoder"]


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model is held and computed; kinds of weights are those of Ops.pack_linear.

    dtype      of activations
    linear     kind of the linear layers
    embedding  kind of the embedding and the head
    """

    dtype: torch.dtype
    linear_format: str
    embedding_format: str

    @classmethod
    def from_dtypes(
        cls, dtype: str, weight_dtype: str | None = None, quantization: str | None = None
    ) -> Precision:
        """weight_dtype is that of activations if None. Quantized to 4 bits, the embedding and the head have 8: they
        decide which token comes out."""
        plain = weight_dtype or dtype
        return cls(getattr(torch, dtype), quantization or plain, "int8" if quantization else plain)


class KVCache(Protocol):
    """The KV cache as a model sees it."""

    def layer(self, index: int) -> KVLayer:
        """K and V of one layer."""


class VisionEncoder(Protocol):
    """Sees one picture at a time: its features depend on nothing else.

    width  values of a feature: H, or a multiple of it where features are also added behind the first layers
    """

    feature_size: int

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, width] of one picture in the decoder's data type, on the engine's device.

        It is run a piece at a time, between the steps of those that only wait for their next token: each yield tells the
        multiply-adds since the last one, those of attention as many times as they take longer. A piece is a block of the
        tower, or less where the picture is large.
        """

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """A black picture that takes as much memory to see as any of at most so many tokens, or as any at all where there are
        none that have fewer."""


class Model(Protocol):
    """A loaded model.

    vocab_size  V: width of its logits
    kv_layers   (heads, head dimension) of each layer's KV cache
    tower       sees pictures, or None
    directions  batches need rope_positions: it knows positions in several directions (M-RoPE)
    """

    ops: Ops
    info: ModelInfo
    vocab_size: int
    kv_layer_shapes: tuple[tuple[int, int], ...]
    vision_encoder: VisionEncoder | None

    @property
    def uses_mrope(self) -> bool: ...

    def set_max_model_len(self, max_model_len: int) -> None:
        """Be ready for contexts of this length, as if loaded for it. Nothing is compiled yet."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Hidden states [T, H] of every row; K and V of every row are written to the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]"""

    def compile_logits(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """forward() and the logits of the sampled rows, float32 [R, V], as one function that is made once and kept.
        A result is valid until the next call."""

    def compile_hidden(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """forward() and the hidden states of the sampled rows [R, H] instead of their logits; else like compiled()."""
