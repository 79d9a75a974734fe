"""Latent attention on every instruction set: V as a view of K, and products by head."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.batch import KVLayer
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import Matrix
from foreword.kernels.quantization import QUANT_BLOCKS
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.budget import examples
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits
from tests.support.quantized_weights import random_blocks, random_float8_blocks, random_grouped_ints
from tests.support.scattered_kv import ScatteredKV, agree

SPLIT = 512  # positions, as in attention.h
CACHES = (torch.float32, torch.bfloat16, torch.int8)
SHAPES = [(16, 576, 512), (5, 40, 32), (1, 18, 16)]  # heads, values of K, of V
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "q8_0", "q4_0", "grouped4", "float8")
MAX_ROWS = 300  # more than two passes, the last of which has a panel of few rows

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())


@each_isa
@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize(("heads", "dim", "latent_dim"), SHAPES)
def test_attention_is_softmax_over_visible_positions(
    isa: str, cached: torch.dtype, heads: int, dim: int, latent_dim: int
) -> None:
    """The error is at most twice that of plain torch, or a few float32 units."""
    start, length = SPLIT - 5, SPLIT + 20
    for dtype in (torch.float32, torch.bfloat16):
        cache = ScatteredKV([length], 1, dim, cached, dtype, latent_dim=latent_dim)
        rows = cache.run(cpu_ops_by_threads(isa)[0], [(0, start, length)], heads)
        exact = cache.textbook(start, length, heads, torch.float64)
        plain = cache.textbook(start, length, heads, dtype)
        actual = torch.stack([rows[0, position] for position in range(start, length)])
        assert actual.shape == (length - start, heads, latent_dim) and actual.dtype == dtype
        narrow = cached != torch.float32  # queries and weights are rounded to bfloat16
        limit = 2 * (plain.double() - exact).abs().max() + (1e-2 if narrow else 2e-5)
        assert (actual.double() - exact).abs().max() <= limit


@each_isa
@pytest.mark.parametrize("cached", CACHES)
@settings(max_examples=examples(10))
@given(
    cuts=st.lists(st.integers(1, SPLIT + 39), max_size=4),
    alone=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
)
def test_rows_do_not_depend_on_cuts_and_neighbours(
    isa: str, cached: torch.dtype, cuts: list[int], alone: bool, threads: int
) -> None:
    cache = ScatteredKV([SPLIT + 40, 70], 1, 40, cached, latent_dim=32)
    whole = cache.run(cpu_ops_by_threads(isa)[0], [(0, 0, SPLIT + 40), (1, 0, 70)])
    ops = cpu_ops_by_threads(isa)[threads - 1]
    for begin, end in itertools.pairwise(sorted({0, SPLIT + 40, *cuts})):
        rows = cache.run(ops, [(0, begin, end), *([] if alone else [(1, 60, 70)])])
        agree(rows, whole)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_has_scales_of_its_own_for_each_part(isa: str, dtype: torch.dtype) -> None:
    """A large rotated key costs the latent vector no precision; bytes and scales are the reference's."""
    latent, own = randn(9, 1, 32, dtype=dtype), randn(9, 1, 8, seed=2, dtype=dtype) * 1000
    own[3] = 0.0
    latent[4, 0, 5] = math.inf
    layers = []
    for ops in (cpu_ops_by_threads(isa)[0], ReferenceOps()):
        k, scales = torch.full((20, 1, 40), 7, dtype=torch.int8), [torch.ones(20, 1) for _ in range(2)]
        layers.append(KVLayer(k, k[..., :32], *scales))
        ops.write_kv(own, latent, layers[-1], torch.arange(9) * 2)
    ours, theirs = layers
    assert torch.equal(ours.k, theirs.k) and (ours.k[1::2] == 7).all(), "other slots keep their values"
    for scale, expected in ((ours.k_scale, theirs.k_scale), (ours.v_scale, theirs.v_scale)):
        assert scale is not None and expected is not None
        assert torch.equal(scale.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert ours.v_scale is not None
    restored = ours.v[0, 0].float() * ours.v_scale[0]
    assert (restored - latent[0, 0].float()).abs().max() <= ours.v_scale[0] * 0.51


def matrix(weight_format: str, head: int) -> Matrix:
    """[70, 256]"""
    if weight_format in QUANT_BLOCKS:
        return random_blocks(weight_format, 70, 256, head)
    if weight_format == "grouped4":
        return random_grouped_ints(4, 70, 256, 128, head)
    if weight_format == "float8":
        return random_float8_blocks(70, 256, (1, 128), head)
    return randn(70, 256, seed=head)


@each_isa
@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [*zip(FORMATS, itertools.cycle((torch.float32, torch.bfloat16)), strict=False)],
)
def test_product_by_head_is_the_ordinary_product(isa: str, weight_format: str, dtype: torch.dtype) -> None:
    """Bit for bit, for every number of rows and threads; appended values are copied."""
    is_tensor = weight_format in ("float32", "bfloat16", "float16", "int8", "int4")
    tensor_format = weight_format if is_tensor else "bfloat16"
    x, append = randn(MAX_ROWS, 3, 256, dtype=dtype), randn(MAX_ROWS, 3, 6, seed=9, dtype=dtype)
    ops = cpu_ops_by_threads(isa)[0]
    packed = [ops.pack_linear([matrix(weight_format, head)], tensor_format) for head in range(3)]
    expected = torch.stack([ops.linear(x[:, head].contiguous(), packed[head]) for head in range(3)], 1)
    for threads, rows in itertools.product((0, 1, 2), (1, 2, 17, MAX_ROWS)):
        other = cpu_ops_by_threads(isa)[threads]
        weights = other.pack_heads(packed)
        part = slice(MAX_ROWS - rows, MAX_ROWS)
        assert same_bits(other.linear_by_head(x[part], weights), expected[part]), (threads, rows)
        joined = other.linear_by_head(x[part], weights, append[part])
        assert same_bits(joined, torch.cat((expected[part], append[part]), -1)), (threads, rows)


@each_isa
@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "q4_0"])
@pytest.mark.parametrize(("k", "n", "appended"), [(128, 512, 64), (512, 128, 0)])
def test_rows_of_a_prompt_have_the_bits_of_rows_alone(
    isa: str, weight_format: str, k: int, n: int, appended: int
) -> None:
    """Heads of DeepSeek-V2-Lite's sizes, as columns of wider rows; the last panel of a pass has few rows."""
    rows, heads = 131, 4
    wide = randn(rows, heads * (k + appended) + 8, dtype=torch.bfloat16)
    x = wide[:, : heads * k].view(rows, heads, k)
    append = wide[:, heads * k : heads * (k + appended)].view(rows, heads, appended) if appended else None
    sources: list[Matrix] = [
        random_blocks(weight_format, n, k, head) if weight_format in QUANT_BLOCKS else randn(n, k, seed=head)
        for head in range(heads)
    ]
    tensor_format = "bfloat16" if weight_format in QUANT_BLOCKS else weight_format
    results = []
    for ops in cpu_ops_by_threads(isa)[:2]:
        weights = ops.pack_heads([ops.pack_linear([source], tensor_format) for source in sources])
        results.append(ops.linear_by_head(x, weights, append))
        for row in range(rows):
            part = slice(row, row + 1)
            alone = ops.linear_by_head(x[part], weights, None if append is None else append[part])
            assert same_bits(alone, results[-1][part]), row
    assert same_bits(*results)
