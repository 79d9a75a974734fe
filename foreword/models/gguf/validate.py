"""Sizes that a GGUF file's metadata claims, held against its tensors before anything is built from them."""

from __future__ import annotations

from foreword.models.gguf.metadata import MetadataReader

__all__ = ["check_shape"]

FUSED_PROJECTIONS = ("phi3",)  # architectures with q, k and v in one tensor, and gate and up in one


def check_shape(metadata: MetadataReader) -> None:
    """Raises CheckpointError, which names the key, the tensor and its size."""
    _check_layers(metadata)
    hidden = metadata.get_int("embedding_length")
    _check_dimension(metadata, "embedding_length", "token_embd.weight", 1, hidden)
    _check_heads(metadata)
    size = metadata.get_int("feed_forward_length")
    _check_dimension(
        metadata,
        "feed_forward_length",
        "blk.0.ffn_up.weight",
        0,
        2 * size if metadata.architecture in FUSED_PROJECTIONS else size,
    )


def _check_layers(metadata: MetadataReader) -> None:
    layers, tensors = metadata.get_int("block_count"), len(metadata.tensors)
    if layers > tensors:
        raise metadata.error("block_count", f"is {layers}, but the file has {tensors} tensors")
    for layer, wanted, why in ((layers - 1, True, "missing"), (layers, False, "there too")):
        name = f"blk.{layer}.attn_norm.weight"
        if (name in metadata.tensors) is not wanted:
            raise metadata.error("block_count", f"is {layers}, but tensor `{name}` is {why}")


def _check_heads(metadata: MetadataReader) -> None:
    heads, size = metadata.get_int("attention.head_count"), metadata.get_head_dim()
    kv_heads = metadata.get_int("attention.head_count_kv", heads)
    key = "attention.key_length" if "attention.key_length" in metadata else "attention.head_count"
    if metadata.architecture in FUSED_PROJECTIONS:
        _check_dimension(metadata, key, "blk.0.attn_qkv.weight", 0, (heads + 2 * kv_heads) * size)
        return
    _check_dimension(metadata, key, "blk.0.attn_q.weight", 0, heads * size)
    _check_dimension(metadata, "attention.head_count_kv", "blk.0.attn_k.weight", 0, kv_heads * size)


def _check_dimension(
    metadata: MetadataReader, key: str, tensor_name: str, dimension: int, expected: int
) -> None:
    """`wanted` is what a claim asks of a dimension of a matrix: 0 its rows, 1 its columns."""
    shape = metadata.tensor_info(tensor_name).shape
    if len(shape) != 2 or shape[dimension] != expected:
        what = ("rows", "columns")[dimension]
        raise metadata.error(
            key, f"makes {expected} {what} of tensor `{tensor_name}`, which is {list(shape)}"
        )
