"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one vector a token is cached for all heads.

The projections of keys and values from that vector are absorbed: queries are multiplied by the one of keys,
and weighted sums of latent vectors by that of values. Prompts, decoding and verification use this one form,
so a row's bits do not depend on how it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.ops import Ops, PackedHeads
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention, by the names of config.json."""

    kv_lora_rank: int  # L: of the latent vector, which is V
    qk_rope_head_dim: int  # R: rotated values of a key, the same for all heads
    qk_nope_head_dim: int  # values of a query and head, beside R rotated ones
    v_head_dim: int  # values of a head's output
    q_lora_rank: int | None = None  # width between the two projections of queries; None: one projection

    @property
    def cached_dim(self) -> int:
        """Values of a token in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def query_order(self, heads: int, interleaved: bool) -> Tensor:
        """Order of the rows of queries, int64 [N]: values of all heads that are not rotated, then the others.

        interleaved  RoPE turns pairs of neighbours in the checkpoint; here it turns the two halves
        """
        rows = torch.arange(heads * self.qk_head_dim).view(heads, self.qk_head_dim)
        nope, rope = torch.split(rows, [self.qk_nope_head_dim, self.qk_rope_head_dim], 1)
        return torch.cat((nope.flatten(), _half_order(rope, interleaved).flatten()))

    def key_order(self, interleaved: bool) -> Tensor:
        """Order of the rows of the latent vector and the rotated key, int64 [L + R]."""
        rows = torch.arange(self.cached_dim)
        latent, rope = rows[: self.kv_lora_rank], rows[self.kv_lora_rank :]
        return torch.cat((latent, _half_order(rope, interleaved)))


def _half_order(rows: Tensor, interleaved: bool) -> Tensor:
    """[..., R] with even entries before odd ones, if they are interleaved."""
    return torch.cat((rows[..., ::2], rows[..., 1::2]), -1) if interleaved else rows


class LatentAttention:
    """Projections of queries and of the cached vector, attention over latent vectors, output projection."""

    def __init__(
        self,
        ops: Ops,
        shape: LatentShape,
        heads: int,
        scale: float,
        queries: Linear,
        latent: Linear,
        latent_norm: RMSNorm,
        heads_k: PackedHeads,
        heads_v: PackedHeads,
        out: Linear,
        query_input: tuple[Linear, RMSNorm] | None = None,
        first: int = 0,
    ) -> None:
        """query_input, if there is one, yields the input of `queries` [q_lora_rank]."""
        self._ops = ops
        self._shape = shape
        self._heads = heads  # Hq
        self._scale = scale
        self._queries = queries  # rows in query_order()
        self._latent = latent  # rows in key_order()
        self._latent_norm = latent_norm
        self._heads_k = heads_k  # [L, qk_nope_head_dim] each
        self._heads_v = heads_v  # [v_head_dim, L] each
        self._out = out
        self._query_input = query_input
        self._first = first  # first position that is seen

    def __call__(
        self, x: Tensor, context: ForwardContext, cache: KVLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], plus `residual` [T, H]. Rows of a step attend through the cache."""
        ops, batch, rows = self._ops, context.batch, x.shape[0]
        rank, heads = self._shape.kv_lora_rank, self._heads
        compressed = self._latent(x)
        latent = self._latent_norm(compressed[:, :rank]).view(rows, 1, rank)
        q = self._project_queries(x, context)
        num_nope = heads * self._shape.qk_nope_head_dim
        q_rope = ops.rope_and_cache(
            q[:, num_nope:].view(rows, heads, -1),
            compressed[:, rank:].view(rows, 1, -1),
            latent,
            context.cos_sin,
            context.positions,
            context.mrope_sections,
            cache,
            batch.slots,
        )
        q = ops.linear_by_head(q[:, :num_nope].view(rows, heads, -1), self._heads_k, q_rope)
        metadata = context.attention_metadata
        attended = ops.attention(q, cache, batch, self._scale, metadata=metadata, first=self._first)
        return self._out(ops.linear_by_head(attended, self._heads_v).flatten(1), residual)

    def write_kv(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> None:
        """The cached vectors of x [T, H] alone."""
        rows, rank = x.shape[0], self._shape.kv_lora_rank
        compressed = self._latent(x)
        latent = self._latent_norm(compressed[:, :rank]).view(rows, 1, rank)
        rotation = context.cos_sin, context.positions, context.mrope_sections
        key = self._ops.rope(compressed[:, rank:].view(rows, 1, -1), *rotation)
        self._ops.write_kv(key, latent, cache, context.batch.slots)

    def _project_queries(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, H] -> [T, Hq * qk_head_dim]"""
        if self._query_input is not None:
            linear, norm = self._query_input
            x = norm(linear(x))
        q = self._queries(x)
        if context.query_scale is None:
            return q
        scaled = self._ops.rope(q.view(len(q), -1, 2), context.query_scale, context.positions)
        return scaled.view(q.shape)
