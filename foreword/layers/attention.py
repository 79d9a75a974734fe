"""Multi-head attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch, KVLayer
from foreword.kernels.ops import AttentionMetadata, MRopeSections, Ops
from foreword.layers.linear import Linear
from foreword.layers.norm import Norm, RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shape and score function of an attention layer."""

    heads: int  # Hq
    kv_heads: int  # Hk
    head_dim: int  # D
    scale: float  # scores are (q . k) * scale
    window: int | None = None
    softcap: float | None = None
    norms_all_heads: bool = False  # the norms of q and k are over all heads together, not over each
    norms_after_rope: bool = False
    has_kv: bool = True  # False: K and V in the cache are those of an earlier layer
    k_eq_v: bool = False  # values are keys before their norm and RoPE
    has_gate: bool = False  # the output is multiplied by sigmoid(gate), gate [T, Hq, D] after q
    first: int = 0  # first position that is seen
    causal: bool = True  # as in Ops.attention


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs shared by all layers of one type; cos_sin and positions as in Ops.rope."""

    batch: Batch
    cos_sin: Tensor  # cosines and sines of keys
    query_cos_sin: Tensor  # the same tensor, unless queries are scaled by their position
    attention_metadata: AttentionMetadata
    positions: Tensor
    mrope_sections: MRopeSections | None = None
    per_layer_inputs: Tensor | None = None  # [T, L * P], see PerLayerEmbedding
    query_scale: Tensor | None = None  # as in Rope


class SplitProjection:
    """Projections of q and a gate, and of k and v: a trained head needs only the latter for most rows."""

    def __init__(self, ops: Ops, q: Linear, kv: Linear) -> None:
        self._ops = ops
        self._q = q
        self.kv = kv

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.concat((self._q(x), self.kv(x)))


class Attention:
    """Fused projection of q, a gate, k and v; norms of q, k (both or neither) and v, RoPE, out projection."""

    def __init__(
        self,
        ops: Ops,
        config: AttentionConfig,
        qkv: Linear | SplitProjection,
        out: Linear,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        v_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._ops = ops
        self._config = config
        self._qkv = qkv
        self._out = out
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._v_norm = v_norm
        self._sinks = sinks  # float32 [Hq], see Ops.attention

    def __call__(
        self, x: Tensor, context: ForwardContext, cache: KVLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], plus `residual` [T, H]. Rows of a step attend through the cache."""
        config, batch = self._config, context.batch
        first_k = config.heads * (1 + config.has_gate)
        qkv = self._qkv(x).view(x.shape[0], -1, config.head_dim)
        q, kv = qkv[:, : config.heads], qkv[:, first_k:]
        if config.has_kv:
            q = self._rotate_and_cache(q, kv, context, cache)
        else:
            q = self._normalize(q, self._q_norm)
            q = self._ops.rope(q, context.query_cos_sin, context.positions, context.mrope_sections)
        attended = self._ops.attention(
            q,
            cache,
            batch,
            config.scale,
            config.window,
            config.softcap,
            context.attention_metadata,
            self._sinks,
            config.first,
            config.causal,
        )
        y = attended.flatten(1)
        if config.has_gate:
            y = self._ops.gate(y, qkv[:, config.heads : first_k].flatten(1), "sigmoid")
        return self._out(y, residual)

    def write_kv(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> None:
        """K and V of x [T, H] alone; the projection is split."""
        assert isinstance(self._qkv, SplitProjection) and not self._config.norms_after_rope
        kv = self._qkv.kv(x).view(x.shape[0], -1, self._config.head_dim)
        k = self._normalize(kv[:, : self._config.kv_heads], self._k_norm)
        v = self._normalize(kv[:, -self._config.kv_heads :], self._v_norm)
        k = self._ops.rope(k, context.cos_sin, context.positions, context.mrope_sections)
        self._ops.write_kv(k, v, cache, context.batch.slots)

    def _rotate_and_cache(self, q: Tensor, kv: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """q [T, Hq, D] -> the same with norm and RoPE; K and V of kv [T, 2 * Hk, D] (k_eq_v: [T, Hk, D])."""
        config, slots = self._config, context.batch.slots
        k, v = kv[:, : config.kv_heads], kv[:, -config.kv_heads :]
        if not config.norms_after_rope:
            q, k = self._normalize(q, self._q_norm), self._normalize(k, self._k_norm)
        v = self._normalize(v, self._v_norm)
        rotation = context.positions, context.mrope_sections
        if not config.norms_after_rope and context.query_cos_sin is context.cos_sin:
            return self._ops.rope_and_cache(q, k, v, context.cos_sin, *rotation, cache, slots)
        q = self._ops.rope(q, context.query_cos_sin, *rotation)
        k = self._ops.rope(k, context.cos_sin, *rotation)
        if config.norms_after_rope:
            q, k = self._normalize(q, self._q_norm), self._normalize(k, self._k_norm)
        self._ops.write_kv(k, v, cache, slots)
        return q

    def _normalize(self, x: Tensor, norm: Norm | None) -> Tensor:
        """[T, heads, D] -> [T, heads, D]"""
        if norm is None:
            return x
        return norm(x.flatten(1)).view(x.shape) if self._config.norms_all_heads else norm(x)
