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
    """Shape and score function of an attention layer."""

    heads: int  # Hq
    kv_heads: int  # Hk
    head_dim: int  # D
    scale: float  # scores are (q . k) * scale
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs shared by all layers with one window; cos_sin and positions as in Ops.rope."""

    batch: Batch
    cos_sin: Tensor
    attention_metadata: AttentionMetadata
    positions: Tensor
    mrope_sections: MRopeSections | None = None


class Attention:
    """Fused qkv projection, norms of each q and k head (both or neither), RoPE, output projection."""

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
        """x [T, H] -> [T, H], plus `residual` [T, H]. Rows of a step attend through the cache."""
        config, batch = self._config, context.batch
        heads, all_heads = config.heads, config.heads + config.kv_heads
        qkv = self._qkv(x).view(x.shape[0], all_heads + config.kv_heads, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads:all_heads], qkv[:, all_heads:]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q = self._ops.rope_and_cache(
            q, k, v, context.cos_sin, context.positions, context.mrope_sections, cache, batch.slots
        )
        attended = self._ops.attention(
            q, cache, batch, config.scale, config.window, config.softcap, context.attention_metadata
        )
        return self._out(attended.flatten(1), residual)
