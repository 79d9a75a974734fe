"""Vision transformer with a fixed tile size and learned positions: CLIP and SigLIP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.models.vision.vision_layers import (
    ACTIVATIONS,
    ATTENTION_COST_FACTOR,
    PatchEmbedding,
    VisionMLP,
    build_linear,
)
from foreword.weights.config_reader import ConfigReader

MAX_SIDE_PIXELS = 1 << 13
MAX_PATCHES = 1 << 14  # per tile; attention is quadratic in them
# Options of training, accepted and ignored.
IGNORED_KEYS = ("projection_dim", "vocab_size", "initializer_factor", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Shape of a vision transformer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # pixels of a tile's side
    patch_size: int  # pixels of a patch's side
    activation: str
    eps: float
    num_class_tokens: int  # rows before the patches

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """N: rows of one tile."""
        return self.num_class_tokens + self.patches_per_side**2

    @property
    def multiply_adds(self) -> int:
        """Cost of one layer and one tile, in multiply-adds of linear layers."""
        attention = ATTENTION_COST_FACTOR * 2 * self.num_positions
        per_value = 4 * self.hidden_size + 2 * self.intermediate_size + attention
        return self.num_positions * self.hidden_size * per_value


def read_vit_config(
    config: ConfigReader, activation: str, eps: float, image_size: int, patch_size: int, num_class_tokens: int
) -> ViTConfig:
    """Read a vision_config; the other parameters are defaults. Raises CheckpointError."""
    config.require_value("num_channels", 3)
    for key in IGNORED_KEYS:
        config.get(key, None)
    vit = ViTConfig(
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
    if vit.hidden_size % vit.num_heads:
        reason = f"{vit.num_heads} does not divide hidden_size {vit.hidden_size}"
        raise config.error("num_attention_heads", reason)
    num_patches = vit.patches_per_side**2
    if not 1 <= num_patches <= MAX_PATCHES:
        reason = f"{vit.patch_size} makes {num_patches} patches of image_size {vit.image_size}"
        raise config.error("patch_size", f"{reason}; 1 to {MAX_PATCHES} here")
    return vit


class ViTLayer:
    """Norm, attention, norm, MLP, with a residual around each branch."""

    def __init__(self, ops: Ops, config: ViTConfig, weight_format: str, weights: Weights) -> None:
        hidden, size = config.hidden_size, config.intermediate_size
        attention, mlp = weights.prefixed("self_attn."), weights.prefixed("mlp.")
        self._ops = ops
        self._heads = config.num_heads
        self._attention_norm = EncoderLayerNorm(weights, "layer_norm1", hidden, config.eps)
        self._qkv = build_linear(
            ops, attention, weight_format, hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        )
        self._out = build_linear(ops, attention, weight_format, hidden, {"out_proj": hidden})
        self._mlp_norm = EncoderLayerNorm(weights, "layer_norm2", hidden, config.eps)
        layers = {"fc1": size, "fc2": hidden}
        self._mlp = VisionMLP(ops, mlp, weight_format, hidden, layers, config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        x = x + self._out(self._attend(self._qkv(self._attention_norm(x))))
        return x + self._mlp(self._mlp_norm(x))

    def _attend(self, qkv: Tensor) -> Tensor:
        """q, k and v [N, 3H] -> [N, H], full attention."""
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).transpose(0, 1).contiguous()
        cu_seqlens = (0, len(qkv))
        return self._ops.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, q.shape[-1] ** -0.5).flatten(1)


class VisionTransformer(ABC):
    """Vision encoder without projector. A subclass per architecture reads the config and embeds a tile.

    The first `num_layers` layers are loaded: later ones do not affect the features.
    """

    PATCH_BIAS: ClassVar[bool]  # whether the patch embedding has a bias
    IGNORED_PREFIXES: ClassVar[Sequence[str]]  # tensors that are not loaded

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
        hidden, patches = config.hidden_size, embeddings.prefixed("patch_embedding.")
        self._patch_embedding = PatchEmbedding(
            ops, patches, weight_format, config.patch_size, hidden, self.PATCH_BIAS
        )
        positions = embeddings.tensor("position_embedding.weight", config.num_positions, hidden)
        self._position_embedding = positions.to(dtype)
        self.load_embeddings(embeddings, weights)
        self._layers = [
            ViTLayer(ops, config, weight_format, weights.prefixed(f"encoder.layers.{index}."))
            for index in range(num_layers)
        ]

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> ViTConfig:
        """Read a vision_config. Raises CheckpointError."""

    @abstractmethod
    def load_embeddings(self, embeddings: Weights, weights: Weights) -> None:
        """Load the tensors that `embed` needs besides patches and positions."""

    def embed(self, patches: Tensor) -> Tensor:
        """Patches [side * side, H] -> [N, H], input of the first layer."""
        return patches + self._position_embedding

    def encode_tile(self, tile: Tensor, feature_layers: Sequence[int]) -> Generator[int, None, Tensor]:
        """Tile float32 [3, image_size, image_size] -> [N, H * len(feature_layers)], after these layers.

        Each yield is the cost since the last one, in multiply-adds.
        """
        states = [self.embed(self._patch_embedding(tile.to(self._dtype)))]
        for layer in self._layers:
            states.append(layer(states[-1]))
            yield self.config.multiply_adds
        return torch.cat([states[layer] for layer in feature_layers], -1)


class CLIP(VisionTransformer):
    """model_type `clip_vision_model` (arXiv 2103.00020): a class token first, a norm before layers."""

    PATCH_BIAS = False
    IGNORED_PREFIXES = ("post_layernorm.", "embeddings.position_ids")

    @classmethod
    def read_config(cls, config: ConfigReader) -> ViTConfig:
        """Read vision_config; defaults are those of OpenAI's model."""
        return read_vit_config(config, "quick_gelu", 1e-5, image_size=224, patch_size=32, num_class_tokens=1)

    def load_embeddings(self, embeddings: Weights, weights: Weights) -> None:
        """Load the class token and the norm, whose name is misspelt in every checkpoint."""
        config = self.config
        self._class_embedding = embeddings.tensor("class_embedding", config.hidden_size).to(self._dtype)
        self._norm = EncoderLayerNorm(weights, "pre_layrnorm", config.hidden_size, config.eps)

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> [1 + side * side, H]"""
        return self._norm(torch.cat((self._class_embedding[None], patches)) + self._position_embedding)


class Siglip(VisionTransformer):
    """model_type `siglip_vision_model` (arXiv 2303.15343): patches without a class token."""

    PATCH_BIAS = True
    IGNORED_PREFIXES = ("post_layernorm.", "head.", "embeddings.position_ids")

    @classmethod
    def read_config(cls, config: ConfigReader) -> ViTConfig:
        """Read vision_config. The pooling head is accepted and ignored: only patch features are used."""
        config.get_bool("vision_use_head", True)
        return read_vit_config(
            config, "gelu_pytorch_tanh", 1e-6, image_size=224, patch_size=16, num_class_tokens=0
        )

    def load_embeddings(self, embeddings: Weights, weights: Weights) -> None:
        """No tensors beyond patches and positions."""
