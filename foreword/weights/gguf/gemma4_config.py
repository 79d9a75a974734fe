"""Options of config.json for GGUF files of Gemma 4, where sizes differ by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.weights.gguf.metadata import (
    LOGIT_SOFTCAP,
    ROPE_FREQS,
    MetadataReader,
    TensorReader,
    read_rope_theta,
)

ARCHITECTURE = "gemma4"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
MIN_STILL_DIVISOR = 1e20  # divisor of an angle that does not turn
KV_HEADS, SHARED_LAYERS = "attention.head_count_kv", "attention.shared_kv_layers"
MLP_SIZE, EXPERT_SIZE = "feed_forward_length", "expert_feed_forward_length"
PER_LAYER_SIZE, PER_LAYER_EMBEDDING_TENSOR = "embedding_length_per_layer_input", "per_layer_token_embd.weight"
Options = dict[str, Any]


def gemma4_options(
    metadata: MetadataReader, layer_types: Sequence[str], read_tensor: TensorReader
) -> Options:
    """Gemma 4's own options. Raises CheckpointError, which names the key."""
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
    num_shared = metadata.get_int(SHARED_LAYERS, 0, low=0)
    _check_layers(metadata, layers, num_shared)
    if layer_types[-1] != "full_attention":
        raise metadata.error("attention.sliding_window_pattern", "must end with a layer without a window")
    first_full = layer_types.index("full_attention")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": layers[0]["num_key_value_heads"],
        "head_dim": layers[0]["head_dim"],
        "per_layer_config": {str(index): layer for index, layer in enumerate(layers)},
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in metadata.tensors,
        "final_logit_softcapping": metadata.get_optional_float("final_logit_softcapping", LOGIT_SOFTCAP),
        "hidden_size_per_layer_input": _read_per_layer_size(metadata, len(layer_types)),
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


def _check_layers(metadata: MetadataReader, layers: Sequence[dict[str, int]], num_shared: int) -> None:
    """Compare heads with the tensors of every layer, before anything is allocated."""
    heads, first_shared = metadata.get_int("attention.head_count"), max(len(layers) - num_shared, 0)
    for index, layer in enumerate(layers):
        rows, prefix = heads * layer["head_dim"], f"blk.{index}."
        metadata.check_dimension("attention.head_count", f"{prefix}attn_q.weight", 0, rows)
        if index >= first_shared:
            if layer not in layers[:first_shared]:
                raise metadata.error(SHARED_LAYERS, f"is {num_shared}: no layer before them is like {index}")
            continue
        if f"{prefix}attn_k.weight" not in metadata.tensors:
            raise metadata.error(SHARED_LAYERS, f"is {num_shared}, but `{prefix}attn_k.weight` is missing")
        rows = layer["num_key_value_heads"] * layer["head_dim"]
        metadata.check_dimension(KV_HEADS, f"{prefix}attn_k.weight", 0, rows)


def _read_per_layer_size(metadata: MetadataReader, num_layers: int) -> int:
    size = metadata.get_int(PER_LAYER_SIZE, 0, low=0)
    has_table = PER_LAYER_EMBEDDING_TENSOR in metadata.tensors
    if has_table != (size > 0):
        state = "there" if has_table else "missing"
        raise metadata.error(
            PER_LAYER_SIZE, f"is {size}, but tensor `{PER_LAYER_EMBEDDING_TENSOR}` is {state}"
        )
    if size:
        metadata.check_dimension(PER_LAYER_SIZE, PER_LAYER_EMBEDDING_TENSOR, 1, size * num_layers)
    return size


def _mlp_options(metadata: MetadataReader, num_layers: int, num_shared: int) -> Options:
    """MLPs of layers with shared K and V may have twice the size of the others."""
    sizes = _read_layers(metadata, MLP_SIZE, num_layers)
    is_double = sizes[-1] == 2 * sizes[0]
    expected = [
        sizes[0] * (1 + (is_double and index >= num_layers - num_shared)) for index in range(num_layers)
    ]
    if sizes != expected:
        raise metadata.error(MLP_SIZE, "must be one size, or twice as much where K and V are shared")
    for index, size in enumerate(sizes):
        metadata.check_dimension(MLP_SIZE, f"blk.{index}.ffn_up.weight", 0, size)
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
