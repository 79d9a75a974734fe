"""Weights in the layout of the native kernels, in their own huge pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.cpu.library import FORMAT_IDS, ExpertMatrices, Experts, HeadWeights, Weight
from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks
from foreword.kernels.quantization import matrix_shape
from foreword.utils.mapped_memory import HugePages, release_pages

DTYPE_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
GROUP_MULTIPLES = {
    "grouped4": 32,
    "grouped8": 32,
    "float8": 128,
}  # a group's values, which share a scale, are a multiple
PIECE_BYTES = 32 << 20  # part of a matrix that is packed before its pages in the file are released
TILE_ROWS = 16
MAX_ZEROS = {4: 16, 8: 255}  # by bits; GPTQ adds one to those of its file


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """Rows [first_row, first_row + weight.n) of a matrix, packed in one format."""

    weight: Weight
    first_row: int
    keep_alive: tuple[Tensor, ...]  # owns the memory of `weight`
    input_order: Tensor | None = None  # int64 [K]: column i multiplies input input_order[i]


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix [N, K]: one block, or several where a file mixes formats."""

    blocks: tuple[PackedBlock, ...]
    out_features: int
    in_features: int

    def first_rows(self, count: int) -> CpuLinear:
        """See Ops.first_rows."""
        assert 0 < count <= self.out_features
        blocks = []
        for block in self.blocks:
            if block.first_row < count:
                weight = Weight.from_buffer_copy(block.weight)
                weight.n = min(weight.n, count - block.first_row)
                blocks.append(replace(block, weight=weight))
        return CpuLinear(tuple(blocks), count, self.in_features)


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The matrices of a mixture of experts."""

    pointers: Experts
    keep_alive: tuple[object, ...]  # owns the memory of `pointers`


@dataclass(frozen=True, slots=True)
class CpuHeads:
    """A matrix [N, K] of each head."""

    pointers: HeadWeights
    out_features: int
    in_features: int
    keep_alive: tuple[object, ...]  # owns the memory of `pointers`


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Properties that the parts of one block share."""

    source: str  # formats, as in FORMAT_NAMES
    target: str
    group_size: int = 0
    input_order: bytes | None = None


class Packer:
    """Packs with the threads of a CPU context (csrc/common/forward_program.h)."""

    def __init__(self, library: ctypes.CDLL, cpu_context: int) -> None:
        self._library = library
        self._cpu_context = cpu_context
        self._memory = HugePages()

    def pack(self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None) -> CpuLinear:
        """See Ops.pack_linear."""
        heights, widths = zip(*map(matrix_shape, parts), strict=True)
        assert len(set(widths)) == 1
        float_bias = None if bias is None else bias.to(torch.float32).contiguous()
        assert bias is None or bias.shape == (sum(heights),), "a bias of another length"
        blocks = tuple(self._pack_blocks(parts, weight_format, float_bias))
        return CpuLinear(blocks, sum(heights), widths[0])

    def _pack_blocks(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None
    ) -> Iterator[PackedBlock]:
        first, (_, k) = 0, matrix_shape(parts[0])
        for layout, parts_of_block in groupby(parts, lambda part: _layout_of(part, weight_format)):
            of_block = list(parts_of_block)
            rows = np.concatenate([_row_pointers(part) for part in of_block])
            row_bytes = min(map(_row_bytes, of_block))
            yield self._pack_block(rows, row_bytes, layout, k, first, bias)
            first += len(rows)

    def _pack_block(
        self,
        rows: np.ndarray,
        row_bytes: int,
        layout: PackedLayout,
        k: int,
        first_row: int,
        bias: Tensor | None,
    ) -> PackedBlock:
        n, format_id, group_size = len(rows), FORMAT_IDS[layout.target], layout.group_size
        num_bytes = self._library.foreword_packed_bytes(format_id, n, k, group_size)
        if num_bytes < 0:
            raise CheckpointError(f"a weight [{n}, {k}] cannot be packed as {layout.target}")
        tiles = self._memory.allocate(num_bytes)
        data, pointers = tiles.data_ptr(), _pointers_to(rows) if rows.ndim == 2 else rows
        num_rows = max(PIECE_BYTES * n // num_bytes // TILE_ROWS, 1) * TILE_ROWS
        for begin in range(0, n, num_rows):  # so that a large file is never mapped beside its packed copy
            piece = pointers[begin : begin + num_rows]
            offset = self._library.foreword_packed_bytes(format_id, begin, k, group_size)
            formats, shape = (format_id, FORMAT_IDS[layout.source]), (len(piece), k, group_size)
            self._library.foreword_pack(
                self._cpu_context, *formats, piece.ctypes.data, row_bytes, *shape, data + offset
            )
            if rows.ndim == 1:
                release_pages(int(piece.min()), int(piece.max() - piece.min()))
        block_bias = None if bias is None else bias[first_row : first_row + n]
        bias_address = None if block_bias is None else block_bias.data_ptr()
        weight = Weight(format_id, group_size, n, k, data, bias_address)
        keep_alive = (tiles,) if block_bias is None else (tiles, block_bias)
        order = None if layout.input_order is None else _order_of(layout.input_order)
        return PackedBlock(weight, first_row, keep_alive, order)


def join_experts(
    gate_up: Sequence[CpuLinear],
    down: Sequence[CpuLinear],
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> CpuExperts:
    """See Ops.pack_experts."""
    vectors = [None if vector is None else vector.contiguous() for vector in (bias, scales)]
    given = [vector for vector in vectors if vector is not None]
    assert all(vector.dtype == torch.float32 and vector.shape == (len(down),) for vector in given)
    hidden, inner = gate_up[0].in_features, down[0].in_features
    assert all(matrix.in_features == hidden for matrix in gate_up)
    assert {matrix.out_features for matrix in gate_up} in ({2 * inner}, {inner})
    assert all((matrix.out_features, matrix.in_features) == (hidden, inner) for matrix in down)
    assert len(gate_up) == len(down)
    if any(block.input_order is not None for matrix in (*gate_up, *down) for block in matrix.blocks):
        raise CheckpointError(
            "experts whose inputs have an order of their own (GPTQ's desc_act) are not supported"
        )
    first, second = _join_blocks(gate_up), _join_blocks(down)
    matrices = [
        ExpertMatrices(ctypes.addressof(blocks), ctypes.addressof(starts))
        for blocks, starts in (first, second)
    ]
    keep_alive = (first, second, tuple(gate_up), tuple(down), vectors)
    addresses = [None if vector is None else vector.data_ptr() for vector in vectors]
    return CpuExperts(Experts(len(down), hidden, inner, *matrices, *addresses), keep_alive)


def join_heads(heads: Sequence[CpuLinear]) -> CpuHeads:
    """Matrices of one shape and format."""
    blocks, _ = joined = _join_blocks(heads)
    first = heads[0].blocks[0].weight
    assert len(blocks) == len(heads), "a head of several formats"
    for matrix in heads:
        (block,) = matrix.blocks
        assert block.input_order is None, "a head whose inputs have an order of their own"
        assert (block.weight.format, block.weight.n, block.weight.k) == (first.format, first.n, first.k)
    pointers = HeadWeights(len(heads), ctypes.addressof(blocks))
    return CpuHeads(pointers, first.n, first.k, (joined, tuple(heads)))


def _join_blocks(matrices: Sequence[CpuLinear]) -> tuple[ctypes.Array[Weight], ctypes.Array[ctypes.c_int64]]:
    """The blocks of all matrices, and where those of each begin."""
    blocks = [block.weight for matrix in matrices for block in matrix.blocks]
    starts = np.cumsum([0, *(len(matrix.blocks) for matrix in matrices)]).tolist()
    return (Weight * len(blocks))(*blocks), (ctypes.c_int64 * len(starts))(*starts)


def _layout_of(part: Matrix, weight_format: str) -> PackedLayout:
    if isinstance(part, QuantizedBlocks):
        return PackedLayout(part.format, part.format, 0, _order_bytes(part.input_order))
    if isinstance(part, Float8Blocks):
        return PackedLayout("float8", "float8", _group_size("float8", part.block_shape[1], part.columns))
    if isinstance(part, GroupedInts):
        return _layout_of_ints(part)
    return PackedLayout(DTYPE_FORMATS[part.dtype], weight_format)


def _layout_of_ints(part: GroupedInts) -> PackedLayout:
    source, columns = f"grouped{part.bits}", part.columns
    group_size = _group_size(source, part.group_size, columns)
    assert int(part.zeros.max()) <= MAX_ZEROS[part.bits], "a zero outside the values"
    order_bytes = _order_bytes(part.input_order)
    is_symmetric = part.bits == 8 and group_size >= columns and bool((part.zeros == 128).all())
    if is_symmetric:  # a scale for each row
        return PackedLayout(source, "int8", 0, order_bytes)
    return PackedLayout(source, source, group_size, order_bytes)


def _group_size(source: str, group_size: int, columns: int) -> int:
    """Values of a row that share a scale, rounded up if all do."""
    multiple = GROUP_MULTIPLES[source]
    if group_size >= columns:
        return -(-columns // multiple) * multiple
    if group_size % multiple:
        raise CheckpointError(
            f"weights with a scale for each {group_size} values of a row: the CPU kernels of {source} "
            f"support multiples of {multiple}, or one scale for the whole row"
        )
    return group_size


def _row_bytes(part: Matrix) -> int:
    """Bytes of a row of values."""
    values = _values_of(part)
    return values.shape[1] * values.itemsize


def _values_of(part: Matrix) -> Tensor:
    """The stored values [N, ...], without scales and zeros that come apart."""
    if isinstance(part, QuantizedBlocks):
        return part.data
    return part if isinstance(part, Tensor) else part.values


def _row_pointers(part: Matrix) -> np.ndarray:
    """Address of each row: uint64 [N], or [N, 3] of values, scales and zeros (struct GroupedRow)."""
    if isinstance(part, GroupedInts):
        groups = -(-part.columns // part.group_size)
        assert part.scales.shape == part.zeros.shape == (len(part.values), groups), "a group without a scale"
        assert part.scales.dtype == torch.float32 and part.values.dtype == part.zeros.dtype == torch.uint8
        return np.stack(
            [_row_addresses(part.values), _row_addresses(part.scales), _row_addresses(part.zeros)], 1
        )
    if isinstance(part, Float8Blocks):
        values, (rows, columns) = _row_addresses(part.values), part.block_shape
        blocks = -(-len(values) // rows), -(-part.columns // columns)
        assert part.scales.shape == blocks and part.scales.dtype == torch.float32, "a block without a scale"
        scales = _row_addresses(part.scales).repeat(part.block_shape[0])[: len(values)]
        return np.stack([values, scales, np.zeros_like(values)], 1)
    return _row_addresses(_values_of(part))


def _row_addresses(data: Tensor) -> np.ndarray:
    """uint64 [N]"""
    assert data.device.type == "cpu" and (data.stride(1) == 1 or data.shape[1] == 1)
    stride = data.stride(0) * data.itemsize
    return data.data_ptr() + np.arange(data.shape[0], dtype=np.uint64) * np.uint64(stride)


def _pointers_to(rows: np.ndarray) -> np.ndarray:
    """uint64 [N]: address of each row of an array, which must outlive them."""
    return rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])


def _order_bytes(order: Tensor | None) -> bytes | None:
    """None for inputs in their own order."""
    is_sorted = order is None or torch.equal(order, torch.arange(len(order)))
    return None if order is None or is_sorted else order.numpy().tobytes()


def _order_of(order_bytes: bytes) -> Tensor:
    """int64 [K]"""
    return torch.from_numpy(np.frombuffer(order_bytes, np.int64).copy())
