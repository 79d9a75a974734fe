"""Options that the configs of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from foreword.models.common import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.vision.base import read_normalization, read_preprocessor_config
from foreword.models.vision.config_text import read_image_token_id
from foreword.models.vision.layers import ACTIVATIONS
from foreword.models.vision.qwen_block import QwenTowerConfig
from foreword.models.vision.qwen_decoder import IGNORED_TOKEN_KEYS

__all__ = [
    "QWEN_WEIGHT_PREFIXES",
    "read_block_indexes",
    "read_hidden_size",
    "read_qwen_image_token_id",
    "read_qwen_tower_config",
    "read_vision_config",
]

QWEN_WEIGHT_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.": ("model.language_model.", "language_model.model.", "model."),
        "lm_head.": ("lm_head.", "language_model.lm_head."),
        "visual.": ("model.visual.", "visual."),
    }
)
MAX_PATCH_SIZE = 1 << 8  # pixels of a side
MAX_MERGE_SIZE = 8
MAX_TEMPORAL_PATCH_SIZE = 16


def read_qwen_image_token_id(config: ConfigReader, decoder_config: DecoderConfig) -> int:
    """The placeholder's id. Other tokens are the template's affair."""
    for key in IGNORED_TOKEN_KEYS:
        config.get(key, None)
    return read_image_token_id(config, decoder_config)


def read_vision_config(config: ConfigReader) -> ConfigReader:
    """The `vision_config`."""
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
    """Checked; `hidden`, `intermediate` and `out` are read already, the others are what holds where the config does not say."""
    for key in ("in_channels", "in_chans"):
        vision.require_value(key, 3)
    vision.get("tokens_per_second", None)  # of films
    heads = vision.get_int("num_heads", 16)
    if hidden_size % (4 * heads):
        raise vision.error("num_heads", f"{heads} heads must share {hidden_size} values evenly, by fours")
    if out_hidden_size != decoder_config.hidden_size:
        raise vision.error(
            "out_hidden_size",
            f"is {out_hidden_size}, but the decoder's hidden_size is {decoder_config.hidden_size}",
        )
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
    """Values of a vector."""
    return vision.get_int(key, default, high=MAX_HIDDEN_SIZE)


def read_block_indexes(
    vision: ConfigReader, key: str, default: tuple[int, ...], depth: int
) -> tuple[int, ...]:
    """Numbers of blocks, ascending."""
    given = vision.get(key, list(default))
    if not isinstance(given, list) or not all(type(item) is int and 0 <= item < depth for item in given):
        raise vision.error(key, f"must be a list of numbers below depth {depth}, got {given!r:.60}")
    if given != sorted(set(given)):
        raise vision.error(key, f"must be ascending, got {given!r:.60}")
    return tuple(given)


def _read_theta(vision: ConfigReader) -> float:
    rope = vision.get_section("rope_parameters")
    if rope is None:
        return 10000.0
    rope.require_value("rope_type", "axial")
    theta = rope.get_float("rope_theta", 10000.0)
    rope.check_all_read()
    return theta
