"""Blocks of float8_e4m3fn on every instruction set of this processor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import FORMAT_IDS, load_library, supported_isas
from foreword.kernels.ops import Float8Blocks
from foreword.kernels.quantization import dequantize
from foreword.planning.memory import float8_bytes
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, same_bits
from tests.support.quantized_weights import random_weight

NAN_BYTES = (0x7F, 0xFF)
SHAPES = (
    (75, 384, (128, 128)),
    (50, 200, (16, 128)),
    (33, 517, (1, 517)),
    (40, 512, (40, 512)),
    (1, 1, (1, 1)),
)

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_shape = pytest.mark.parametrize(("n", "k", "block_shape"), SHAPES)


def random_float8(n: int, k: int, block_shape: tuple[int, int], seed: int = 0) -> Float8Blocks:
    """All values but NaN, subnormal ones too."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 254, (n, k), generator=generator)
    values = torch.where(data >= NAN_BYTES[0], data + 1, data).to(torch.uint8).view(torch.float8_e4m3fn)
    blocks = (-(-n // block_shape[0]), -(-k // block_shape[1]))
    return Float8Blocks(values, torch.randn(blocks, generator=generator) * 0.01, block_shape)


@each_isa
@each_shape
def test_products_match_definition(isa: str, n: int, k: int, block_shape: tuple[int, int]) -> None:
    ops, matrix, bias = CpuOps(isa, threads=2), random_float8(n, k, block_shape), random_weight(1, n)[0]
    weight = dequantize(matrix).double()
    for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (18, torch.float32), (70, torch.bfloat16)):
        x = random_weight(rows, k, seed=1).to(dtype)
        ours = ops.linear(x, ops.pack_linear([matrix], "bfloat16", bias), torch.float32)
        sizes = x.double().abs() @ weight.abs().T + bias.abs()
        assert ((ours.double() - (x.double() @ weight.T + bias)).abs() <= 2e-6 * sizes).all()


@each_isa
@given(
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 300),
    first=st.integers(0, 299),
    threads=st.integers(1, 3),
)
def test_rows_are_batch_invariant(
    isa: str, shape: tuple[int, int, tuple[int, int]], rows: int, first: int, threads: int
) -> None:
    matrix, x = random_float8(*shape), random_weight(300, shape[1], seed=1)
    end = min(first + rows, 300)
    one, several = cpu_ops_by_threads(isa)[0], cpu_ops_by_threads(isa)[threads - 1]
    part = several.linear(x[first:end], several.pack_linear([matrix], "bfloat16"))
    assert torch.equal(part, one.linear(x, one.pack_linear([matrix], "bfloat16"))[first:end])


@each_isa
def test_every_value_is_converted_exactly(isa: str) -> None:
    """All float8 values, as weights of a product with 1."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    matrix = Float8Blocks(values, torch.ones(256, 1), (1, 1))
    ops = CpuOps(isa)
    packed = ops.pack_linear([matrix], "bfloat16")
    for rows in (1, 20):
        out = ops.linear(torch.ones(rows, 1), packed)
        assert all(same_bits(row + 0.0, values[:, 0].float() + 0.0) for row in out)
    assert out.isnan().sum(1).tolist() == [len(NAN_BYTES)] * 20


@each_isa
def test_non_finite_values_stay_in_their_row_and_column(isa: str) -> None:
    matrix, x = random_float8(40, 300, (1, 128)), random_weight(20, 300, seed=1)
    ops = CpuOps(isa, threads=2)
    clean = ops.linear(x, ops.pack_linear([matrix], "bfloat16"))
    matrix.values.view(torch.uint8)[3, 299] = NAN_BYTES[0]
    matrix.values.view(torch.uint8)[5, 0] = NAN_BYTES[1]
    matrix.scales[7, 1] = torch.nan
    matrix.scales[9] = 0.0
    x[2, 100] = torch.nan
    x[17] = 0.0
    ours = ops.linear(x, ops.pack_linear([matrix], "bfloat16"))
    assert ours[2].isnan().all() and ours[:, [3, 5, 7]].isnan().all()
    rows = [row for row in range(20) if row not in (2, 17)]
    columns = [column for column in range(40) if column not in (3, 5, 7, 9)]
    assert not ours[rows][:, 9].any() and not ours[17, columns].any()
    assert torch.equal(ours[rows][:, columns], clean[rows][:, columns])


@each_isa
def test_activation_dtypes(isa: str) -> None:
    """bfloat16 inputs equal the same float32 inputs; bfloat16 outputs are float32 outputs rounded once."""
    ops, x = CpuOps(isa), random_weight(6, 256, seed=1).bfloat16()
    packed = ops.pack_linear([random_float8(37, 256, (1, 256))], "bfloat16", random_weight(1, 37, seed=2)[0])
    wide = ops.linear(x.float(), packed)
    assert torch.equal(ops.linear(x, packed, torch.float32), wide)
    assert torch.equal(ops.linear(x, packed), wide.bfloat16())


@each_shape
def test_rows_unpack_to_their_values(n: int, k: int, block_shape: tuple[int, int]) -> None:
    ops, matrix = CpuOps(supported_isas()[0]), random_float8(n, k, block_shape)
    matrix.values.view(torch.uint8)[0, k // 2] = NAN_BYTES[0]
    rows = ops.embedding(torch.arange(n), ops.pack_linear([matrix], "bfloat16"), torch.float32)
    assert same_bits(rows, dequantize(matrix))


def test_parts_have_blocks_of_their_own() -> None:
    """The scales of a part begin anew at its first row."""
    ops, x = CpuOps(supported_isas()[-1]), random_weight(11, 256, seed=1)
    parts = [random_float8(n, 256, (16, 128), seed=n) for n in (21, 37)]
    whole = ops.linear(x, ops.pack_linear(parts, "bfloat16"))
    expected = [ops.linear(x, ops.pack_linear([part], "bfloat16")) for part in parts]
    assert torch.equal(whole, torch.cat(expected, 1))


def test_block_size_that_kernels_do_not_support_is_refused() -> None:
    ops = CpuOps(supported_isas()[0])
    with pytest.raises(CheckpointError, match=r"each 64 values.*float8.*multiples of 128"):
        ops.pack_linear([random_float8(4, 256, (64, 64))], "bfloat16")


@each_shape
def test_bytes_are_those_of_the_kernels(n: int, k: int, block_shape: tuple[int, int]) -> None:
    library, _ = load_library()
    assert library is not None
    packed = library.foreword_packed_bytes(FORMAT_IDS["float8"], n, k, -(-block_shape[1] // 128) * 128)
    assert float8_bytes(n, k, -(-k // block_shape[1])) == packed
