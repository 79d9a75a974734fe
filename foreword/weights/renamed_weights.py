"""Weights under other names than those in the files, or with rows in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks
from foreword.layers.weights import Weights

RowScale = float | tuple[tuple[int, float], ...]  # one scale, or numbers of rows and the scale of each


class PrefixedWeights:
    """Other weights, with a prefix before each name."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def name_in_file(self, name: str) -> str:
        """A name or prefix in terms of the other weights."""
        return self._prefix + name

    @property
    def num_parameters(self) -> int:
        return self._weights.num_parameters

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(self.name_in_file(name), *shape)

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.weights(
            {self.name_in_file(name): size for name, size in out_features.items()}, in_features
        )

    def has(self, name: str) -> bool:
        return self._weights.has(self.name_in_file(name))

    def stacked(self, name: str, index: int, *shape: int) -> AbstractContextManager[Matrix]:
        return self._weights.stacked(self.name_in_file(name), index, *shape)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, self._prefix + prefix)


class ReorderedWeights(PrefixedWeights):
    """Weights of a layer with the rows of some projections in another order: int64 [N], by their names."""

    def __init__(self, weights: Weights, row_orders: Mapping[str, Tensor]) -> None:
        super().__init__(weights, "")
        self._row_orders = row_orders

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._reorder(name, super().tensor(name, *shape))

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        with super().weights(out_features, in_features) as matrices:
            yield [
                self._reorder_matrix(name, matrix)
                for name, matrix in zip(out_features, matrices, strict=True)
            ]

    def _reorder_matrix(self, name: str, matrix: Matrix) -> Matrix:
        if isinstance(matrix, QuantizedBlocks):
            return replace(matrix, data=self._reorder(name, matrix.data))
        if isinstance(matrix, GroupedInts):
            values, scales, zeros = (
                self._reorder(name, rows) for rows in (matrix.values, matrix.scales, matrix.zeros)
            )
            return replace(matrix, values=values, scales=scales, zeros=zeros)
        if isinstance(matrix, Float8Blocks):
            by_row = _with_scales_by_row(matrix)
            values, scales = self._reorder(name, by_row.values), self._reorder(name, by_row.scales)
            return replace(by_row, values=values, scales=scales)
        return self._reorder(name, matrix)

    def _reorder(self, name: str, rows: Tensor) -> Tensor:
        order = self._row_orders.get(name.partition(".")[0])
        return rows if order is None or len(rows) != len(order) else rows[order.to(rows.device)]


class ScaledWeights(PrefixedWeights):
    """Weights with some tensors multiplied, or ranges of their rows. Quantized ones get other scales."""

    def __init__(self, weights: Weights, row_scales: Mapping[str, RowScale]) -> None:
        super().__init__(weights, "")
        self._row_scales = row_scales

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._scale_rows(name, super().tensor(name, *shape))

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        with super().weights(out_features, in_features) as matrices:
            yield [self._scale(name, matrix) for name, matrix in zip(out_features, matrices, strict=True)]

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def _scale(self, name: str, matrix: Matrix) -> Matrix:
        if isinstance(matrix, Float8Blocks):
            by_row = _with_scales_by_row(matrix)
            return replace(by_row, scales=self._scale_rows(name, by_row.scales))
        if isinstance(matrix, GroupedInts):
            return replace(matrix, scales=self._scale_rows(name, matrix.scales))
        assert isinstance(matrix, Tensor), "GGUF files hold scaled weights"
        return self._scale_rows(name, matrix)

    def _scale_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows [N, ...], multiplied in float32 and rounded once."""
        scale = self._row_scales.get(name)
        if scale is None:
            return rows
        scales = rows_of_scale(scale, len(rows)).to(rows.device)
        return (rows.to(torch.float32) * scales.view(-1, *(1,) * (rows.dim() - 1))).to(rows.dtype)


def rows_of_scale(scale: RowScale, num_rows: int) -> Tensor:
    """float32 [num_rows]"""
    counts, values = zip(*(((num_rows, scale),) if isinstance(scale, float) else scale), strict=True)
    return torch.tensor(values).repeat_interleave(torch.tensor(counts))


def _with_scales_by_row(matrix: Float8Blocks) -> Float8Blocks:
    """A scale for each row: rows may leave their blocks."""
    block_rows, block_columns = matrix.block_shape
    scales = matrix.scales.repeat_interleave(block_rows, 0)[: len(matrix.values)]
    return Float8Blocks(matrix.values, scales, (1, block_columns))


class HeadlessWeights(PrefixedWeights):
    """Weights of a checkpoint saved without its head: names lack `model.`."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, "")

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, prefix.removeprefix("model."))


class MultipartWeights(PrefixedWeights):
    """Weights whose prefixes differ between files; `prefixes` maps ours to those in files, by priority."""

    def __init__(
        self, weights: Weights, names: frozenset[str], prefixes: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(weights, "")
        self._file_prefixes = {
            ours: next((prefix for prefix in known if _has_prefix(names, prefix)), known[0])
            for ours, known in prefixes.items()
        }

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def name_in_file(self, name: str) -> str:
        for ours, actual in self._file_prefixes.items():
            if name.startswith(ours):
                return actual + name.removeprefix(ours)
        return name


def _has_prefix(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)
