"""Multi-head attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch, KVLayer
from foreword.kernels.ops import AttentionMetadata, MRopeSections, Ops
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm

__all__ = ["Attention", "AttentionConfig", "ForwardContext"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """heads Hq, kv_heads Hk, head_dim D; scores are (q . k) * scale, soft-capped if asked for."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What all layers of one kind share in one forward pass: `table`, `positions` and `axes` as in Ops.rope."""

    batch: Batch
    cos_sin: Tensor
    attention_metadata: AttentionMetadata
    positions: Tensor
    mrope_sections: MRopeSections | None = None


class Attention:
    """`qkv` is the three projections in one; `q_norm` and `k_norm` (over each head) come in pairs."""

    def __init__(
        self,
        ops: Ops,
        config: AttentionConfig,
        qkv: Linear,
        out: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self._ops = ops
        self._config = config
        self._qkv = qkv
        self._out = out
        self._q_norm = q_norm
        self._k_norm = k_norm

    def __call__(
        self, x: Tensor, context: ForwardContext, cache: KVLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], added to `residual` [T, H] if given. K and V go to the cache first: rows of one step see each
        other only there."""
        config, batch = self._config, context.batch
        heads, all_heads = config.heads, config.heads + config.kv_heads
        qkv = self._qkv(x).view(x.shape[0], all_heads + config.kv_heads, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads:all_heads], qkv[:, all_heads:]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q = self._ops.rope_and_cache(
            q, k, v, context.cos_sin, context.positions, context.mrope_sections, cache, batch.slots
        )
        seen = self._ops.attention(
            q, cache, batch, config.scale, config.window, config.softcap, context.attention_metadata
        )
        return self._out(seen.flatten(1), residual)
