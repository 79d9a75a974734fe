"""The operations that take each row for itself."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.ops import MRopeSections
from foreword.kernels.triton import elementwise, norm, rope

__all__ = ["TritonRows"]


class TritonRows:
    """Mixin of TritonOps. add, take_rows and put_rows are torch's, which round once at most."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, ..., H], weight float32 [H] -> [T, ..., H]"""
        return norm.rms_norm(x, weight, eps)

    def rope(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
    ) -> Tensor:
        """x [T, heads, D] -> [T, heads, D]"""
        return rope.rope(x, cos_sin, positions, mrope_sections)

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        mrope_sections: MRopeSections | None,
        cache: KVLayer,
        slots: Tensor,
    ) -> Tensor:
        """q [T, Hq, D] turned; k and v [T, Hk, D] go to the cache: one launch"""
        return rope.rope_and_cache(q, k, v, cos_sin, positions, mrope_sections, cache, slots)

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        """k, v [T, Hk, D] into the cache"""
        rope.write_kv(k, v, cache, slots)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> [T, I], computed in float32"""
        return elementwise.gated_act(gate_up, activation)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), computed in float32"""
        return elementwise.softcap(x, cap)
