"""The tower of SigLIP (arXiv 2303.15343): patches and nothing else."""

from __future__ import annotations

from torch import Tensor

from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader
from foreword.models.vision.vit import VisionTransformer, ViTConfig, read_vit

__all__ = ["Siglip"]


class Siglip(VisionTransformer):
    """vision_config of model_type `siglip_vision_model`"""

    PATCH_BIAS = True
    UNUSED = ("post_layernorm.", "head.", "embeddings.position_ids")

    @classmethod
    def read(cls, config: ConfigReader) -> ViTConfig:
        """Its head, if it has one, makes one vector of a picture, which nobody needs here."""
        config.flag("vision_use_head", True)
        return read_vit(config, "gelu_pytorch_tanh", 1e-6, image_size=224, patch_size=16, class_tokens=0)

    def load(self, embeddings: Weights, weights: Weights) -> None:
        """Nothing more."""

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> the same"""
        return patches + self._positions
