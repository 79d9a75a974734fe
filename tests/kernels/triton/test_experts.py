"""Mixtures of experts on Triton: routing, grouping, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import ExpertsConfig, PackedExperts
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton import gemm, linear
from foreword.kernels.triton.backend import TritonFastMath, TritonOps
from foreword.kernels.triton.experts import max_row_tiles
from foreword.kernels.triton.gemm import HOPPER_TILES, TILES, Tile
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.triton_compile import KernelSource, compile_all
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot, program_order

pytestmark = pytest.mark.usefixtures("on_device")

KINDS = ("float32", "int8", "fp8", "int4")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed))


def pack(
    ops: ReferenceOps,
    config: ExpertsConfig,
    hidden: int,
    inner: int,
    kind: str = "float32",
    bias: bool = True,
    scaled: bool = False,
) -> PackedExperts:
    def layer(expert: int, rows: int, columns: int) -> object:
        matrix = normal(rows, columns, seed=expert) * columns**-0.5
        return ops.pack_linear([matrix], kind, normal(rows, seed=expert + 1) if bias else None)

    experts = range(0, 10 * config.num_experts, 10)
    return ops.pack_experts(
        [layer(expert, (1 + config.gated) * inner, hidden) for expert in experts],
        [layer(expert + 5, hidden, inner) for expert in experts],
        scales=normal(config.num_experts, seed=7) if scaled else None,
    )


def use_tiles(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, Sequence[Tile]]) -> None:
    """Half precision tiles for float32 values, which reveal more."""
    pick = gemm.pick_tile
    monkeypatch.setattr(
        linear, "pick_tile", lambda form, _, rows, splits, __: pick(form, 2, rows, splits, table)
    )


@settings(max_examples=examples(10))
@given(
    sizes=st.sampled_from([(4, 1), (4, 4), (7, 3), (40, 8)]),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    rows=st.integers(0, 40),
    shape=st.sampled_from([(40, 24), (300, 70)]),
    renormalize=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh", "gpt_oss"]),
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    has_residual=st.booleans(),
    scoring=st.sampled_from(["softmax", "sigmoid", "sparse_mixer"]),
    scaled=st.booleans(),
    gated=st.booleans(),
)
def test_experts_match_reference(
    sizes, groups, rows, shape, renormalize, activation, kind, bias, has_residual, scoring, scaled, gated
) -> None:
    activation = activation if gated else "relu2"
    fits = sizes[0] % groups[0] == 0 and sizes[1] <= sizes[0] // groups[0] * groups[1]
    scale = 1.0 if scoring == "softmax" else 1.7
    rule = (renormalize, activation, scoring, scale)
    has_groups = fits and scoring != "sparse_mixer"
    config = ExpertsConfig(*sizes, *rule, *(groups if has_groups else (1, 1)), gated=gated, tolerance=0.3)
    hidden, inner = shape
    x, logits = normal(rows, hidden, seed=1), normal(rows, config.num_experts, seed=2) * 2
    residual = normal(rows, hidden, seed=3) if has_residual else None
    results = [
        ops.experts(x, logits, pack(ops, config, hidden, inner, kind, bias, scaled), config, residual)
        for ops in (TritonOps(), TritonFastMath(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    """The reference rounds each product to the type of activations."""
    config, kind = ExpertsConfig(8, 4, True, "silu"), str(dtype).removeprefix("torch.")
    x, logits, residual = (normal(30, size, seed=size).to(dtype) for size in (64, 8, 65))
    residual = residual[:, :64]
    with exact_dot():
        mine, expected = (
            ops.experts(x, logits.float(), pack(ops, config, 64, 32, kind), config, residual)
            for ops in (TritonOps(), ReferenceOps())
        )
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, expected, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("renormalize", [False, True])
def test_ties_go_to_the_lowest_id(renormalize: bool) -> None:
    """Also of zeros with signs, and of masked experts."""
    config = ExpertsConfig(6, 3, renormalize, "silu")
    logits = torch.tensor(
        [
            [1.0, 2.0, 2.0, 2.0, 2.0, 0.0],
            [-0.0, 0.0, -0.0, 0.0, -1.0, -1.0],
            [-torch.inf, 3.0, -torch.inf, -torch.inf, 3.0, -torch.inf],
            [-torch.inf, -1e38, 1e38, -1e-45, 1e-45, 0.0],
        ]
    )
    x = normal(4, 32, seed=0)
    results = [
        ops.experts(x, logits, pack(ops, config, 32, 16), config) for ops in (TritonOps(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_of_groups_go_to_the_lowest(scoring: str) -> None:
    config = ExpertsConfig(12, 4, True, "silu", scoring, 1.0, 4, 2)
    x, logits = normal(40, 32, seed=0), (normal(40, 12, seed=1) * 2).round() / 2
    results = [
        ops.experts(x, logits, pack(ops, config, 32, 16), config) for ops in (TritonOps(), ReferenceOps())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("table", [TILES, HOPPER_TILES], ids=["ampere", "hopper"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_neighbours(
    kind: str, table: Mapping[str, Sequence[Tile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one row for an expert to several tiles; K has two splits."""
    use_tiles(monkeypatch, table)
    ops, config = TritonOps(), ExpertsConfig(3, 2, True, "gpt_oss")
    weights = pack(ops, config, 516, 24, kind)
    assert weights.gate_up.splits == 2 and weights.down.splits == 1
    x, logits, residual = normal(100, 516, seed=1), normal(100, 3, seed=2), normal(100, 516, seed=3)
    logits[:, 1] += 2.0  # a busy expert

    def run(rows: slice | list[int]) -> Tensor:
        return ops.experts(x[rows], logits[rows], weights, config, residual[rows])

    with exact_dot():
        whole = run(slice(None))
        for count in (1, 40):
            assert same_bits(run(slice(0, count)), whole[:count]), count
        assert same_bits(run([99])[0], whole[99])
        order = list(range(20, 0, -1))
        assert same_bits(run(order), whole[order])


@pytest.mark.parametrize("split_k_tiles", [1, 10**6])
def test_split_mode_changes_no_bit(split_k_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, config = TritonOps(), ExpertsConfig(4, 2, False, "silu")
    weights = pack(ops, config, 516, 24)
    x, logits = normal(5, 516, seed=1), normal(5, 4, seed=2)
    with exact_dot():
        expected = ops.experts(x, logits, weights, config)
        monkeypatch.setattr(gemm, "SPLIT_K_MAX_ROWS", 0)
        monkeypatch.setattr(gemm, "SPLIT_K_MAX_TILES", split_k_tiles)
        assert same_bits(ops.experts(x, logits, weights, config), expected)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order of programs")
def test_program_order_changes_no_bit() -> None:
    ops, config = TritonOps(), ExpertsConfig(4, 2, True, "silu")
    weights = pack(ops, config, 516, 24)
    x, logits = normal(9, 516, seed=1), normal(9, 4, seed=2)
    with exact_dot():
        expected = ops.experts(x, logits, weights, config)
        with program_order(lambda numbers: numbers[::-1]):
            assert same_bits(ops.experts(x, logits, weights, config), expected)


@settings(max_examples=examples(20))
@given(
    choices=st.lists(
        st.lists(st.integers(0, 8), min_size=3, max_size=3, unique=True), min_size=1, max_size=70
    ),
    tile_rows=st.sampled_from([16, 32]),
)
def test_pairs_are_grouped_in_order(choices: list[list[int]], tile_rows: int) -> None:
    """Pairs by (expert, row); each place belongs to one tile of its expert; the bound on tiles holds."""
    config = ExpertsConfig(9, 3, True, "silu")
    chosen = torch.tensor(choices, dtype=torch.int32).flatten()
    places, input_rows = torch.empty_like(chosen), torch.empty_like(chosen)
    tiles = TritonOps()._group(chosen, places, input_rows, config, tile_rows, False).tolist()
    order = chosen.sort(stable=True).indices
    assert torch.equal(places[order], torch.arange(len(chosen), dtype=torch.int32))
    assert torch.equal(input_rows, (order // 3).int())
    used = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[len(used) :] == [tile for tile in tiles if tile[0] < 0]
    assert len(tiles) == max_row_tiles(len(chosen), config, tile_rows)
    covered = [
        (place, expert) for expert, first, end in used for place in range(first, min(first + tile_rows, end))
    ]
    assert covered == list(enumerate(chosen.sort().values.tolist()))


@given(
    counts=st.lists(st.integers(0, 300), min_size=2, max_size=12),
    tile_rows=st.sampled_from([16, 64]),
)
def test_row_tiles_are_bounded(counts: list[int], tile_rows: int) -> None:
    """Reached by one row for each expert but one."""
    rows = max(*counts, -(-sum(counts) // 2), 1)
    config = ExpertsConfig(len(counts) + 2, 2, True, "silu")
    counts = [*counts, *(divmod(2 * rows - sum(counts), 2)[0] + i for i in (0, (2 * rows - sum(counts)) % 2))]
    tiles = sum(-(-count // tile_rows) for count in counts)
    assert tiles <= max_row_tiles(2 * rows, config, tile_rows) <= len(counts) * -(-rows // tile_rows)
    assert max_row_tiles(8, replace(config, num_experts=128, top_k=8), 64) == 8


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of numpy
@pytest.mark.parametrize("scoring", ["softmax", "sparse_mixer"])
def test_broken_row_stays_alone(scoring: str) -> None:
    """A row with NaN logits chooses experts that exist."""
    ops, config = TritonOps(), ExpertsConfig(6, 2, True, "silu", scoring, tolerance=0.3)
    weights = pack(ops, config, 64, 32)
    x, logits = normal(5, 64, seed=1), normal(5, 6, seed=2)
    with exact_dot():
        sound = ops.experts(x, logits, weights, config)
        for value in (torch.nan, -torch.nan, torch.inf):
            logits[2, 4] = value
            broken = ops.experts(x, logits, weights, config)
            assert broken[2].isnan().all() and same_bits(broken[[0, 1, 3, 4]], sound[[0, 1, 3, 4]])


def test_experts_have_one_format() -> None:
    ops = TritonOps()
    layers = [ops.pack_linear([normal(64, 64, seed=1)], kind) for kind in ("float32", "int8")]
    with pytest.raises(CheckpointError, match="several formats: dense, int8"):
        ops.pack_experts(layers, layers)


@pytest.mark.parametrize("mixer", [False, True])
def test_small_kernels_compile_without_spilling(mixer: bool) -> None:
    kernels = {
        "_route_kernel": (
            {
                "logits": "*fp32",
                "bias": "*fp32",
                "scales": "*fp32",
                "chosen": "*i32",
                "shares": "*fp32",
                "scale": "fp32",
                "tolerance": "fp32",
            },
            dict.fromkeys(("TOP_K", "NUM_GROUPS", "RANKS"), 8)
            | dict.fromkeys(("NUM_EXPERTS", "BLOCK"), 256)
            | {"TOPK_GROUPS": 4, "RENORMALIZE": True, "SIGMOID": not mixer, "MIXER": mixer},
        ),
        "_group_kernel": (
            dict.fromkeys(("chosen", "places", "input_rows", "tiles"), "*i32")
            | dict.fromkeys(("num_pairs", "num_tiles"), "i32"),
            {"TOP_K": 8, "BINS": 128, "TILE_ROWS": 64, "BLOCK": 1024},
        ),
        "_combine_kernel": (
            {"outputs": "*fp32", "places": "*i32", "shares": "*fp32", "add_to": "*bf16", "out": "*bf16"},
            {"TOP_K": 8, "WIDTH": 2048, "BLOCK": 1024},
        ),
    }
    sources = [
        KernelSource(
            f"foreword.kernels.triton.experts:{name}",
            arguments,
            {**constants, "PDL": capability == 90},
            capability,
            num_warps=1 if name == "_route_kernel" else 4,
            enable_fp_fusion=False,
        )
        for capability in (80, 90)
        for name, (arguments, constants) in kernels.items()
    ]
    for made in compile_all(sources):
        assert made.stack == made.spills == 0 and made.registers <= 128
        assert not made.count(r"fma\.rn\.f32|atom\.\S*f32"), "sums are not fused, nor in any order"
