"""Grouped integers of AWQ, GPTQ and compressed-tensors on every instruction set of this processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import FORMAT_IDS, load_library, supported_isas
from foreword.kernels.ops import GroupedInts
from foreword.kernels.quantization import dequantize, quantize
from foreword.planning.memory import grouped_bytes
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, same_bits
from tests.support.quantized_weights import fake_quantize_activations, random_weight

MAX_ZEROS = {4: 16, 8: 255}  # GPTQ adds one to the zeros of its file

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_bits = pytest.mark.parametrize("bits", [4, 8])


def random_grouped(bits: int, n: int, k: int, group_size: int, seed: int = 0) -> GroupedInts:
    generator = torch.Generator().manual_seed(seed)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, dtype=torch.uint8, generator=generator)

    zeros = integers(MAX_ZEROS[bits] + 1, n, k // group_size)
    scales = torch.randn(n, k // group_size, generator=generator) * 0.01
    return GroupedInts(bits, group_size, integers(256, n, k * bits // 8), scales, zeros)


def product(ops: CpuOps, x: Tensor, matrix: GroupedInts, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, ops.pack_linear([matrix], "bfloat16", bias))


@each_isa
@each_bits
@pytest.mark.parametrize(("k", "group_size"), [(256, 32), (384, 64), (384, 128), (384, 384), (90, 90)])
def test_products_match_definition(isa: str, bits: int, k: int, group_size: int) -> None:
    ops = CpuOps(isa, threads=2)
    for n, rows in ((1, 1), (16, 3), (50, 18), (37, 70)):
        matrix, bias = random_grouped(bits, n, k, group_size), random_weight(1, n, seed=2)[0]
        x = random_weight(rows, k, seed=1)
        weight, operands = dequantize(matrix).double(), fake_quantize_activations(x, f"grouped{bits}")
        sizes = operands.abs() @ weight.abs().T + bias.abs()
        ours = product(ops, x, matrix, bias)
        assert ((ours.double() - (operands @ weight.T + bias)).abs() <= 2e-6 * sizes).all()


@each_bits
@pytest.mark.parametrize("group_size", [32, 128, 768])
def test_all_isas_agree_in_bits(bits: int, group_size: int) -> None:
    """Row counts that reach every group and run of rows of each instruction set."""
    matrix, x = random_grouped(bits, 75, 768, group_size), random_weight(85, 768, seed=1)
    matrix.scales[4] = 0.0
    matrix.scales[5] *= 1e-37
    x[3] *= 1e30
    x[4] *= 1e-20
    x[5, 40:80] = 0.0
    backends = [CpuOps(isa) for isa in supported_isas()]
    expected, *others = [(ops, ops.pack_linear([matrix], "bfloat16")) for ops in backends]
    whole = expected[0].linear(x, expected[1])
    assert whole.isfinite().all()
    for ops, packed in others:
        for count in (*range(1, 18), 85):
            assert same_bits(ops.linear(x[-count:], packed), whole[-count:]), (ops.name, count)


@each_isa
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, 256]),
    n=st.integers(1, 50),
    rows=st.integers(1, 130),
    first=st.integers(0, 129),
    threads=st.integers(1, 3),
)
def test_rows_are_batch_invariant(
    isa: str, bits: int, group_size: int, n: int, rows: int, first: int, threads: int
) -> None:
    x, matrix = random_weight(130, 256, seed=1), random_grouped(bits, n, 256, group_size)
    end = min(first + rows, 130)
    one, several = cpu_ops_by_threads(isa)[0], cpu_ops_by_threads(isa)[threads - 1]
    assert torch.equal(product(several, x[first:end], matrix), product(one, x, matrix)[first:end])


@each_isa
@each_bits
def test_extreme_products_are_exact(isa: str, bits: int) -> None:
    """The largest and smallest values, zeros and activations show a sum in 16 bits that overflows."""
    fills = [(value, zero) for value in (0, 255) for zero in (0, 1, MAX_ZEROS[bits] // 2, MAX_ZEROS[bits])]
    matrix = random_grouped(bits, len(fills), 512, 128)
    matrix.scales.fill_(1.0)
    for row, (value, zero) in enumerate(fills):
        matrix.values[row], matrix.zeros[row] = value, zero
    place = torch.arange(512)
    signs = torch.stack([(place // run % 2) * 2.0 - 1 for run in (1, 2, 4, 8, 16, 32, 64, 1024)])
    x = 127 * torch.cat([signs, -signs, signs.roll(1, 0), -signs.flip(0), signs])
    ops = CpuOps(isa)
    for rows in (1, 3, 16, 40):
        exact = x[:rows].double() @ dequantize(matrix).double().T
        assert torch.equal(product(ops, x[:rows], matrix).double(), exact)


@each_isa
@each_bits
def test_zero_and_non_finite_scales_stay_in_their_column(isa: str, bits: int) -> None:
    matrix, x = random_grouped(bits, 40, 256, 64), random_weight(20, 256, seed=1)
    clean = product(CpuOps(isa), x, matrix)
    matrix.scales[2] = 0.0
    matrix.scales[5, 3] = torch.nan
    matrix.scales[17, 0] = torch.inf
    x[7, 100] = torch.nan
    ours = product(CpuOps(isa), x, matrix)
    finite_rows = [row for row in range(20) if row != 7]
    others = [column for column in range(40) if column not in (2, 5, 17)]
    assert ours[7].isnan().all()
    assert not ours[finite_rows][:, 2].any()
    assert ours[:, 5].isnan().all() and not ours[:, 17].isfinite().any()
    assert torch.equal(ours[finite_rows][:, others], clean[finite_rows][:, others])


@each_isa
@each_bits
def test_activation_dtypes(isa: str, bits: int) -> None:
    """bfloat16 inputs equal the same float32 inputs; bfloat16 outputs are float32 outputs rounded once."""
    ops, x = CpuOps(isa), random_weight(6, 256, seed=1).bfloat16()
    packed = ops.pack_linear([random_grouped(bits, 37, 256, 64)], "bfloat16", random_weight(1, 37, seed=2)[0])
    wide = ops.linear(x.float(), packed)
    assert torch.equal(ops.linear(x, packed, torch.float32), wide)
    assert torch.equal(ops.linear(x, packed), wide.bfloat16())


@each_bits
@pytest.mark.parametrize(("k", "group_size"), [(256, 32), (384, 128), (384, 384), (90, 90)])
def test_rows_unpack_to_their_values(bits: int, k: int, group_size: int) -> None:
    ops, matrix = CpuOps(supported_isas()[0]), random_grouped(bits, 37, k, group_size)
    matrix.scales[3, 0] = torch.nan
    rows = ops.embedding(torch.arange(37), ops.pack_linear([matrix], "bfloat16"), torch.float32)
    assert same_bits(rows, dequantize(matrix))


@each_isa
def test_int8_with_a_scale_a_row_is_int8(isa: str) -> None:
    """The given values and scales, as if the weight had been quantized here."""
    weight, x = random_weight(40, 333), random_weight(20, 333, seed=1)
    ops, rounded = CpuOps(isa), quantize(weight, "int8")
    values = (rounded.quants[:, 0] + 128).to(torch.uint8)
    matrix = GroupedInts(8, 333, values, rounded.scales, torch.full((40, 1), 128, dtype=torch.uint8))
    packed = ops.pack_linear([matrix], "bfloat16")
    assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_linear([weight], "int8")))
    assert torch.equal(ops.embedding(torch.arange(40), packed, torch.float32), dequantize(matrix))


@each_isa
def test_columns_follow_their_order(isa: str) -> None:
    """GPTQ's desc_act: a product with the values sorted by group is one with the sorted inputs."""
    ops, k = CpuOps(isa, threads=2), 256
    orders = [torch.randperm(k, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    plain = [random_grouped(4, n, k, 64, seed=n) for n in (21, 5, 30)]
    parts = [replace(matrix, input_order=order) for matrix, order in zip(plain, orders, strict=True)]
    parts.append(replace(plain[0], input_order=torch.arange(k)))
    packed = ops.pack_linear(parts, "bfloat16")
    assert [block.weight.n for block in packed.blocks] == [26, 30, 21]
    for rows, dtype in ((1, torch.float32), (200, torch.bfloat16)):
        x = random_weight(rows, k, seed=1).to(dtype)
        inputs = [x[:, order] for order in orders] + [x]
        expected = [product(ops, of, matrix) for of, matrix in zip(inputs, [*plain, plain[0]], strict=True)]
        assert torch.equal(ops.linear(x, packed), torch.cat(expected, 1))
    values = dequantize(parts[0]).double()
    x = random_weight(3, k, seed=1)
    assert torch.allclose(ops.linear(x, packed)[:, :21].double(), x.double() @ values.T, atol=0.1)


def test_parts_of_other_formats_are_column_ranges() -> None:
    ops, x = CpuOps(supported_isas()[-1]), random_weight(11, 256, seed=1)
    parts = [random_grouped(4, 21, 256, 64), random_weight(33, 256), random_grouped(4, 5, 256, 32)]
    bias = random_weight(1, 59, seed=2)[0]
    whole = ops.linear(x, ops.pack_linear(parts, "bfloat16", bias))
    starts = (0, 21, 54, 59)
    for i, part in enumerate(parts):
        columns = slice(starts[i], starts[i + 1])
        packed = ops.pack_linear([part], "bfloat16", bias[columns])
        assert torch.equal(whole[:, columns], ops.linear(x, packed))


def test_group_size_that_kernels_do_not_support_is_refused() -> None:
    ops = CpuOps(supported_isas()[0])
    with pytest.raises(CheckpointError, match=r"each 16 values.*grouped4.*multiples of 32"):
        ops.pack_linear([random_grouped(4, 4, 64, 16)], "bfloat16")


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(1, 32, 32), (75, 384, 128), (16, 90, 90), (40, 704, 64)]
)
def test_bytes_are_those_of_the_kernels(rows: int, columns: int, group_size: int) -> None:
    library, _ = load_library()
    assert library is not None
    size = -(-group_size // 32) * 32
    for bits in (4, 8):
        packed = library.foreword_packed_bytes(FORMAT_IDS[f"grouped{bits}"], rows, columns, size)
        assert grouped_bytes(rows, columns, bits, columns // group_size) == packed
