"""Options that the configs of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from foreword.models.common import MAX_LAYERS, MAX_WIDTH
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.vision.base import read_normalization, read_preprocessor
from foreword.models.vision.parts import ACTIVATIONS
from foreword.models.vision.qwen_block import QwenTowerConfig
from foreword.models.vision.qwen_text import OTHER_TOKENS
from foreword.models.vision.text import read_image_token

__all__ = ["QWEN_PREFIXES", "read_blocks", "read_qwen_tokens", "read_qwen_tower", "read_vision", "read_width"]

QWEN_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.": ("model.language_model.", "language_model.model.", "model."),
        "lm_head.": ("lm_head.", "language_model.lm_head."),
        "visual.": ("model.visual.", "visual."),
    }
)
MAX_PATCH = 1 << 8  # pixels of a side
MAX_MERGE = 8
MAX_FRAMES = 16


def read_qwen_tokens(config: ConfigReader, decoder: DecoderConfig) -> int:
    """The placeholder's id. Other tokens are the template's affair."""
    for key in OTHER_TOKENS:
        config.raw(key, None)
    return read_image_token(config, decoder)


def read_vision(config: ConfigReader) -> ConfigReader:
    """The `vision_config`."""
    vision = config.table("vision_config")
    if vision is None:
        raise config.refuse("vision_config", "is missing")
    return vision


def read_qwen_tower(
    vision: ConfigReader,
    decoder: DecoderConfig,
    path: Path,
    *,
    depth: int = 32,
    hidden: int,
    intermediate: int,
    out: int,
    patch: int = 14,
    activation: str,
) -> QwenTowerConfig:
    """Checked; `hidden`, `intermediate` and `out` are read already, the others are what holds where the config does not say."""
    for key in ("in_channels", "in_chans"):
        vision.expect(key, 3)
    vision.raw("tokens_per_second", None)  # of films
    heads = vision.whole("num_heads", 16)
    if hidden % (4 * heads):
        raise vision.refuse("num_heads", f"{heads} heads must share {hidden} values evenly, by fours")
    if out != decoder.hidden:
        raise vision.refuse("out_hidden_size", f"is {out}, but the decoder's hidden_size is {decoder.hidden}")
    size = vision.whole("patch_size", patch, high=MAX_PATCH)
    vision.expect("spatial_patch_size", size)
    return QwenTowerConfig(
        depth=vision.whole("depth", depth, high=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        out=out,
        patch=size,
        frames=vision.whole("temporal_patch_size", 2, high=MAX_FRAMES),
        merge=vision.whole("spatial_merge_size", 2, high=MAX_MERGE),
        theta=_read_theta(vision),
        activation=vision.choice("hidden_act", ACTIVATIONS, activation),
        normalization=read_normalization(read_preprocessor(path)),
    )


def read_width(vision: ConfigReader, key: str, default: int) -> int:
    """Values of a vector."""
    return vision.whole(key, default, high=MAX_WIDTH)


def read_blocks(vision: ConfigReader, key: str, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Numbers of blocks, ascending."""
    given = vision.raw(key, list(default))
    if not isinstance(given, list) or not all(type(item) is int and 0 <= item < depth for item in given):
        raise vision.refuse(key, f"must be a list of numbers below depth {depth}, got {given!r:.60}")
    if given != sorted(set(given)):
        raise vision.refuse(key, f"must be ascending, got {given!r:.60}")
    return tuple(given)


def _read_theta(vision: ConfigReader) -> float:
    rope = vision.table("rope_parameters")
    if rope is None:
        return 10000.0
    rope.expect("rope_type", "axial")
    theta = rope.number("rope_theta", 10000.0)
    rope.finish()
    return theta
