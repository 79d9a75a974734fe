"""Products with quantized weights on every instruction set of this processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS, fake_quantize
from tests.support.cpu_kernels import isas_under_test, same_bits
from tests.support.quantized_weights import (
    SUPER_FORMATS,
    WEIGHT_FORMATS,
    fake_quantize_activations,
    random_blocks,
    random_matrix,
    random_weight,
    scale_bytes,
    weight_values,
)

# Around each row count where an instruction set changes runs (4, 6), groups (16), instructions (17, 64),
# passes (256) or chunks (576 for k = 896, fewer for larger k).
ROW_COUNTS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 513)

# Bytes of the scales of parts in a block, and of their minimums.
PART_SCALES = {
    "q4_k": slice(4, 16),
    "q5_k": slice(4, 16),
    "q6_k": slice(192, 208),
    "q2_k": slice(0, 16),
    "q3_k": slice(96, 108),
    "iq4_xs": slice(2, 8),
}

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_kind = pytest.mark.parametrize("kind", WEIGHT_FORMATS)


def columns_of(kind: str) -> int:
    """A width with the largest remainder that the format allows."""
    return 768 if kind in SUPER_FORMATS else 333 if kind in ("int8", "int4") else 352


@each_isa
@each_kind
def test_products_match_reference(isa: str, kind: str) -> None:
    ops, k = CpuOps(isa, threads=2), columns_of(kind)
    for n, rows in ((1, 1), (16, 3), (50, 18)):
        matrix, x, bias = (
            random_matrix(kind, n, k),
            random_weight(rows, k, seed=1),
            random_weight(1, n, seed=2)[0],
        )
        weight, operands = weight_values(matrix, kind).double(), fake_quantize_activations(x, kind)
        sizes = operands.abs() @ weight.abs().T + bias.abs()
        ours = ops.linear(x, ops.pack_linear([matrix], kind, bias))
        assert ((ours.double() - (operands @ weight.T + bias)).abs() <= 2e-6 * sizes).all()


@each_kind
def test_all_isas_agree_in_bits(kind: str) -> None:
    """Row counts that reach every group and run of rows of each instruction set."""
    k = columns_of(kind)
    matrix, x, bias = (
        random_matrix(kind, 75, k),
        random_weight(85, k, seed=1),
        random_weight(1, 75, seed=2)[0],
    )
    x[3] *= 1e30
    x[4] *= 1e-20
    backends = [CpuOps(isa) for isa in supported_isas()]
    expected, *others = [(ops, ops.pack_linear([matrix], kind, bias)) for ops in backends]
    whole = expected[0].linear(x, expected[1])
    assert whole.isfinite().all()
    for ops, packed in others:
        for count in (*range(1, 18), 85):
            assert torch.equal(ops.linear(x[-count:], packed), whole[-count:]), (ops.name, count)


@each_isa
@each_kind
def test_rows_are_batch_invariant(isa: str, kind: str) -> None:
    k, counts = columns_of(kind), ROW_COUNTS if isa != "portable" else (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)
    matrix, x = random_matrix(kind, 50, k), random_weight(max(counts), k, seed=1)
    alone = [CpuOps(isa, threads=threads) for threads in (1, 2, 3)]
    packed = [ops.pack_linear([matrix], kind) for ops in alone]
    whole = alone[0].linear(x, packed[0])
    for i, count in enumerate(counts):
        start = 7 * count % (max(counts) - count + 1)
        part = alone[i % 3].linear(x[start : start + count], packed[i % 3])
        assert torch.equal(part, whole[start : start + count]), count


@each_isa
@each_kind
def test_non_finite_values_stay_in_their_row(isa: str, kind: str) -> None:
    ops, k = CpuOps(isa, threads=2), columns_of(kind)
    packed = ops.pack_linear([random_matrix(kind, 40, k)], kind)
    x, poisoned = random_weight(70, k, seed=1), [2, 17, 18]
    clean = ops.linear(x, packed)
    x[2, 5], x[17, k - 1], x[18, 0] = torch.nan, torch.inf, -torch.inf
    dirty = ops.linear(x, packed)
    assert dirty[poisoned].isnan().all()
    others = [row for row in range(70) if row not in poisoned]
    assert torch.equal(dirty[others], clean[others])


@each_isa
@each_kind
def test_activation_dtypes(isa: str, kind: str) -> None:
    """bfloat16 inputs equal the same float32 inputs; bfloat16 outputs are float32 outputs rounded once."""
    ops, k = CpuOps(isa), columns_of(kind)
    packed = ops.pack_linear([random_matrix(kind, 37, k)], kind, random_weight(1, 37, seed=2)[0])
    x = random_weight(6, k, seed=1).bfloat16()
    wide = ops.linear(x.float(), packed)
    assert torch.equal(ops.linear(x, packed, torch.float32), wide)
    assert torch.equal(ops.linear(x, packed), wide.bfloat16())
    packed = ops.pack_linear([random_matrix(kind, 16, k)], kind)
    x = random_weight(2, k, seed=1) * 1e-28  # subnormal results
    scaled = ops.linear(x, packed)
    tiny = ops.linear(
        torch.zeros(1, k), ops.pack_linear([random_matrix(kind, 16, k)], kind, torch.full((16,), 1.2e-39))
    )
    assert scaled.isfinite().all() and scaled.any() and tiny.any()
    assert torch.equal(ops.linear(x, packed, torch.bfloat16), scaled.bfloat16())


@each_isa
@each_kind
def test_parts_are_column_ranges(isa: str, kind: str) -> None:
    """Blocks of different formats write adjacent columns of one result."""
    ops, k = CpuOps(isa, threads=2), 768
    matrices = [
        random_matrix(kind, 21, k),
        random_blocks("q8_0", 33, k, seed=3),
        random_matrix(kind, 5, k, seed=4),
    ]
    x, bias = random_weight(11, k, seed=1), random_weight(1, 59, seed=2)[0]
    whole = ops.linear(x, ops.pack_linear(matrices, kind, bias))
    starts = (0, 21, 54, 59)
    for i, matrix in enumerate(matrices):
        columns = slice(starts[i], starts[i + 1])
        assert torch.equal(whole[:, columns], ops.linear(x, ops.pack_linear([matrix], kind, bias[columns])))


@each_isa
@each_kind
def test_first_rows_are_columns_of_the_whole_result(isa: str, kind: str) -> None:
    ops, k = CpuOps(isa, threads=2), columns_of(kind)
    matrices = [random_matrix(kind, 21, k), random_matrix("q8_0" if k % 32 == 0 else kind, 29, k, seed=3)]
    x, bias = random_weight(9, k, seed=1), random_weight(1, 50, seed=2)[0]
    weight = ops.pack_linear(matrices, kind, bias)
    whole = ops.linear(x, weight)
    for count in (1, 16, 20, 21, 37, 50):
        assert torch.equal(ops.linear(x, ops.first_rows(weight, count)), whole[:, :count])


@each_kind
def test_rows_unpack_to_their_values(kind: str) -> None:
    ops = CpuOps(supported_isas()[0])
    for k in (768,) if kind in SUPER_FORMATS else (32, 768, columns_of(kind)):
        matrix = random_matrix(kind, 37, k)
        rows = ops.embedding(torch.arange(37), ops.pack_linear([matrix], kind), torch.float32)
        assert torch.equal(rows, weight_values(matrix, kind))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_rounded_like_reference(kind: str, dtype: torch.dtype) -> None:
    weight = random_weight(40, 200).to(dtype)
    weight[1] = 0
    weight[2] *= 1e-6
    weight[3, 50] = torch.nan
    weight[4, :64] = weight[4, 64:128] = 3.0
    weight[5] = torch.where(weight[5] > 0, weight[5], -weight[5].flip(0))
    ops = CpuOps(supported_isas()[0])
    ours = ops.embedding(torch.arange(40), ops.pack_linear([weight], kind), torch.float32)
    assert same_bits(ours + 0.0, fake_quantize(weight, kind) + 0.0)


@pytest.mark.parametrize("kind", QUANT_BLOCKS)
@each_isa
def test_extreme_blocks(isa: str, kind: str) -> None:
    """All bits set or clear, zero, subnormal and large scales: products match float64."""
    block, ops = QUANT_BLOCKS[kind], CpuOps(isa)
    blocks = random_blocks(kind, 6, 512)
    data = blocks.data.clone().reshape(6, -1, block.num_bytes)
    others = [place for place in range(block.num_bytes) if place not in scale_bytes(kind)]
    data[0, :, others] = 255
    data[1, :, others] = 128
    data[2] = 0
    data[3] = random_blocks(kind, 1, 512, scale=1e-7).data.reshape(-1, block.num_bytes)
    data[4] = random_blocks(kind, 1, 512, scale=1e4).data.reshape(-1, block.num_bytes)
    blocks = replace(blocks, data=data.reshape(6, -1))
    x = random_weight(5, 512, seed=1)
    x[0] = torch.where(x[0] > 0, 127.0, -127.0)
    x[1] = 127.0
    x[2] = 0.0
    weight, operands = weight_values(blocks, kind).double(), fake_quantize_activations(x, kind)
    sizes = operands.abs() @ weight.abs().T
    ours = ops.linear(x, ops.pack_linear([blocks], kind))
    assert ((ours.double() - operands @ weight.T).abs() <= 2e-6 * sizes).all()
    assert not ours[2].any() and not ours[:, 2].any()


@pytest.mark.parametrize("kind", QUANT_BLOCKS)
def test_extreme_products_agree_in_bits(kind: str) -> None:
    """The largest weights, scales and activations of either sign show a sum in 16 bits that overflows."""
    block = QUANT_BLOCKS[kind]
    fills = [(quants, scales) for quants in (0, 15, 127, 128, 240, 255) for scales in (127, 128, 255)]
    data = torch.zeros(len(fills), 512 // block.num_values, block.num_bytes, dtype=torch.uint8)
    for row, (quants, scales) in enumerate(fills):
        data[row] = quants
        if kind in PART_SCALES:
            data[row, :, PART_SCALES[kind]] = scales
    one = [128] if kind == "mxfp4" else [0x00, 0x3C] * (len(scale_bytes(kind)) // 2)
    data[..., scale_bytes(kind)] = torch.tensor(one, dtype=torch.uint8)
    blocks = QuantizedBlocks(kind, data.reshape(len(fills), -1), 512)
    place = torch.arange(512)
    signs = torch.stack([(place // run % 2) * 2.0 - 1 for run in (1, 2, 4, 8, 16, 32, 64, 1024)])
    x = 127 * torch.cat([signs, -signs])
    weight, operands = weight_values(blocks, kind).double(), fake_quantize_activations(x, kind)
    portable = CpuOps("portable")
    expected = portable.linear(x, portable.pack_linear([blocks], kind))
    assert ((expected.double() - operands @ weight.T).abs() <= 1e-6 * (operands.abs() @ weight.abs().T)).all()
    for isa in supported_isas():
        ops = CpuOps(isa)
        ours = ops.linear(x, ops.pack_linear([blocks], kind))
        assert torch.equal(ours, expected), isa
        for row in range(len(x)):
            assert torch.equal(ops.linear(x[row : row + 1], ops.pack_linear([blocks], kind))[0], ours[row])


@each_isa
def test_int8_sums_do_not_overflow(isa: str) -> None:
    """The largest k of known models, with the largest products."""
    k = 53248
    weight = torch.where(random_weight(16, k) > 0, 1.0, -1.0)
    weight[0] = 1.0
    x = torch.stack([weight[0], -weight[0], weight[1]])
    ops = CpuOps(isa)
    ours = ops.linear(x, ops.pack_linear([weight], "int8"))
    torch.testing.assert_close(ours, (x.double() @ weight.double().T).float(), rtol=1e-6, atol=1e-2)


@each_isa
def test_long_rows_and_many_columns_are_exact(isa: str) -> None:
    """More columns than one work item, more rows than one chunk."""
    ops = CpuOps(isa, threads=3)
    matrix, x = random_weight(48, 9000), random_weight(70, 9000, seed=1)
    packed = ops.pack_linear([matrix], "int8")
    whole = ops.linear(x, packed)
    rows: list[Tensor] = [ops.linear(x[row : row + 1], packed) for row in (0, 47, 48, 63, 64, 69)]
    assert torch.equal(whole[[0, 47, 48, 63, 64, 69]], torch.cat(rows))
    exact = fake_quantize_activations(x, "int8") @ fake_quantize(matrix, "int8").double().T
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-4)


def test_block_matrix_may_be_a_slice() -> None:
    whole = random_blocks("q4_0", 40, 96)
    part = QuantizedBlocks("q4_0", whole.data[7:29], 96)
    ops = CpuOps(supported_isas()[-1])
    x = random_weight(3, 96, seed=1)
    assert torch.equal(
        ops.linear(x, ops.pack_linear([part], "x")), ops.linear(x, ops.pack_linear([whole], "x"))[:, 7:29]
    )
