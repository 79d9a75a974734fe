"""Tiny random vision-language checkpoints in Hugging Face's format, and images for them.

Weights are scaled so that greedy outputs vary and depend on the image.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.core.images import PromptImage
from tests.support.checkpoints import COMMON, Shapes, random_weights, write_json, write_tokenizer
from tests.support.checkpoints import FAMILIES as TEXT_FAMILIES
from tests.support.llava_checkpoints import (
    CLIP,
    IMAGE_TOKEN,
    LLAVA,
    LLAVA_PREFIXES,
    LLAVA_TEMPLATE,
    PINPOINTS,
    SIGLIP,
    anyres_preprocessor,
    clip_preprocessor,
    llava_image_geometry,
    llava_next_image_geometry,
    llava_processor,
    llava_shapes,
    siglip_preprocessor,
)
from tests.support.qwen_checkpoints import (
    QWEN2_5_VISION,
    QWEN2_VISION,
    QWEN3_VISION,
    QWEN_CONFIG,
    QWEN_PREFIXES,
    QWEN_SPECIAL_TOKENS,
    QWEN_TEMPLATE,
    QWEN_TEXT,
    qwen2_5_vl_shapes,
    qwen2_vl_shapes,
    qwen3_vl_shapes,
    qwen_image_geometry,
    qwen_preprocessor,
)

LAST_LAYER = re.compile(r"linear_2|merger.*(mlp\.2|linear_fc2)")  # of a projector
ImageGeometry = tuple[tuple[int, int, int, int], tuple[int, int, int], int]


@dataclass(frozen=True)
class VisionFamily:
    """Contents of a family's checkpoints. Functions take the whole config."""

    architecture: str
    model_type: str
    text: str  # family of the decoder in tests/support/checkpoints.py
    config: Mapping[str, Any]
    vision: Mapping[str, Any]  # vision_config
    preprocessor: Callable[[dict[str, Any]], dict[str, Any]]
    shapes: Callable[[dict[str, Any]], Shapes]  # tensors outside of the decoder
    image_geometry: Callable[[dict[str, Any], int, int], ImageGeometry]  # shape of pixels, grid, tokens
    processor: Callable[[dict[str, Any]], dict[str, Any]] = llava_processor
    text_options: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=lambda: LLAVA_PREFIXES)  # old name -> new name
    decoder: str = "language_model."  # prefix of the decoder's tensors in the old layout
    is_flat: bool = False  # the old layout has the options of text_config at the top level
    has_old_names: bool = True  # the hub has an old layout
    special_tokens: tuple[str, ...] = (IMAGE_TOKEN,)  # the first is the placeholder
    chat_template: str = LLAVA_TEMPLATE


def write_vision_checkpoint(
    path: Path,
    family: str = "llava",
    seed: int = 0,
    dtype: str = "float32",
    layout: str = "old",
    text: str | None = None,
    **overrides: Any,
) -> Path:
    """A checkpoint directory with options of config.json overridden (... removes one, None writes null).

    layout     names of tensors: "old", as on the hub, or "new", as in transformers 5
    text       another family of the decoder
    overrides  also of single options in `text_config` and `vision_config`
    """
    path.mkdir(parents=True, exist_ok=True)
    spec = VISION_FAMILIES[family]
    spec = spec if text is None else replace(spec, text=text)
    config = _make_config(spec, dtype, **overrides)
    is_flat = spec.is_flat and layout == "old"
    write_json(path / "config.json", _flatten(config) if is_flat else _without_dots(config))
    prefixes = {} if layout == "old" and spec.has_old_names else spec.prefixes
    weights = _random_vision_weights(spec, config, seed)
    tensors = {_rename(name, prefixes): value.to(getattr(torch, dtype)) for name, value in weights.items()}
    save_file(tensors, path / "model.safetensors")
    write_json(path / "preprocessor_config.json", spec.preprocessor(config))
    write_json(path / "processor_config.json", spec.processor(config))
    write_tokenizer(path, spec.special_tokens, spec.chat_template)
    return path


def _make_config(spec: VisionFamily, dtype: str, **overrides: Any) -> dict[str, Any]:
    """config.json, with `...` for options to be removed."""
    text = {**COMMON, **TEXT_FAMILIES[spec.text], "model_type": spec.text, **spec.text_options}
    nested = {"text_config": {**text, "torch_dtype": dtype}, "vision_config": dict(spec.vision)}
    for name, values in nested.items():
        values |= overrides.pop(name, {})
    config = {**spec.config, **nested, "torch_dtype": dtype, **overrides}
    return config | {"model_type": spec.model_type, "architectures": [spec.architecture]}


def _random_vision_weights(spec: VisionFamily, config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """All tensors by their old names, float32."""
    text = {**_without_dots(config["text_config"]), "model_type": spec.text}
    generator = torch.Generator().manual_seed(seed + 1)
    weights = {f"{spec.decoder}{name}": value for name, value in random_weights(text, seed).items()}
    size = 0.3 if text["tie_word_embeddings"] else 1.0
    for name, shape in spec.shapes(config).items():
        weights[name] = _scaled(name, torch.randn(shape, generator=generator), size)
    return weights


def random_image(path: Path, seed: int = 0, height: int = 40, width: int = 30) -> PromptImage:
    """Random pixels for the checkpoint in `path`, preprocessed as an image of this size."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    spec = next(spec for spec in VISION_FAMILIES.values() if spec.model_type == config["model_type"])
    shape, grid, num_tokens = spec.image_geometry(config, height, width)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy().tobytes()
    digest = blake2b(pixels + repr((shape, height, width)).encode(), digest_size=16).digest()
    return PromptImage(digest, num_tokens, grid, (height, width), shape, pixels)


def _scaled(name: str, value: Tensor, size: float) -> Tensor:
    """Features as large as token embeddings (`size`), so that both affect the output."""
    if name.endswith("bias"):
        return 0.3 * value
    if "position_embedding" in name or "class_embedding" in name or "pos_embed" in name:
        return value
    if "newline" in name:
        return value * size
    if value.dim() == 1:
        return 1 + 0.2 * value
    if LAST_LAYER.search(name):
        # LLaVA's encoder has no final norm, so its features are larger.
        value = value * size * (0.2 if "linear_2" in name else 2.0)
    return value * (1.6 / math.sqrt(math.prod(value.shape[1:])))


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    plain = _without_dots(config)
    return {**plain.pop("text_config"), **plain}


def _without_dots(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dots(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not ...
    }


LLAVA_FAMILY = VisionFamily(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    text="llama",
    config=LLAVA,
    vision=CLIP,
    preprocessor=clip_preprocessor,
    shapes=llava_shapes,
    image_geometry=llava_image_geometry,
)
QWEN2_ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN3_ROPE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
QWEN2_FAMILY = VisionFamily(
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    text="qwen2",
    config=QWEN_CONFIG,
    vision=QWEN2_VISION,
    preprocessor=qwen_preprocessor,
    shapes=qwen2_vl_shapes,
    image_geometry=qwen_image_geometry,
    processor=lambda _: {"processor_class": "Qwen2VLProcessor"},
    text_options={**QWEN_TEXT, "model_type": "qwen2_vl_text", "rope_scaling": QWEN2_ROPE},
    prefixes=QWEN_PREFIXES,
    decoder="",
    is_flat=True,
    special_tokens=QWEN_SPECIAL_TOKENS,
    chat_template=QWEN_TEMPLATE,
)
VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": LLAVA_FAMILY,
    "llava_siglip": replace(
        LLAVA_FAMILY,
        text="qwen2",
        config={**LLAVA, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        vision=SIGLIP,
        preprocessor=siglip_preprocessor,
    ),
    "llava_next": replace(
        LLAVA_FAMILY,
        architecture="LlavaNextForConditionalGeneration",
        model_type="llava_next",
        text="mistral",
        config={**LLAVA, "image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True},
        preprocessor=anyres_preprocessor,
        image_geometry=llava_next_image_geometry,
    ),
    "qwen2_vl": QWEN2_FAMILY,
    "qwen2_5_vl": replace(
        QWEN2_FAMILY,
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        vision=QWEN2_5_VISION,
        shapes=qwen2_5_vl_shapes,
        processor=lambda _: {"processor_class": "Qwen2_5_VLProcessor"},
        text_options={**QWEN_TEXT, "model_type": "qwen2_5_vl_text", "rope_scaling": QWEN2_ROPE},
    ),
    "qwen3_vl": replace(
        QWEN2_FAMILY,
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        text="qwen3",
        vision=QWEN3_VISION,
        shapes=qwen3_vl_shapes,
        processor=lambda _: {"processor_class": "Qwen3VLProcessor"},
        text_options={
            **QWEN_TEXT,
            "model_type": "qwen3_vl_text",
            "use_sliding_window": ...,
            "max_window_layers": ...,
            "rope_scaling": QWEN3_ROPE,
        },
        is_flat=False,
        has_old_names=False,
    ),
}
