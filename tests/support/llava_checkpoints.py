"""What tests/support/vision_checkpoints.py needs to know of LLaVA and LLaVA-NeXT."""

from __future__ import annotations

import math
from typing import Any

from foreword.core.images import compute_tiling

__all__ = [
    "CLIP",
    "IMAGE_TOKEN",
    "IMAGE_TOKEN_ID",
    "LLAVA",
    "LLAVA_PREFIXES",
    "LLAVA_TEMPLATE",
    "PINPOINTS",
    "SIGLIP",
    "anyres_preprocessor",
    "clip_preprocessor",
    "llava_image_geometry",
    "llava_next_image_geometry",
    "llava_next_shapes",
    "llava_processor",
    "llava_shapes",
    "siglip_preprocessor",
]

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = 270  # behind the bytes, the special tokens and the merges
LLAVA_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
Shapes = dict[str, tuple[int, ...]]
ImageGeometry = tuple[tuple[int, int, int, int], tuple[int, int, int], int]


def clip_shapes(config: dict[str, Any]) -> Shapes:
    """A CLIP tower, with what nobody needs: the layers above the feature layer and the last norm."""
    vision = config["vision_config"]
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    prefix = "vision_tower.vision_model."
    return {
        f"{prefix}embeddings.class_embedding": (hidden,),
        f"{prefix}embeddings.patch_embedding.weight": (hidden, 3, vision["patch_size"], vision["patch_size"]),
        f"{prefix}embeddings.position_embedding.weight": (side * side + 1, hidden),
        **_norm(f"{prefix}pre_layrnorm", hidden),
        **_encoder(prefix, vision),
        **_norm(f"{prefix}post_layernorm", hidden),
    }


def siglip_shapes(config: dict[str, Any]) -> Shapes:
    """A SigLIP tower, with its head if the config says that it has one."""
    vision = config["vision_config"]
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    prefix = "vision_tower.vision_model."
    return {
        f"{prefix}embeddings.patch_embedding.weight": (hidden, 3, vision["patch_size"], vision["patch_size"]),
        f"{prefix}embeddings.patch_embedding.bias": (hidden,),
        f"{prefix}embeddings.position_embedding.weight": (side * side, hidden),
        **_encoder(prefix, vision),
        **_norm(f"{prefix}post_layernorm", hidden),
        **(_siglip_head(prefix + "head.", vision) if vision["vision_use_head"] else {}),
    }


def _siglip_head(prefix: str, vision: dict[str, Any]) -> Shapes:
    hidden = vision["hidden_size"]
    return {
        f"{prefix}probe": (1, 1, hidden),
        f"{prefix}attention.in_proj_weight": (3 * hidden, hidden),
        f"{prefix}attention.in_proj_bias": (3 * hidden,),
        **_linear(f"{prefix}attention.out_proj", hidden, hidden),
        **_norm(f"{prefix}layernorm", hidden),
        **_linear(f"{prefix}mlp.fc1", vision["intermediate_size"], hidden),
        **_linear(f"{prefix}mlp.fc2", hidden, vision["intermediate_size"]),
    }


def _encoder(prefix: str, vision: dict[str, Any]) -> Shapes:
    hidden, size = vision["hidden_size"], vision["intermediate_size"]
    result: Shapes = {}
    for index in range(vision["num_hidden_layers"]):
        layer = f"{prefix}encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            result |= _linear(f"{layer}self_attn.{name}", hidden, hidden)
        result |= {**_linear(f"{layer}mlp.fc1", size, hidden), **_linear(f"{layer}mlp.fc2", hidden, size)}
        result |= {**_norm(f"{layer}layer_norm1", hidden), **_norm(f"{layer}layer_norm2", hidden)}
    return result


def llava_shapes(config: dict[str, Any]) -> Shapes:
    """The tower and the projector."""
    vision, text = config["vision_config"], config["text_config"]["hidden_size"]
    tower = clip_shapes if vision["model_type"] == "clip_vision_model" else siglip_shapes
    layers = config["vision_feature_layer"]
    inputs = vision["hidden_size"] * (len(layers) if isinstance(layers, list) else 1)
    bias = config.get("multimodal_projector_bias", True)
    return {
        **tower(config),
        **_linear("multi_modal_projector.linear_1", text, inputs, bias),
        **_linear("multi_modal_projector.linear_2", text, text, bias),
    }


def llava_next_shapes(config: dict[str, Any]) -> Shapes:
    """The tower, the projector, and what ends a row of tiles."""
    return {**llava_shapes(config), "image_newline": (config["text_config"]["hidden_size"],)}


def _linear(name: str, outputs: int, inputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


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
        "processor_class": {"llava": "LlavaProcessor", "llava_next": "LlavaNextProcessor"}[
            config["model_type"]
        ],
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
    tiles = compute_tiling(
        (height, width), [(one[0], one[1]) for one in config["image_grid_pinpoints"]], size, side
    )
    tokens = side * side + tiles.num_tokens
    return (1 + math.prod(tiles.tile_grid), 3, size, size), (1, 1, tokens), tokens
