"""Configs, tensor shapes and image geometry of tiny LLaVA and LLaVA-NeXT checkpoints."""

from __future__ import annotations

import math
from typing import Any

from foreword.core.anyres_tiles import compute_tiling
from tests.support.checkpoints import IMAGE_CHAT_TEMPLATE, Shapes, linear_shapes, norm_shapes

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = 270  # after the bytes, special tokens and merges
LLAVA_TEMPLATE = IMAGE_CHAT_TEMPLATE.replace("IMAGE", "<image>\n")
LLAVA_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 16,
    "hidden_act": "quick_gelu",
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 30,
    "patch_size": 7,
    "hidden_act": "gelu_pytorch_tanh",
    "vision_use_head": False,
}
LLAVA: dict[str, Any] = {
    "ignore_index": -100,
    "image_token_index": IMAGE_TOKEN_ID,
    "image_seq_length": 16,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]
NORMALIZATION: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
ImageGeometry = tuple[tuple[int, int, int, int], tuple[int, int, int], int]


def _vit_shapes(vision: dict[str, Any]) -> Shapes:
    """A CLIP or SigLIP encoder, including the tensors that are not loaded: upper layers, last norm, head."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    num_patches = (vision["image_size"] // patch) ** 2
    is_clip = vision["model_type"] == "clip_vision_model"
    result: Shapes = {"embeddings.class_embedding": (hidden,)} if is_clip else {}
    result["embeddings.patch_embedding.weight"] = (hidden, 3, patch, patch)
    if not is_clip:
        result["embeddings.patch_embedding.bias"] = (hidden,)
    result["embeddings.position_embedding.weight"] = (num_patches + is_clip, hidden)
    if is_clip:
        result |= norm_shapes("pre_layrnorm", hidden)
    result |= {**_encoder(vision), **norm_shapes("post_layernorm", hidden)}
    return {**result, **(_siglip_head(vision) if vision.get("vision_use_head") else {})}


def _siglip_head(vision: dict[str, Any]) -> Shapes:
    hidden, size = vision["hidden_size"], vision["intermediate_size"]
    return {
        "head.probe": (1, 1, hidden),
        "head.attention.in_proj_weight": (3 * hidden, hidden),
        "head.attention.in_proj_bias": (3 * hidden,),
        **linear_shapes("head.attention.out_proj", hidden, hidden),
        **norm_shapes("head.layernorm", hidden),
        **linear_shapes("head.mlp.fc1", size, hidden),
        **linear_shapes("head.mlp.fc2", hidden, size),
    }


def _encoder(vision: dict[str, Any]) -> Shapes:
    hidden, size = vision["hidden_size"], vision["intermediate_size"]
    result: Shapes = {}
    for index in range(vision["num_hidden_layers"]):
        layer = f"encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            result |= linear_shapes(f"{layer}self_attn.{name}", hidden, hidden)
        result |= linear_shapes(f"{layer}mlp.fc1", size, hidden)
        result |= linear_shapes(f"{layer}mlp.fc2", hidden, size)
        result |= norm_shapes(f"{layer}layer_norm1", hidden) | norm_shapes(f"{layer}layer_norm2", hidden)
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


def clip_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    square = {"height": size, "width": size}
    crop = {"crop_size": square, "do_center_crop": True, "size": {"shortest_edge": size}}
    return {**NORMALIZATION, **crop, "image_processor_type": "CLIPImageProcessor"}


def siglip_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return {
        **NORMALIZATION,
        **colours,
        "size": {"height": size, "width": size},
        "image_processor_type": "SiglipImageProcessor",
    }


def anyres_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    more = {
        "aspect_ratio_setting": "anyres",
        "do_pad": True,
        "image_grid_pinpoints": config["image_grid_pinpoints"],
    }
    return {**clip_preprocessor(config), **more, "image_processor_type": "LlavaNextImageProcessor"}


def llava_processor(config: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "processor_class": "LlavaProcessor" if config["model_type"] == "llava" else "LlavaNextProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": vision["patch_size"],
        "num_additional_image_tokens": 1 if vision["model_type"] == "clip_vision_model" else 0,
        "vision_feature_select_strategy": config["vision_feature_select_strategy"],
    }


def llava_image_geometry(config: dict[str, Any], height: int, width: int) -> ImageGeometry:
    vision = config["vision_config"]
    size, side = vision["image_size"], vision["image_size"] // vision["patch_size"]
    tokens = side * side
    if vision["model_type"] == "clip_vision_model":
        tokens += config["vision_feature_select_strategy"] == "full"
    else:
        tokens -= config["vision_feature_select_strategy"] == "default"
    return (1, 3, size, size), (1, side, side), tokens


def llava_next_image_geometry(config: dict[str, Any], height: int, width: int) -> ImageGeometry:
    vision = config["vision_config"]
    size, side = vision["image_size"], vision["image_size"] // vision["patch_size"]
    pinpoints = [(rows, columns) for rows, columns in config["image_grid_pinpoints"]]
    tiles = compute_tiling((height, width), pinpoints, size, side)
    tokens = side * side + tiles.num_tokens
    return (1 + math.prod(tiles.tile_grid), 3, size, size), (1, 1, tokens), tokens
