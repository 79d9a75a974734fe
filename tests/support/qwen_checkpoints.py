"""Configs, tensor shapes and image geometry of tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL checkpoints."""

from __future__ import annotations

from typing import Any

from tests.support.checkpoints import IMAGE_CHAT_TEMPLATE, Shapes, linear_shapes, norm_shapes

QWEN_SPECIAL_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_CONFIG: dict[str, Any] = {
    "image_token_id": 270,
    "vision_start_token_id": 271,
    "vision_end_token_id": 272,
    "video_token_id": 273,
    "tie_word_embeddings": False,
}
QWEN_TEXT: dict[str, Any] = {"vocab_size": 280, "rope_theta": 1000000.0}  # more ids than tokens
QWEN_PREFIXES = {"model.": "model.language_model.", "visual.": "model.visual."}
QWEN_TEMPLATE = IMAGE_CHAT_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
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
        "image_mean": [0.5, 0.5, 0.5] if is_qwen3 else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if is_qwen3 else [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessorFast" if is_qwen3 else "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if is_qwen3 else "Qwen2VLProcessor",
    }


def qwen_image_geometry(
    config: dict[str, Any], height: int, width: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int], int]:
    """Sides rounded to whole tokens, without the preprocessor's bounds."""
    vision = config["vision_config"]
    side = vision["patch_size"] * vision["spatial_merge_size"]
    rows, columns = (max(1, round(size / side)) for size in (height, width))
    return (1, 3, rows * side, columns * side), (1, rows, columns), rows * columns
