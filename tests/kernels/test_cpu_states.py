"""Operations of layers with state: values, and bits that no cut, neighbour, draft or repetition changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch, Chunk, StateLayer, build_batch
from foreword.core.states import NO_ANCHOR, SEGMENT, StateShape, StateSizes
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kv_cache.storage import KVStorage
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

MAX_ROWS = 5  # a token and its draft
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
LENGTHS = (200, 64, 131)  # tokens of the requests


def shape_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel_size: int) -> StateShape:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateShape(channels, kernel_size, key_heads, value_heads, key_dim, value_dim)


SHAPES = (  # one and several value heads for each key head; whole and partial tiles
    shape_of(1, 1, 16, 16, 2),
    shape_of(2, 4, 16, 32, 4),
    shape_of(2, 6, 48, 80, 3),
    shape_of(1, 2, 128, 128, 16),
    shape_of(1, 9, 16, 48, 4),  # heads of several work items
)
each_rule = pytest.mark.parametrize("is_scan", [False, True], ids=["delta", "scan"])
LIMITS = 0.4, 2.0  # of time steps
# Every pair of a shape, a rule and a type.
each_pair = pytest.mark.parametrize(
    ("shape", "is_scan", "dtype"),
    [
        (shape, is_scan, (torch.float32, torch.bfloat16)[(number + is_scan) % 2])
        for number, shape in enumerate(SHAPES)
        for is_scan in (False, True)
    ],
)

Span = tuple[int, int, int]  # request, first position, end
Outputs = dict[str, list[Tensor]]  # by operation and request


@dataclass
class Requests:
    """Inputs of a layer for requests of LENGTHS tokens."""

    shape: StateShape
    dtype: torch.dtype
    is_scan: bool = False  # Mamba-2 instead of the gated delta rule

    def __post_init__(self) -> None:
        shape, heads = self.shape, self.shape.value_heads
        self.conv_weight = randn(shape.kernel_size, shape.channels, seed=1)
        self.conv_bias = randn(shape.channels, seed=2)
        self.rates, self.offsets = 0.3 * randn(heads, seed=3).exp(), randn(heads, seed=4)
        self.skips = randn(heads, seed=5)
        self.inputs = [self.random_inputs(length, seed) for seed, length in enumerate(LENGTHS)]

    def random_inputs(self, length: int, seed: int) -> Tensor:
        """[length, C + 2 * value heads]: qkv, alpha and beta, views of one matrix as in a model."""
        return randn(length, self.shape.channels + 2 * self.shape.value_heads, seed=seed, dtype=self.dtype)

    def make_state(self) -> StateLayer:
        """Memory of sentinels: whatever is read has been written before."""
        sizes = StateSizes(len(LENGTHS) + 1, 1 + len(LENGTHS) * self.num_segments, MAX_ROWS)
        state = KVStorage(1, 16, [self.shape], "float32", states=sizes, state_dtype=self.dtype).layer(0)
        assert isinstance(state, StateLayer)
        for tensor in tensors_of(state):
            tensor.fill_(torch.nan)
        return state

    @property
    def num_segments(self) -> int:
        return max(LENGTHS) // SEGMENT + 1

    def batch(self, spans: Sequence[Span], keep_all: bool) -> Batch:
        """keep_all  every anchor is written, not only the last of each span"""
        chunks = []
        for request, start, end in spans:
            first, last = start // SEGMENT, end // SEGMENT
            ids = [1 + request * self.num_segments + segment for segment in range(first, last + 1)]
            anchors = [
                each if keep_all or i in (0, last - first) else NO_ANCHOR for i, each in enumerate(ids)
            ]
            if first == 0:
                anchors[0] = NO_ANCHOR
            blocks = [1] * (-(-end // 16))
            chunk = Chunk([0] * (end - start), start, blocks, 0, state_slot=request + 1, anchors=anchors)
            chunks.append(chunk)
        return build_batch(chunks, 16, 1, "cpu", with_states=True)

    def run(self, ops: Ops, state: StateLayer, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Both convolutions and the rule of rows x."""
        size, heads = self.shape.channels, self.shape.value_heads
        qkv, alpha, beta = x[:, :size], x[:, size : size + heads], x[:, size + heads :]
        plain = ops.causal_conv(qkv, self.conv_weight, self.conv_bias, "none", state, batch)
        active = ops.causal_conv(qkv, self.conv_weight, None, "silu", state, batch)
        rates = self.rates, self.offsets
        if self.is_scan:
            return plain, active, ops.ssm_scan(qkv, alpha, *rates, self.skips, LIMITS, state, batch)
        return plain, active, ops.gated_delta_rule(qkv, alpha, beta, *rates, state, batch)

    def run_steps(
        self, ops: Ops, steps: Sequence[Sequence[Span]], keep_all: bool = True, repeat: bool = False
    ) -> list[list[Tensor]]:
        """By request: the outputs of all its rows."""
        state = self.make_state()
        outputs: list[list[list[Tensor]]] = [[[] for _ in range(3)] for _ in LENGTHS]
        for spans in steps:
            batch = self.batch(spans, keep_all)
            rows = torch.cat([self.inputs[request][start:end] for request, start, end in spans])
            results = self.run(ops, state, rows, batch)
            if repeat:
                before = [tensor.clone() for tensor in tensors_of(state)]
                again = self.run(ops, state, rows, batch)
                assert all(map(same_bits, results, again))
                assert all(map(same_bits, tensors_of(state), before))
            for (request, *_), start, end in zip(
                spans, batch.query_start_loc, batch.query_start_loc[1:], strict=False
            ):
                for parts, result in zip(outputs[request], results, strict=True):
                    parts.append(result[start:end])
        return [[torch.cat(parts) for parts in each if parts] for each in outputs]


def tensors_of(state: StateLayer) -> list[Tensor]:
    return [state.inputs, state.tails, state.keys, state.updates, state.decays, state.matrices]


def whole(request: int) -> list[list[Span]]:
    return [[(request, 0, LENGTHS[request])]]


def random_steps(seed: int) -> list[list[Span]]:
    """All requests side by side, cut as StateCache.limit_rows() permits."""
    chance, done, steps = random.Random(seed), [0] * len(LENGTHS), []
    while any(count < length for count, length in zip(done, LENGTHS, strict=True)):
        spans = []
        for request, length in enumerate(LENGTHS):
            start, anchor = done[request], done[request] // SEGMENT * SEGMENT
            end = min(start + chance.choice((1, 2, 9, 33, 64, 70, 150)), length)
            if start > anchor:
                end = min(end, anchor + SEGMENT + chance.randrange(MAX_ROWS))
            if end > start and chance.random() < 0.8:
                spans.append((request, start, end))
                done[request] = end
        chance.shuffle(spans)
        steps += [spans] if spans else []
    return steps


def textbook(requests: Requests, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolutions and the recurrence of the rule in float64, one token after the other."""
    shape, heads, wide = requests.shape, requests.shape.value_heads, x.double()
    qkv = wide[:, : shape.channels]
    padded = F.pad(qkv.t()[None], (shape.kernel_size - 1, 0))
    kernel = requests.conv_weight.double().t()[:, None]
    plain = F.conv1d(padded, kernel, requests.conv_bias.double(), groups=shape.channels)[0].t()
    active = F.silu(F.conv1d(padded, kernel, groups=shape.channels)[0].t())
    keys, group = shape.key_heads * shape.key_dim, heads // shape.key_heads
    if requests.is_scan:
        return plain, active, textbook_scan(requests, wide)
    q, k = (part.reshape(len(x), shape.key_heads, -1) for part in qkv[:, : 2 * keys].chunk(2, 1))
    q, k = (
        (y * torch.rsqrt((y * y).sum(2, keepdim=True) + 1e-6)).repeat_interleave(group, 1) for y in (q, k)
    )
    v = qkv[:, 2 * keys :].reshape(len(x), heads, -1)
    alpha, beta = wide[:, shape.channels :].chunk(2, 1)
    decays = torch.exp(-requests.rates.double() * F.softplus(alpha + requests.offsets.double()))
    state = torch.zeros(heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    rows = []
    for t in range(len(x)):
        state = decays[t][:, None, None] * state
        update = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * update[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", state, q[t] * shape.key_dim**-0.5))
    return plain, active, torch.stack(rows)


def textbook_scan(requests: Requests, x: Tensor) -> Tensor:
    shape, heads, rows = requests.shape, requests.shape.value_heads, []
    keys, group = shape.key_heads * shape.key_dim, heads // shape.key_heads
    c, b = (
        part.reshape(len(x), shape.key_heads, -1).repeat_interleave(group, 1)
        for part in x[:, : 2 * keys].chunk(2, 1)
    )
    values = x[:, 2 * keys : shape.channels].reshape(len(x), heads, -1)
    steps = F.softplus(x[:, shape.channels :][:, :heads] + requests.offsets.double()).clamp(*LIMITS)
    state = torch.zeros(heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    for t in range(len(x)):
        decay = torch.exp(-requests.rates.double() * steps[t])
        update = steps[t][:, None] * values[t]
        state = decay[:, None, None] * state + b[t][:, :, None] * update[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", state, c[t]) + requests.skips[:, None] * values[t])
    return torch.stack(rows)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@each_isa
@each_pair
def test_values_equal_the_textbook(isa: str, dtype: torch.dtype, shape: StateShape, is_scan: bool) -> None:
    requests = Requests(shape, dtype, is_scan)
    for request in range(len(LENGTHS)):
        actual = requests.run_steps(cpu_ops_by_threads(isa)[1], whole(request))[request]
        for values, expected in zip(actual, textbook(requests, requests.inputs[request]), strict=True):
            assert error(values, expected) < (1e-6 if dtype == torch.float32 else 6e-3)


@each_isa
@each_type
@each_rule
@pytest.mark.parametrize("shape", SHAPES[1:2], ids=["16-32"])
def test_values_equal_the_reference(isa: str, dtype: torch.dtype, shape: StateShape, is_scan: bool) -> None:
    """The reference is closer than the textbook: it rounds keys and updates as the kernels do."""
    requests, steps = Requests(shape, dtype, is_scan), random_steps(1)
    reference = requests.run_steps(ReferenceOps(), steps)
    actual = requests.run_steps(cpu_ops_by_threads(isa)[0], steps)
    for ours, theirs in zip(actual, reference, strict=True):
        for values, expected in zip(ours, theirs, strict=True):
            assert error(values, expected.double()) < (1e-6 if dtype == torch.float32 else 3e-3)


@each_isa
@each_pair
def test_cuts_neighbours_and_threads_change_no_bit(
    isa: str, dtype: torch.dtype, shape: StateShape, is_scan: bool
) -> None:
    """Steps that are run twice too: the second time they read and write the same."""
    requests = Requests(shape, dtype, is_scan)
    alone = [requests.run_steps(cpu_ops_by_threads(isa)[0], whole(i))[i] for i in range(len(LENGTHS))]
    for seed, ops in enumerate(cpu_ops_by_threads(isa)):
        crowd = requests.run_steps(ops, random_steps(seed), keep_all=seed == 1, repeat=True)
        for rows, expected in zip(crowd, alone, strict=True):
            assert all(map(same_bits, rows, expected))


@each_isa
@each_type
@each_rule
def test_rejected_rows_change_no_bit(isa: str, dtype: torch.dtype, is_scan: bool) -> None:
    """Single tokens with drafts of other inputs behind them, across anchors."""
    requests, ops = Requests(SHAPES[1], dtype, is_scan), cpu_ops_by_threads(isa)[0]
    expected, state = requests.run_steps(ops, whole(0))[0], requests.make_state()
    wrong = requests.random_inputs(MAX_ROWS - 1, seed=99)
    chance, start = random.Random(5), 0
    while start < LENGTHS[0] - MAX_ROWS:
        accepted = chance.randrange(MAX_ROWS)
        end = start + 1 + accepted
        x = torch.cat((requests.inputs[0][start:end], wrong))[:MAX_ROWS]
        results = requests.run(ops, state, x, requests.batch([(0, start, start + MAX_ROWS)], True))
        for values, right in zip(results, expected, strict=True):
            assert same_bits(values[: end - start], right[start:end]), start
        start = end


@each_isa
@each_type
@pytest.mark.parametrize("activation", GATES)
def test_gate(isa: str, dtype: torch.dtype, activation: str) -> None:
    gate = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4]))).to(dtype)
    x = torch.stack((randn(len(gate), dtype=dtype), gate))
    actual = cpu_ops_by_threads(isa)[0].gate(x[:1], x[1:], activation)
    expected = x[:1].double() * GATES[activation](x[1:].double())
    rounding = 1e-6 if dtype == torch.float32 else 2**-8 * 1.001
    torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=1e-6)
    for ops in cpu_ops_by_threads(isa):
        many = x[:1].repeat(40, 1), x[1:].repeat(40, 1)
        assert same_bits(ops.gate(*many, activation), actual.repeat(40, 1))
        for width in (1, 7, 17, 600):
            assert same_bits(ops.gate(x[:1, :width], x[1:, :width], activation), actual[:, :width])
