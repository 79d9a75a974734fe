"""Vision encoder of CLIP (arXiv 2103.00020): a class token before the patches, a norm before the layers."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.layers.norm import LayerNorm
from foreword.layers.weights import Weights
from foreword.models.vision.vit import VisionTransformer, ViTConfig, read_vit_config
from foreword.weights.config_reader import ConfigReader


class CLIP(VisionTransformer):
    """vision_config of model_type `clip_vision_model`"""

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
        self._norm = LayerNorm(weights, "pre_layrnorm", config.hidden_size, config.eps)

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> [1 + side * side, H]"""
        return self._norm(torch.cat((self._class_embedding[None], patches)) + self._position_embedding)
