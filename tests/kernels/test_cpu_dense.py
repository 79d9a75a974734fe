"""Products with float32, bfloat16 and float16 weights on every instruction set of this processor."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import FORMAT_IDS as KIND_NUMBERS
from foreword.kernels.cpu.library import Weight, load_library, supported_isas
from foreword.kernels.ops import QuantizedBlocks
from foreword.kernels.quantization import dequantize
from tests.support.budget import examples
from tests.support.cpu_kernels import bits, isas_under_test

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = (torch.float32, torch.bfloat16)
CASES = [(isa, kind) for isa in isas_under_test() for kind in KINDS]

# Around each row count where an instruction set changes its inner loop (4, 6, 8, 12, 16, 32) or passes (256).
ROW_COUNTS = (*range(1, 18), 23, 24, 25, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 513)

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_case = pytest.mark.parametrize(("isa", "kind"), CASES)


def random(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(values: Tensor, exact: Tensor) -> float:
    return float((values.double() - exact).square().mean().sqrt())


# Every pair of a size, a kind of weights and a type of activations.
ERROR_CASES = [
    (isa, kind, ACTIVATIONS[(i + j) % 2], k)
    for isa in isas_under_test()
    for i, kind in enumerate(KINDS)
    for j, k in enumerate((64, 513, 896, 4864))
]


@pytest.mark.parametrize(("isa", "kind", "dtype", "k"), ERROR_CASES)
def test_error_is_at_most_twice_that_of_torch(isa: str, kind: str, dtype: torch.dtype, k: int) -> None:
    ops = CpuOps(isa)
    weight = (random(70, k) / k**0.5).to(KINDS[kind])
    x = random(19, k, dtype, seed=1)
    operands = x.to(torch.bfloat16) if kind == "bfloat16" else x
    exact = operands.double() @ weight.double().T
    theirs = F.linear(operands, weight.to(operands.dtype)).to(dtype)
    ours = ops.linear(x, ops.pack_linear([weight], kind))
    assert ours.dtype == dtype
    assert error(ours, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@each_case
def test_integer_products_are_exact(isa: str, kind: str, dtype: torch.dtype) -> None:
    """Sums that are exact in every type reveal any error in layout, bias or padding."""
    generator = torch.Generator().manual_seed(5)
    ops = CpuOps(isa, threads=2)
    for n, k, rows in ((1, 1, 1), (16, 32, 3), (17, 33, 5), (37, 77, 18), (100, 700, 40)):
        weight = torch.randint(-1, 2, (n, k), generator=generator).float()
        bias = torch.randint(-8, 9, (n,), generator=generator).float()
        x = torch.randint(-1, 2, (rows, k), generator=generator).float()
        packed = ops.pack_linear([weight], kind, bias)
        assert torch.equal(ops.linear(x.to(dtype), packed, torch.float32), x @ weight.T + bias), (n, k, rows)


@pytest.mark.parametrize("shape", [(33, 77), (1200, 33), (130, 1090)])
@each_case
def test_rows_are_batch_invariant(isa: str, kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    dtype = torch.float32 if kind == "float16" else torch.bfloat16
    x = random(max(ROW_COUNTS), k, dtype)
    weight, bias = random(n, k, seed=1), random(1, n, seed=2)[0]
    wanted = None
    for threads in (1, 2, 3):
        ops = CpuOps(isa, threads)
        packed = ops.pack_linear([weight], kind, bias)
        if wanted is None:
            wanted = bits(torch.cat([ops.linear(row, packed, torch.float32) for row in x.split(1)]))
        for rows in ROW_COUNTS:
            last = x[-rows:]
            assert torch.equal(bits(ops.linear(last, packed, torch.float32)), wanted[-rows:]), (threads, rows)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_case
def test_non_finite_neighbours_change_no_bit(isa: str, kind: str, bad: float) -> None:
    ops = CpuOps(isa, threads=2)
    packed = ops.pack_linear([random(50, 90)], kind)
    for rows in (2, 3, 7, 16, 21, 45):
        x = random(rows, 90, seed=rows)
        wanted = ops.linear(x, packed)
        spoilt = x.clone()
        spoilt[1::2] = bad
        got = ops.linear(spoilt, packed)
        assert torch.equal(bits(got[::2]), bits(wanted[::2]))
        assert not got[1::2].isfinite().any()


@each_case
def test_bfloat16_output_is_the_rounded_float32_output(isa: str, kind: str) -> None:
    """Every high half of a finite float32, exact ties and values around them, infinities and NaN."""
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bias = (halves[:, None] | lows).view(torch.float32).flatten()
    bias = bias[(bias.abs() >= 2.0**-126) | bias.isnan()]
    ops = CpuOps(isa)
    weight = ops.pack_linear([torch.zeros(len(bias), 1)], kind, bias)
    for rows in (1, 2):
        x = torch.zeros(rows, 1)
        wide, narrow = (ops.linear(x, weight, dtype) for dtype in ACTIVATIONS)
        assert wide.isnan().equal(bias.isnan().expand(rows, -1))
        assert torch.equal(bits(narrow), bits(wide.to(torch.bfloat16)))


@each_case
def test_non_finite_values_propagate(isa: str, kind: str) -> None:
    ops = CpuOps(isa)
    x = torch.zeros(4, 8)
    x[0, 0], x[1, 3], x[2, 7] = torch.inf, -torch.inf, torch.nan
    out = ops.linear(x, ops.pack_linear([torch.ones(20, 8)], kind), torch.bfloat16)
    assert (out[0] == torch.inf).all() and (out[1] == -torch.inf).all()
    assert out[2].isnan().all() and (out[3] == 0).all()


@each_case
def test_inputs_and_outputs_may_be_slices(isa: str, kind: str) -> None:
    """x with any stride and offset; y between columns that must stay unchanged."""
    ops = CpuOps(isa, threads=2)
    for dtype in ACTIVATIONS:
        wide = random(20, 201, dtype)
        parts = [random(n, 90, seed=n) for n in (5, 18, 40)]
        packed = [ops.pack_linear([part], kind) for part in parts]
        for first in (0, 1, 7):
            for rows in (1, 3, 20):
                x = wide[:rows, first : first + 90]
                together = ops.linear(x, ops.pack_linear(parts, kind))
                alone = torch.cat([ops.linear(x.contiguous(), part) for part in packed], 1)
                assert torch.equal(bits(together), bits(alone))


@each_case
def test_columns_beyond_the_output_stay_unchanged(isa: str, kind: str) -> None:
    """A matrix of several formats is written block by block, each between the columns of the others."""
    ops = CpuOps(isa, threads=2)
    blocks = QuantizedBlocks("q8_0", torch.full((3, 34), 1, dtype=torch.uint8), 32)
    dense = [random(7, 32, seed=1), random(19, 32, seed=2)]
    mixed = ops.pack_linear([dense[0], blocks, dense[1]], kind)
    for rows in (1, 6, 33):
        x = random(rows, 32, seed=rows)
        out = ops.linear(x, mixed)
        assert torch.equal(out[:, :7], ops.linear(x, ops.pack_linear([dense[0]], kind)))
        assert torch.equal(out[:, 7:10], ops.linear(x, ops.pack_linear([blocks], kind)))
        assert torch.equal(out[:, 10:], ops.linear(x, ops.pack_linear([dense[1]], kind)))


@each_case
def test_zero_rows_and_small_shapes(isa: str, kind: str) -> None:
    ops = CpuOps(isa, threads=2)
    packed = ops.pack_linear([torch.full((1, 1), 3.0)], kind)
    assert ops.linear(torch.empty(0, 1), packed).shape == (0, 1)
    assert ops.linear(torch.full((1, 1), 2.0), packed).tolist() == [[6.0]]


@settings(max_examples=examples(20))
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 150),
    rows=st.integers(1, 40),
    place=st.integers(0, 39),
    seed=st.integers(0, 99),
)
@each_case
def test_random_shapes(isa: str, kind: str, n: int, k: int, rows: int, place: int, seed: int) -> None:
    ops = CpuOps(isa, threads=2)
    weight, x = random(n, k, seed=seed), random(rows, k, torch.bfloat16, seed + 1)
    packed = ops.pack_linear([weight], kind)
    out = ops.linear(x, packed, torch.float32)
    exact = x.double() @ weight.to(KINDS[kind]).double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    row = place % rows
    assert torch.equal(bits(ops.linear(x[row : row + 1], packed, torch.float32)), bits(out[row : row + 1]))


@settings(max_examples=examples(30))
@given(n=st.integers(1, 40), k=st.integers(1, 100), seed=st.integers(0, 99))
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_values_equal_torch(kind: str, source: str, n: int, k: int, seed: int) -> None:
    ops = CpuOps("portable", threads=2)
    weight = (random(n, k, seed=seed) * 10.0 ** (seed % 9 - 6)).to(KINDS[source])
    packed = ops.pack_linear([weight], kind)
    values = ops.embedding(torch.arange(n), packed, torch.float32)
    assert torch.equal(values, weight.to(KINDS[kind]).float())


def test_packing_rounds_like_torch() -> None:
    """Ties, subnormals, overflow, infinity and zeros of both signs."""
    hard = [
        1 + 2**-9,
        1 + 3 * 2**-9,
        1 + 2**-12,
        65519.9,
        65520.0,
        2**-24,
        2**-25,
        3 * 2**-26,
        1e-40,
        3.4e38,
        torch.inf,
        0.0,
    ]
    weight = torch.tensor([hard, [-value for value in hard]])
    ops = CpuOps("portable")
    for kind, dtype in KINDS.items():
        values = ops.embedding(torch.arange(2), ops.pack_linear([weight], kind), torch.float32)
        assert torch.equal(bits(values), bits(weight.to(dtype).float())), kind
    spoilt = ops.pack_linear([torch.full((1, 4), torch.nan)], "bfloat16")
    assert ops.embedding(torch.zeros(1, dtype=torch.int64), spoilt, torch.float32).isnan().all()


@pytest.mark.parametrize("isa", isas_under_test())
def test_every_float16_is_converted_exactly(isa: str) -> None:
    """All float16 values, as weights of a product with 1."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    ops = CpuOps(isa)
    out = ops.linear(torch.ones(1, 1), ops.pack_linear([every[:, None]], "float16"))
    assert torch.equal(bits(out[0] + 0.0), bits(every.float() + 0.0))


@pytest.mark.parametrize("kind", KINDS)
def test_file_blocks_become_dense(kind: str) -> None:
    blocks = QuantizedBlocks("q8_0", torch.randint(0, 60, (21, 2 * 34), dtype=torch.uint8), 64)
    library, _ = load_library()
    assert library is not None
    machine = library.foreword_machine_new(0, 1)
    tiles = torch.empty(library.foreword_packed_bytes(KIND_NUMBERS[kind], 21, 64, 0), dtype=torch.uint8)
    rows = np.array([row.data_ptr() for row in blocks.data], dtype=np.uint64)
    formats, shape = (KIND_NUMBERS[kind], KIND_NUMBERS["q8_0"]), (21, 64, 0)
    library.foreword_pack(machine, *formats, rows.ctypes.data, 2 * 34, *shape, tiles.data_ptr())
    values = torch.empty(21, 64)
    weight = Weight(KIND_NUMBERS[kind], 0, 21, 64, tiles.data_ptr(), None)
    library.foreword_unpack(machine, ctypes.byref(weight), values.data_ptr())
    library.foreword_machine_delete(machine)
    assert torch.equal(values, dequantize(blocks).to(KINDS[kind]).float())


@pytest.mark.parametrize("isa", isas_under_test())
def test_threads_may_change_between_operations(isa: str) -> None:
    ops = CpuOps(isa, threads=3)
    packed, x = ops.pack_linear([random(700, 513)], "float32"), random(65, 513, seed=1)
    expected = bits(ops.linear(x, packed))
    for threads in (1, 2, 3, 1, 2):
        ops.set_threads(threads)
        assert torch.equal(bits(ops.linear(x, packed)), expected), threads


def test_threads_that_the_system_does_not_grant_change_nothing() -> None:
    ops = CpuOps("portable", threads=2)
    packed, x = ops.pack_linear([random(70, 64)], "float32"), random(5, 64, seed=1)
    expected = bits(ops.linear(x, packed))
    ops._library = RefusingLibrary(ops._library)  # type: ignore[assignment]
    ops.set_threads(1)
    assert torch.equal(bits(ops.linear(x, packed)), expected)


class RefusingLibrary:
    """Grants no threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def foreword_machine_new(self, isa: int, threads: int) -> None:
        return None

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)
