"""LLaVA-1.5 (arXiv 2310.03744): a vision encoder for one square image, and a projector of two layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.architectures import read_decoder
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision
from foreword.models.vision.vision_layers import ACTIVATIONS, VisionMLP, unquantized_format
from foreword.models.vision.vision_model import (
    BuildTower,
    Normalization,
    VisionModel,
    read_image_token_id,
    read_normalization,
    read_preprocessor_config,
)
from foreword.models.vision.vit import CLIP, Siglip, VisionTransformer, ViTConfig
from foreword.weights.config_reader import ConfigReader, read_text_config

VIT_TYPES: Mapping[str, type[VisionTransformer]] = MappingProxyType(
    {"clip_vision_model": CLIP, "siglip_vision_model": Siglip}
)
# vision_config of LLaVA-1.5, used where config.json has none.
DEFAULT_VISION_CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
NUM_DROPPED_ROWS = {"default": 1, "full": 0}  # first rows of a tile, by vision_feature_select_strategy
MAX_FEATURE_LAYERS = 64
IGNORED_KEYS = (
    "ignore_index",
    "image_seq_length",
    "vocab_size",
)  # options of training, processors and text_config

WEIGHT_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
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


@dataclass(frozen=True, slots=True)
class LlavaConfig:
    """Vision encoder and projector of a LLaVA checkpoint."""

    vit_type: type[VisionTransformer]
    vit: ViTConfig
    feature_layers: tuple[int, ...]  # features are the outputs after these layers, concatenated
    num_dropped_rows: int  # first rows of a tile that are dropped: the class token
    projector_activation: str
    projector_bias: bool
    hidden_size: int  # the decoder's
    normalization: Normalization

    @property
    def tokens_per_tile(self) -> int:
        return self.vit.num_positions - self.num_dropped_rows


class LlavaTower:
    """Vision encoder and projector, applied tile by tile."""

    def __init__(
        self, config: LlavaConfig, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        weight_format, tower = unquantized_format(precision), weights.prefixed("vision_tower.")
        self.feature_size = config.hidden_size
        self.config = config
        self._device = device
        num_layers = max(config.feature_layers)
        self._vit = config.vit_type(config.vit, ops, weight_format, precision.dtype, tower, num_layers)
        hidden, inputs = config.hidden_size, config.vit.hidden_size * len(config.feature_layers)
        self._projector = VisionMLP(
            ops,
            weights.prefixed("multi_modal_projector."),
            weight_format,
            inputs,
            {"linear_1": hidden, "linear_2": hidden},
            config.projector_activation,
            config.projector_bias,
        )
        self._projector_multiply_adds = config.tokens_per_tile * hidden * (inputs + hidden)

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, feature_size]; one piece is one layer of one tile."""
        side = self.config.vit.image_size
        assert image.shape[2:] == (side, side), "image preprocessed for another vision encoder"
        tiles = []
        for pixels in self.config.normalization.normalize(image, self._device):
            hidden = yield from self._vit.encode_tile(pixels, self.config.feature_layers)
            tiles.append(self._projector(hidden[self.config.num_dropped_rows :]))
            yield self._projector_multiply_adds
        features = self.arrange(tiles, image)
        assert len(features) == image.num_tokens, "number of features differs from the placeholders"
        return features

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """Every image takes the same memory."""
        return self._make_black_image(self.config.tokens_per_tile, (self.config.vit.image_size,) * 2, 1)

    def _make_black_image(self, num_tokens: int, size: tuple[int, int], num_tiles: int) -> PromptImage:
        shape = (num_tiles, 3, *(self.config.vit.image_size,) * 2)
        return PromptImage(bytes(16), num_tokens, (1, 1, num_tokens), size, shape, bytes(math.prod(shape)))

    def arrange(self, tiles: Sequence[Tensor], image: PromptImage) -> Tensor:
        """Features of the tiles, each [tokens_per_tile, feature_size], in the order of the placeholders."""
        (tile,) = tiles
        return tile


def read_llava(config: ConfigReader, path: Path) -> VisionModel:
    """model_type `llava`"""
    return read_llava_model(config, path, lambda llava: partial(LlavaTower, llava))


def read_llava_model(
    config: ConfigReader, path: Path, make_tower: Callable[[LlavaConfig], BuildTower]
) -> VisionModel:
    """Read the options that LLaVA-1.5 and LLaVA-NeXT share. Raises CheckpointError."""
    for key in IGNORED_KEYS:
        config.get(key, None)
    decoder_type, decoder = _read_text_decoder(config)
    vit_type, vit = _read_vit(config)
    strategy = config.get_choice("vision_feature_select_strategy", tuple(NUM_DROPPED_ROWS), "default")
    llava = LlavaConfig(
        vit_type=vit_type,
        vit=vit,
        feature_layers=_read_feature_layers(config, vit.num_layers),
        num_dropped_rows=NUM_DROPPED_ROWS[strategy],
        projector_activation=config.get_choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        projector_bias=config.get_bool("multimodal_projector_bias", True),
        hidden_size=decoder.hidden_size,
        normalization=read_normalization(read_preprocessor_config(path)),
    )
    if llava.tokens_per_tile < 1:
        raise config.error("vision_feature_select_strategy", "leaves no token of a tile of one patch")
    above = range(max(llava.feature_layers), vit.num_layers)  # layers after the last feature layer
    ignored = (*vit_type.IGNORED_PREFIXES, *(f"encoder.layers.{index}." for index in above))
    return VisionModel(
        decoder_type,
        decoder,
        read_image_token_id(config, decoder),
        WEIGHT_PREFIXES,
        make_tower(llava),
        tuple(f"vision_tower.{name}" for name in ignored),
    )


def _read_text_decoder(config: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    """Read `text_config`; data type and tying of the outer config override it. Raises CheckpointError.

    The head belongs to the whole model in transformers, so softcap and scale of text_config do not apply.
    """
    architecture, decoder = read_decoder(read_text_config(config), "llama")
    if decoder.per_layer_size:
        raise config.error("text_config", "has per-layer embeddings, of which images have none")
    if decoder.head_bias:
        raise config.error(
            "text_config", f"{decoder.architecture} has a bias in its head, and LLaVA has none"
        )
    tied = config.get_bool("tie_word_embeddings", False) or decoder.tie_word_embeddings
    dtype = config.get_dtype() if "dtype" in config or "torch_dtype" in config else decoder.dtype
    return architecture, replace(
        decoder, tie_word_embeddings=tied, dtype=dtype, logit_softcap=None, logit_scale=1.0
    )


def _read_vit(config: ConfigReader) -> tuple[type[VisionTransformer], ViTConfig]:
    source = f"{config.source}: vision_config"
    vision = config.get_section("vision_config") or ConfigReader(DEFAULT_VISION_CONFIG, source)
    name = vision.get_choice("model_type", tuple(VIT_TYPES), "clip_vision_model")
    vit = VIT_TYPES[name].read_config(vision)
    vision.check_all_read()
    return VIT_TYPES[name], vit


def _read_feature_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, one or several: 0 is the input of the first layer, -1 the last output."""
    value = config.get("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    if not 1 <= len(layers) <= MAX_FEATURE_LAYERS or not all(type(layer) is int for layer in layers):
        reason = f"must be a number or 1 to {MAX_FEATURE_LAYERS} of them, got {value!r:.60}"
        raise config.error("vision_feature_layer", reason)
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise config.error("vision_feature_layer", f"{layer} is none of the tower's {num_layers} layers")
    return tuple(layer if layer >= 0 else num_layers + 1 + layer for layer in layers)
