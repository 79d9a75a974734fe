"""Configs of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a decoder with M-RoPE, and the vision encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from foreword.kernels.ops import MRopeSections
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_rope,
)
from foreword.models.qwen2 import read_qwen_layer_windows
from foreword.models.qwen3 import HEAD_DIM
from foreword.models.vision.qwen_tower import QwenTowerConfig
from foreword.models.vision.vision_layers import ACTIVATIONS
from foreword.models.vision.vision_model import (
    BuildTower,
    VisionModel,
    read_image_token_id,
    read_normalization,
    read_preprocessor_config,
)
from foreword.weights.config_reader import ConfigReader, read_text_config

QWEN_WEIGHT_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.": ("model.language_model.", "language_model.model.", "model."),
        "lm_head.": ("lm_head.", "language_model.lm_head."),
        "visual.": ("model.visual.", "visual."),
    }
)
QWEN2_MROPE_SECTIONS = MRopeSections((16, 24, 24))
QWEN3_MROPE_SECTIONS = MRopeSections((24, 20, 20), interleaved=True)
# Tokens that the chat template writes; the model needs only image_token_id.
IGNORED_TOKEN_KEYS = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
QWEN2_THETA, QWEN3_THETA = 1000000.0, 500000.0  # defaults of rope_theta
MAX_PATCH_SIZE = 1 << 8  # pixels of a side
MAX_MERGE_SIZE = 8  # patches of a side
MAX_TEMPORAL_PATCH_SIZE = 16


def read_qwen2_decoder(config: ConfigReader) -> DecoderConfig:
    """Decoder of Qwen2-VL and Qwen2.5-VL: options at the top level, or in `text_config` in newer files."""
    text = read_text_config(config)
    if text is config:
        return _read_qwen2(config)
    return _merge_text_config(config, text, _read_qwen2(text))


def read_qwen3_decoder(config: ConfigReader) -> DecoderConfig:
    """Decoder of Qwen3-VL."""
    text = read_text_config(config)
    if text is config:
        raise config.error("text_config", "is missing")
    context_length = text.get_int("max_position_embeddings")
    rope = read_rope(text, read_head_dim(text, HEAD_DIM), context_length, QWEN3_THETA, QWEN3_MROPE_SECTIONS)
    layer_types = [LayerType(window, rope) for window in read_qwen_layer_windows(text)]
    decoder = read_decoder_config(
        text,
        "qwen3_vl",
        layer_types=layer_types,
        head_dim=HEAD_DIM,
        bias_key="attention_bias",
        qk_norm=QKNorm(),
    )
    return _merge_text_config(config, text, decoder)


def _read_qwen2(config: ConfigReader) -> DecoderConfig:
    context_length = config.get_int("max_position_embeddings")
    rope = read_rope(config, read_head_dim(config), context_length, QWEN2_THETA, QWEN2_MROPE_SECTIONS)
    layer_types = [LayerType(window, rope) for window in read_qwen_layer_windows(config)]
    return read_decoder_config(config, "qwen2_vl", layer_types=layer_types, qkv_bias=True)


def _merge_text_config(
    config: ConfigReader, text: ConfigReader, decoder_config: DecoderConfig
) -> DecoderConfig:
    """Options that may be on either level; some files repeat all of text_config at the top level."""
    for key in ("image_token_id", *IGNORED_TOKEN_KEYS):
        text.get(key, None)
    text.check_all_read()
    config.ignore_repeats_of(text)
    tied = config.get_bool("tie_word_embeddings", False) or decoder_config.tie_word_embeddings
    return replace(
        decoder_config,
        tie_word_embeddings=tied,
        dtype=decoder_config.dtype if "dtype" in text or "torch_dtype" in text else config.get_dtype(),
    )


def make_qwen_model(
    config: ConfigReader,
    vision: ConfigReader,
    decoder_type: type[Decoder],
    decoder_config: DecoderConfig,
    build_tower: BuildTower,
) -> VisionModel:
    """The model, when all options of the vision_config are read. Raises CheckpointError."""
    vision.check_all_read()
    for key in IGNORED_TOKEN_KEYS:
        config.get(key, None)
    token_id = read_image_token_id(config, decoder_config)
    return VisionModel(decoder_type, decoder_config, token_id, QWEN_WEIGHT_PREFIXES, build_tower)


def read_vision_config(config: ConfigReader) -> ConfigReader:
    vision = config.get_section("vision_config")
    if vision is None:
        raise config.error("vision_config", "is missing")
    return vision


def read_qwen_tower_config(
    vision: ConfigReader,
    decoder_config: DecoderConfig,
    path: Path,
    *,
    depth: int = 32,
    hidden_size: int,
    intermediate_size: int,
    out_hidden_size: int,
    patch_size: int = 14,
    activation: str,
) -> QwenTowerConfig:
    """Read and check a vision_config; depth, patch_size and activation are defaults."""
    for key in ("in_channels", "in_chans"):
        vision.require_value(key, 3)
    vision.get("tokens_per_second", None)  # for videos only
    heads = vision.get_int("num_heads", 16)
    if hidden_size % (4 * heads):
        raise vision.error("num_heads", f"{heads} heads must divide hidden_size {hidden_size} by fours")
    if out_hidden_size != decoder_config.hidden_size:
        reason = f"is {out_hidden_size}, but the decoder's hidden_size is {decoder_config.hidden_size}"
        raise vision.error("out_hidden_size", reason)
    size = vision.get_int("patch_size", patch_size, high=MAX_PATCH_SIZE)
    vision.require_value("spatial_patch_size", size)
    return QwenTowerConfig(
        depth=vision.get_int("depth", depth, high=MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=heads,
        intermediate_size=intermediate_size,
        out_hidden_size=out_hidden_size,
        patch_size=size,
        temporal_patch_size=vision.get_int("temporal_patch_size", 2, high=MAX_TEMPORAL_PATCH_SIZE),
        merge_size=vision.get_int("spatial_merge_size", 2, high=MAX_MERGE_SIZE),
        rope_theta=_read_theta(vision),
        activation=vision.get_choice("hidden_act", ACTIVATIONS, activation),
        normalization=read_normalization(read_preprocessor_config(path)),
    )


def read_hidden_size(vision: ConfigReader, key: str, default: int) -> int:
    return vision.get_int(key, default, high=MAX_HIDDEN_SIZE)


def read_block_indexes(
    vision: ConfigReader, key: str, default: tuple[int, ...], depth: int
) -> tuple[int, ...]:
    """Block indexes, ascending."""
    blocks = vision.get(key, list(default))
    if not isinstance(blocks, list) or not all(type(item) is int and 0 <= item < depth for item in blocks):
        raise vision.error(key, f"must be a list of numbers below depth {depth}, got {blocks!r:.60}")
    if blocks != sorted(set(blocks)):
        raise vision.error(key, f"must be ascending, got {blocks!r:.60}")
    return tuple(blocks)


def _read_theta(vision: ConfigReader) -> float:
    rope = vision.get_section("rope_parameters")
    if rope is None:
        return 10000.0
    rope.require_value("rope_type", "axial")
    theta = rope.get_float("rope_theta", 10000.0)
    rope.check_all_read()
    return theta
