"""Options of config.json for GGUF's deepseek2: DeepSeek-V2, V3, Kimi K2 and GLM-4.7-Flash.

Newer files hold keys and values of the latent vector by head (attn_k_b, attn_v_b), and the lengths of one
key and value head for all; older files have them joined (attn_kv_b) and the lengths of heads.
"""

from __future__ import annotations

from typing import Any

from foreword.weights.gguf.metadata import MetadataReader
from foreword.weights.gguf.state_config import read_num_dense_layers

LATENT_ARCHITECTURES = ("deepseek2",)


def has_score_bias(metadata: MetadataReader) -> bool:
    """Experts are chosen by sigmoids plus a bias, as in DeepSeek-V3; no key tells in all files."""
    return f"blk.{read_num_dense_layers(metadata)}.exp_probs_b.bias" in metadata.tensors


def check_latent_heads(metadata: MetadataReader) -> None:
    """Compare the sizes of attention with the first layer's tensors. Raises CheckpointError."""
    sizes, heads = _read_sizes(metadata), metadata.get_int("attention.head_count")
    rank, rope = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    q_rows = heads * (sizes["qk_nope_head_dim"] + rope)
    metadata.check_dimension("attention.kv_lora_rank", "blk.0.attn_kv_a_norm.weight", 0, rank, 1)
    metadata.check_dimension("rope.dimension_count", "blk.0.attn_kv_a_mqa.weight", 0, rank + rope)
    q_name = "attn_q" if sizes["q_lora_rank"] is None else "attn_q_b"
    metadata.check_dimension("attention.head_count", f"blk.0.{q_name}.weight", 0, q_rows)
    if sizes["q_lora_rank"] is not None:
        metadata.check_dimension("attention.q_lora_rank", "blk.0.attn_q_a.weight", 0, sizes["q_lora_rank"])
    metadata.check_dimension(
        "attention.head_count", "blk.0.attn_output.weight", 1, heads * sizes["v_head_dim"]
    )


def latent_shape_options(metadata: MetadataReader) -> dict[str, Any]:
    """Sizes of attention, by the names of config.json."""
    metadata.get_int("attention.head_count_kv", 1)  # 1, or as many as queries in older files
    return {**_read_sizes(metadata), "num_key_value_heads": metadata.get_int("attention.head_count")}


def _read_sizes(metadata: MetadataReader) -> dict[str, Any]:
    rank, rope = metadata.get_int("attention.kv_lora_rank"), metadata.get_int("rope.dimension_count")
    if "attention.key_length_mla" in metadata:
        metadata.require_value("attention.key_length", rank + rope)
        metadata.require_value("attention.value_length", rank)
        key = "attention.key_length_mla"
        key_length, value_length = metadata.get_int(key), metadata.get_int("attention.value_length_mla")
    else:
        key = "attention.key_length"
        key_length, value_length = metadata.get_int(key), metadata.get_int("attention.value_length")
    if key_length <= rope:
        raise metadata.error(key, f"must be above rope.dimension_count, {rope}, got {key_length}")
    q_rank = "attention.q_lora_rank"
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.get_int(q_rank) if q_rank in metadata else None,
        "qk_nope_head_dim": key_length - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value_length,
    }
