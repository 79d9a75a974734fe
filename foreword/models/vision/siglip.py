"""The tower of SigLIP (arXiv 2303.15343): patches and nothing else."""

from __future__ import annotations

from torch import Tensor

from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader
from foreword.models.vision.vit import VisionTransformer, ViTConfig, read_vit_config

__all__ = ["Siglip"]


class Siglip(VisionTransformer):
    """vision_config of model_type `siglip_vision_model`"""

    PATCH_BIAS = True
    IGNORED_PREFIXES = ("post_layernorm.", "head.", "embeddings.position_ids")

    @classmethod
    def read_config(cls, config: ConfigReader) -> ViTConfig:
        """Its head, if it has one, makes one vector of a picture, which nobody needs here."""
        config.get_bool("vision_use_head", True)
        return read_vit_config(
            config, "gelu_pytorch_tanh", 1e-6, image_size=224, patch_size=16, num_class_tokens=0
        )

    def load_embeddings(self, embeddings: Weights, weights: Weights) -> None:
        """Nothing more."""

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> the same"""
        return patches + self._position_embedding
