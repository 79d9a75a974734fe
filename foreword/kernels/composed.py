"""Operations that are others in a row, for backends that gain nothing from doing them at once."""

from __future__ import annotations

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.kernels.ops import Axes, Ops, PackedLinear

__all__ = ["Composed"]


class Composed:
    """Mixin of a backend that has the parts."""

    def linear_gated(self: Ops, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K], weight [2I, K] -> [T, I]"""
        return self.gated(self.linear(x, weight), activation)

    def rope_and_cache(
        self: Ops,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        positions: Tensor,
        axes: Axes | None,
        cache: KVLayer,
        slots: Tensor,
    ) -> Tensor:
        """q [T, Hq, D] turned; k and v [T, Hk, D] go to the cache"""
        turned = self.rope(q, table, positions, axes)
        self.write_kv(self.rope(k, table, positions, axes), v, cache, slots)
        return turned
