"""The KV cache as kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["KVLayer"]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """K and V of one layer, each [S, Hk, D].

    k_scale, v_scale  float32 [S, Hk] where K and V are int8 or float8_e4m3fn: the largest magnitude of that slot's and
                      head's vector / 127 or / 448, written once with it; else None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.k.shape == self.v.shape and self.k.dtype == self.v.dtype
        assert (self.k_scale is None) == (self.v_scale is None)
