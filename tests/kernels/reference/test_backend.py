"""The reference backend: correctness and row invariance."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.ops import ExpertsConfig, QuantizedBlocks
from foreword.kernels.quantization import fake_quantize
from foreword.kernels.reference.attention import KV_TILE, Q_TILE, build_attention_metadata
from foreword.kernels.reference.backend import FastMathOps, ReferenceOps, reference_threads
from tests.support.budget import examples, some_of
from tests.support.cpu_kernels import randn, same_bits
from tests.support.kernel_rows import RowDependentOps
from tests.support.scattered_kv import Rows, ScatteredKV, agree, check_first, check_not_causal

OPS = ReferenceOps()
TILE = OPS.row_tile
COUNTS = [*range(1, 41), 47, 48, 49, 64, 100]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, ops: ReferenceOps = OPS):
    return ops.pack_linear([weight], str(weight.dtype).removeprefix("torch."), bias)


def operations(dtype: torch.dtype, width: int):
    """(name, operation on rows [T, width]) of every row-wise operation."""
    packed = pack(randn(40, width, seed=1, dtype=dtype), randn(40, seed=2))
    weight = randn(width, seed=3)
    table = randn(10, 8, seed=4)
    experts = OPS.pack_experts(
        [pack(randn(24, width, seed=seed, dtype=dtype)) for seed in range(5)],
        [pack(randn(width, 12, seed=seed, dtype=dtype)) for seed in range(5)],
    )

    def route(x: torch.Tensor, renormalize: bool) -> torch.Tensor:
        return OPS.experts(x, x[:, :5].to(torch.float32), experts, ExpertsConfig(5, 3, renormalize, "silu"))

    def rope(x: torch.Tensor) -> torch.Tensor:
        # every row gets the same angle: the place in the batch must not matter
        count = x.shape[0]
        return OPS.rope(x.view(count, 2, -1), table, torch.full((count,), 7))

    return {
        "linear": lambda x: OPS.linear(x, packed),
        "rms_norm": lambda x: OPS.rms_norm(x, weight, 1e-6),
        "layer_norm": lambda x: OPS.layer_norm(x, weight, weight, 1e-6),
        "relu2": lambda x: OPS.act(x, "relu2"),
        "xielu": lambda x: OPS.act(x, "xielu", (0.8, 0.6)),
        "head_norm": lambda x: OPS.rms_norm(x.view(x.shape[0], 2, -1), weight[: width // 2], 1e-6),
        "silu": lambda x: OPS.gated_act(x, "silu"),
        "gelu": lambda x: OPS.gated_act(x, "gelu"),
        "gelu_tanh": lambda x: OPS.gated_act(x, "gelu_tanh"),
        "gpt_oss": lambda x: OPS.gated_act(x, "gpt_oss"),
        "softcap": lambda x: OPS.softcap(x, 3.0),
        "scale_by_sigmoid": lambda x: OPS.scale_by_sigmoid(x, x[:, :1]),
        "experts": lambda x: route(x, renormalize=True),
        "softmax of all experts": lambda x: route(x, renormalize=False),
        "rope": rope,
    }


@pytest.mark.parametrize("width", some_of([74, 64, 192, 1024], 2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_batch_invariant(dtype: torch.dtype, width: int):
    for name, operation in operations(dtype, width).items():
        rows = randn(max(COUNTS), width, seed=5, dtype=dtype)
        alone = torch.cat([operation(rows[index : index + 1]) for index in range(rows.shape[0])])
        for count in COUNTS:
            assert same_bits(operation(rows[:count]), alone[:count]), (name, count)
        moved = torch.cat((rows[37:], torch.full((3, width), math.nan, dtype=dtype), rows[:37]))
        assert same_bits(operation(moved)[-37:], alone[:37]), name


@pytest.mark.parametrize("inputs, outputs", [(512, 2048), (2048, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_products_are_batch_invariant(dtype: torch.dtype, inputs: int, outputs: int):
    packed = pack(randn(outputs, inputs, seed=1, dtype=dtype))
    rows = randn(80, inputs, seed=2, dtype=dtype)
    whole = OPS.linear(rows, packed)
    for count in (1, 15, 16, 17, 33, 64):
        assert same_bits(OPS.linear(rows[-count:], packed), whole[-count:]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype):
    torch.set_num_threads(reference_threads(2))
    for name, operation in operations(dtype, 2048).items():
        rows = randn(40, 2048, seed=5, dtype=dtype)
        moved = torch.cat((rows[33:], rows[:33]))
        assert same_bits(operation(moved)[-33:], operation(rows)[:33]), name


@pytest.mark.parametrize("width", [3072, 40000])
def test_wide_activations_are_split_at_safe_rows(width: int):
    rows = randn(20, 2 * width)
    alone = torch.cat([OPS.gated_act(rows[index : index + 1], "silu") for index in range(20)])
    assert same_bits(OPS.gated_act(rows, "silu"), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_dependent_products_are_detected(dtype: torch.dtype):
    """Negative control."""
    ops = RowDependentOps()
    packed = pack(randn(40, 64, seed=1, dtype=dtype), ops=ops)
    rows = randn(max(COUNTS), 64, dtype=dtype)
    alone = torch.cat([ops.linear(rows[index : index + 1], packed) for index in range(rows.shape[0])])
    for count in (2, 16, 17, 40, 100):
        assert not same_bits(ops.linear(rows[:count], packed), alone[:count]), count


def test_fast_math_is_close():
    fast, x, matrix = FastMathOps(), randn(20, 64, seed=5), randn(24, 64, seed=1)
    torch.testing.assert_close(fast.linear(x, pack(matrix, ops=fast)), OPS.linear(x, pack(matrix)))
    torch.testing.assert_close(fast.gated_act(x, "silu"), OPS.gated_act(x, "silu"))
    torch.testing.assert_close(fast.rms_norm(x, matrix[0], 1e-6), OPS.rms_norm(x, matrix[0], 1e-6))


def test_operations_match_torch():
    x, weight = randn(5, 64), randn(64, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-6), expected)
    layer_norm = torch.nn.functional.layer_norm(x, (64,), weight, weight, 1e-6)
    torch.testing.assert_close(OPS.layer_norm(x, weight, weight, 1e-6), layer_norm)
    torch.testing.assert_close(OPS.act(x, "relu2"), x.relu() ** 2)
    matrix, bias = randn(24, 64, seed=2), randn(24, seed=3)
    torch.testing.assert_close(OPS.linear(x, pack(matrix, bias)), x @ matrix.T + bias)
    torch.testing.assert_close(OPS.gated_act(x, "silu"), torch.nn.functional.silu(x[:, :32]) * x[:, 32:])
    torch.testing.assert_close(OPS.softcap(x, 2.0), 2.0 * torch.tanh(x / 2.0))
    assert torch.equal(OPS.embedding(torch.tensor([3, 0]), pack(x), torch.float32), x[[3, 0]])
    assert torch.equal(OPS.index_rows(x, torch.tensor([3, 0])), x[[3, 0]])
    assert torch.equal(OPS.add(x, x), 2 * x)


def test_parts_are_stacked():
    upper, lower, bias, x = (
        randn(24, 64),
        randn(8, 64, seed=1, dtype=torch.float16),
        randn(32, seed=2),
        randn(5, 64, seed=3),
    )
    packed = OPS.pack_linear([upper, lower], "float32", bias)
    torch.testing.assert_close(OPS.linear(x, packed), x @ torch.cat((upper, lower.float())).T + bias)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weight_uses_its_rounded_values(kind: str):
    weight, x = randn(24, 64), randn(5, 64, seed=3)
    packed = OPS.pack_linear([weight], kind)
    values = fake_quantize(weight, kind)
    torch.testing.assert_close(OPS.linear(x, packed), x @ values.T)
    assert same_bits(
        OPS.embedding(torch.tensor([3, 0]), packed, torch.bfloat16, 1.5), (values[[3, 0]] * 1.5).bfloat16()
    )


def test_file_blocks_keep_their_format():
    scales = torch.full((24, 2), 0.5, dtype=torch.float16).view(torch.uint8).view(24, 2, 2)
    quants = torch.arange(64, dtype=torch.uint8).expand(24, 64).reshape(24, 2, 32)
    blocks = QuantizedBlocks("q8_0", torch.cat((scales, quants), 2).view(24, 68), 64)
    packed = OPS.pack_linear([blocks], "int4")
    assert torch.equal(OPS.embedding(torch.tensor([5]), packed, torch.float32), torch.arange(64)[None] * 0.5)


def test_results_may_be_wider_than_activations():
    x, packed = randn(5, 64, dtype=torch.bfloat16), pack(randn(24, 64, seed=1, dtype=torch.bfloat16))
    wide = OPS.linear(x, packed, torch.float32)
    assert wide.dtype == torch.float32
    assert same_bits(wide.bfloat16(), OPS.linear(x, packed))


def test_rope_rotates_halves_and_copies_the_rest():
    x, angles = randn(3, 2, 12), randn(3, 4, seed=1)
    positions = torch.tensor([2, 0, 1])
    turned = OPS.rope(x, torch.cat((angles.cos(), angles.sin()), 1), positions)
    left, right = (
        torch.complex(x[..., :4], x[..., 4:8]),
        torch.polar(torch.ones(3, 1, 4), angles[positions, None]),
    )
    torch.testing.assert_close(torch.complex(turned[..., :4], turned[..., 4:8]), left * right)
    assert torch.equal(turned[..., 8:], x[..., 8:])


def test_threads_are_a_power_of_two_within_a_tile():
    assert [reference_threads(cores) for cores in (1, 2, 3, 7, 8, 12, 64)] == [1, 2, 2, 4, 8, 8, 16]


# Attention


def cache_of(
    lengths: list[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    garbage: float = 7.0,
) -> ScatteredKV:
    """Attention takes another way where it meets a NaN, so tests run with either kind of garbage."""
    return ScatteredKV(lengths, kv_heads, dim, dtype, dtype, row_tile=TILE, garbage=garbage)


def run(cache: ScatteredKV, spans: list[tuple[int, int, int]], heads: int, **options) -> Rows:
    return cache.run(OPS, spans, heads, **options)


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (3, 1, 24), (2, 2, 20)])
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_softmax_over_visible_positions(heads, kv_heads, dim, window, softcap):
    length = 2 * KV_TILE + 37
    cache = cache_of([length], kv_heads, dim)
    out = run(cache, [(0, 0, length)], heads, window=window, softcap=softcap)
    expected = cache.textbook(0, length, heads, torch.float64, window, softcap)
    actual = torch.stack([out[0, position] for position in range(length)])
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)


def chunked(cache: ScatteredKV, request: int, length: int, cuts: list[int], heads: int, **options) -> dict:
    edges = sorted({0, length, *cuts})
    result = {}
    for start, end in itertools.pairwise(edges):
        result |= run(cache, [(request, start, end)], heads, **options)
    return result


@settings(max_examples=examples(25))
@given(
    cuts=st.lists(st.integers(1, 599), max_size=6),
    window=st.sampled_from([None, 5, 100, 256, 257]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 20.0]),
)
def test_attention_is_independent_of_chunks_and_garbage(
    cuts: list[int], window: int | None, dtype: torch.dtype, softcap: float | None
):
    clean, dirty = (cache_of([600], 2, 16, dtype, garbage) for garbage in (7.0, math.nan))
    whole = run(clean, [(0, 0, 600)], 6, window=window, softcap=softcap)
    agree(chunked(clean, 0, 600, cuts, 6, window=window, softcap=softcap), whole)
    agree(chunked(dirty, 0, 600, cuts, 6, window=window, softcap=softcap), whole)


@pytest.mark.parametrize("window", [None, 16, 250, 290])
def test_attention_around_the_edge_of_a_kv_tile(window: int | None):
    length = KV_TILE + 60
    cache = cache_of([length], 1, 16)
    whole = run(cache, [(0, 0, length)], 1, window=window)
    for start in range(KV_TILE - 20, KV_TILE + 40):
        rows = run(cache, [(0, start, start + 16)], 1, window=window)
        agree(rows, whole)


def test_decode_attention_is_batch_invariant():
    lengths = [1 + 13 * index for index in range(max(COUNTS))]
    cache = cache_of(lengths, 1, 16)
    spans = [(request, length - 1, length) for request, length in enumerate(lengths)]
    alone: Rows = {}
    for span in spans:
        alone |= run(cache, [span], 3)
    for count in COUNTS:
        agree(run(cache, spans[:count], 3), alone)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_number_of_query_tiles_changes_no_bit(heads: int, softcap: float | None):
    """A sink for each row and head is few values: in one place of torch's vectors, in another behind them."""
    cache = cache_of([44, 30, 19], 1, 16)
    options = {"softcap": softcap, "sinks": randn(heads, seed=5)}
    together = run(cache, [(0, 0, 44), (1, 0, 30), (2, 18, 19)], heads, **options)
    for start in range(44):
        alone = run(cache, [(0, start, start + 1)], heads, **options)
        agree(alone, together)


@settings(max_examples=examples(25))
@given(
    spans=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.sampled_from([None, 7, 90]),
    garbage=st.sampled_from([7.0, math.nan]),
)
def test_attention_is_independent_of_neighbours(
    spans: list[tuple[int, int]], window: int | None, garbage: float
):
    """Prompt chunks, decode rows and verified drafts in any mixture."""
    lengths = [start + count for start, count in spans]
    cache = cache_of(lengths, 2, 16, garbage=garbage)
    mixed = [(request, start, start + count) for request, (start, count) in enumerate(spans)]
    together = run(cache, mixed, 4, window=window)
    apart = {}
    for span in mixed:
        apart |= run(cache, [span], 4, window=window)
    agree(together, apart)
    assert all(value.isfinite().all() for value in together.values())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 20])
def test_masked_non_finite_values_do_not_reach_a_row(poison: float, window: int | None):
    """A draft token whose K and V overflow must not reach earlier rows, nor rows beyond the window."""
    length, bad = 60, 50
    cache = cache_of([length], 1, 16)
    clean = run(cache, [(0, 30, length)], 2, window=window)
    cache.kv.v[cache.slots(0, length)[bad]] = poison
    cache.kv.k[cache.slots(0, length)[bad]] = poison
    spoilt = run(cache, [(0, 30, length)], 2, window=window)
    for position in range(30, length):
        if position < bad:
            assert same_bits(clean[0, position], spoilt[0, position]), position
        elif window is None or position < bad + window:
            assert not spoilt[0, position].isfinite().any()


@pytest.mark.parametrize("first", [1, 30, KV_TILE, KV_TILE + 3])
def test_positions_before_the_first_are_not_seen(first: int):
    requests = ScatteredKV([KV_TILE + 40])
    check_first(lambda spans, **options: requests.run(OPS, spans, **options), KV_TILE + 40, first)


@pytest.mark.parametrize("length", [9, 70, KV_TILE + 5])
def test_rows_that_see_later_rows(length: int) -> None:
    requests = ScatteredKV([length, 40, 20], 2, 16, torch.float32, torch.float32)
    check_not_causal(requests, lambda spans, **o: requests.run(OPS, spans, **o), 6, length - 8, length)


def test_metadata_can_be_shared_by_layers():
    cache = cache_of([300, 20], 2, 16)
    batch = cache.batch([(0, 290, 300), (1, 0, 20)])
    q = randn(len(batch.positions), 4, 16)
    planned = OPS.attention(q, cache.kv, batch, 0.25, metadata=build_attention_metadata(batch))
    assert same_bits(planned, OPS.attention(q, cache.kv, batch, 0.25))
    (group,) = build_attention_metadata(batch).groups
    assert group.padded_rows.shape == (2 * Q_TILE + 3 * Q_TILE,)
    assert group.valid_rows.tolist() == list(range(30))
    assert [place % Q_TILE for place in group.valid_places.tolist()] == [
        p % Q_TILE for p in (*range(290, 300), *range(20))
    ]


def test_product_that_rounds_by_place_is_detected(monkeypatch: pytest.MonkeyPatch):
    """For a BLAS that rounds the last rows of a tile differently, each row is computed alone."""

    def uneven(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.t()
        out[8:] *= 1 + 2**-20  # a row alone is never among the last
        return out

    monkeypatch.setattr("foreword.kernels.reference.backend.F", SimpleNamespace(linear=uneven))
    packed, x = pack(randn(24, 32)), randn(40, 32)
    assert same_bits(OPS.linear(x, packed)[20:30], OPS.linear(x[20:30], packed))
    assert packed.by_dtype[torch.float32].row_by_row


def test_uniform_product_runs_on_row_tiles():
    packed = pack(randn(24, 32))
    OPS.linear(randn(1, 32), packed)
    assert not packed.by_dtype[torch.float32].row_by_row


def test_empty_batch_is_all_padding():
    cache = cache_of([5], 1, 16)
    assert OPS.attention(randn(0, 2, 16), cache.kv, cache.batch([]), 1.0).shape == (0, 2, 16)


def test_write_kv_writes_to_slots():
    k_cache, v_cache = torch.zeros(48, 2, 4), torch.zeros(48, 2, 4)
    qkv = randn(3, 8, 4)
    OPS.write_kv(qkv[:, 4:6], qkv[:, 6:], KVLayer(k_cache, v_cache), torch.tensor([40, 17, 18]))
    assert torch.equal(k_cache[[40, 17, 18]], qkv[:, 4:6]) and torch.equal(v_cache[[40, 17, 18]], qkv[:, 6:])
    assert k_cache.count_nonzero() == 24


def int8_layer(slots: int, kv_heads: int, dim: int) -> KVLayer:
    values = [torch.full((slots, kv_heads, dim), 99, dtype=torch.int8) for _ in range(2)]
    return KVLayer(*values, *(torch.full((slots, kv_heads), math.nan) for _ in range(2)))


def test_int8_cache_has_a_scale_per_vector():
    layer = int8_layer(48, 2, 4)
    k, v = randn(3, 2, 4), torch.zeros(3, 2, 4)
    k[1, 0] = math.inf
    OPS.write_kv(k, v, layer, torch.tensor([40, 17, 18]))
    assert layer.k_scale is not None and layer.v_scale is not None
    torch.testing.assert_close(layer.k_scale[40], k[0].abs().amax(-1) / 127)
    kept = layer.k[[40, 18]] * layer.k_scale[[40, 18]][..., None]
    torch.testing.assert_close(kept, k[[0, 2]], atol=float(k[[0, 2]].abs().max()) / 254 + 1e-6, rtol=0)
    assert layer.k[40].abs().amax() == 127
    assert not (layer.k[17, 0] * layer.k_scale[17, 0]).isfinite().any(), "what overflowed must not look sound"
    assert not layer.v[[40, 17, 18]].any() and not layer.v_scale[[40, 17, 18]].any()


@pytest.mark.parametrize("window", [None, 40])
def test_attention_reads_rounded_int8(window: int | None):
    """Bits equal those of a float32 cache with the rounded values; unwritten slots hold NaN."""
    length = KV_TILE + 37
    cache = cache_of([length], 2, 16)
    slots = torch.tensor(cache.slots(0, length))
    layer = int8_layer(cache.kv.k.shape[0], 2, 16)
    OPS.write_kv(cache.kv.k[slots], cache.kv.v[slots], layer, slots)
    assert layer.k_scale is not None and layer.v_scale is not None
    cache.kv.k[slots] = layer.k[slots] * layer.k_scale[slots][..., None]
    cache.kv.v[slots] = layer.v[slots] * layer.v_scale[slots][..., None]
    expected = run(cache, [(0, 0, length)], 4, window=window)
    cache.kv = layer
    agree(run(cache, [(0, 0, length)], 4, window=window), expected)


def test_attention_reads_rounded_float8():
    length = KV_TILE + 5
    cache = cache_of([length], 2, 16)
    slots = torch.tensor(cache.slots(0, length))
    values = [torch.full(cache.kv.k.shape, math.nan).to(torch.float8_e4m3fn) for _ in range(2)]
    layer = KVLayer(*values, *(torch.full(cache.kv.k.shape[:2], math.nan) for _ in range(2)))
    OPS.write_kv(cache.kv.k[slots], cache.kv.v[slots], layer, slots)
    assert layer.k_scale is not None and layer.v_scale is not None
    torch.testing.assert_close(layer.k_scale[slots], cache.kv.k[slots].abs().amax(-1) / 448)
    for exact, stored, scale in ((cache.kv.k, layer.k, layer.k_scale), (cache.kv.v, layer.v, layer.v_scale)):
        kept = stored.float()[slots] * scale[slots][..., None]
        torch.testing.assert_close(kept, exact[slots], atol=1e-3, rtol=1 / 16)
        exact[slots] = kept
    expected = run(cache, [(0, 0, length)], 4)
    cache.kv = layer
    agree(run(cache, [(0, 0, length)], 4), expected)
