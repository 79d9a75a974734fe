"""The tower of CLIP (arXiv 2103.00020): a class token before the patches, and a norm before the layers."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader
from foreword.models.vision.parts import LayerNorm
from foreword.models.vision.vit import VisionTransformer, ViTConfig, read_vit

__all__ = ["CLIP"]


class CLIP(VisionTransformer):
    """vision_config of model_type `clip_vision_model`"""

    PATCH_BIAS = False
    UNUSED = ("post_layernorm.", "embeddings.position_ids")

    @classmethod
    def read(cls, config: ConfigReader) -> ViTConfig:
        """As OpenAI's own where it does not say."""
        return read_vit(config, "quick_gelu", 1e-5, image_size=224, patch_size=32, class_tokens=1)

    def load(self, embeddings: Weights, weights: Weights) -> None:
        """The norm has lost a letter in every checkpoint."""
        config = self.config
        self._class = embeddings.take("class_embedding", config.hidden).to(self._dtype)
        self._norm = LayerNorm(weights, "pre_layrnorm", config.hidden, config.eps)

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> [1 + side * side, H]"""
        return self._norm(torch.cat((self._class[None], patches)) + self._positions)
