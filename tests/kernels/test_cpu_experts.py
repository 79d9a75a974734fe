"""Mixtures of experts on every instruction set: the reference's values, and row invariance."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import ExpertsConfig, Matrix, Ops, PackedExperts
from foreword.kernels.quantization import QUANT_BLOCKS, dequantize
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.budget import examples
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits
from tests.support.quantized_weights import (
    WEIGHT_FORMATS,
    random_blocks,
    random_float8_blocks,
    random_grouped_ints,
)

DENSE_FORMATS = ("float32", "bfloat16", "float16")
GROUPED_BITS = {"grouped4": 4, "grouped8": 8}
FORMATS = (*DENSE_FORMATS, *WEIGHT_FORMATS, *GROUPED_BITS, "float8")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gpt_oss")
REFERENCE = ReferenceOps()
MAX_ROWS = 200  # up to four panels of an expert

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_format = pytest.mark.parametrize("weight_format", FORMATS)


@dataclass(frozen=True)
class Mixture:
    """Random weights [2I, H] and [H, I] of each expert, with biases; H and I are multiples of 256."""

    weight_format: str
    num_experts: int = 6
    hidden: int = 256
    inner: int = 256
    mixed: bool = False  # the gate has another format than the matrix above it
    gated: bool = True

    def matrix(self, rows: int, columns: int, seed: int) -> Matrix:
        if self.weight_format in GROUPED_BITS:
            bits = GROUPED_BITS[self.weight_format]
            return random_grouped_ints(bits, rows, columns, 128, seed, scale=2**-bits / math.sqrt(columns))
        if self.weight_format == "float8":
            return random_float8_blocks(rows, columns, (128, 128), seed, scale=0.025 / math.sqrt(columns))
        if self.weight_format not in QUANT_BLOCKS:
            return randn(rows, columns, seed=seed) / math.sqrt(columns)
        scale = block_scale(self.weight_format) / math.sqrt(columns)
        return random_blocks(self.weight_format, rows, columns, seed, scale)

    def gate_up(self, expert: int) -> list[Matrix]:
        if not self.gated:
            return [self.matrix(self.inner, self.hidden, 2 * expert)]
        up = self.matrix(self.inner, self.hidden, 2 * expert)
        gate = randn(self.inner, self.hidden, seed=100 + expert).to(torch.bfloat16) / 16
        return [gate, up] if self.mixed else [self.matrix(2 * self.inner, self.hidden, 2 * expert)]

    @property
    def tensor_format(self) -> str:
        """Of tensors among the parts."""
        floats = ("float32", "bfloat16", "float16")
        return self.weight_format if self.weight_format in (*floats, "int8", "int4") else "bfloat16"

    def bias(self, rows: int, seed: int) -> Tensor:
        return randn(rows, seed=seed) / 4

    def pack(self, ops: Ops) -> PackedExperts:
        experts = range(self.num_experts)
        gate_up = [
            ops.pack_linear(self.gate_up(e), self.tensor_format, self.bias((1 + self.gated) * self.inner, e))
            for e in experts
        ]
        down = [
            ops.pack_linear(
                [self.matrix(self.hidden, self.inner, 2 * e + 1)],
                self.tensor_format,
                self.bias(self.hidden, 50 + e),
            )
            for e in experts
        ]
        return ops.pack_experts(gate_up, down)

    def config(self, top_k: int = 3, renormalize: bool = True, activation: str = "silu") -> ExpertsConfig:
        return ExpertsConfig(self.num_experts, top_k, renormalize, activation, gated=self.gated)


@functools.cache
def block_scale(weight_format: str) -> float:
    """Scale of random_blocks() whose values have about a standard deviation of one."""
    return 1 / float(dequantize(random_blocks(weight_format, 32, 256, scale=1.0)).std())


@functools.cache
def packed(mixture: Mixture, isa: str, threads: int = 1) -> tuple[CpuOps, PackedExperts]:
    ops = cpu_ops_by_threads(isa)[threads - 1]
    return ops, mixture.pack(ops)


@functools.cache
def packed_reference(mixture: Mixture) -> PackedExperts:
    return mixture.pack(REFERENCE)


def skewed_logits(rows: int, experts: int, seed: int = 1) -> Tensor:
    """Nearly all rows choose the first expert, few the last, and rows have ties."""
    logits = randn(rows, experts, seed=seed) - torch.arange(experts) * 0.4
    return (logits * 4).round() / 4


@each_isa
@each_format
@pytest.mark.parametrize(("dtype", "renormalize"), [(torch.float32, True), (torch.bfloat16, False)])
def test_experts_match_reference(isa: str, weight_format: str, dtype: torch.dtype, renormalize: bool) -> None:
    """Apart from what products round: activations to int8 or bfloat16, and results to bfloat16."""
    mixture, x, add_to = Mixture(weight_format), randn(40, 256).to(dtype), randn(40, 256, seed=2).to(dtype)
    logits = skewed_logits(40, mixture.num_experts)
    ops, weights = packed(mixture, isa, 2)
    for activation in ACTIVATIONS:
        config = mixture.config(3, renormalize, activation)
        expected = REFERENCE.experts(x, logits, packed_reference(mixture), config, add_to).double()
        actual = ops.experts(x, logits, weights, config, add_to).double()
        is_exact = dtype == torch.float32 and weight_format in ("float32", "float16")
        assert (actual - expected).abs().max() <= (2e-6 if is_exact else 0.06) * expected.abs().max()
        assert (actual - expected).norm() <= (1e-6 if is_exact else 0.03) * expected.norm()


@each_isa
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "q4_k"])
def test_experts_without_gates_match_reference(isa: str, weight_format: str) -> None:
    mixture, x = Mixture(weight_format, gated=False), randn(40, 256)
    logits, config = skewed_logits(40, mixture.num_experts), mixture.config(activation="relu2")
    ops, weights = packed(mixture, isa, 2)
    actual = ops.experts(x, logits, weights, config).double()
    expected = REFERENCE.experts(x, logits, packed_reference(mixture), config).double()
    assert (actual - expected).norm() <= (1e-6 if weight_format == "float32" else 0.03) * expected.norm()
    for row in (0, 7, 39):
        alone = ops.experts(x[row : row + 1], logits[row : row + 1], weights, config)
        assert same_bits(alone, ops.experts(x, logits, weights, config)[row : row + 1])


@each_isa
@pytest.mark.parametrize(
    ("weight_format", "mixed"),
    [
        *((name, False) for name in FORMATS),
        *((name, True) for name in ("int8", "q4_k", "grouped8", "float8")),
    ],
)
def test_chosen_expert_is_the_ordinary_products(isa: str, weight_format: str, mixed: bool) -> None:
    """Bit for bit, with one expert a row; also of weights in two formats."""
    mixture = Mixture(weight_format, mixed=mixed)
    ops, weights = packed(mixture, isa, 2)
    x, logits = randn(MAX_ROWS, 256, dtype=torch.bfloat16), skewed_logits(MAX_ROWS, 6)
    actual = ops.experts(x, logits, weights, mixture.config(1))
    for expert in range(6):
        rows = logits.argmax(1) == expert
        assert rows.any()
        gate_up = ops.pack_linear(mixture.gate_up(expert), mixture.tensor_format, mixture.bias(512, expert))
        down = ops.pack_linear(
            [mixture.matrix(256, 256, 2 * expert + 1)], mixture.tensor_format, mixture.bias(256, 50 + expert)
        )
        inner = ops.linear_gated_act(x[rows], gate_up, "silu")
        expected = ops.linear(inner, down, torch.float32).to(torch.bfloat16)
        assert same_bits(actual[rows], expected), expert


@each_isa
@each_format
@settings(max_examples=examples(10))
@given(
    start=st.integers(0, MAX_ROWS - 1),
    count=st.sampled_from([1, 2, 3, 5, 8, 13, 17, 40, 80, MAX_ROWS]),
    threads=st.sampled_from([1, 2, 3]),
    top_k=st.sampled_from([1, 2, 6]),
    with_sum=st.booleans(),
)
def test_rows_are_batch_invariant(
    isa: str, weight_format: str, start: int, count: int, threads: int, top_k: int, with_sum: bool
) -> None:
    mixture = Mixture(weight_format)
    whole = whole_result(mixture, isa, top_k, with_sum)
    x, logits, add_to = inputs(mixture)
    ops, weights = packed(mixture, isa, threads)
    rows = slice(start, start + count)
    part = ops.experts(
        x[rows], logits[rows], weights, mixture.config(top_k), add_to[rows] if with_sum else None
    )
    assert same_bits(part, whole[rows])


@functools.cache
def inputs(mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, logits and a sum; rows 5 to 7 are extreme."""
    x, add_to = (randn(MAX_ROWS, mixture.hidden, seed=seed) for seed in (3, 4))
    x[5] *= 1e20
    x[6] = 0.0
    x[7, 3] = math.nan
    return x, skewed_logits(MAX_ROWS, mixture.num_experts), add_to


@functools.cache
def whole_result(mixture: Mixture, isa: str, top_k: int, with_sum: bool) -> Tensor:
    ops, weights = packed(mixture, isa)
    x, logits, add_to = inputs(mixture)
    return ops.experts(x, logits, weights, mixture.config(top_k), add_to if with_sum else None)


@each_isa
def test_ties_go_to_the_lowest_id(isa: str) -> None:
    mixture, x = Mixture("float32"), randn(4, 256)
    ops, weights = packed(mixture, isa)
    logits = torch.tensor(
        [[0.0, 1, 2, 2, 1, 2], [0, 0, 0, 0, 0, 0], [-0.0, 0, 1, 0, 1, 1], [3, 3, 4, 3, 3, 3]]
    )
    first = [(2, 3), (0, 1), (2, 4), (2, 0)]
    without = torch.full_like(logits, -math.inf)
    for row, chosen in enumerate(first):
        without[row, list(chosen)] = logits[row, list(chosen)]
    config = mixture.config(2)
    assert same_bits(ops.experts(x, logits, weights, config), ops.experts(x, without, weights, config))


def factors_of(
    ops: CpuOps | ReferenceOps,
    logits: Tensor,
    config: ExpertsConfig,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """float32 [T, E]: the factor of each expert, the result of experts with unit vectors as outputs."""
    count = config.num_experts
    gate_up = [ops.pack_linear([torch.zeros(2, count)], "float32") for _ in range(count)]
    down = [ops.pack_linear([torch.zeros(count, 1)], "float32", torch.eye(count)[e]) for e in range(count)]
    experts = ops.pack_experts(gate_up, down, bias, scales)
    return ops.experts(torch.ones(len(logits), count), logits, experts, config)


@each_isa
@pytest.mark.parametrize("renormalize", [True, False])
def test_factors_are_a_softmax(isa: str, renormalize: bool) -> None:
    logits = torch.cat((randn(30, 5) * 10, torch.tensor([[0.0, -50, 0, -800, -math.inf]])))
    actual = factors_of(cpu_ops_by_threads(isa)[0], logits, ExpertsConfig(5, 3, renormalize, "silu"))
    chosen = torch.sort(logits, descending=True, stable=True).indices[:, :3]
    kept = torch.full_like(logits, -math.inf).scatter(1, chosen, logits.gather(1, chosen)).double()
    total = (kept if renormalize else logits.double()).logsumexp(1, keepdim=True)
    torch.testing.assert_close(actual.double(), (kept - total).exp(), rtol=1e-7, atol=1e-12)


def sparse_mixer_factors(logits: Tensor, top_k: int, tolerance: float) -> Tensor:
    """float64 [T, E], expert by expert."""
    factors = torch.zeros(logits.shape, dtype=torch.float64)
    for row, values in enumerate(logits.tolist()):
        ranked = sorted(range(len(values)), key=lambda expert: -values[expert])
        for rank in range(top_k):
            own = values[ranked[rank]]
            others = [values[expert] for expert in ranked[rank:]]
            near = [x for x in others if own == x or (own - x) / max(abs(x), own) <= tolerance]
            factors[row, ranked[rank]] = 1 / sum(math.exp(x - own) for x in near)
    return factors


@each_isa
@pytest.mark.parametrize(("top_k", "tolerance"), [(2, 0.02), (2, 0.6), (4, 0.6), (1, 5.0)])
def test_sparse_mixer_weighs_a_choice_against_logits_near_it(isa: str, top_k: int, tolerance: float) -> None:
    """Also where logits are equal, negative, zero or infinitely low. NaN and infinity make the row NaN."""
    rows = [[0.0, 0, 0, -1, -1, 0], [-3.0, -2, -2.5, -2, -9, -math.inf], [5.0, 4, 3, -1, 0, 4]]
    logits = torch.cat(((randn(60, 6) * 2), torch.tensor(rows)))
    config = ExpertsConfig(6, top_k, True, "silu", "sparse_mixer", 1.5, tolerance=tolerance)
    expected = 1.5 * sparse_mixer_factors(logits, top_k, tolerance)
    broken = logits[:3].clone()
    broken[0, 3], broken[2, 5] = math.nan, math.inf
    for ops in (cpu_ops_by_threads(isa)[0], REFERENCE):
        torch.testing.assert_close(factors_of(ops, logits, config).double(), expected, rtol=1e-6, atol=1e-12)
        assert factors_of(ops, broken, config).isnan().all(1).tolist() == [True, False, True]


@each_isa
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_factors_are_scaled_by_expert(isa: str, scoring: str) -> None:
    """The scales weigh, and choose no expert."""
    logits, scales = randn(30, 5), torch.tensor([0.5, -2.0, 0.0, 1.0, 30.0])
    config = ExpertsConfig(5, 3, True, "silu", scoring)
    for ops in (cpu_ops_by_threads(isa)[0], REFERENCE):
        plain, scaled = factors_of(ops, logits, config), factors_of(ops, logits, config, scales=scales)
        assert torch.equal(scaled, plain * scales)


@each_isa
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_bias_chooses_experts_and_weighs_none(isa: str, renormalize: bool, scoring: str) -> None:
    logits = torch.cat((randn(30, 5) * 4, torch.tensor([[0.0, -30, 0, 40, -3]])))
    config = ExpertsConfig(5, 3, renormalize, "silu", scoring, scale=1.5)
    bias = torch.tensor([0.0, 0.3, -0.2, 0.0, 5.0])
    scores = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(1)
    chosen = (scores + bias).topk(3).indices
    assert (chosen == 4).any(1).all(), "the bias decides"
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    total = weights.sum(1, keepdim=True) if renormalize else 1.0
    for ops in (cpu_ops_by_threads(isa)[0], ReferenceOps()):
        actual = factors_of(ops, logits, config, bias)
        torch.testing.assert_close(actual.double(), 1.5 * weights / total, rtol=1e-5, atol=1e-7)


def choose_in_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """Experts of each row in order, int64 [T, top_k], one row and group after the other."""
    size, best = config.num_experts // config.num_groups, []
    for row in scores.tolist():
        groups = [sorted(row[first : first + size], reverse=True) for first in range(0, len(row), size)]
        totals = [sum(group[: 1 + (config.scoring == "sigmoid")]) for group in groups]
        chosen = sorted(range(config.num_groups), key=lambda group: -totals[group])[: config.topk_groups]
        ids = [expert for expert in range(len(row)) if expert // size in chosen]
        best.append(sorted(ids, key=lambda expert: -row[expert])[: config.top_k])
    return torch.tensor(best)


@each_isa
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "topk_groups", "top_k"), [(8, 4, 2, 3), (12, 3, 1, 4), (15, 5, 4, 6)]
)
def test_experts_of_the_best_groups(
    isa: str, scoring: str, num_experts: int, num_groups: int, topk_groups: int, top_k: int
) -> None:
    """Ties go to the lowest group: quarters make many of them. Sums of sigmoids tie only up to rounding."""
    config = ExpertsConfig(num_experts, top_k, False, "silu", scoring, 2.0, num_groups, topk_groups)
    logits, bias = randn(300, num_experts), randn(num_experts, seed=2) if scoring == "sigmoid" else None
    if bias is None:
        logits = (logits * 4).round() / 4
    scores = logits if bias is None else logits.double().sigmoid().float() + bias
    chosen = choose_in_groups(scores, config)
    weights = logits.double().softmax(1) if bias is None else logits.double().sigmoid()
    expected = torch.zeros_like(weights).scatter(1, chosen, 2.0 * weights.gather(1, chosen))
    plain = factors_of(REFERENCE, logits, replace(config, num_groups=1, topk_groups=1), bias)
    assert not torch.allclose(plain.double(), expected), "groups change the choice"
    for ops in (cpu_ops_by_threads(isa)[0], REFERENCE):
        actual = factors_of(ops, logits, config, bias)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
    logits[7, 1] = math.nan
    broken = factors_of(cpu_ops_by_threads(isa)[0], logits, config, bias)
    assert broken[7].isnan().all() and not broken[8].isnan().any()


@each_isa
def test_sum_is_in_order_of_falling_logits(isa: str) -> None:
    """Bit for bit: one product and one sum after the other in float32, add_to at the end."""
    mixture, x, logits, add_to = (
        Mixture("float32"),
        randn(20, 256),
        randn(20, 6, seed=1),
        randn(20, 256, seed=2),
    )
    ops, weights = packed(mixture, isa, 2)
    config = mixture.config(6)
    factors, order = factors_of(ops, logits, config), logits.argsort(1, descending=True)
    expected = torch.zeros(20, 256)
    for rank in range(6):
        only = torch.full_like(logits, -math.inf).scatter(1, order[:, rank : rank + 1], 0.0)
        outputs = ops.experts(x, only, weights, mixture.config(1))
        expected = expected + outputs * factors.gather(1, order[:, rank : rank + 1])
    assert same_bits(ops.experts(x, logits, weights, config, add_to), expected + add_to)


@each_isa
@pytest.mark.parametrize("renormalize", [True, False])
def test_rows_with_broken_logits_are_nan(isa: str, renormalize: bool) -> None:
    mixture, x = Mixture("q4_0"), randn(8, 256)
    ops, weights = packed(mixture, isa, 2)
    logits = randn(8, 6, seed=1)
    clean = ops.experts(x, logits, weights, mixture.config(2, renormalize))
    logits[1, 5] = logits[2] = math.nan
    logits[4, 0] = math.inf
    logits[6] = -math.inf
    broken = ops.experts(x, logits, weights, mixture.config(2, renormalize))
    assert broken[[1, 2, 4, 6]].isnan().all()
    assert same_bits(broken[[0, 3, 5, 7]], clean[[0, 3, 5, 7]])


@each_isa
def test_long_prompts_take_several_passes(isa: str) -> None:
    """Memory is bounded: rows that take 177 MB, more than MEMORY_BYTES, have the bits of few rows."""
    mixture, rows = Mixture("int8", num_experts=8, hidden=64, inner=8192), 300
    ops, weights = packed(mixture, isa, 2)
    x, logits, config = randn(rows, 64), randn(rows, 8, seed=1), mixture.config(8)
    whole = ops.experts(x, logits, weights, config)
    for part in (slice(0, 3), slice(rows // 2 - 1, rows // 2 + 2), slice(rows - 2, rows)):
        assert same_bits(ops.experts(x[part], logits[part], weights, config), whole[part])


def test_sparse_mixer_chooses_from_all_groups() -> None:
    with pytest.raises(AssertionError, match="a sparse mixer of groups"):
        ExpertsConfig(8, 2, True, "silu", "sparse_mixer", num_groups=4, topk_groups=2)
