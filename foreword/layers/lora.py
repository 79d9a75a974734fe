"""LoRA adapters of a model's linear layers: y += scale * B (A x), chosen by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.ops import LoraTable, Ops


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Adapters in memory at a time, and their largest rank."""

    max_loras: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The adapter of one projection."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scale: float
    interleaves_qk: bool = False  # rows of b are in the order of llama.cpp's converter, if they are of q or k


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """The adapters of one linear layer, which may fuse several projections."""

    ops: Ops
    layers: LoraLayers
    table: LoraTable

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, N], x [T, K] -> [T, N]; see Ops.add_lora"""
        assert self.layers.batch is not None, "no forward pass has begun"
        return self.ops.add_lora(y, x, self.table, self.layers.batch)


@dataclass(frozen=True, slots=True)
class _Projection:
    """Where a projection's adapters are."""

    table: LoraTable | None  # None: without limits
    part: int
    in_features: int
    out_features: int
    heads: int | None = None  # heads of q or k
    row_order: Tensor | None = None  # int64 [N]: rows are reordered at load, see ReorderedWeights
    row_scale: Tensor | None = None  # float32 [N]: and multiplied before, see ScaledWeights


@dataclass(slots=True)
class LoraLayers:
    """All adapters of a model, by the names of its projections, such as `layers.0.self_attn.q_proj`.

    Without limits LoRA is off: layers are counted, and get no tables.
    """

    limits: LoraLimits | None
    dtype: torch.dtype  # activations
    device: str
    batch: Batch | None = None  # batch of the current forward pass
    _projections: dict[str, _Projection] = field(default_factory=dict)

    @property
    def values_per_rank(self) -> int:
        """Values of an adapter of rank 1 for all projections."""
        return sum(each.in_features + each.out_features for each in self._projections.values())

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each projection."""
        return {name: (each.out_features, each.in_features) for name, each in self._projections.items()}

    def add_linear(
        self,
        ops: Ops,
        out_features: Mapping[str, int],
        in_features: int,
        qk_heads: Mapping[str, int],
        row_orders: Mapping[str, Tensor],
        row_scales: Mapping[str, Tensor],
    ) -> LoraLinear | None:
        """Make room for the adapters of one layer; None if LoRA is off.

        out_features  the projections that it fuses, in order, and their rows
        qk_heads      heads of those that are queries or keys
        row_orders    int64 [N] of those whose rows are reordered at load: see ReorderedWeights
        row_scales    float32 [N] of those whose rows are multiplied before: see ScaledWeights
        """
        table = None if self.limits is None else self._make_table(tuple(out_features.values()), in_features)
        for part, (name, size) in enumerate(out_features.items()):
            order = qk_heads.get(name), row_orders.get(name), row_scales.get(name)
            self._projections[name] = _Projection(table, part, in_features, size, *order)
        return None if table is None else LoraLinear(ops, self, table)

    def _make_table(self, part_sizes: tuple[int, ...], in_features: int) -> LoraTable:
        """Only ranks that are filled are ever touched: on a CPU, the others take no memory."""
        assert self.limits is not None
        slots, rank, device = self.limits.max_loras, self.limits.max_rank, self.device
        return LoraTable(
            part_sizes,
            torch.empty(slots, len(part_sizes), rank, in_features, dtype=self.dtype, device=device),
            torch.empty(slots, rank, sum(part_sizes), dtype=self.dtype, device=device),
            torch.zeros(slots, len(part_sizes), dtype=torch.int64, device=device),
            torch.zeros(slots, len(part_sizes), dtype=torch.float32, device=device),
        )

    def fill(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Put an adapter into a slot that no running request uses. Names and shapes must fit `shapes`."""
        self.clear(slot)
        for name, each in weights.items():
            place = self._projections[name]
            table, part, rank = place.table, place.part, len(each.a)
            assert table is not None and self.limits is not None and 0 < rank <= self.limits.max_rank
            start = list(accumulate(table.part_sizes, initial=0))[part]
            b = each.b
            if place.row_scale is not None:
                b = b * place.row_scale[:, None]
            if place.row_order is not None:
                b = b[place.row_order]
            elif place.heads is not None and each.interleaves_qk:
                b = deinterleave_heads(b, place.heads)
            table.a[slot, part, :rank].copy_(each.a)
            table.b[slot, :rank, start : start + place.out_features].copy_(b.t())
            table.scales[slot, part] = each.scale
            table.ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        """Rows of this slot get the base model again."""
        for place in self._projections.values():
            if place.table is not None:
                place.table.ranks[slot, place.part] = 0


def deinterleave_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Rows [N, ...] of q or k with each head's even rows before its odd rows."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def deinterleaved_order(num_rows: int, num_heads: int, rotary_dim: int) -> Tensor:
    """deinterleave_heads() of the first rows of each head as the order of all rows, int64 [N]."""
    rotated, rest = torch.arange(num_rows).view(num_heads, -1).tensor_split([rotary_dim], 1)
    halves = deinterleave_heads(rotated.reshape(-1), num_heads).view(num_heads, -1)
    return torch.cat((halves, rest), 1).flatten()


def split_order(group_sizes: Sequence[int], num_groups: int) -> Tensor:
    """The order of rows [N] that puts equal parts together: of groups with parts of these sizes."""
    rows = torch.arange(sum(group_sizes) * num_groups).view(num_groups, -1)
    return torch.cat([part.reshape(-1) for part in torch.split(rows, list(group_sizes), 1)])
