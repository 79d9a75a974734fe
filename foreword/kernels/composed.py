"""Operations that are others in a row, for backends that gain nothing from doing them at once."""

from __future__ import annotations

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.kernels.ops import MRopeSections, Ops, PackedLinear

__all__ = ["UnfusedOps"]


class UnfusedOps:
    """Mixin of a backend that has the parts."""

    def linear_gated_act(self: Ops, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K], weight [2I, K] -> [T, I]"""
        return self.gated_act(self.linear(x, weight), activation)

    def rope_and_cache(
        self: Ops,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        mrope_sections: MRopeSections | None,
        cache: KVLayer,
        slots: Tensor,
    ) -> Tensor:
        """q [T, Hq, D] turned; k and v [T, Hk, D] go to the cache"""
        turned = self.rope(q, cos_sin, positions, mrope_sections)
        self.write_kv(self.rope(k, cos_sin, positions, mrope_sections), v, cache, slots)
        return turned
