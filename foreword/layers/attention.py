"""Multi-head attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.ops import AttentionPlan, Ops
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
    """What all layers of one kind share in one forward pass: cos and sin are float32 [T, D_rot]."""

    batch: Batch
    cos: Tensor
    sin: Tensor
    plan: AttentionPlan


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

    def __call__(self, x: Tensor, shared: Pass, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, H] -> [T, H]. K and V go to the cache first: rows of one step see each other only there."""
        config = self._config
        heads, all_heads = config.heads, config.heads + config.kv_heads
        qkv = self._qkv(x).view(x.shape[0], all_heads + config.kv_heads, config.head_dim)
        turned = self._ops.rope(self._normed(qkv[:, :all_heads]), shared.cos, shared.sin)
        self._ops.write_kv(turned[:, heads:], qkv[:, all_heads:], *cache, shared.batch.slots)
        seen = self._ops.attention(
            turned[:, :heads], *cache, shared.batch, config.scale, config.window, config.softcap, shared.plan
        )
        return self._out(seen.reshape(x.shape[0], -1))

    def _normed(self, qk: Tensor) -> Tensor:
        """[T, Hq + Hk, D] -> the same"""
        if self._q_norm is None or self._k_norm is None:
            return qk
        heads = self._config.heads
        return torch.cat((self._q_norm(qk[:, :heads]), self._k_norm(qk[:, heads:])), 1)
