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

from foreword.core.images import PromptImage, compute_tiling
from tests.support.checkpoints import (
    COMMON,
    IMAGE_CHAT_TEMPLATE,
    Shapes,
    norm_shapes,
    random_weights,
    write_json,
    write_tokenizer,
)
from tests.support.checkpoints import FAMILIES as TEXT_FAMILIES
from tests.support.layouts import linear_shapes

IMAGE_TOKEN_ID = 270  # after the bytes, special tokens and merges
CLIP_COLOURS: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF_COLOURS: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
LLAVA_PREPROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
LAST_LAYER = re.compile(r"linear_2|merger.*(mlp\.2|linear_fc2)")  # of a projector
ImageGeometry = tuple[tuple[int, int, int, int], tuple[int, int, int], int]  # shape of pixels, grid, tokens


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
    image_geometry: Callable[[dict[str, Any], int, int], ImageGeometry]
    processor: Callable[[dict[str, Any]], dict[str, Any]]
    text_options: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)  # old name -> new name
    decoder: str = ""  # prefix of the decoder's tensors in the old layout
    is_flat: bool = False  # the old layout has the options of text_config at the top level
    has_old_names: bool = True  # the hub has an old layout
    special_tokens: tuple[str, ...] = ("<image>",)  # the first is the placeholder
    image_text: str = "<image>\n"  # of an image in the chat template


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
    spec = VISION_FAMILIES[family]
    spec = spec if text is None else replace(spec, text=text)
    config = _write_configs(path, spec, dtype, layout, **overrides)
    prefixes = {} if layout == "old" and spec.has_old_names else spec.prefixes
    weights = _random_vision_weights(spec, config, seed)
    tensors = {_rename(name, prefixes): value.to(getattr(torch, dtype)) for name, value in weights.items()}
    save_file(tensors, path / "model.safetensors")
    write_tokenizer(path, spec.special_tokens, IMAGE_CHAT_TEMPLATE.replace("IMAGE", spec.image_text))
    return path


def write_vision_config(path: Path, family: str = "llava", **overrides: Any) -> Path:
    """config.json and the preprocessor's config of write_vision_checkpoint() alone, in the new layout."""
    _write_configs(path, VISION_FAMILIES[family], "float32", "new", **overrides)
    return path


def _write_configs(
    path: Path, spec: VisionFamily, dtype: str, layout: str, **overrides: Any
) -> dict[str, Any]:
    """Returns config.json as of _make_config()."""
    path.mkdir(parents=True, exist_ok=True)
    config = _make_config(spec, dtype, **overrides)
    is_flat = spec.is_flat and layout == "old"
    write_json(path / "config.json", _flatten(config) if is_flat else _without_dots(config))
    write_json(path / "preprocessor_config.json", spec.preprocessor(config))
    write_json(path / "processor_config.json", spec.processor(config))
    return config


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


def _vit_shapes(vision: dict[str, Any]) -> Shapes:
    """A CLIP or SigLIP encoder, including the tensors that are not loaded: upper layers, last norm, head."""
    hidden, size, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    num_patches = (vision["image_size"] // patch) ** 2
    is_clip = vision["model_type"] == "clip_vision_model"
    result: Shapes = {"embeddings.class_embedding": (hidden,)} if is_clip else {}
    result["embeddings.patch_embedding.weight"] = (hidden, 3, patch, patch)
    if not is_clip:
        result["embeddings.patch_embedding.bias"] = (hidden,)
    result["embeddings.position_embedding.weight"] = (num_patches + is_clip, hidden)
    if is_clip:
        result |= norm_shapes("pre_layrnorm", hidden)
    for index in range(vision["num_hidden_layers"]):
        layer = f"encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            result |= linear_shapes(f"{layer}self_attn.{name}", hidden, hidden)
        result |= linear_shapes(f"{layer}mlp.fc1", size, hidden)
        result |= linear_shapes(f"{layer}mlp.fc2", hidden, size)
        result |= norm_shapes(f"{layer}layer_norm1", hidden) | norm_shapes(f"{layer}layer_norm2", hidden)
    result |= norm_shapes("post_layernorm", hidden)
    if vision.get("vision_use_head"):
        result["head.probe"] = (1, 1, hidden)
        result["head.attention.in_proj_weight"] = (3 * hidden, hidden)
        result["head.attention.in_proj_bias"] = (3 * hidden,)
        result |= linear_shapes("head.attention.out_proj", hidden, hidden)
        result |= norm_shapes("head.layernorm", hidden)
        result |= linear_shapes("head.mlp.fc1", size, hidden) | linear_shapes("head.mlp.fc2", hidden, size)
    return result


def llava_shapes(config: dict[str, Any]) -> Shapes:
    """Vision encoder, projector, and the newline of LLaVA-NeXT."""
    vision, text = config["vision_config"], config["text_config"]["hidden_size"]
    layers = config["vision_feature_layer"]
    inputs = vision["hidden_size"] * (len(layers) if isinstance(layers, list) else 1)
    bias = config.get("multimodal_projector_bias", True)
    return {
        **{f"vision_tower.vision_model.{name}": shape for name, shape in _vit_shapes(vision).items()},
        **linear_shapes("multi_modal_projector.linear_1", text, inputs, bias),
        **linear_shapes("multi_modal_projector.linear_2", text, text, bias),
        **({"image_newline": (text,)} if config["model_type"] == "llava_next" else {}),
    }


def llava_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    square = {"height": size, "width": size}
    if config["vision_config"]["model_type"] == "siglip_vision_model":
        options = {**HALF_COLOURS, "size": square, "image_processor_type": "SiglipImageProcessor"}
        return {**LLAVA_PREPROCESSOR, **options}
    options = {**CLIP_COLOURS, "crop_size": square, "do_center_crop": True, "size": {"shortest_edge": size}}
    if config["model_type"] == "llava":
        return {**LLAVA_PREPROCESSOR, **options, "image_processor_type": "CLIPImageProcessor"}
    options |= {"image_grid_pinpoints": config["image_grid_pinpoints"], "aspect_ratio_setting": "anyres"}
    return {
        **LLAVA_PREPROCESSOR,
        **options,
        "do_pad": True,
        "image_processor_type": "LlavaNextImageProcessor",
    }


def llava_processor(config: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "processor_class": "LlavaProcessor" if config["model_type"] == "llava" else "LlavaNextProcessor",
        "image_token": "<image>",
        "patch_size": vision["patch_size"],
        "num_additional_image_tokens": 1 if vision["model_type"] == "clip_vision_model" else 0,
        "vision_feature_select_strategy": config["vision_feature_select_strategy"],
    }


def llava_image_geometry(config: dict[str, Any], height: int, width: int) -> ImageGeometry:
    vision = config["vision_config"]
    size, side = vision["image_size"], vision["image_size"] // vision["patch_size"]
    if config["model_type"] == "llava_next":
        pinpoints = [(rows, columns) for rows, columns in config["image_grid_pinpoints"]]
        tiles = compute_tiling((height, width), pinpoints, size, side)
        tokens = side * side + tiles.num_tokens
        return (1 + math.prod(tiles.tile_grid), 3, size, size), (1, 1, tokens), tokens
    is_clip, strategy = vision["model_type"] == "clip_vision_model", config["vision_feature_select_strategy"]
    tokens = side * side + (is_clip and strategy == "full") - (not is_clip and strategy == "default")
    return (1, 3, size, size), (1, side, side), tokens


def qwen2_vl_shapes(config: dict[str, Any]) -> Shapes:
    """Biases everywhere except in the patch embedding."""
    vision = config["vision_config"]
    hidden, inner = vision["embed_dim"], vision["embed_dim"] * vision["mlp_ratio"]
    return {
        **_patch_shapes(vision, hidden),
        **_block_shapes(vision, hidden, {"fc1": (inner, hidden), "fc2": (hidden, inner)}),
        **norm_shapes("visual.merger.ln_q", hidden),
        **_merger_shapes(vision, hidden, vision["hidden_size"]),
    }


def qwen2_5_vl_shapes(config: dict[str, Any]) -> Shapes:
    """Norms without biases."""
    vision = config["vision_config"]
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        **_patch_shapes(vision, hidden),
        "visual.merger.ln_q.weight": (hidden,),
        **_block_shapes(vision, hidden, mlp, norm_bias=False),
        **_merger_shapes(vision, hidden, vision["out_hidden_size"]),
    }


def qwen3_vl_shapes(config: dict[str, Any]) -> Shapes:
    """A learned position embedding, and a merger for each DeepStack layer."""
    vision = config["vision_config"]
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    result: Shapes = {
        **_patch_shapes(vision, hidden),
        "visual.patch_embed.proj.bias": (hidden,),
        "visual.pos_embed.weight": (vision["num_position_embeddings"], hidden),
        **_block_shapes(vision, hidden, {"linear_fc1": (inner, hidden), "linear_fc2": (hidden, inner)}),
    }
    merged = hidden * vision["spatial_merge_size"] ** 2
    norm_sizes = {"visual.merger.": hidden}
    for index in range(len(vision["deepstack_visual_indexes"])):
        norm_sizes[f"visual.deepstack_merger_list.{index}."] = merged
    for prefix, norm_size in norm_sizes.items():
        result |= norm_shapes(f"{prefix}norm", norm_size)
        result |= linear_shapes(f"{prefix}linear_fc1", merged, merged)
        result |= linear_shapes(f"{prefix}linear_fc2", vision["out_hidden_size"], merged)
    return result


def _patch_shapes(vision: dict[str, Any], hidden: int) -> Shapes:
    patch = vision["patch_size"]
    shape = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    return {"visual.patch_embed.proj.weight": shape}


def _block_shapes(
    vision: dict[str, Any], hidden: int, mlp: dict[str, tuple[int, int]], norm_bias: bool = True
) -> Shapes:
    result: Shapes = {}
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}."
        result |= linear_shapes(f"{block}attn.qkv", 3 * hidden, hidden)
        result |= linear_shapes(f"{block}attn.proj", hidden, hidden)
        for name in ("norm1", "norm2"):
            weight_and_bias = norm_shapes(f"{block}{name}", hidden)
            result |= weight_and_bias if norm_bias else {f"{block}{name}.weight": (hidden,)}
        for name, (outputs, inputs) in mlp.items():
            result |= linear_shapes(f"{block}mlp.{name}", outputs, inputs)
    return result


def _merger_shapes(vision: dict[str, Any], hidden: int, outputs: int) -> Shapes:
    merged = hidden * vision["spatial_merge_size"] ** 2
    first = linear_shapes("visual.merger.mlp.0", merged, merged)
    return first | linear_shapes("visual.merger.mlp.2", outputs, merged)


def qwen_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    """Small images: 4 to 64 tokens. Qwen3-VL has the current option names."""
    vision = config["vision_config"]
    token = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    bounds = {"min_pixels": 4 * token, "max_pixels": 64 * token}
    is_qwen3 = config["model_type"] == "qwen3_vl"
    if is_qwen3:
        bounds = {"size": {"shortest_edge": bounds["min_pixels"], "longest_edge": bounds["max_pixels"]}}
    return {
        **bounds,
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        **(HALF_COLOURS if is_qwen3 else CLIP_COLOURS),
        "image_processor_type": "Qwen2VLImageProcessorFast" if is_qwen3 else "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if is_qwen3 else "Qwen2VLProcessor",
    }


def qwen_image_geometry(config: dict[str, Any], height: int, width: int) -> ImageGeometry:
    """Sides rounded to whole tokens, without the preprocessor's bounds."""
    vision = config["vision_config"]
    side = vision["patch_size"] * vision["spatial_merge_size"]
    rows, columns = (max(1, round(size / side)) for size in (height, width))
    return (1, 3, rows * side, columns * side), (1, rows, columns), rows * columns


VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": 7,
}
CLIP: dict[str, Any] = {
    **VIT,
    "model_type": "clip_vision_model",
    "num_hidden_layers": 3,
    "image_size": 28,
    "projection_dim": 16,
    "hidden_act": "quick_gelu",
}
SIGLIP: dict[str, Any] = {
    **VIT,
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 2,
    "image_size": 30,
    "hidden_act": "gelu_pytorch_tanh",
    "vision_use_head": False,
}
LLAVA_FAMILY = VisionFamily(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    text="llama",
    config={
        "ignore_index": -100,
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": 16,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
    },
    vision=CLIP,
    preprocessor=llava_preprocessor,
    shapes=llava_shapes,
    image_geometry=llava_image_geometry,
    processor=llava_processor,
    prefixes={
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.vision_model.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "image_newline": "model.image_newline",
    },
    decoder="language_model.",
)
QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_TEXT: dict[str, Any] = {"vocab_size": 280, "rope_theta": 1000000.0}  # more ids than tokens
QWEN2_ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN2_FAMILY = VisionFamily(
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    text="qwen2",
    config={
        "image_token_id": IMAGE_TOKEN_ID,
        "vision_start_token_id": 271,
        "vision_end_token_id": 272,
        "video_token_id": 273,
        "tie_word_embeddings": False,
    },
    vision={
        **QWEN_VISION,
        "model_type": "qwen2_vl",
        "embed_dim": 32,
        "hidden_size": 64,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
    },
    preprocessor=qwen_preprocessor,
    shapes=qwen2_vl_shapes,
    image_geometry=qwen_image_geometry,
    processor=lambda _: {"processor_class": "Qwen2VLProcessor"},
    text_options={**QWEN_TEXT, "model_type": "qwen2_vl_text", "rope_scaling": QWEN2_ROPE},
    prefixes={"model.": "model.language_model.", "visual.": "model.visual."},
    is_flat=True,
    special_tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    image_text="<|vision_start|><|image_pad|><|vision_end|>",
)
VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": LLAVA_FAMILY,
    "llava_siglip": replace(
        LLAVA_FAMILY,
        text="qwen2",
        config={**LLAVA_FAMILY.config, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        vision=SIGLIP,
    ),
    "llava_next": replace(
        LLAVA_FAMILY,
        architecture="LlavaNextForConditionalGeneration",
        model_type="llava_next",
        text="mistral",
        config={
            **LLAVA_FAMILY.config,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]],
            "use_image_newline_parameter": True,
        },
    ),
    "qwen2_vl": QWEN2_FAMILY,
    "qwen2_5_vl": replace(
        QWEN2_FAMILY,
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        vision={
            **QWEN_VISION,
            "model_type": "qwen2_5_vl",
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 52,
            "hidden_act": "silu",
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        shapes=qwen2_5_vl_shapes,
        processor=lambda _: {"processor_class": "Qwen2_5_VLProcessor"},
        text_options={**QWEN2_FAMILY.text_options, "model_type": "qwen2_5_vl_text"},
    ),
    "qwen3_vl": replace(
        QWEN2_FAMILY,
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        text="qwen3",
        vision={
            **QWEN_VISION,
            "model_type": "qwen3_vl",
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        shapes=qwen3_vl_shapes,
        processor=lambda _: {"processor_class": "Qwen3VLProcessor"},
        text_options={
            **QWEN_TEXT,
            "model_type": "qwen3_vl_text",
            "use_sliding_window": ...,
            "max_window_layers": ...,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        is_flat=False,
        has_old_names=False,
    ),
}
