"""Options of config.json for GGUF files of Gemma 4, where sizes differ by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.weights.gguf.metadata import ROPE_FREQS, MetadataReader, TensorReader, read_rope_theta

ARCHITECTURE = "gemma4"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
MIN_STILL_DIVISOR = 1e20  # of an angle that does not turn
KV_HEADS, MLP_SIZE, EXPERT_SIZE = (
    "attention.head_count_kv",
    "feed_forward_length",
    "expert_feed_forward_length",
)
Options = dict[str, Any]


def gemma4_options(
    metadata: MetadataReader, layer_types: Sequence[str], read_tensor: TensorReader
) -> Options:
    """What Gemma 4 has beside the options of all families. Raises CheckpointError, which names the key."""
    local, full = metadata.get_int("attention.key_length_swa"), metadata.get_int("attention.key_length")
    for key, size in (("attention.value_length_swa", local), ("attention.value_length", full)):
        metadata.require_value(key, size)
    for key, size in (("rope.dimension_count_swa", local), ("rope.dimension_count", full)):
        metadata.require_value(key, size)
    metadata.ignore("rope.scaling.finetuned")
    sizes = {"sliding_attention": local, "full_attention": full}
    layers = [
        {"head_dim": sizes[layer_type], "num_key_value_heads": heads}
        for layer_type, heads in zip(
            layer_types, _read_layers(metadata, KV_HEADS, len(layer_types)), strict=True
        )
    ]
    _check_heads(metadata, layers)
    num_shared = metadata.get_int("attention.shared_kv_layers", 0, low=0)
    first_full = layer_types.index("full_attention") if "full_attention" in layer_types else 0
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": layers[0]["num_key_value_heads"],
        "head_dim": layers[0]["head_dim"],
        "per_layer_config": {str(index): layer for index, layer in enumerate(layers)},
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in metadata.tensors,
        "final_logit_softcapping": metadata.get_optional_float("final_logit_softcapping"),
        "hidden_size_per_layer_input": metadata.get_int("embedding_length_per_layer_input", 0, low=0),
        "rope_parameters": _rope_parameters(metadata, full, read_tensor),
        **_mlp_options(metadata, len(layer_types), num_shared),
        **_expert_options(metadata),
    }


def _read_layers(metadata: MetadataReader, key: str, num_layers: int) -> list[int]:
    """A number for each layer, or one for all."""
    values = metadata.get(key)
    if not isinstance(values, list):
        return [metadata.get_int(key)] * num_layers
    if len(values) != num_layers or not all(type(value) is int and value > 0 for value in values):
        raise metadata.error(key, f"must be a number or {num_layers} numbers, got {values!s:.60}")
    return values


def _check_heads(metadata: MetadataReader, layers: Sequence[dict[str, int]]) -> None:
    """Compare with the tensors of the first layer, before anything is allocated."""
    heads, size = metadata.get_int("attention.head_count"), layers[0]["head_dim"]
    metadata.check_dimension("attention.head_count", "blk.0.attn_q.weight", 0, heads * size)
    rows = layers[0]["num_key_value_heads"] * size
    metadata.check_dimension(KV_HEADS, "blk.0.attn_k.weight", 0, rows)


def _mlp_options(metadata: MetadataReader, num_layers: int, num_shared: int) -> Options:
    """MLPs of layers with shared K and V may have twice the size of the others."""
    sizes = _read_layers(metadata, MLP_SIZE, num_layers)
    is_double = sizes[-1] == 2 * sizes[0]
    expected = [
        sizes[0] * (1 + (is_double and index >= num_layers - num_shared)) for index in range(num_layers)
    ]
    if sizes != expected:
        raise metadata.error(MLP_SIZE, "must be one size, or twice as much where K and V are shared")
    metadata.check_dimension(MLP_SIZE, "blk.0.ffn_up.weight", 0, sizes[0])
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}


def _expert_options(metadata: MetadataReader) -> Options:
    count = metadata.get_int("expert_count", 0, low=0)
    if not count:
        for key in ("expert_used_count", EXPERT_SIZE):
            metadata.require_value(key, 0)
        return {"enable_moe_block": False}
    size = metadata.get_int(EXPERT_SIZE)
    for key, dimension, expected in (("expert_count", 0, count), (EXPERT_SIZE, 2, size)):
        metadata.check_dimension(key, "blk.0.ffn_down_exps.weight", dimension, expected, 3)
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": metadata.get_int("expert_used_count"),
        "moe_intermediate_size": size,
    }


def _rope_parameters(metadata: MetadataReader, head_dim: int, read_tensor: TensorReader) -> Options:
    """Divisors of the angles of global layers tell which of them turn."""
    metadata.tensor_info(ROPE_FREQS)
    divisors = read_tensor(ROPE_FREQS)
    num_turned = sum(divisor < MIN_STILL_DIVISOR for divisor in divisors)
    if len(divisors) != head_dim // 2 or divisors[:num_turned] != [1.0] * num_turned:
        reason = f"does not fit the tensor `{ROPE_FREQS}`: {head_dim // 2} divisors, 1 or above 1e20"
        raise metadata.error("attention.key_length", reason)
    # The reader multiplies by the size of a head and rounds down
    share = (num_turned + 0.25) / len(divisors) if num_turned < len(divisors) else 1.0
    theta = read_rope_theta(metadata, "rope.freq_base", GLOBAL_THETA)
    local_theta = read_rope_theta(metadata, "rope.freq_base_swa", LOCAL_THETA)
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": theta,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
    }
