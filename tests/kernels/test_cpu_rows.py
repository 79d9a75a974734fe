"""Row-wise operations on every instruction set of this processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import KVLayer
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import MRopeSections
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.budget import examples
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
}
TYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 896, 1023, 1024, 1025, 2500)
ROW_COUNTS = (1, 2, 3, 5, 8, 9, 17, 40)
# Relative error of one rounding: for bfloat16, half a unit in the last place.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8 * 1.001}

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_type = pytest.mark.parametrize("dtype", TYPES)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[actual.dtype], atol=1e-6)


def operations(width: int) -> dict[str, Callable[[CpuOps, Tensor], Tensor]]:
    """name -> operation on x [T, 2 * width]."""
    weight = randn(width, seed=1)
    table = randn(64, width // 2 * 2, seed=2)
    axes = MRopeSections(
        (width // 2 - width // 3, width // 6, width // 3 - width // 6), interleaved=width % 2 == 1
    )

    def places(x: Tensor) -> Tensor:
        return x.to(torch.float32).abs().mul(10).nan_to_num(0.0).long().clamp(0, 63)

    def rope(ops: CpuOps, x: Tensor) -> Tensor:
        return ops.rope(x.view(-1, 2, width), table, places(x[:, 0]))

    def mrope(ops: CpuOps, x: Tensor) -> Tensor:
        positions = torch.stack((places(x[:, 0]), places(x[:, -1]), places(x[:, width // 2])), 1)
        return ops.rope(x.view(-1, 2, width), table, positions, axes)

    return {
        "rms_norm": lambda ops, x: ops.rms_norm(x[:, :width], weight, 1e-5),
        "rms_norm of heads": lambda ops, x: ops.rms_norm(x.view(-1, 2, width), weight, 1e-5),
        "rms_norm by head": lambda ops, x: ops.rms_norm(
            x.view(-1, 2, width), torch.stack((weight, 2 * weight)), 1e-5
        ),
        "layer_norm": lambda ops, x: ops.layer_norm(x[:, :width], weight, None, 1e-5),
        "layer_norm of heads": lambda ops, x: ops.layer_norm(x.view(-1, 2, width), weight, weight, 1e-5),
        "layer_norm by head": lambda ops, x: ops.layer_norm(
            x.view(-1, 2, width), torch.stack((weight, 2 * weight)), None, 1e-5
        ),
        "rope": rope,
        "mrope": mrope,
        "silu": lambda ops, x: ops.gated_act(x, "silu"),
        "gelu": lambda ops, x: ops.gated_act(x, "gelu"),
        "gelu_tanh": lambda ops, x: ops.gated_act(x, "gelu_tanh"),
        "gpt_oss": lambda ops, x: ops.gated_act(x, "gpt_oss"),
        "relu2": lambda ops, x: ops.act(x, "relu2"),
        "xielu": lambda ops, x: ops.act(x, "xielu", (0.8, 0.6)),
        "scale_by_sigmoid": lambda ops, x: ops.scale_by_sigmoid(x[:, :width], x[:, width : width + 1]),
        "gate": lambda ops, x: ops.gate(x[:, :width], x[:, width:], "silu"),
        "add": lambda ops, x: ops.add(x[:, :width], x[:, width:]),
        "softcap": lambda ops, x: ops.softcap(x.to(torch.float32), 3.0),
    }


@each_isa
@each_type
@pytest.mark.parametrize("widths", [WIDTHS[:9], WIDTHS[9:]], ids=["narrow", "wide"])
def test_rows_are_batch_invariant(isa: str, dtype: torch.dtype, widths: Sequence[int]):
    for width in widths:
        check_rows(isa, dtype, width)


def check_rows(isa: str, dtype: torch.dtype, width: int) -> None:
    """Row count, place, other rows and thread count change no bit."""
    x = randn(max(ROW_COUNTS), 2 * width, dtype=dtype)
    for name, operation in operations(width).items():
        whole = operation(cpu_ops_by_threads(isa)[0], x.clone())
        for ops in cpu_ops_by_threads(isa):
            assert same_bits(operation(ops, x.clone()), whole), (name, width)
            for count in ROW_COUNTS:
                last = operation(ops, x[-count:].clone())
                assert same_bits(last, whole[-count:]), (name, width, count)
        poisoned = x.clone()
        poisoned[1:] = math.nan
        assert same_bits(operation(cpu_ops_by_threads(isa)[0], poisoned)[:1], whole[:1]), (name, width)


@each_isa
@each_type
def test_rms_norm(isa: str, dtype: torch.dtype):
    ops, factors = cpu_ops_by_threads(isa)[0], torch.tensor([[1.0], [3.0], [0.5]])
    for width in WIDTHS:
        x, weight = randn(5, 3, width, dtype=dtype) * 4, randn(width, seed=1)
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(ops.rms_norm(x, weight, 1e-5), expected)
        close(ops.rms_norm(x, weight * factors, 1e-5), expected * factors)


@each_isa
@each_type
def test_layer_norm(isa: str, dtype: torch.dtype):
    """The mean outweighs the rest: a variance by the mean of squares would cancel."""
    native = cpu_ops_by_threads(isa)[0]
    for width in WIDTHS:
        x, weight = (randn(5, 3, width) * 4 + 50).to(dtype), randn(width, seed=1)
        for bias in (None, randn(width, seed=2)):
            wide_bias = None if bias is None else bias.double()
            expected = F.layer_norm(x.double(), (width,), weight.double(), wide_bias, 1e-5)
            actual = native.layer_norm(x, weight, bias, 1e-5)
            torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)
        by_head = torch.stack((weight, -weight, 2 * weight))
        for ops in (native, ReferenceOps()):
            heads = ops.layer_norm(x, by_head, None, 1e-5)
            plain = [ops.layer_norm(x[:, i].contiguous(), by_head[i], None, 1e-5) for i in range(3)]
            assert torch.equal(heads, torch.stack(plain, 1))


@each_isa
@each_type
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 20), (8, 8), (6, 6), (128, 96), (16, 2)])
def test_rope_rotates_pairs_and_copies_the_rest(isa: str, dtype: torch.dtype, dim: int, rotary: int):
    x, angles = randn(4, 3, dim, dtype=dtype), randn(9, rotary // 2, seed=1)
    table, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([8, 0, 3, 3])
    turned = cpu_ops_by_threads(isa)[0].rope(x, table, positions)
    left, right = x.double()[..., : rotary // 2], x.double()[..., rotary // 2 : rotary]
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    close(turned[..., :rotary], torch.cat((left * cos - right * sin, left * sin + right * cos), -1))
    assert torch.equal(turned[..., rotary:], x[..., rotary:])


@each_isa
@each_type
@pytest.mark.parametrize(
    ("dim", "axes"),
    [
        (64, MRopeSections((8, 12, 12))),
        (12, MRopeSections((1, 2, 3))),
        (16, MRopeSections((0, 5, 3))),
        (64, MRopeSections((12, 10, 10), True)),
        (16, MRopeSections((4, 2, 2), True)),
    ],
)
def test_mrope_rotates_each_angle_by_its_axis(isa: str, dtype: torch.dtype, dim: int, axes: MRopeSections):
    """Also for positions that are columns of a wider tensor."""
    x, angles = randn(21, 3, dim + 4, dtype=dtype), randn(50, sum(axes.sections), seed=1)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(50, (21, 5), generator=torch.Generator().manual_seed(2))[:, 1:4]
    expected = rotate_angle_by_angle(x, angles, positions, axes)
    for ops in cpu_ops_by_threads(isa):
        turned = ops.rope(x, table, positions, axes)
        assert same_bits(turned[..., dim:], x[..., dim:])
        close(turned[..., :dim], expected)
        alike = positions[:, :1].expand(-1, 3)
        assert same_bits(
            ops.rope(x, table, alike.contiguous(), axes), ops.rope(x, table, positions[:, 0].contiguous())
        )


def rotate_angle_by_angle(x: Tensor, angles: Tensor, positions: Tensor, axes: MRopeSections) -> Tensor:
    """The rotated values in float64."""
    half = sum(axes.sections)
    parts: list[tuple[Tensor, Tensor]] = []
    for index, direction in enumerate(axes.angle_axes()):
        cos, sin = (values.float().double()[:, None] for values in (angles.cos(), angles.sin()))
        rows = positions[:, direction]
        left, right = x[..., index].double(), x[..., half + index].double()
        c, s = cos[rows][..., index], sin[rows][..., index]
        parts.append((left * c - right * s, left * s + right * c))
    return torch.stack([part[0] for part in parts] + [part[1] for part in parts], -1)


@each_isa
@each_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_act(isa: str, dtype: torch.dtype, activation: str):
    gate = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4]))).to(dtype)
    x = torch.stack((gate, randn(len(gate), dtype=dtype))).flatten()[None]
    expected = ACTIVATIONS[activation](gate.double()) * x[0, len(gate) :].double()
    close(cpu_ops_by_threads(isa)[0].gated_act(x, activation)[0], expected)


def xielu(x: Tensor, alphas: tuple[float, float]) -> Tensor:
    curve = torch.where(x > 0, alphas[0] * x * x, alphas[1] * (torch.expm1(x) - x))
    return curve + x / 2


@each_isa
@each_type
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "xielu"])
def test_act(isa: str, dtype: torch.dtype, activation: str):
    """No gate; beside 0, the negative branch of xIELU is the difference of nearly equal numbers."""
    alphas = (0.8, 60.0)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-5, -1e-3, -0.02, -0.4999, -0.5001, 1e4, -1e4])
    x = torch.cat((torch.linspace(-20, 20, 4001), special)).to(dtype)[None]
    wide = x.double()
    expected = xielu(wide, alphas) if activation == "xielu" else ACTIVATIONS[activation](wide)
    actual = cpu_ops_by_threads(isa)[0].act(x, activation, alphas)
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype] * 2, atol=1e-6)
    gone = cpu_ops_by_threads(isa)[0].act(torch.tensor([[math.nan, math.inf]]), activation, alphas)
    assert gone[0, 0].isnan() and gone[0, 1] == math.inf


@each_isa
@each_type
def test_gpt_oss_clamps_gate_and_up(isa: str, dtype: torch.dtype):
    gate, up = torch.linspace(-30, 30, 4001).to(dtype), (randn(4001) * 8).to(dtype)
    wide, inner = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    expected = wide * torch.sigmoid(1.702 * wide) * (inner + 1)
    close(cpu_ops_by_threads(isa)[0].gated_act(torch.cat((gate, up))[None], "gpt_oss")[0], expected)


@each_isa
def test_gpt_oss_propagates_nan(isa: str):
    x = torch.tensor([[math.nan, 1.0, math.inf, -math.inf, 1.0, math.nan, 1.0, 1.0]])
    (out,) = cpu_ops_by_threads(isa)[0].gated_act(x, "gpt_oss")
    assert out[:2].isnan().all() and out[2] == pytest.approx(14.0, rel=1e-4)


@each_isa
@each_type
@pytest.mark.parametrize("gate_dtype", TYPES)
def test_scale_by_sigmoid(isa: str, dtype: torch.dtype, gate_dtype: torch.dtype):
    x, gate = randn(9, 77, dtype=dtype), torch.linspace(-20, 20, 9).to(gate_dtype)[:, None]
    expected = x.double() * torch.sigmoid(gate.double())
    for ops in cpu_ops_by_threads(isa):
        close(ops.scale_by_sigmoid(x, gate), expected)


@each_isa
def test_activations_propagate_non_finite_values(isa: str):
    x = torch.tensor([[math.nan, math.inf, 1.0, 1.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        (out,) = cpu_ops_by_threads(isa)[0].gated_act(x, activation)
        assert out[0].isnan() and out[1] == math.inf and out[2].isfinite(), activation


@each_isa
def test_softcap_is_exact_for_small_values(isa: str):
    x = torch.cat(
        (torch.linspace(-100, 100, 2001), torch.logspace(-8, 0, 300), torch.tensor([math.inf, -math.inf]))
    )
    for cap in (0.5, 3.0, 30.0):
        expected = cap * torch.tanh(x.double() / cap)
        actual = cpu_ops_by_threads(isa)[1].softcap(x[None].clone(), cap)[0]
        torch.testing.assert_close(actual.double(), expected, rtol=5e-7, atol=0)


@each_isa
@each_type
def test_add_rounds_once(isa: str, dtype: torch.dtype):
    a, b = randn(3, 77, dtype=dtype), randn(3, 77, seed=1, dtype=dtype)
    ops = cpu_ops_by_threads(isa)[0]
    assert same_bits(ops.add(a, b), a + b)
    scaled = ((a.to(torch.float32) + b.to(torch.float32)) * 0.7).to(dtype)
    assert same_bits(ops.add(a, b, 0.7), scaled) and same_bits(ReferenceOps().add(a, b, 0.7), scaled)


@each_isa
@each_type
def test_bfloat16_rounds_to_even_and_keeps_nan(isa: str, dtype: torch.dtype):
    """Through the KV cache, the only conversion between types."""
    values = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, math.inf, math.nan, -0.0, 65504.0]
    ).to(dtype)
    cache = KVLayer(torch.zeros(2, 1, 8, dtype=torch.bfloat16), torch.zeros(2, 1, 8, dtype=torch.bfloat16))
    cpu_ops_by_threads(isa)[0].write_kv(values.view(1, 1, 8), values.view(1, 1, 8), cache, torch.tensor([1]))
    assert same_bits(cache.k[1, 0], values.to(torch.bfloat16)) and same_bits(
        cache.v[1, 0], values.to(torch.bfloat16)
    )
    assert not cache.k[0].any()


@each_isa
@each_type
@settings(max_examples=examples(20))
@given(width=st.integers(1, 70), count=st.integers(1, 20), scale=st.sampled_from([1.0, 0.25]))
def test_embedding(isa: str, dtype: torch.dtype, width: int, count: int, scale: float):
    ops = cpu_ops_by_threads(isa)[1]
    weight = randn(50, width, dtype=dtype)
    ids = torch.arange(count) * 7 % 50
    packed = ops.pack_linear([weight], str(dtype).removeprefix("torch."))
    assert same_bits(ops.embedding(ids, packed, dtype, scale), weight[ids] * scale)


@each_isa
def test_write_kv_writes_to_slots(isa: str):
    cache = KVLayer(torch.zeros(48, 2, 5), torch.zeros(48, 2, 5))
    qkv = randn(3, 8, 5)
    cpu_ops_by_threads(isa)[0].write_kv(qkv[:, 4:6], qkv[:, 6:], cache, torch.tensor([40, 17, 18]))
    assert torch.equal(cache.k[[40, 17, 18]], qkv[:, 4:6]) and torch.equal(cache.v[[40, 17, 18]], qkv[:, 6:])
    assert cache.k.count_nonzero() == 30


def int8_cache(slots: int, heads: int, dim: int) -> KVLayer:
    def values() -> Tensor:
        return torch.full((slots, heads, dim), 99, dtype=torch.int8)

    return KVLayer(
        values(), values(), torch.full((slots, heads), math.nan), torch.full((slots, heads), math.nan)
    )


@each_isa
@each_type
@pytest.mark.parametrize("dim", [5, 8, 16, 33, 64])
def test_int8_cache_has_a_scale_per_slot_and_head(isa: str, dtype: torch.dtype, dim: int):
    k, v = randn(4, 2, dim, dtype=dtype), randn(4, 2, dim, seed=1, dtype=dtype)
    k[1, 1] = 0
    cache, slots = int8_cache(6, 2, dim), torch.tensor([5, 0, 3, 2])
    cpu_ops_by_threads(isa)[0].write_kv(k, v, cache, slots)
    for vectors, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        wide = vectors.to(torch.float32)
        expected = wide.abs().amax(-1) / 127
        assert scales is not None and torch.equal(scales[slots], expected)
        quotients = (wide / expected[..., None]).nan_to_num(0.0)
        assert torch.equal(values[slots], quotients.round().to(torch.int8))
    assert (cache.k[[1, 4]] == 99).all()


@each_isa
def test_non_finite_vectors_have_non_finite_scales(isa: str):
    k, cache = randn(3, 2, 16), int8_cache(3, 2, 16)
    k[:, 1, 3] = torch.tensor([math.nan, math.inf, -math.inf])
    cpu_ops_by_threads(isa)[0].write_kv(k, k, cache, torch.arange(3))
    assert cache.k_scale is not None
    assert cache.k_scale[:, 0].isfinite().all() and not cache.k_scale[:, 1].isfinite().any()


@each_type
def test_hidden_states_are_written_and_read_by_slot(dtype: torch.dtype):
    ops, x, cache = CpuOps(), randn(3, 40, dtype=dtype), torch.zeros(7, 40, dtype=dtype)
    ops.write_hidden(x, cache, torch.tensor([5, 0, 2]))
    expected = torch.zeros(7, 40, dtype=dtype).index_copy_(0, torch.tensor([5, 0, 2]), x)
    assert torch.equal(cache, expected)
    assert torch.equal(ops.read_hidden(cache, torch.tensor([2, 2, 1, 5])), expected[[2, 2, 1, 5]])


@each_type
def test_parts_are_concatenated(dtype: torch.dtype):
    """Also views of wider tensors."""
    parts = [randn(3, 7, dtype=dtype), randn(3, 9, dtype=dtype)[:, 2:6], randn(3, 1, dtype=dtype)]
    assert torch.equal(CpuOps().concat(parts), torch.cat(parts, 1))


def test_logits_of_a_part_of_the_vocabulary():
    logits, ids = randn(2, 4), torch.tensor([6, 0, 3, 8])
    expanded = CpuOps().expand_vocab(logits, ids, 9)
    assert torch.equal(expanded[:, ids], logits) and expanded[:, [1, 2, 4, 5, 7]].isneginf().all()
    assert torch.equal(expanded, ReferenceOps().expand_vocab(logits, ids, 9))
