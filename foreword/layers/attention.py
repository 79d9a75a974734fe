"""Multi-head attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch
from foreword.core.kv import KVLayer
from foreword.kernels.ops import AttentionPlan, Axes, Ops
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm

__all__ = ["Attention", "AttentionConfig", "Pass"]


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
class Pass:
    """What all layers of one kind share in one forward pass: `table`, `positions` and `axes` as in Ops.rope."""

    batch: Batch
    table: Tensor
    plan: AttentionPlan
    positions: Tensor
    axes: Axes | None = None


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

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]. K and V go to the cache first: rows of one step see each other only there."""
        config, batch = self._config, shared.batch
        heads, all_heads = config.heads, config.heads + config.kv_heads
        qkv = self._qkv(x).view(x.shape[0], all_heads + config.kv_heads, config.head_dim)
        q = self._turned(qkv[:, :heads], self._q_norm, shared)
        k = self._turned(qkv[:, heads:all_heads], self._k_norm, shared)
        self._ops.write_kv(k, qkv[:, all_heads:], cache, batch.slots)
        seen = self._ops.attention(q, cache, batch, config.scale, config.window, config.softcap, shared.plan)
        return self._out(seen.flatten(1))

    def _turned(self, x: Tensor, norm: RMSNorm | None, shared: Pass) -> Tensor:
        """[T, heads, D] -> the same, normed if there is a norm, and rotated"""
        return self._ops.rope(x if norm is None else norm(x), shared.table, shared.positions, shared.axes)
