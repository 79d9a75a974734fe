"""Sizes that a GGUF file's metadata claims, held against its tensors before anything is built from them."""

from __future__ import annotations

from foreword.models.gguf.keys import Keys

__all__ = ["check_shape"]

FUSED = ("phi3",)  # architectures with q, k and v in one tensor, and gate and up in one


def check_shape(keys: Keys) -> None:
    """Raises CheckpointError, which names the key, the tensor and its size."""
    _check_layers(keys)
    hidden = keys.whole("embedding_length")
    _check(keys, "embedding_length", "token_embd.weight", 1, hidden)
    _check_heads(keys)
    size = keys.whole("feed_forward_length")
    _check(keys, "feed_forward_length", "blk.0.ffn_up.weight", 0, 2 * size if keys.architecture in FUSED else size)


def _check_layers(keys: Keys) -> None:
    layers, tensors = keys.whole("block_count"), len(keys.tensors)
    if layers > tensors:
        raise keys.refuse("block_count", f"is {layers}, but the file has {tensors} tensors")
    for layer, wanted, why in ((layers - 1, True, "missing"), (layers, False, "there too")):
        name = f"blk.{layer}.attn_norm.weight"
        if (name in keys.tensors) is not wanted:
            raise keys.refuse("block_count", f"is {layers}, but tensor `{name}` is {why}")


def _check_heads(keys: Keys) -> None:
    heads, size = keys.whole("attention.head_count"), keys.head_dim()
    kv_heads = keys.whole("attention.head_count_kv", heads)
    key = "attention.key_length" if "attention.key_length" in keys else "attention.head_count"
    if keys.architecture in FUSED:
        _check(keys, key, "blk.0.attn_qkv.weight", 0, (heads + 2 * kv_heads) * size)
        return
    _check(keys, key, "blk.0.attn_q.weight", 0, heads * size)
    _check(keys, "attention.head_count_kv", "blk.0.attn_k.weight", 0, kv_heads * size)


def _check(keys: Keys, key: str, tensor: str, dimension: int, wanted: int) -> None:
    """`wanted` is what a claim asks of a dimension of a matrix: 0 its rows, 1 its columns."""
    shape = keys.tensor(tensor).shape
    if len(shape) != 2 or shape[dimension] != wanted:
        what = ("rows", "columns")[dimension]
        raise keys.refuse(key, f"makes {wanted} {what} of tensor `{tensor}`, which is {list(shape)}")
