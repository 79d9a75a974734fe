"""LLaVA-1.5 (arXiv 2310.03744): a tower that sees one square, and two layers between it and the decoder."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from torch import Tensor

from foreword.core.pictures import Picture
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, Tower
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.vision.base import Normalization, VisionModel, read_normalization, read_preprocessor
from foreword.models.vision.clip import CLIP
from foreword.models.vision.parts import ACTIVATIONS, FeedForward, dense, plain_kind
from foreword.models.vision.siglip import Siglip
from foreword.models.vision.text import read_image_token, read_text
from foreword.models.vision.vit import VisionTransformer, ViTConfig

__all__ = ["Llava", "LlavaConfig", "LlavaTower", "read_llava"]

TOWERS: Mapping[str, type[VisionTransformer]] = MappingProxyType({"clip_vision_model": CLIP, "siglip_vision_model": Siglip})
# A vision_config that is missing altogether means the tower of LLaVA-1.5.
DEFAULT_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
DROPPED = {"default": 1, "full": 0}  # first rows of a tile, as vision_feature_select_strategy says
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
    layers: tuple[int, ...]
    dropped: int
    activation: str
    bias: bool
    hidden: int
    normalization: Normalization

    @property
    def tile_tokens(self) -> int:
        """Of one tile."""
        return self.vit.rows - self.dropped


class LlavaTower:
    """The tower and the projector: sees tile by tile."""

    def __init__(self, config: LlavaConfig, ops: Ops, precision: Precision, weights: Weights, device: str) -> None:
        kind, tower = plain_kind(precision), weights.within("vision_tower.")
        self.width = config.hidden
        self.config = config
        self._device = device
        self._vit = config.vit_type(config.vit, ops, kind, precision.dtype, tower, max(config.layers))
        inner, inputs = weights.within("multi_modal_projector."), config.vit.hidden * len(config.layers)
        self._projector = FeedForward(
            dense(ops, inner, kind, inputs, {"linear_1": config.hidden}, config.bias),
            dense(ops, inner, kind, config.hidden, {"linear_2": config.hidden}, config.bias),
            config.activation,
        )
        self._projector_work = config.tile_tokens * config.hidden * (inputs + config.hidden)

    def encode(self, picture: Picture) -> Generator[int, None, Tensor]:
        """Features [num_tokens, width]; a piece is one layer and one tile."""
        side = self.config.vit.image_size
        assert picture.shape[2:] == (side, side), "a picture prepared for another tower"
        tiles = []
        for pixels in self.config.normalization.tensor(picture, self._device):
            seen = yield from self._vit.see(pixels, self.config.layers)
            tiles.append(self._projector(seen[self.config.dropped :]))
            yield self._projector_work
        features = self.arranged(tiles, picture)
        assert len(features) == picture.num_tokens, "a picture with another number of placeholders than features"
        return features

    def largest(self, max_tokens: int) -> Picture:
        """All pictures are alike."""
        return self._black(self.config.tile_tokens, (self.config.vit.image_size,) * 2, 1)

    def _black(self, num_tokens: int, size: tuple[int, int], num_tiles: int) -> Picture:
        """A picture of this size, cut into so many tiles."""
        shape = (num_tiles, 3, *(self.config.vit.image_size,) * 2)
        return Picture(bytes(16), num_tokens, (1, 1, num_tokens), size, shape, bytes(math.prod(shape)))

    def arranged(self, tiles: Sequence[Tensor], picture: Picture) -> Tensor:
        """Features of the tiles [tile_tokens, width] in the order of the picture's tokens."""
        (tile,) = tiles
        return tile


class Llava(VisionModel):
    """model_type `llava`"""

    PREFIXES: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
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

    def __init__(self, decoder_type: type[Decoder], decoder: DecoderConfig, image_token_id: int, config: LlavaConfig) -> None:
        super().__init__(decoder_type, decoder, image_token_id)
        self.config = config

    @classmethod
    def read(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        return cls(*read_llava(config, path))

    @property
    def unused(self) -> tuple[str, ...]:
        """Layers above the one that is read, and what comes behind them."""
        above = range(max(self.config.layers), self.config.vit.layers)
        names = (*self.config.vit_type.UNUSED, *(f"encoder.layers.{index}." for index in above))
        return tuple(f"vision_tower.{name}" for name in names)

    def tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> Tower:
        """Build the tower."""
        return LlavaTower(self.config, ops, precision, weights, device)


def read_llava(config: ConfigReader, path: Path) -> tuple[type[Decoder], DecoderConfig, int, LlavaConfig]:
    """What LLaVA-1.5 and its descendants have in common. Raises CheckpointError."""
    for key in ("ignore_index", "image_seq_length", "vocab_size"):  # of training, of processors, and of the text_config again
        config.raw(key, None)
    decoder_type, decoder = read_text(config, "llama")
    vit_type, vit = _read_tower(config)
    read = LlavaConfig(
        vit_type=vit_type,
        vit=vit,
        layers=_read_layers(config, vit.layers),
        dropped=DROPPED[config.choice("vision_feature_select_strategy", {name: name for name in DROPPED}, "default")],
        activation=config.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        bias=config.flag("multimodal_projector_bias", True),
        hidden=decoder.hidden,
        normalization=read_normalization(read_preprocessor(path)),
    )
    if read.tile_tokens < 1:
        raise config.refuse("vision_feature_select_strategy", "leaves nothing of a tile of one patch")
    return decoder_type, decoder, read_image_token(config, decoder), read


def _read_tower(config: ConfigReader) -> tuple[type[VisionTransformer], ViTConfig]:
    source = f"{config.source}: vision_config"
    vision = config.table("vision_config") or ConfigReader(DEFAULT_TOWER, source)
    name = vision.choice("model_type", {name: name for name in TOWERS}, "clip_vision_model")
    read = TOWERS[name].read(vision)
    vision.finish()
    return TOWERS[name], read


def _read_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, a number or several: 0 is what the first layer reads, -1 what the last one writes."""
    value = config.raw("vision_feature_layer", -2)
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= MAX_FEATURE_LAYERS or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in given
    ):
        raise config.refuse("vision_feature_layer", f"must be a number or 1 to {MAX_FEATURE_LAYERS} of them, got {value!r:.60}")
    for item in given:
        if not -num_layers - 1 <= item <= num_layers:
            raise config.refuse("vision_feature_layer", f"{item} is none of the tower's {num_layers} layers")
    return tuple(item if item >= 0 else num_layers + 1 + item for item in given)
