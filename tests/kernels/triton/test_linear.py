"""Linear layers on Triton: correctness and row invariance, interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.ops import Matrix, PackedLinear
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton import gemm as tiles
from foreword.kernels.triton import linear as module
from foreword.kernels.triton.backend import TritonFastMath
from foreword.kernels.triton.gemm import HOPPER_TILES, TILES, WIDE_TILES, Tile
from foreword.kernels.triton.gemm_pack import GROUP_SCALED_FORMATS, num_splits
from foreword.kernels.triton.linear import TritonLinear
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.quantized_weights import (
    random_blocks,
    random_float8_blocks,
    random_grouped_ints,
    random_weight,
)
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot, program_order
from tests.support.write_tracker import track_writes

COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 130, 257)
FEW_COUNTS = (1, 17, 33, 65, 257)  # one for each tile
ALONE = (0, 1, 31, 64, 129, 256)
KINDS = ("float32", "int8", "int4", "fp8")
INT_KINDS = ("grouped4_32", "grouped4_128", "grouped8_32", "grouped8_64")
ALL_KINDS = (*KINDS, "q8_0", "mxfp4", "fp8_blocks", *INT_KINDS)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gpt_oss")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    return normal(rows, columns, seed=seed) * columns**-0.5


def matrix_of(kind: str, rows: int, columns: int, seed: int = 1) -> Matrix:
    """Random weights; columns in groups are rounded up."""
    if kind in KINDS:
        return weights(rows, columns, seed)
    if kind in INT_KINDS:
        bits, group = (int(number) for number in kind.removeprefix("grouped").split("_"))
        size = -(-columns // group) * group
        ints = random_grouped_ints(bits, rows, size, group, seed, scale=2.0 ** (2 - bits) * columns**-0.5)
        return replace(
            ints, values=ints.values.to(DEVICE), scales=ints.scales.to(DEVICE), zeros=ints.zeros.to(DEVICE)
        )
    if kind == "fp8_blocks":
        blocks = random_float8_blocks(rows, columns, (24, 128), seed, scale=0.03 * columns**-0.5)
        return replace(blocks, values=blocks.values.to(DEVICE), scales=blocks.scales.to(DEVICE))
    quantized = random_blocks(kind, rows, -(-columns // 32) * 32, seed, scale=0.01 * columns**-0.5)
    return replace(quantized, data=quantized.data.to(DEVICE))


def columns_of(matrix: Matrix) -> int:
    return matrix.shape[1] if isinstance(matrix, Tensor) else matrix.columns


def packed(
    ops: TritonLinear | ReferenceOps, matrix: Matrix, kind: str, bias: Tensor | None = None
) -> PackedLinear:
    return ops.pack_linear([matrix], kind if kind in KINDS else "float32", bias)


@settings(max_examples=examples(15))
@given(
    st.sampled_from(ALL_KINDS),
    st.integers(1, 150),
    st.integers(1, 600),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_linear_matches_reference(
    kind: str, outputs: int, inputs: int, rows: int, has_bias: bool, has_residual: bool, seed: int
) -> None:
    matrix = matrix_of(kind, outputs, inputs, seed)
    x = normal(rows, columns_of(matrix), seed=seed + 1)
    bias = normal(outputs, seed=seed + 2) if has_bias else None
    residual = normal(rows, outputs, seed=seed + 3) if has_residual else None
    results = [
        ops.linear(x, packed(ops, matrix, kind, bias), None, residual)
        for ops in (TritonLinear(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-5)


@settings(max_examples=examples(10))
@given(
    st.sampled_from(KINDS),
    st.sampled_from(ACTIVATIONS),
    st.integers(1, 100),
    st.integers(1, 300),
    st.integers(0, 20),
)
def test_gated_layer_matches_reference(kind: str, activation: str, size: int, inputs: int, rows: int) -> None:
    gate, up, x = weights(size, inputs), weights(size, inputs, 2), normal(rows, inputs)
    results = [
        ops.linear_gated_act(x, ops.pack_linear([gate, up], kind), activation)
        for ops in (TritonLinear(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("value", [-200.0, -1.0, -1e-4, 0.0, 3.0, 200.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_at_extremes(activation: str, value: float) -> None:
    weight = torch.eye(2, device=DEVICE)
    x = torch.tensor([[value, 1.0]], device=DEVICE)
    results = [
        ops.linear_gated_act(x, ops.pack_linear([weight], "float32"), activation)
        for ops in (TritonLinear(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_result_dtype_can_differ() -> None:
    ops, x = TritonLinear(), normal(3, 64)
    weight = ops.pack_linear([weights(20, 64)], "float32")
    with exact_dot():
        exact = ops.linear(x, weight)
        assert torch.equal(ops.linear(x, weight, torch.float64), exact.double())
    assert ops.linear(x, weight, torch.float16).dtype == torch.float16


def check_counts(run: Callable[[slice], Tensor], counts: Sequence[int] = COUNTS) -> None:
    """`run` over slices of 257 rows gives each row the bits that it has alone."""
    with exact_dot():
        whole = run(slice(0, max(counts)))
        for count in counts:
            assert same_bits(run(slice(0, count)), whole[:count]), count
        for row in ALONE:
            assert same_bits(run(slice(row, row + 1))[0], whole[row]), row


def use_half_tiles(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, Sequence[Tile]]) -> None:
    """Half precision tiles for float32 values, which reveal more."""
    monkeypatch.setattr(
        module,
        "pick_tile",
        lambda form, _, rows, splits, __: tiles.pick_tile(form, 2, rows, splits, table),
    )


@pytest.fixture(params=["ampere", "hopper"])
def half_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_half_tiles(monkeypatch, TILES if request.param == "ampere" else HOPPER_TILES)


TABLES = ("ampere", "hopper")
BOTH_TABLES = ("float32", "int4", "q8_0")  # other kinds take one in turn


@pytest.mark.parametrize(
    ("half_tiles", "kind"),
    [
        (table, kind)
        for index, kind in enumerate(ALL_KINDS)
        for table in (TABLES if kind in BOTH_TABLES else TABLES[index % 2 :][:1])
    ],
    indirect=["half_tiles"],
)
def test_linear_is_batch_invariant(half_tiles: None, kind: str) -> None:
    ops = TritonLinear()
    matrix = matrix_of(kind, 40, 516)
    x, residual = normal(max(COUNTS), columns_of(matrix)), normal(max(COUNTS), 40, seed=4)
    weight = packed(ops, matrix, kind, normal(40, seed=5))
    assert (weight.splits, weight.format) == (2, "dense" if kind == "float32" else kind)
    counts = COUNTS if kind in ("float32", "q8_0") else FEW_COUNTS
    check_counts(lambda rows: ops.linear(x[rows], weight, None, residual[rows]), counts)


@pytest.mark.parametrize(
    ("half_tiles", "kind"),
    [
        *((table, "float32") for table in TABLES),
        *zip(2 * TABLES, ("int8", "int4", "q8_0", "grouped4_128"), strict=True),
        *zip(TABLES, ("fp8", "fp8_blocks"), strict=True),
    ],
    indirect=["half_tiles"],
)
def test_gated_layer_is_batch_invariant(half_tiles: None, kind: str) -> None:
    ops, matrix = TritonLinear(), matrix_of(kind, 40, 516)
    x, weight = normal(max(COUNTS), columns_of(matrix)), packed(ops, matrix, kind)
    check_counts(lambda rows: ops.linear_gated_act(x[rows], weight, "silu"), FEW_COUNTS)


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_tables_of_tiles_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TritonLinear()
    x, weight = normal(257, 160), packed(ops, matrix_of(kind, 40, 160), kind)
    assert weight.splits == 1
    results = []
    for table in (TILES, HOPPER_TILES, {**HOPPER_TILES, "dense": WIDE_TILES}):
        use_half_tiles(monkeypatch, table)
        with exact_dot():
            results.append(torch.cat([ops.linear(x[:rows], weight) for rows in (1, 257)]))
    assert same_bits(results[1], results[0]) and same_bits(results[2], results[0])


@pytest.mark.usefixtures("half_tiles")
@pytest.mark.parametrize(
    ("half_tiles", "kind"), [("ampere", "float32"), ("hopper", "int8")], indirect=["half_tiles"]
)
def test_split_mode_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tiles, one program computes all splits of K."""
    monkeypatch.setattr(tiles, "SPLIT_K_MAX_TILES", 1)
    ops = TritonLinear()
    x, weight = normal(max(COUNTS), 800), ops.pack_linear([weights(136, 800)], kind)
    assert weight.splits == 3
    check_counts(lambda rows: ops.linear(x[rows], weight), (1, 65, 257))
    check_counts(lambda rows: ops.linear_gated_act(x[rows], weight, "gelu"), (257,))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", torch.float16)]
)
def test_linear_is_batch_invariant_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    ops = TritonLinear()
    x, weight = normal(max(COUNTS), 260, dtype=dtype), ops.pack_linear([weights(40, 260).to(dtype)], kind)
    check_counts(lambda rows: ops.linear(x[rows], weight))


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order of programs")
def test_program_order_changes_no_bit() -> None:
    ops = TritonLinear()
    x, weight = normal(9, 1100), ops.pack_linear([weights(100, 1100)], "float32")
    assert weight.splits == 4
    with exact_dot():
        first = ops.linear(x, weight)
        for seed in range(4):
            shuffled = torch.Generator().manual_seed(seed)
            with program_order(
                lambda numbers, g=shuffled: torch.randperm(
                    len(numbers), generator=g.manual_seed(g.initial_seed())
                ).tolist()
            ):
                assert same_bits(ops.linear(x, weight), first)
        with program_order(lambda numbers: numbers[::-1]):
            assert same_bits(ops.linear(x, weight), first)
    assert not any(workspace.tile_counters.any() for workspace in ops._workspaces.values())


@pytest.mark.skipif(not IS_INTERPRETED, reason="only the interpreter tells what is written")
@pytest.mark.usefixtures("half_tiles")
@pytest.mark.parametrize("rows", [3, 70])
def test_only_the_last_program_writes_the_result(rows: int) -> None:
    """Stores of earlier programs would be wrong, but the last program would overwrite them."""
    ops = TritonLinear()
    x, weight = normal(rows, 516), ops.pack_linear([weights(40, 516)], "float32")
    assert weight.splits == 2
    with track_writes() as writes:
        results = [ops.linear(x, weight), ops.linear_gated_act(x, weight, "silu")]
    assert all(writes.each_written_once(result) for result in results)


@pytest.mark.parametrize("kind", ["grouped4_32", "q8_0", "q4_k"])
def test_inputs_are_gathered_into_the_order_of_columns(kind: str) -> None:
    """GPTQ with desc_act, and value heads in GGUF files of Qwen3.5; Q4_K becomes dense."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    matrix = replace(matrix_of(kind, 40, 256), input_order=order)
    x = normal(3, 256)
    mine, expected = (
        ops.linear_gated_act(x, ops.pack_linear([matrix], "float32"), "silu")
        for ops in (TritonLinear(), ReferenceOps())
    )
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=2e-5)


def test_non_finite_rows_do_not_affect_others() -> None:
    ops = TritonLinear()
    x, weight = normal(5, 70), ops.pack_linear([weights(10, 70)], "float32")
    with exact_dot():
        sound = ops.linear(x, weight)
        x[2] = torch.nan
        broken = ops.linear(x, weight)
    assert broken[2].isnan().all() and same_bits(broken[[0, 1, 3, 4]], sound[[0, 1, 3, 4]])


@settings(max_examples=examples(20))
@given(
    st.sampled_from((*ALL_KINDS, "bfloat16")),
    st.integers(1, 150),
    st.integers(1, 1500),
    st.sampled_from((1.0, 3.3)),
)
def test_embedding_matches_reference(kind: str, vocabulary: int, size: int, scale: float) -> None:
    stored = kind in (*KINDS, "bfloat16")
    matrix = random_weight(vocabulary, size).to(DEVICE) if stored else matrix_of(kind, vocabulary, size)
    ids = torch.randint(vocabulary, (5,), generator=torch.Generator().manual_seed(size)).to(DEVICE)
    results = [
        ops.embedding(ids, ops.pack_linear([matrix], kind if stored else "float32"), torch.float32, scale)
        for ops in (TritonLinear(), ReferenceOps())
    ]
    assert torch.equal(*results)


def test_empty_ids_give_no_rows() -> None:
    ops = TritonLinear()
    weight = ops.pack_linear([weights(8, 64)], "float32")
    assert ops.embedding(torch.zeros(0, dtype=torch.int64, device=DEVICE), weight, torch.float32).shape == (
        0,
        64,
    )
    assert ops.linear(normal(0, 64), weight).shape == (0, 8)


@given(
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 15),
    st.integers(1, 64),
    st.sampled_from(("dense", "int8", *GROUP_SCALED_FORMATS)),
    st.sampled_from((2, 4)),
    st.sampled_from((TILES, HOPPER_TILES)),
)
def test_few_rows_fit_the_workspace(
    outputs: int, inputs: int, rows: int, form: str, itemsize: int, table: Mapping[str, Sequence[Tile]]
) -> None:
    splits = num_splits(outputs, inputs, form)
    tile = tiles.pick_tile(form, itemsize, rows, splits, table)
    count = -(-outputs // tile.bm) * -(-rows // tile.bn)
    assert tiles.pick_split_mode(count, tile, splits, rows) == ("none" if splits == 1 else "split_k")


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_fast_math_is_close(kind: str) -> None:
    fast, exact = TritonFastMath(), TritonLinear()
    matrix, x, bias, residual = weights(24, 96), normal(5, 96), normal(24), normal(5, 24, seed=3)
    mine, theirs = (ops.pack_linear([matrix], kind, bias) for ops in (fast, exact))
    torch.testing.assert_close(fast.linear(x, mine, None, residual), exact.linear(x, theirs, None, residual))
    torch.testing.assert_close(
        fast.linear_gated_act(x, mine, "silu"), exact.linear_gated_act(x, theirs, "silu")
    )
    ids = torch.arange(4, device=DEVICE)
    assert torch.equal(
        fast.embedding(ids, mine, torch.float32, 2.0), exact.embedding(ids, theirs, torch.float32, 2.0)
    )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_first_rows_are_columns_of_the_whole_result(kind: str) -> None:
    ops = TritonLinear()
    matrix, x = matrix_of(kind, 150, 256), normal(3, 256, seed=4)
    weight = ops.pack_linear([matrix], kind if kind in KINDS else "float32", normal(150, seed=2))
    whole = ops.linear(x, weight)
    for count in (1, 64, 100, 150):
        assert same_bits(ops.linear(x, ops.first_rows(weight, count)), whole[:, :count].contiguous())
