"""Fused operations as sequences of others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.ops import MRopeSections, Ops, PackedLinear


class UnfusedOps:
    """Mixin: fused operations as sequences of others, for backends without fused kernels or a compiler."""

    def precompile(
        self, run: Callable[[], object], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        pass

    def set_threads(self, num_threads: int) -> None:
        pass

    def linear_gated_act(self: Ops, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
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
        rotated = self.rope(q, cos_sin, positions, mrope_sections)
        self.write_kv(self.rope(k, cos_sin, positions, mrope_sections), v, cache, slots)
        return rotated
