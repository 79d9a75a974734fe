"""Attention on every instruction set: correctness and row invariance."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels.cpu.library import supported_isas
from tests.support.budget import examples
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits
from tests.support.scattered_kv import ScatteredKV, agree, check_first, check_not_causal

SPLIT = 512  # positions, as in attention.h
CACHES = (torch.float32, torch.bfloat16, torch.int8)
TYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
each_isa = pytest.mark.parametrize("isa", isas_under_test())
each_cache = pytest.mark.parametrize("cached", CACHES)


# Every pair of a shape, options and a cache.
SHAPES = [
    (14, 2, 64),
    (3, 1, 8),
    (2, 2, 80),
    (1, 1, 256),
    (9, 1, 7),
    (4, 2, 512),
]  # heads, KV heads, dimension
OPTIONS = [(None, None, False), (70, None, False), (None, 2.0, False), (70, None, True), (None, 2.0, True)]
PAIRS = [
    (CACHES[(place + index) % 3], *shape, *options)
    for place, shape in enumerate(SHAPES)
    for index, options in enumerate(OPTIONS)
]


@each_isa
@pytest.mark.parametrize(("cached", "heads", "kv_heads", "dim", "window", "softcap", "sunk"), PAIRS)
def test_attention_is_softmax_over_visible_positions(
    isa: str,
    cached: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
):
    """The error is at most twice that of plain torch, or a few float32 units: sums differ by machine.

    A float32 product adds its values one after the other: more units for wide heads.
    """
    start, length = SPLIT - 5, SPLIT + 20
    sinks = torch.linspace(7.0, -3.0, heads) if sunk else None
    for dtype in TYPES:
        requests = ScatteredKV([length], kv_heads, dim, cached, dtype)
        rows = requests.run(
            cpu_ops_by_threads(isa)[0],
            [(0, start, length)],
            heads,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        actual = torch.stack(list(rows.values())).double()
        plain = torch.float32 if dtype == cached == torch.float32 else torch.bfloat16
        exact, rounded = (
            requests.textbook(start, length, heads, by, window, softcap, sinks)
            for by in (torch.float64, plain)
        )
        units = 2e-6 * max(dim / 256, 1)
        assert (actual - exact).abs().max() <= max(2 * (rounded - exact).abs().max(), units)


@pytest.mark.full
@each_isa
@pytest.mark.parametrize(
    ("cached", "window"),
    [*((cached, None) for cached in CACHES), *zip(2 * CACHES, (1, 64, 513, 600), strict=False)],
)
def test_chunks_neighbours_and_threads_change_no_bit(isa: str, cached: torch.dtype, window: int | None):
    """One prompt: whole, in chunks around vector and split edges, and as single rows."""
    length = 2 * SPLIT + 70
    requests = ScatteredKV([length, 40], cached=cached)
    one, *others = cpu_ops_by_threads(isa)
    whole = requests.run(one, [(0, 0, length)], window=window)
    for ops in others:
        agree(requests.run(ops, [(0, 0, length)], window=window), whole)
    edges = [0, 1, 7, 8, 63, 64, 65, 127, 200, 511, 512, 513, 521, 575, 1022, 1023, 1024, 1025, 1033, length]
    for start, end in itertools.pairwise(edges):
        agree(requests.run(others[0], [(0, start, end)], window=window), whole)
    for position in (0, 1, 62, 63, 64, 65, 510, 511, 512, 513, 1022, 1023, 1024, 1025, length - 1):
        rows = [(1, 30, 40), (0, position, position + 1)]
        agree({(0, position): requests.run(others[1], rows, window=window)[0, position]}, whole)


@each_isa
@pytest.mark.parametrize("length", [9, 70, SPLIT + 5])
def test_rows_that_see_later_rows(isa: str, length: int) -> None:
    requests, ops = (
        ScatteredKV([length, 40, 20], 2, 16, torch.float32, torch.float32),
        cpu_ops_by_threads(isa)[1],
    )
    check_not_causal(requests, lambda spans, **o: requests.run(ops, spans, **o), 6, length - 8, length)


@each_isa
@each_cache
@pytest.mark.parametrize("first", [1, 30, SPLIT, SPLIT + 3])
def test_positions_before_the_first_are_not_seen(isa: str, cached: torch.dtype, first: int):
    """In tasks of several rows, and in those that share the splits of one row."""
    requests, ops = ScatteredKV([SPLIT + 40], cached=cached), cpu_ops_by_threads(isa)[1]
    check_first(lambda spans, **options: requests.run(ops, spans, **options), SPLIT + 40, first)


@each_isa
@pytest.mark.parametrize("block_size", [1, 2, 64, 256])
def test_block_placement_changes_no_bit(isa: str, block_size: int):
    spans = [(0, SPLIT - 20, SPLIT + 60)]
    ops, moved = cpu_ops_by_threads(isa)[0], ScatteredKV([SPLIT + 60], block_size=block_size, seed=5)
    agree(moved.run(ops, spans), ScatteredKV([SPLIT + 60]).run(ops, spans))


@each_isa
@settings(max_examples=examples(15))
@given(
    spans=st.lists(st.tuples(st.integers(0, 1100), st.integers(1, 40)), min_size=1, max_size=5),
    heads=st.sampled_from([2, 6, 8, 14]),
    window=st.sampled_from([None, 7, 530]),
    softcap=st.sampled_from([None, 20.0]),
    cached=st.sampled_from(CACHES),
    sunk=st.booleans(),
)
def test_mixed_batch_equals_each_row_alone(
    isa: str,
    spans: list[tuple[int, int]],
    heads: int,
    window: int | None,
    softcap: float | None,
    cached: torch.dtype,
    sunk: bool,
):
    requests = ScatteredKV([start + count for start, count in spans], cached=cached)
    mixed = [(request, start, start + count) for request, (start, count) in enumerate(spans)]
    options = {"window": window, "softcap": softcap, "sinks": randn(heads) if sunk else None}
    together = requests.run(cpu_ops_by_threads(isa)[1], mixed, heads, **options)
    for request, start, end in mixed:
        for position in {start, (start + end) // 2, end - 1}:
            alone = requests.run(
                cpu_ops_by_threads(isa)[0], [(request, position, position + 1)], heads, **options
            )
            agree(alone, together)
    assert all(value.isfinite().all() for value in together.values())


@each_isa
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 111, 112, 113, 230, 447, 448, 449])
def test_row_groups_change_no_bit(isa: str, rows: int):
    """Around the row counts that share a task, by threads; larger requests are not divided by splits."""
    length = SPLIT + 250
    requests = ScatteredKV([length], 1, 8)
    one, _, many = cpu_ops_by_threads(isa)
    for heads in (1, 7):
        whole = requests.run(one, [(0, 0, length)], heads)
        for ops in (one, many):
            agree(requests.run(ops, [(0, length - rows, length)], heads), whole)


@each_isa
@pytest.mark.parametrize(
    ("cached", "poison", "window"),
    [
        (cached, poison, (None, 20)[(i + j) % 2])
        for i, cached in enumerate(CACHES)
        for j, poison in enumerate((math.nan, math.inf, -math.inf))
    ],
)
def test_masked_non_finite_values_do_not_reach_a_row(
    isa: str, cached: torch.dtype, poison: float, window: int | None
):
    """A draft token whose K and V overflow reaches neither earlier rows nor rows beyond the window."""
    length, bad = SPLIT + 60, SPLIT + 21
    requests, ops = ScatteredKV([length], cached=cached), cpu_ops_by_threads(isa)[0]
    span = [(0, SPLIT - 10, length)]
    clean = requests.run(ops, span, window=window)
    slot = torch.tensor([requests.slots(0, length)[bad]])
    for tensors in ("v", "kv"):
        k, v = (randn(1, 2, 16, dtype=torch.bfloat16) for _ in range(2))
        for name, values in (("k", k), ("v", v)):
            if name in tensors:
                values[..., 3] = poison
        ops.write_kv(k, v, requests.kv, slot)
        for (_, position), value in requests.run(ops, span, window=window).items():
            if position < bad or (window is not None and position >= bad + window):
                assert same_bits(value, clean[0, position]), position
            else:
                assert not value.isfinite().any(), position


@each_isa
def test_extreme_sinks(isa: str):
    """A sink far above the scores leaves zeros, and one far below changes nothing."""
    requests, span, ops = ScatteredKV([SPLIT + 60]), [(0, SPLIT - 10, SPLIT + 60)], cpu_ops_by_threads(isa)[0]
    sinks = torch.tensor([1e30, 500.0, -500.0, -1e30, math.inf, -math.inf])
    sunk, plain = requests.run(ops, span, sinks=sinks), requests.run(ops, span)
    for key, value in sunk.items():
        assert not value[[0, 1, 4]].any()
        assert same_bits(value[[2, 3, 5]], plain[key][[2, 3, 5]])


@each_isa
def test_empty_batch_is_all_padding(isa: str):
    requests = ScatteredKV([5])
    assert requests.run(cpu_ops_by_threads(isa)[0], []) == {}
