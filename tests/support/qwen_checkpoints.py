"""What tests/support/vision_checkpoints.py needs to know of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any

__all__ = [
    "QWEN2_5_VISION",
    "QWEN2_VISION",
    "QWEN3_VISION",
    "QWEN_CONFIG",
    "QWEN_PREFIXES",
    "QWEN_SPECIAL_TOKENS",
    "QWEN_TEMPLATE",
    "QWEN_TEXT",
    "qwen2_5_vl_shapes",
    "qwen2_vl_shapes",
    "qwen3_vl_shapes",
    "qwen_image_geometry",
    "qwen_preprocessor",
]

QWEN_SPECIAL_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_CONFIG: dict[str, Any] = {
    "image_token_id": 270,
    "vision_start_token_id": 271,
    "vision_end_token_id": 272,
    "video_token_id": 273,
    "tie_word_embeddings": False,
}
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 280,
    "rope_theta": 1000000.0,
}  # a few ids more than there are tokens, as in theirs
QWEN_PREFIXES = {"model.": "model.language_model.", "visual.": "model.visual."}
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2_VISION: dict[str, Any] = {
    **COMMON_VISION,
    "model_type": "qwen2_vl",
    "embed_dim": 32,
    "hidden_size": 64,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 2,
}
QWEN2_5_VISION: dict[str, Any] = {
    **COMMON_VISION,
    "model_type": "qwen2_5_vl",
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 52,
    "hidden_act": "silu",
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
QWEN3_VISION: dict[str, Any] = {
    **COMMON_VISION,
    "model_type": "qwen3_vl",
    "depth": 4,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
Shapes = dict[str, tuple[int, ...]]


def qwen2_vl_shapes(config: dict[str, Any]) -> Shapes:
    """Biases everywhere but in the patches' embedding."""
    vision = config["vision_config"]
    width, inner = vision["embed_dim"], vision["embed_dim"] * vision["mlp_ratio"]
    result: Shapes = {"visual.patch_embed.proj.weight": (width, *_patch(vision))}
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}."
        result |= {
            **_attention(block, width),
            **_norm(f"{block}norm1", width),
            **_norm(f"{block}norm2", width),
        }
        result |= {**_linear(f"{block}mlp.fc1", inner, width), **_linear(f"{block}mlp.fc2", width, inner)}
    return {**result, **_norm("visual.merger.ln_q", width), **_merger(vision, width, vision["hidden_size"])}


def qwen2_5_vl_shapes(config: dict[str, Any]) -> Shapes:
    """Norms without biases."""
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    result: Shapes = {
        "visual.patch_embed.proj.weight": (width, *_patch(vision)),
        "visual.merger.ln_q.weight": (width,),
    }
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}."
        result |= {
            **_attention(block, width),
            f"{block}norm1.weight": (width,),
            f"{block}norm2.weight": (width,),
        }
        result |= {
            **_linear(f"{block}mlp.gate_proj", inner, width),
            **_linear(f"{block}mlp.up_proj", inner, width),
        }
        result |= _linear(f"{block}mlp.down_proj", width, inner)
    return {**result, **_merger(vision, width, vision["out_hidden_size"])}


def qwen3_vl_shapes(config: dict[str, Any]) -> Shapes:
    """A learned position embedding, and a merger for each layer whose features go deeper."""
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    result: Shapes = {
        "visual.patch_embed.proj.weight": (width, *_patch(vision)),
        "visual.patch_embed.proj.bias": (width,),
        "visual.pos_embed.weight": (vision["num_position_embeddings"], width),
    }
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}."
        result |= {
            **_attention(block, width),
            **_norm(f"{block}norm1", width),
            **_norm(f"{block}norm2", width),
        }
        result |= {
            **_linear(f"{block}mlp.linear_fc1", inner, width),
            **_linear(f"{block}mlp.linear_fc2", width, inner),
        }
    merged = width * vision["spatial_merge_size"] ** 2
    mergers = {"visual.merger.": width}
    mergers |= {
        f"visual.deepstack_merger_list.{i}.": merged for i in range(len(vision["deepstack_visual_indexes"]))
    }
    for name, normed in mergers.items():
        result |= {**_norm(f"{name}norm", normed), **_linear(f"{name}linear_fc1", merged, merged)}
        result |= _linear(f"{name}linear_fc2", vision["out_hidden_size"], merged)
    return result


def _patch(vision: dict[str, Any]) -> tuple[int, ...]:
    return vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]


def _attention(block: str, width: int) -> Shapes:
    return {**_linear(f"{block}attn.qkv", 3 * width, width), **_linear(f"{block}attn.proj", width, width)}


def _merger(vision: dict[str, Any], width: int, outputs: int) -> Shapes:
    merged = width * vision["spatial_merge_size"] ** 2
    return {
        **_linear("visual.merger.mlp.0", merged, merged),
        **_linear("visual.merger.mlp.2", outputs, merged),
    }


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def qwen_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    """Small pictures: 4 to 64 tokens. Qwen3-VL has the names of today."""
    vision = config["vision_config"]
    token = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    bounds = {"min_pixels": 4 * token, "max_pixels": 64 * token}
    if config["model_type"] == "qwen3_vl":
        bounds = {"size": {"shortest_edge": bounds["min_pixels"], "longest_edge": bounds["max_pixels"]}}
    plain = config["model_type"] == "qwen3_vl"
    return {
        **bounds,
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_mean": [0.5, 0.5, 0.5] if plain else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if plain else [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessorFast" if plain else "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if plain else "Qwen2VLProcessor",
    }


def qwen_image_geometry(
    config: dict[str, Any], height: int, width: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int], int]:
    """Sides rounded to whole tokens; the bounds of the preprocessor are not looked at."""
    vision = config["vision_config"]
    side = vision["patch_size"] * vision["spatial_merge_size"]
    rows, columns = (max(1, round(size / side)) for size in (height, width))
    return (1, 3, rows * side, columns * side), (1, rows, columns), rows * columns
