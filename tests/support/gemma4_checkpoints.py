"""Tensors of Gemma 4 checkpoints: what differs by layer."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
COMMON: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 24,
    "rope_theta": ...,
    "rope_parameters": ROPES,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
# As E2B and E4B: per-layer embeddings, and layers that read K and V of an earlier one
SHARED_KV: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 272,
}
# As 12B and 31B: values that are keys, and fewer of them in global layers
DENSE: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# As 26B-A4B, a variant of gemma4_text
EXPERTS: dict[str, Any] = {
    **DENSE,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
ROPE_FREQS = "rope_freqs.weight"  # in GGUF files
SCALES = ("layer_scalar", "router.scale", "per_expert_scale")  # ends of names


def outer_shapes(config: dict[str, Any]) -> Shapes:
    """Per-layer embeddings, if there are any."""
    size, hidden = config.get("hidden_size_per_layer_input", 0), config["hidden_size"]
    if not size:
        return {}
    width = size * config["num_hidden_layers"]
    return {
        "model.embed_tokens_per_layer.weight": (config["vocab_size"], width),
        "model.per_layer_model_projection.weight": (width, hidden),
        "model.per_layer_projection_norm.weight": (size,),
    }


def layer_shapes(config: dict[str, Any], index: int) -> Shapes:
    hidden, size = config["hidden_size"], config.get("hidden_size_per_layer_input", 0)
    is_shared = index >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    inner = config["intermediate_size"] * (1 + (is_shared and config.get("use_double_wide_mlp", False)))
    norms = [
        f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ]
    result: Shapes = {"layer_scalar": (1,), **_attention_shapes(config, index, is_shared)}
    result |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    result["mlp.down_proj.weight"] = (hidden, inner)
    if config.get("enable_moe_block"):
        experts, inner = config["num_experts"], config["moe_intermediate_size"]
        norms += [f"{norms[2]}_2", f"{norms[3]}_1", f"{norms[3]}_2"]
        result |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,)}
        result |= {"router.per_expert_scale": (experts,), "experts.down_proj": (experts, hidden, inner)}
        result["experts.gate_up_proj"] = (experts, 2 * inner, hidden)
    if size:
        norms.append("post_per_layer_input_norm")
        result["per_layer_input_gate.weight"] = (size, hidden)
        result["per_layer_projection.weight"] = (hidden, size)
    return result | {f"{name}.weight": (hidden,) for name in norms}


def _attention_shapes(config: dict[str, Any], index: int, is_shared: bool) -> Shapes:
    hidden, heads, kv_heads = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    k_eq_v, head_dim = False, config["head_dim"]
    if _layer_type(config, index) == FULL:
        k_eq_v, head_dim = config.get("attention_k_eq_v", False), config.get("global_head_dim")
        kv_heads = (config.get("num_global_key_value_heads") or kv_heads) if k_eq_v else kv_heads
    options = config.get("per_layer_config", {}).get(str(index), {})
    head_dim, kv_heads = options.get("head_dim", head_dim), options.get("num_key_value_heads", kv_heads)
    sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    if is_shared or k_eq_v:
        del sizes["v_proj"]
    if is_shared:
        del sizes["k_proj"]
    norms = ["q_norm"] if is_shared else ["q_norm", "k_norm"]
    result: Shapes = {f"self_attn.{name}.weight": (size, hidden) for name, size in sizes.items()}
    if config.get("attention_bias"):
        result |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
        result["self_attn.o_proj.bias"] = (hidden,)
    result["self_attn.o_proj.weight"] = (hidden, heads * head_dim)
    return result | {f"self_attn.{name}.weight": (head_dim,) for name in norms}


def _layer_type(config: dict[str, Any], index: int) -> str:
    default = FULL if (index + 1) % 6 == 0 else SLIDING
    return str(config["layer_types"][index]) if "layer_types" in config else default


def gguf_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of GGUF files as llama.cpp's converter writes them; None removes one."""
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    types = [_layer_type(config, index) for index in range(layers)]
    full_heads = (config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else 0) or heads
    num_shared, size = config.get("num_kv_shared_layers", 0), config["intermediate_size"]
    sizes = [size * (1 + (index >= layers - num_shared)) for index in range(layers)]
    keys = {
        "attention.head_count_kv": [full_heads if item == FULL else heads for item in types],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": num_shared,
        "attention.sliding_window_pattern": [item == SLIDING for item in types],
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "feed_forward_length": sizes if config.get("use_double_wide_mlp") else size,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": config["rope_parameters"][FULL]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"][SLIDING]["rope_theta"],
    }
    if config.get("enable_moe_block"):
        keys |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return keys


def rope_divisors(config: dict[str, Any]) -> list[float]:
    """Values of ROPE_FREQS: angles of global layers that do not turn have a huge divisor."""
    num_angles = config["global_head_dim"] // 2
    turned = int(config["rope_parameters"][FULL]["partial_rotary_factor"] * num_angles)
    return [1.0] * turned + [1e30] * (num_angles - turned)
