"""Tiny checkpoints of models that see, in Hugging Face's format, and pictures for them.

Written without transformers, as tests/support/checkpoints.py is: random weights whose greedy outputs vary, and differ by the picture.
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
from tests.support.checkpoints import COMMON, EOS, random_weights, tokenizer
from tests.support.checkpoints import FAMILIES as TEXT_FAMILIES
from tests.support.llava_checkpoints import (
    CLIP,
    IMAGE_TOKEN,
    IMAGE_TOKEN_ID,
    LLAVA,
    LLAVA_PREFIXES,
    LLAVA_TEMPLATE,
    PINPOINTS,
    SIGLIP,
    anyres_preprocessor,
    clip_preprocessor,
    llava_image_geometry,
    llava_next_image_geometry,
    llava_next_shapes,
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

__all__ = ["IMAGE_TOKEN", "IMAGE_TOKEN_ID", "VISION_FAMILIES", "random_image", "write_vision_checkpoint"]

LAST = re.compile(r"linear_2|merger.*(mlp\.2|linear_fc2)")  # layer of a projector
Shapes = dict[str, tuple[int, ...]]
ImageGeometry = tuple[tuple[int, int, int, int], tuple[int, int, int], int]


@dataclass(frozen=True)
class VisionFamily:
    """What a checkpoint of one family holds.

    text            family of the decoder, as in tests/support/checkpoints.py
    config, vision  options of config.json, and of its vision_config
    preprocessor, processor  preprocessor_config.json and processor_config.json, made from the whole config
    shapes          names and shapes of all tensors outside of the decoder, made from the whole config
    picture         prepares a picture of a size: shape of the pixels, grid, tokens; made from the whole config
    prefixes        (old, new) beginnings of tensors' names: how they are written -> in the layout of transformers 5
    decoder         what stands before the names of the decoder's tensors, in the old layout
    flat            in the old layout the options of text_config stand at the top
    old             it is on the hub in a layout of its own
    specials        more special tokens; the first is the placeholder
    """

    architecture: str
    model_type: str
    text: str
    config: Mapping[str, Any]
    vision: Mapping[str, Any]
    preprocessor: Callable[[dict[str, Any]], dict[str, Any]]
    shapes: Callable[[dict[str, Any]], Shapes]
    image_geometry: Callable[[dict[str, Any], int, int], ImageGeometry]
    processor: Callable[[dict[str, Any]], dict[str, Any]]
    text_options: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=lambda: LLAVA_PREFIXES)
    decoder: str = "language_model."
    is_flat: bool = False
    has_old_names: bool = True
    special_tokens: tuple[str, ...] = (IMAGE_TOKEN,)
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
    """A checkpoint directory of a family with options of config.json overridden (... removes one, None writes null).

    layout     names of tensors: "old", as on the hub, or "new", as transformers 5 calls them
    text       another family of decoder than is usual
    overrides  `text_config` and `vision_config` are overridden option by option too
    """
    path.mkdir(parents=True, exist_ok=True)
    kind = VISION_FAMILIES[family]
    kind = kind if text is None else replace(kind, text=text)
    made = config_of(kind, dtype, **overrides)
    _write_json(
        path / "config.json", _flatten(made) if kind.is_flat and layout == "old" else _without_dots(made)
    )
    names = {} if layout == "old" and kind.has_old_names else kind.prefixes
    tensors = {_rename(name, names): value for name, value in vision_weights(kind, made, seed).items()}
    save_file(
        {name: value.to(getattr(torch, dtype)) for name, value in tensors.items()}, path / "model.safetensors"
    )
    _write_json(path / "preprocessor_config.json", kind.preprocessor(made))
    _write_json(path / "processor_config.json", kind.processor(made))
    _write_tokenizer(path, kind)
    return path


def config_of(kind: VisionFamily, dtype: str, **overrides: Any) -> dict[str, Any]:
    """config.json as a dictionary; options that are to be removed stand as `...`."""
    nested = {
        "text_config": {
            **COMMON,
            **TEXT_FAMILIES[kind.text],
            "model_type": kind.text,
            **kind.text_options,
            "torch_dtype": dtype,
        },
        "vision_config": dict(kind.vision),
    }
    for name, values in nested.items():
        values |= overrides.pop(name, {})
    config = {**kind.config, **nested, "torch_dtype": dtype, **overrides}
    return config | {"model_type": kind.model_type, "architectures": [kind.architecture]}


def vision_weights(kind: VisionFamily, config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """All tensors, by their old names, float32."""
    text = {**_without_dots(config["text_config"]), "model_type": kind.text}
    generator = torch.Generator().manual_seed(seed + 1)
    decoder = {f"{kind.decoder}{name}": value for name, value in random_weights(text, seed).items()}
    size = 0.3 if text["tie_word_embeddings"] else 1.0
    tower = {
        name: _scaled(name, torch.randn(shape, generator=generator), size)
        for name, shape in kind.shapes(config).items()
    }
    return {**decoder, **tower}


def random_image(path: Path, seed: int = 0, height: int = 40, width: int = 30) -> PromptImage:
    """A picture of random colours for the checkpoint in `path`, prepared as if it had been of this size."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    family = next(one for one in VISION_FAMILIES.values() if one.model_type == config["model_type"])
    shape, grid, num_tokens = family.image_geometry(config, height, width)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy().tobytes()
    digest = blake2b(pixels + repr((shape, height, width)).encode(), digest_size=16).digest()
    return PromptImage(digest, num_tokens, grid, (height, width), shape, pixels)


def _scaled(name: str, value: Tensor, size: float) -> Tensor:
    """Features as large as embeddings of tokens (`size`), so that neither drowns the other."""
    if name.endswith("bias"):
        return 0.3 * value
    if "position_embedding" in name or "class_embedding" in name or "pos_embed" in name:
        return value
    if "newline" in name:
        return value * size
    if value.dim() == 1:
        return 1 + 0.2 * value
    if LAST.search(name):
        value = (
            value * size * (0.2 if "linear_2" in name else 2.0)
        )  # a tower without a norm at its end shouts
    return value * (1.6 / math.sqrt(math.prod(value.shape[1:])))


def _write_tokenizer(path: Path, family: VisionFamily) -> None:
    made = tokenizer()
    made.add_special_tokens(list(family.special_tokens))
    made.save(str(path / "tokenizer.json"))
    special = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": family.chat_template,
        "add_bos_token": False,
    }
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    _write_json(path / "generation_config.json", {"bos_token_id": 256, "eos_token_id": EOS})


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


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        architecture="LlavaForConditionalGeneration",
        model_type="llava",
        text="llama",
        config=LLAVA,
        vision=CLIP,
        preprocessor=clip_preprocessor,
        shapes=llava_shapes,
        image_geometry=llava_image_geometry,
        processor=llava_processor,
    ),
    "llava_siglip": VisionFamily(
        architecture="LlavaForConditionalGeneration",
        model_type="llava",
        text="qwen2",
        config={**LLAVA, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        vision=SIGLIP,
        preprocessor=siglip_preprocessor,
        shapes=llava_shapes,
        image_geometry=llava_image_geometry,
        processor=llava_processor,
    ),
    "llava_next": VisionFamily(
        architecture="LlavaNextForConditionalGeneration",
        model_type="llava_next",
        text="mistral",
        config={**LLAVA, "image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True},
        vision=CLIP,
        preprocessor=anyres_preprocessor,
        shapes=llava_next_shapes,
        image_geometry=llava_next_image_geometry,
        processor=llava_processor,
    ),
    "qwen2_vl": VisionFamily(
        architecture="Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl",
        text="qwen2",
        config=QWEN_CONFIG,
        vision=QWEN2_VISION,
        preprocessor=qwen_preprocessor,
        shapes=qwen2_vl_shapes,
        image_geometry=qwen_image_geometry,
        processor=lambda _: {"processor_class": "Qwen2VLProcessor"},
        text_options={
            **QWEN_TEXT,
            "model_type": "qwen2_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        prefixes=QWEN_PREFIXES,
        decoder="",
        is_flat=True,
        special_tokens=QWEN_SPECIAL_TOKENS,
        chat_template=QWEN_TEMPLATE,
    ),
    "qwen2_5_vl": VisionFamily(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        text="qwen2",
        config=QWEN_CONFIG,
        vision=QWEN2_5_VISION,
        preprocessor=qwen_preprocessor,
        shapes=qwen2_5_vl_shapes,
        image_geometry=qwen_image_geometry,
        processor=lambda _: {"processor_class": "Qwen2_5_VLProcessor"},
        text_options={
            **QWEN_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        prefixes=QWEN_PREFIXES,
        decoder="",
        is_flat=True,
        special_tokens=QWEN_SPECIAL_TOKENS,
        chat_template=QWEN_TEMPLATE,
    ),
    "qwen3_vl": VisionFamily(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        text="qwen3",
        config=QWEN_CONFIG,
        vision=QWEN3_VISION,
        preprocessor=qwen_preprocessor,
        shapes=qwen3_vl_shapes,
        image_geometry=qwen_image_geometry,
        processor=lambda _: {"processor_class": "Qwen3VLProcessor"},
        text_options={
            **QWEN_TEXT,
            "model_type": "qwen3_vl_text",
            "use_sliding_window": ...,
            "max_window_layers": ...,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        prefixes=QWEN_PREFIXES,
        decoder="",
        has_old_names=False,
        special_tokens=QWEN_SPECIAL_TOKENS,
        chat_template=QWEN_TEMPLATE,
    ),
}
