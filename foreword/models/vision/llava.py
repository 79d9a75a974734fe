"""LLaVA-1.5 (arXiv 2310.03744): a tower that sees one square, and two layers between it and the decoder."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, VisionEncoder
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.vision.base import (
    Normalization,
    VisionModel,
    read_normalization,
    read_preprocessor_config,
)
from foreword.models.vision.clip import CLIP
from foreword.models.vision.config_text import read_image_token_id, read_text_decoder
from foreword.models.vision.layers import ACTIVATIONS, VisionMLP, build_linear, unquantized_format
from foreword.models.vision.siglip import Siglip
from foreword.models.vision.vit import VisionTransformer, ViTConfig

__all__ = ["Llava", "LlavaConfig", "LlavaTower", "read_llava_config"]

VIT_TYPES: Mapping[str, type[VisionTransformer]] = MappingProxyType(
    {"clip_vision_model": CLIP, "siglip_vision_model": Siglip}
)
# A vision_config that is missing altogether means the tower of LLaVA-1.5.
DEFAULT_VISION_CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
NUM_DROPPED_ROWS = {"default": 1, "full": 0}  # first rows of a tile, as vision_feature_select_strategy says
MAX_FEATURE_LAYERS = 64


@dataclass(frozen=True, slots=True)
class LlavaConfig:
    """layers   behind so many of them the tower is read: side by side where there are several
    dropped     first rows of a tile that are left away
    activation  between the two layers of the projector
    hidden      of the decoder
    """

    vit_type: type[VisionTransformer]
    vit: ViTConfig
    feature_layers: tuple[int, ...]
    num_dropped_rows: int
    projector_activation: str
    projector_bias: bool
    hidden_size: int
    normalization: Normalization

    @property
    def tokens_per_tile(self) -> int:
        """Of one tile."""
        return self.vit.num_positions - self.num_dropped_rows


class LlavaTower:
    """The tower and the projector: sees tile by tile."""

    def __init__(
        self, config: LlavaConfig, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        kind, tower = unquantized_format(precision), weights.prefixed("vision_tower.")
        self.feature_size = config.hidden_size
        self.config = config
        self._device = device
        self._vit = config.vit_type(config.vit, ops, kind, precision.dtype, tower, max(config.feature_layers))
        inner, inputs = (
            weights.prefixed("multi_modal_projector."),
            config.vit.hidden_size * len(config.feature_layers),
        )
        self._projector = VisionMLP(
            build_linear(ops, inner, kind, inputs, {"linear_1": config.hidden_size}, config.projector_bias),
            build_linear(
                ops, inner, kind, config.hidden_size, {"linear_2": config.hidden_size}, config.projector_bias
            ),
            config.projector_activation,
        )
        self._projector_multiply_adds = (
            config.tokens_per_tile * config.hidden_size * (inputs + config.hidden_size)
        )

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, width]; a piece is one layer and one tile."""
        side = self.config.vit.image_size
        assert image.shape[2:] == (side, side), "a picture prepared for another tower"
        tiles = []
        for pixels in self.config.normalization.normalize(image, self._device):
            seen = yield from self._vit.encode_tile(pixels, self.config.feature_layers)
            tiles.append(self._projector(seen[self.config.num_dropped_rows :]))
            yield self._projector_multiply_adds
        features = self.arrange(tiles, image)
        assert len(features) == image.num_tokens, (
            "a picture with another number of placeholders than features"
        )
        return features

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """All pictures are alike."""
        return self._make_black_image(self.config.tokens_per_tile, (self.config.vit.image_size,) * 2, 1)

    def _make_black_image(self, num_tokens: int, size: tuple[int, int], num_tiles: int) -> PromptImage:
        """A picture of this size, cut into so many tiles."""
        shape = (num_tiles, 3, *(self.config.vit.image_size,) * 2)
        return PromptImage(bytes(16), num_tokens, (1, 1, num_tokens), size, shape, bytes(math.prod(shape)))

    def arrange(self, tiles: Sequence[Tensor], image: PromptImage) -> Tensor:
        """Features of the tiles [tile_tokens, width] in the order of the picture's tokens."""
        (tile,) = tiles
        return tile


class Llava(VisionModel):
    """model_type `llava`"""

    WEIGHT_PREFIXES: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "model.": ("model.language_model.", "language_model.model."),
            "lm_head.": ("lm_head.", "language_model.lm_head."),
            "vision_tower.": (
                "model.vision_tower.vision_model.",
                "model.vision_tower.",
                "vision_tower.vision_model.",
                "vision_tower.",
            ),
            "multi_modal_projector.": ("model.multi_modal_projector.", "multi_modal_projector."),
            "image_newline": ("model.image_newline", "image_newline"),
        }
    )

    def __init__(
        self,
        decoder_type: type[Decoder],
        decoder_config: DecoderConfig,
        image_token_id: int,
        config: LlavaConfig,
    ) -> None:
        super().__init__(decoder_type, decoder_config, image_token_id)
        self.config = config

    @classmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        return cls(*read_llava_config(config, path))

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Layers above the one that is read, and what comes behind them."""
        above = range(max(self.config.feature_layers), self.config.vit.num_layers)
        names = (*self.config.vit_type.IGNORED_PREFIXES, *(f"encoder.layers.{index}." for index in above))
        return tuple(f"vision_tower.{name}" for name in names)

    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        """Build the tower."""
        return LlavaTower(self.config, ops, precision, weights, device)


def read_llava_config(
    config: ConfigReader, path: Path
) -> tuple[type[Decoder], DecoderConfig, int, LlavaConfig]:
    """What LLaVA-1.5 and its descendants have in common. Raises CheckpointError."""
    for key in (
        "ignore_index",
        "image_seq_length",
        "vocab_size",
    ):  # of training, of processors, and of the text_config again
        config.get(key, None)
    decoder_type, decoder = read_text_decoder(config, "llama")
    vit_type, vit = _read_vit(config)
    read = LlavaConfig(
        vit_type=vit_type,
        vit=vit,
        feature_layers=_read_feature_layers(config, vit.num_layers),
        num_dropped_rows=NUM_DROPPED_ROWS[
            config.get_choice(
                "vision_feature_select_strategy", {name: name for name in NUM_DROPPED_ROWS}, "default"
            )
        ],
        projector_activation=config.get_choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        projector_bias=config.get_bool("multimodal_projector_bias", True),
        hidden_size=decoder.hidden_size,
        normalization=read_normalization(read_preprocessor_config(path)),
    )
    if read.tokens_per_tile < 1:
        raise config.error("vision_feature_select_strategy", "leaves nothing of a tile of one patch")
    return decoder_type, decoder, read_image_token_id(config, decoder), read


def _read_vit(config: ConfigReader) -> tuple[type[VisionTransformer], ViTConfig]:
    source = f"{config.source}: vision_config"
    vision = config.get_section("vision_config") or ConfigReader(DEFAULT_VISION_CONFIG, source)
    name = vision.get_choice("model_type", {name: name for name in VIT_TYPES}, "clip_vision_model")
    read = VIT_TYPES[name].read_config(vision)
    vision.check_all_read()
    return VIT_TYPES[name], read


def _read_feature_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, a number or several: 0 is what the first layer reads, -1 what the last one writes."""
    value = config.get("vision_feature_layer", -2)
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= MAX_FEATURE_LAYERS or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in given
    ):
        raise config.error(
            "vision_feature_layer",
            f"must be a number or 1 to {MAX_FEATURE_LAYERS} of them, got {value!r:.60}",
        )
    for item in given:
        if not -num_layers - 1 <= item <= num_layers:
            raise config.error("vision_feature_layer", f"{item} is none of the tower's {num_layers} layers")
    return tuple(item if item >= 0 else num_layers + 1 + item for item in given)
