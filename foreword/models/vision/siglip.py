"""Vision encoder of SigLIP (arXiv 2303.15343): patches without a class token."""

from __future__ import annotations

from torch import Tensor

from foreword.layers.weights import Weights
from foreword.models.vision.vit import VisionTransformer, ViTConfig, read_vit_config
from foreword.weights.config_reader import ConfigReader


class Siglip(VisionTransformer):
    """vision_config of model_type `siglip_vision_model`"""

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

    def embed(self, patches: Tensor) -> Tensor:
        """[side * side, H] -> [side * side, H]"""
        return patches + self._position_embedding
