"""Loads latent attention: keys and values are projected head by head, absorbed into queries and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from foreword.kernels.ops import GroupedInts, Matrix, Ops, PackedHeads, PackedLinear, QuantizedBlocks
from foreword.kernels.quantization import dequantize, slice_rows
from foreword.layers.latent_attention import LatentAttention, LatentShape
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision
from foreword.weights.renamed_weights import ReorderedWeights

JOINED = "kv_b_proj.weight"  # rows of keys, then of values, of one head after the other
KEYS, VALUES = "k_b_proj.weight", "v_b_proj.weight"  # of GGUF files: keys are transposed
NORM_EPS = 1e-6  # norms within latent attention, whatever that of the others


class MakeLinear(Protocol):
    """Loads a linear layer of the attention, with adapters."""

    def __call__(
        self,
        weights: Weights,
        inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        row_orders: Mapping[str, Tensor] = ...,
    ) -> Linear: ...


def load_latent_attention(
    ops: Ops,
    config: DecoderConfig,
    precision: Precision,
    weights: Weights,
    make_linear: MakeLinear,
    first: int = 0,
) -> LatentAttention:
    """weights  of the attention of one layer; first: as in Ops.attention"""
    shape, heads, hidden, bias = config.latent, config.num_heads, config.hidden_size, config.qkv_bias
    assert shape is not None
    rank, latent = shape.q_lora_rank, "kv_a_proj_with_mqa"
    q_name = "q_proj" if rank is None else "q_b_proj"
    orders = {
        q_name: shape.query_order(heads, config.interleaved_rope),
        latent: shape.key_order(config.interleaved_rope),
    }
    weights = ReorderedWeights(weights, orders)

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(ops, weights.tensor(f"{name}.weight", size), NORM_EPS)

    query_input = None
    if rank is not None:
        query_input = make_linear(weights, hidden, {"q_a_proj": rank}, bias), norm("q_a_layernorm", rank)
    heads_k, heads_v = load_heads(ops, weights, precision.linear_format, shape, heads)
    return LatentAttention(
        ops,
        shape,
        heads,
        config.attn_scale,
        make_linear(weights, rank or hidden, {q_name: heads * shape.qk_head_dim}, False, orders),
        make_linear(weights, hidden, {latent: shape.cached_dim}, bias, orders),
        norm("kv_a_layernorm", shape.kv_lora_rank),
        heads_k,
        heads_v,
        make_linear(weights, heads * shape.v_head_dim, {"o_proj": hidden}, config.out_bias),
        query_input,
        first,
    )


def load_heads(
    ops: Ops, weights: Weights, weight_format: str, shape: LatentShape, heads: int
) -> tuple[PackedHeads, PackedHeads]:
    """Weights [L, qk_nope_head_dim] that queries are multiplied by, and [v_head_dim, L] of outputs.

    Rows of quantized values stay quantized; transposed keys become floats, which get this format.
    """
    nope, rank, value_dim = shape.qk_nope_head_dim, shape.kv_lora_rank, shape.v_head_dim
    keys: list[PackedLinear] = []
    values: list[PackedLinear] = []
    if weights.has(KEYS):
        for packed, name, size in ((keys, KEYS, (rank, nope)), (values, VALUES, (value_dim, rank))):
            for head in range(heads):
                with weights.stacked(name, head, heads, *size) as matrix:
                    packed.append(ops.pack_linear([matrix], weight_format))
    else:
        with weights.weights({JOINED: heads * (nope + value_dim)}, rank) as (matrix,):
            for first in range(0, heads * (nope + value_dim), nope + value_dim):
                rows = slice_rows(matrix, slice(first, first + nope))
                keys.append(ops.pack_linear([_as_floats(rows).t().contiguous()], weight_format))
                rows = slice_rows(matrix, slice(first + nope, first + nope + value_dim))
                is_ordered = isinstance(rows, GroupedInts | QuantizedBlocks) and rows.input_order is not None
                values.append(ops.pack_linear([_as_floats(rows) if is_ordered else rows], weight_format))
    return ops.pack_heads(keys), ops.pack_heads(values)


def _as_floats(matrix: Matrix) -> Tensor:
    """[N, K]"""
    return matrix if isinstance(matrix, Tensor) else dequantize(matrix)
