"""Vision transformers that see tiles of one size, with learned positions: what CLIP and SigLIP have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.common import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.models.config import ConfigReader
from foreword.models.vision.layers import (
    ACTIVATIONS,
    ATTENTION_COST_FACTOR,
    PatchEmbedding,
    VisionLayerNorm,
    VisionMLP,
    build_linear,
)

__all__ = ["ViTConfig", "VisionTransformer", "read_vit_config"]

MAX_SIDE_PIXELS = 1 << 13  # pixels
MAX_PATCHES = 1 << 14  # of a tile: attention is square in them


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """image_size, patch_size  pixels of a side
    class_tokens           rows before the patches that stand for no place
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    eps: float
    num_class_tokens: int

    @property
    def patches_per_side(self) -> int:
        """Patches of a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """N: of a tile."""
        return self.num_class_tokens + self.patches_per_side**2

    @property
    def multiply_adds(self) -> int:
        """Of one layer and one tile, as a tower tells them."""
        attention = ATTENTION_COST_FACTOR * 2 * self.num_positions
        return (
            self.num_positions
            * self.hidden_size
            * (4 * self.hidden_size + 2 * self.intermediate_size + attention)
        )


def read_vit_config(
    config: ConfigReader, activation: str, eps: float, image_size: int, patch_size: int, num_class_tokens: int
) -> ViTConfig:
    """A vision_config; the others are what holds where it does not say. Raises CheckpointError."""
    config.require_value("num_channels", 3)
    for key in (
        "projection_dim",
        "vocab_size",
        "initializer_factor",
        "tie_word_embeddings",
    ):  # of what it was trained with
        config.get(key, None)
    read = ViTConfig(
        hidden_size=config.get_int("hidden_size", 768, high=MAX_HIDDEN_SIZE),
        intermediate_size=config.get_int("intermediate_size", 3072, high=MAX_HIDDEN_SIZE),
        num_layers=config.get_int("num_hidden_layers", 12, high=MAX_LAYERS),
        num_heads=config.get_int("num_attention_heads", 12),
        image_size=config.get_int("image_size", image_size, high=MAX_SIDE_PIXELS),
        patch_size=config.get_int("patch_size", patch_size, high=MAX_SIDE_PIXELS),
        activation=config.get_choice("hidden_act", ACTIVATIONS, activation),
        eps=config.get_float("layer_norm_eps", eps),
        num_class_tokens=num_class_tokens,
    )
    if read.hidden_size % read.num_heads:
        raise config.error(
            "num_attention_heads", f"{read.num_heads} does not divide hidden_size {read.hidden_size}"
        )
    if not 1 <= read.patches_per_side**2 <= MAX_PATCHES:
        raise config.error(
            "patch_size",
            f"{read.patch_size} makes {read.patches_per_side**2} patches of image_size {read.image_size}; 1 to {MAX_PATCHES} here",
        )
    return read


class ViTLayer:
    """Norm, attention, norm, feed-forward; each branch is added to what it read."""

    def __init__(self, ops: Ops, config: ViTConfig, weight_format: str, weights: Weights) -> None:
        hidden, size = config.hidden_size, config.intermediate_size
        attention, mlp = weights.prefixed("self_attn."), weights.prefixed("mlp.")
        self._ops = ops
        self._heads = config.num_heads
        self._attention_norm = VisionLayerNorm(weights, "layer_norm1", hidden, config.eps)
        self._qkv = build_linear(
            ops, attention, weight_format, hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        )
        self._out = build_linear(ops, attention, weight_format, hidden, {"out_proj": hidden})
        self._mlp_norm = VisionLayerNorm(weights, "layer_norm2", hidden, config.eps)
        up, down = (
            build_linear(ops, mlp, weight_format, hidden, {"fc1": size}),
            build_linear(ops, mlp, weight_format, size, {"fc2": hidden}),
        )
        self._mlp = VisionMLP(up, down, config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        x = x + self._out(self._attend(self._qkv(self._attention_norm(x))))
        return x + self._mlp(self._mlp_norm(x))

    def _attend(self, qkv: Tensor) -> Tensor:
        """q, k and v [N, 3H] -> [N, H]: every row sees every other one."""
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).transpose(0, 1).contiguous()
        whole = (0, len(qkv))
        return self._ops.varlen_attention(q, k, v, whole, whole, q.shape[-1] ** -0.5).flatten(1)


class VisionTransformer(ABC):
    """A tower without what comes behind it. A subclass, one to an architecture, reads the config and embeds a tile.

    PATCH_BIAS  patches have one
    UNUSED      beginnings of names of tensors that nobody needs here
    layers      how many of them are needed: the others are not loaded
    """

    PATCH_BIAS: ClassVar[bool]
    IGNORED_PREFIXES: ClassVar[Sequence[str]]

    def __init__(
        self,
        config: ViTConfig,
        ops: Ops,
        weight_format: str,
        dtype: torch.dtype,
        weights: Weights,
        num_layers: int,
    ) -> None:
        embeddings = weights.prefixed("embeddings.")
        self.config = config
        self._dtype = dtype
        self._patch_embedding = PatchEmbedding(
            ops,
            embeddings.prefixed("patch_embedding."),
            weight_format,
            config.patch_size,
            config.hidden_size,
            self.PATCH_BIAS,
        )
        self._position_embedding = embeddings.tensor(
            "position_embedding.weight", config.num_positions, config.hidden_size
        ).to(dtype)
        self.load_embeddings(embeddings, weights)
        self._layers = [
            ViTLayer(ops, config, weight_format, weights.prefixed(f"encoder.layers.{index}."))
            for index in range(num_layers)
        ]

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> ViTConfig:
        """A vision_config. Raises CheckpointError."""

    @abstractmethod
    def load_embeddings(self, embeddings: Weights, weights: Weights) -> None:
        """Take what `embed` needs besides patches and positions."""

    @abstractmethod
    def embed(self, patches: Tensor) -> Tensor:
        """Patches [side * side, H] -> [N, H]: what the first layer reads."""

    def encode_tile(self, tile: Tensor, feature_layers: Sequence[int]) -> Generator[int, None, Tensor]:
        """One tile, float32 [3, image_size, image_size], as it is behind so many layers: [N, H * len(layers)]. Each yield
        tells multiply-adds."""
        states = [self.embed(self._patch_embedding(tile.to(self._dtype)))]
        for layer in self._layers:
            states.append(layer(states[-1]))
            yield self.config.multiply_adds
        return torch.cat([states[layer] for layer in feature_layers], -1)
