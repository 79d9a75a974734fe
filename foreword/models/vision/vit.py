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
from foreword.models.common import MAX_LAYERS, MAX_WIDTH
from foreword.models.config import ConfigReader
from foreword.models.vision.parts import ACTIVATIONS, ATTENTION_PACE, FeedForward, LayerNorm, Patches, dense

__all__ = ["ViTConfig", "VisionTransformer", "read_vit"]

MAX_SIDE = 1 << 13  # pixels
MAX_PATCHES = 1 << 14  # of a tile: attention is square in them


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """image_size, patch_size  pixels of a side
    class_tokens           rows before the patches that stand for no place
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    activation: str
    eps: float
    class_tokens: int

    @property
    def side(self) -> int:
        """Patches of a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        """N: of a tile."""
        return self.class_tokens + self.side**2

    @property
    def multiply_adds(self) -> int:
        """Of one layer and one tile, as a tower tells them."""
        attention = ATTENTION_PACE * 2 * self.rows
        return self.rows * self.hidden * (4 * self.hidden + 2 * self.intermediate + attention)


def read_vit(config: ConfigReader, activation: str, eps: float, image_size: int, patch_size: int, class_tokens: int) -> ViTConfig:
    """A vision_config; the others are what holds where it does not say. Raises CheckpointError."""
    config.expect("num_channels", 3)
    for key in ("projection_dim", "vocab_size", "initializer_factor", "tie_word_embeddings"):  # of what it was trained with
        config.raw(key, None)
    read = ViTConfig(
        hidden=config.whole("hidden_size", 768, high=MAX_WIDTH),
        intermediate=config.whole("intermediate_size", 3072, high=MAX_WIDTH),
        layers=config.whole("num_hidden_layers", 12, high=MAX_LAYERS),
        heads=config.whole("num_attention_heads", 12),
        image_size=config.whole("image_size", image_size, high=MAX_SIDE),
        patch_size=config.whole("patch_size", patch_size, high=MAX_SIDE),
        activation=config.choice("hidden_act", ACTIVATIONS, activation),
        eps=config.number("layer_norm_eps", eps),
        class_tokens=class_tokens,
    )
    if read.hidden % read.heads:
        raise config.refuse("num_attention_heads", f"{read.heads} does not divide hidden_size {read.hidden}")
    if not 1 <= read.side**2 <= MAX_PATCHES:
        raise config.refuse(
            "patch_size",
            f"{read.patch_size} makes {read.side**2} patches of image_size {read.image_size}; 1 to {MAX_PATCHES} here",
        )
    return read


class ViTLayer:
    """Norm, attention, norm, feed-forward; each branch is added to what it read."""

    def __init__(self, ops: Ops, config: ViTConfig, kind: str, weights: Weights) -> None:
        hidden, size = config.hidden, config.intermediate
        attention, mlp = weights.within("self_attn."), weights.within("mlp.")
        self._ops = ops
        self._heads = config.heads
        self._attention_norm = LayerNorm(weights, "layer_norm1", hidden, config.eps)
        self._qkv = dense(ops, attention, kind, hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden))
        self._out = dense(ops, attention, kind, hidden, {"out_proj": hidden})
        self._mlp_norm = LayerNorm(weights, "layer_norm2", hidden, config.eps)
        up, down = dense(ops, mlp, kind, hidden, {"fc1": size}), dense(ops, mlp, kind, size, {"fc2": hidden})
        self._mlp = FeedForward(up, down, config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        x = x + self._out(self._attend(self._qkv(self._attention_norm(x))))
        return x + self._mlp(self._mlp_norm(x))

    def _attend(self, qkv: Tensor) -> Tensor:
        """q, k and v [N, 3H] -> [N, H]: every row sees every other one."""
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).transpose(0, 1).contiguous()
        whole = (0, len(qkv))
        return self._ops.attend_sections(q, k, v, whole, whole, q.shape[-1] ** -0.5).flatten(1)


class VisionTransformer(ABC):
    """A tower without what comes behind it. A subclass, one to an architecture, reads the config and embeds a tile.

    PATCH_BIAS  patches have one
    UNUSED      beginnings of names of tensors that nobody needs here
    layers      how many of them are needed: the others are not loaded
    """

    PATCH_BIAS: ClassVar[bool]
    UNUSED: ClassVar[Sequence[str]]

    def __init__(self, config: ViTConfig, ops: Ops, kind: str, dtype: torch.dtype, weights: Weights, layers: int) -> None:
        embeddings = weights.within("embeddings.")
        self.config = config
        self._dtype = dtype
        self._patches = Patches(
            ops, embeddings.within("patch_embedding."), kind, config.patch_size, config.hidden, self.PATCH_BIAS
        )
        self._positions = embeddings.take("position_embedding.weight", config.rows, config.hidden).to(dtype)
        self.load(embeddings, weights)
        self._layers = [ViTLayer(ops, config, kind, weights.within(f"encoder.layers.{index}.")) for index in range(layers)]

    @classmethod
    @abstractmethod
    def read(cls, config: ConfigReader) -> ViTConfig:
        """A vision_config. Raises CheckpointError."""

    @abstractmethod
    def load(self, embeddings: Weights, weights: Weights) -> None:
        """Take what `embed` needs besides patches and positions."""

    @abstractmethod
    def embed(self, patches: Tensor) -> Tensor:
        """Patches [side * side, H] -> [N, H]: what the first layer reads."""

    def see(self, tile: Tensor, layers: Sequence[int]) -> Generator[int, None, Tensor]:
        """One tile, float32 [3, image_size, image_size], as it is behind so many layers: [N, H * len(layers)]. Each yield
        tells multiply-adds."""
        states = [self.embed(self._patches(tile.to(self._dtype)))]
        for layer in self._layers:
            states.append(layer(states[-1]))
            yield self.config.multiply_adds
        return torch.cat([states[layer] for layer in layers], -1)
