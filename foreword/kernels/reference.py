"""The specification of every operation, in plain torch.

Torch's own kernels change their order of summation, and even their exponential, with the shape of what
they get. So whatever is not exact in itself runs on exactly `row_tile` rows, the last tile padded: then
the bits of a row depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch
from foreword.kernels.reference_attention import Plan, attend, plan_attention
from foreword.kernels.reference_sampling import ReferenceSampling

__all__ = ["Reference", "reference_threads"]

VECTOR = 64  # values that no CPU's vector loop leaves a remainder of
GRAIN = 32768  # torch splits element-wise work above this among threads


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}


def reference_threads(cores: int) -> int:
    """Torch threads to use on so many cores: a power of two, so that a tile of rows splits evenly."""
    assert cores > 0
    return min(1 << (cores.bit_length() - 1), 16)


@dataclass(frozen=True, slots=True)
class Packed:
    """weight [N, K] (float32: [K, N], which torch multiplies sooner), bias [N] or None

    by_row  this machine's product rounds by a row's place in the tile: each row is computed alone
    """

    weight: Tensor
    bias: Tensor | None
    by_row: bool = False


class Reference(ReferenceSampling):
    """Row-invariant torch. `row_tile` rows are what every tiled operation runs on."""

    name = "reference"

    def __init__(self, row_tile: int = 16) -> None:
        self.row_tile = row_tile

    def threads(self, cores: int) -> int:
        """Torch threads to use on so many cores."""
        return reference_threads(cores)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """See Packed."""
        packed = Packed(weight.t().contiguous() if weight.dtype == torch.float32 else weight, bias)
        return replace(packed, by_row=self._place_matters(packed, weight[0]))

    def linear(self, x: Tensor, weight: Packed) -> Tensor:
        """x [T, K] -> [T, N]"""
        matrix = weight.weight.t() if x.dtype == torch.float32 else weight.weight
        if weight.by_row:
            return torch.cat([F.linear(row, matrix, weight.bias) for row in torch.split(x.contiguous(), 1)])
        return self._tiled(lambda rows: F.linear(rows, matrix, weight.bias), x)

    def _place_matters(self, packed: Packed, like: Tensor) -> bool:
        """Whether one row, put at every place of a tile, comes out with different bits (some BLAS round their
        first and last rows differently)."""
        ramp = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
        for step in (0.7, 1.9, 3.1):
            row = torch.sin(ramp * step).to(like.dtype)
            tile = self.linear(row.expand(self.row_tile, -1).contiguous(), packed)
            if not torch.equal(tile, tile[:1].expand_as(tile)):
                return True
        return False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, ..., H], weight [H] -> [T, ..., H]"""
        scale = weight.to(torch.float32)

        def norm(rows: Tensor) -> Tensor:
            wide = rows.to(torch.float32)
            inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            return (wide * inverse).mul_(scale).to(x.dtype)

        return self._tiled(norm, x)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, D], cos and sin [T, D_rot] -> [T, heads, D]. Products and sums of single values: exact for any T."""
        rotary = cos.shape[-1]
        wide = x[..., :rotary].to(torch.float32)
        left, right = wide.chunk(2, -1)
        turned = torch.cat((-right, left), -1).mul_(sin[:, None]).add_(wide * cos[:, None]).to(x.dtype)
        return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), -1)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> [T, I], computed in float32"""
        act = ACTIVATIONS[activation]
        gate, up = gate_up.chunk(2, -1)
        gate = gate.to(torch.float32).contiguous()
        pieces = [act(piece) for piece in torch.split(gate, _rows_a_call(gate.shape[1], self.row_tile))]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).mul_(up).to(gate_up.dtype)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids [T], weight [V, H] -> [T, H]"""
        return weight.index_select(0, ids)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """k, v [T, Hk, D] into the caches [S, Hk, D]"""
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)

    def plan_attention(self, batch: Batch, window: int | None = None) -> Plan:
        """See reference_attention."""
        return plan_attention(batch, window)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]; see reference_attention"""
        return attend(q, k_cache, v_cache, plan or plan_attention(batch, window), scale, softcap)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)"""
        return torch.tanh(x / cap).mul_(cap)

    def _tiled(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`operation` on the rows of x, `row_tile` contiguous ones at a time."""
        num_rows = x.shape[0]
        if num_rows == self.row_tile:
            return operation(x.contiguous())
        padding = -num_rows % self.row_tile
        if padding:
            x = torch.cat((x, x.new_zeros(padding, *x.shape[1:])))
        return torch.cat([operation(rows) for rows in torch.split(x.contiguous(), self.row_tile)])[:num_rows]


def _rows_a_call(width: int, most: int) -> int:
    """How many contiguous rows an activation may take at once: the scalar loop that torch ends with must not
    begin inside them, nor a thread. One row alone is always treated alike."""
    if width % VECTOR:
        return 1
    return max(min(most, GRAIN // width), 1)
