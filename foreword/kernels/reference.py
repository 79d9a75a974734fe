"""The specification of every operation, in plain torch.

Torch's own kernels change their order of summation, and even their exponential, with the shape of what
they get. So whatever is not exact in itself runs on exactly `row_tile` rows, the last tile padded: then
the bits of a row depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch
from foreword.core.kv import KVLayer
from foreword.kernels.composed import Composed
from foreword.kernels.ops import Axes, Blocks, Matrix
from foreword.kernels.quantization import dequantize, rounded
from foreword.kernels.reference_attention import Plan, attend, plan_attention
from foreword.kernels.reference_sampling import ReferenceSampling

__all__ = ["Reference", "reference_threads", "sizes_of"]

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
class Layout:
    """A weight for activations of one type: matrix [N, K], bias [N] or None.

    by_row  this machine's product rounds by a row's place in the tile: each row is computed alone
    """

    matrix: Tensor
    bias: Tensor | None
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """values [N, K] that the weight stands for, bias [N] or None, and what was made of them so far."""

    values: Tensor
    bias: Tensor | None
    layouts: dict[torch.dtype, Layout] = field(default_factory=dict)


class Reference(ReferenceSampling, Composed):
    """Row-invariant torch. `row_tile` rows are what every tiled operation runs on."""

    name = "reference"
    recordable = False

    def __init__(self, row_tile: int = 16) -> None:
        self.row_tile = row_tile

    def threads(self, wanted: int) -> int:
        """Torch threads to use on so many cores."""
        return reference_threads(wanted)

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Torch computes it as it stands."""
        return forward

    def pack_linear(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None = None) -> Packed:
        """See Packed."""
        return Packed(torch.cat([_values(part, kind) for part in parts]), bias)

    def linear(self, x: Tensor, weight: Packed, dtype: torch.dtype | None = None, add_to: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] of `dtype`"""
        layout = self._layout(weight, x.dtype)
        product = self._product(x, layout)
        product = product if dtype is None else product.to(dtype)
        return product if add_to is None else self.add(add_to, product)

    def embedding(self, ids: Tensor, weight: Packed, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """ids [T], weight [V, H] -> [T, H], scaled in float32"""
        rows = weight.values.index_select(0, ids)
        return (rows if scale == 1.0 else rows.to(torch.float32) * scale).to(dtype)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b"""
        return a + b

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows [R] -> [R, H]"""
        return x.index_select(0, rows)

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """x [T, H], rows [N], values [N, H]"""
        x.index_copy_(0, rows, values)

    def _layout(self, weight: Packed, dtype: torch.dtype) -> Layout:
        """The weight for activations of this type, made when they first come."""
        layout = weight.layouts.get(dtype)
        if layout is None:
            bias = None if weight.bias is None else weight.bias.to(dtype)
            layout = Layout(weight.values.to(dtype), bias)
            layout = weight.layouts[dtype] = replace(layout, by_row=self._place_matters(layout))
        return layout

    def _product(self, x: Tensor, layout: Layout) -> Tensor:
        if layout.by_row:
            return torch.cat([F.linear(row, layout.matrix, layout.bias) for row in torch.split(x.contiguous(), 1)])
        return self._tiled(lambda rows: F.linear(rows, layout.matrix, layout.bias), x)

    def _place_matters(self, layout: Layout) -> bool:
        """Whether one row, put at every place of a tile, comes out with different bits (some BLAS round their
        first and last rows differently)."""
        like = layout.matrix[0]
        ramp = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
        for step in (0.7, 1.9, 3.1):
            row = torch.sin(ramp * step).to(like.dtype)
            tile = self._product(row.expand(self.row_tile, -1).contiguous(), layout)
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

    def rope(self, x: Tensor, table: Tensor, positions: Tensor, axes: Axes | None = None) -> Tensor:
        """x [T, heads, D], table [positions, D_rot] -> [T, heads, D]. Products and sums of single values: exact for any T."""
        rotary = table.shape[1]
        angles = table.index_select(0, positions) if axes is None else _angles(table, positions, axes)
        cos, sin = angles[:, None].chunk(2, -1)
        left, right = x[..., :rotary].to(torch.float32).chunk(2, -1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
        return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), -1)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> [T, I], computed in float32"""
        act = ACTIVATIONS[activation]
        gate, up = gate_up.chunk(2, -1)
        gate = gate.to(torch.float32).contiguous()
        pieces = [act(piece) for piece in torch.split(gate, _rows_a_call(gate.shape[1], self.row_tile))]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).mul_(up).to(gate_up.dtype)

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        """k, v [T, Hk, D] into the cache"""
        for vectors, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            if scales is None:
                values.index_copy_(0, slots, vectors)
            else:
                rounded, scale = _round_by_scale(vectors, values.dtype)
                values.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))
                scales.index_copy_(0, slots, scale)

    def plan_attention(self, batch: Batch, window: int | None = None) -> Plan:
        """See reference_attention."""
        return plan_attention(batch, window)

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]; see reference_attention"""
        return attend(q, cache, plan or plan_attention(batch, window), scale, softcap)

    def attend_sections(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Sequence[int], kv_starts: Sequence[int], scale: float
    ) -> Tensor:
        """q [N, heads, D], k and v [M, heads, D] -> [N, heads, D], each section by a call of its own"""
        queries = torch.split(q, sizes_of(q_starts))
        keys, values = (torch.split(one, sizes_of(kv_starts)) for one in (k, v))
        return torch.cat([_see(*section, scale) for section in zip(queries, keys, values, strict=True)])

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


def sizes_of(starts: Sequence[int]) -> list[int]:
    """Of sections that begin where the one before ends."""
    return [end - start for start, end in pairwise(starts)]


def _see(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, heads, D], k and v [m, heads, D] -> [n, heads, D]"""
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def _angles(table: Tensor, positions: Tensor, axes: Axes) -> Tensor:
    """Cosines and sines of each row [T, D_rot]; each angle turns by the position [T, 3] in its direction."""
    directions = torch.tensor(axes.directions() * 2, device=table.device)
    return table.gather(0, positions.index_select(1, directions))


def _rows_a_call(width: int, most: int) -> int:
    """How many contiguous rows an activation may take at once: the scalar loop that torch ends with must not
    begin inside them, nor a thread. One row alone is always treated alike."""
    if width % VECTOR:
        return 1
    return max(min(most, GRAIN // width), 1)


def _values(part: Matrix, kind: str) -> Tensor:
    """What a part stands for once it is of this kind."""
    if isinstance(part, Blocks):
        return dequantize(part)
    return rounded(part, kind) if kind in ("int8", "int4", "fp8") else part.to(getattr(torch, kind))


def _round_by_scale(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, Hk, D] -> int8 or float8_e4m3fn [T, Hk, D], and a scale for each vector [T, Hk]: not finite where the vector is not."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = vectors.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True) / largest
    usable = (scale > 0) & scale.isfinite()
    values = torch.where(usable, wide / scale, 0.0)
    if dtype == torch.int8:
        values.round_()
    return values.clamp_(-largest, largest).to(dtype), scale.squeeze(-1)
