"""Triton attention against the reference, with the same bits for every division of work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.batch import Batch
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton import attention
from foreword.kernels.triton.attention import TileShape, TritonAttention, TritonAttnMetadata, plan_launches
from foreword.planning.memory import estimate_memory
from tests.support.budget import examples
from tests.support.device import DEVICE
from tests.support.scattered_kv import Rows, ScatteredKV, Spans, agree, check_first, check_not_causal, randn
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot, program_order

BLOCK = 8
SPLIT = 32
SMALL_TILE = TileShape(16, 32, 4, 16)
REFERENCE = ReferenceOps()
STORED = {"float32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Small tiles and splits: the interpreter takes a millisecond for each tile operation."""
    with pytest.MonkeyPatch.context() as patch, exact_dot(), torch.device(DEVICE):
        patch.setattr(attention, "SPLIT", SPLIT)
        patch.setattr(attention, "tile_shape", lambda *_: SMALL_TILE)
        yield


def cache_of(lengths: list[int], kv_heads: int, dim: int, stored: str = "float32") -> ScatteredKV:
    types = STORED[stored], torch.float32
    return ScatteredKV(lengths, kv_heads, dim, *types, block_size=BLOCK, row_tile=1, request_index=True)


def run(cache: ScatteredKV, spans: Spans, heads: int, row_tile: int = 1, **options: Any) -> Rows:
    ops = TritonAttention()
    rows = cache.run(ops, spans, heads, row_tile, **options)
    assert ops._counters is None or not ops._counters.any(), "the next launch counts from zero"
    return rows


@settings(max_examples=examples(12))
@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 12)), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 2), (2, 2), (7, 1), (3, 2), (20, 1)]),
    dim=st.sampled_from([16, 20]),
    window=st.sampled_from([None, 1, 20, 33]),
    softcap=st.sampled_from([None, 2.0]),
    stored=st.sampled_from(["float32", "int8", "fp8"]),
    row_tile=st.sampled_from([1, 4]),
    sink=st.sampled_from([None, -3.0, 1.0, 300.0]),
)
def test_attention_matches_reference(spans, heads, dim, window, softcap, stored, row_tile, sink) -> None:
    group, kv_heads = heads
    sinks = None if sink is None else randn(group * kv_heads, seed=5) + sink
    cache = cache_of([start + count for start, count in spans], kv_heads, dim, stored)
    mixed = [(request, start, start + count) for request, (start, count) in enumerate(spans)]
    batch = cache.batch(mixed, 1)
    expected = REFERENCE.attention(
        cache.queries(batch, mixed, group * kv_heads),
        cache.kv,
        batch,
        dim**-0.5,
        window,
        softcap,
        None,
        sinks,
    )
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    actual = torch.stack(list(run(cache, mixed, group * kv_heads, row_tile, **options).values()))
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("first", [1, 17, SPLIT, SPLIT + 3])
@pytest.mark.parametrize("programs", [1, 528])
def test_positions_before_the_first_are_not_seen(
    first: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TARGET_NUM_PROGRAMS", programs)
    cache = cache_of([SPLIT + 20], 2, 16)
    check_first(lambda spans, **options: run(cache, spans, 4, **options), SPLIT + 20, first)


@pytest.mark.parametrize("programs", [1, 528])
def test_rows_that_see_later_rows(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TARGET_NUM_PROGRAMS", programs)
    cache = cache_of([SPLIT + 5, 40, 20], 2, 16)
    check_not_causal(cache, lambda spans, **options: run(cache, spans, 4, **options), 4, SPLIT - 3, SPLIT + 5)


def test_heads_of_512_values_match_reference() -> None:
    """In global layers of Gemma 4."""
    cache = cache_of([40], 1, 512)
    whole = run(cache, [(0, 0, 40)], 2, window=33)
    batch = cache.batch([(0, 0, 40)], 1)
    expected = REFERENCE.attention(cache.queries(batch, [(0, 0, 40)], 2), cache.kv, batch, 512**-0.5, 33)
    torch.testing.assert_close(torch.stack(list(whole.values())), expected, atol=5e-6, rtol=1e-5)
    for start, end in pairwise((0, 1, 30, 39, 40)):
        agree(run(cache, [(0, start, end)], 2, window=33), whole)


@settings(max_examples=examples(6))
@given(
    cuts=st.lists(st.integers(1, 79), max_size=2),
    group=st.sampled_from([1, 3, 5]),
    window=st.sampled_from([None, 5, 31, 40]),
    softcap=st.sampled_from([None, 20.0]),
    stored=st.sampled_from(["float32", "int8", "fp8"]),
    programs=st.sampled_from([1, 2, 7, 528]),
    has_sinks=st.booleans(),
)
def test_rows_do_not_depend_on_chunks_or_programs(
    cuts: list[int],
    group: int,
    window: int | None,
    softcap: float | None,
    stored: str,
    programs: int,
    has_sinks: bool,
) -> None:
    cache = cache_of([80], 1, 20, stored)
    sinks = randn(group, seed=5) if has_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    whole = run(cache, [(0, 0, 80)], group, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TARGET_NUM_PROGRAMS", programs)
        for start, end in pairwise(sorted({0, 80, *cuts})):
            agree(run(cache, [(0, start, end)], group, **options), whole)
        for position in (31, 32, 79):
            agree(run(cache, [(0, position, position + 1)], group, **options), whole)


@settings(max_examples=examples(6))
@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 4, 11])), min_size=2, max_size=3),
    window=st.sampled_from([None, 25]),
    tile=st.sampled_from([TileShape(16, 16, 4, 16), TileShape(32, 32, 4, 16), TileShape(16, 64, 4, 16)]),
    heads=st.sampled_from([2, 6, 10]),
    has_sinks=st.booleans(),
)
def test_rows_do_not_depend_on_neighbours_or_tiles(
    spans: list[tuple[int, int]], window: int | None, tile: TileShape, heads: int, has_sinks: bool
) -> None:
    """Prompt chunks, decode rows and verified drafts in any mixture."""
    cache = cache_of([start + count for start, count in spans], 2, 16)
    mixed = [(request, start, start + count) for request, (start, count) in enumerate(spans)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "tile_shape", lambda *_: tile)
        options = {"window": window, "sinks": randn(heads, seed=5) if has_sinks else None}
        together = run(cache, mixed, heads, row_tile=4, **options)
    for request, start, end in mixed:
        for span in ((request, start, end), (request, end - 1, end)):  # in other places of a tile
            agree(run(cache, [span], heads, **options), together)
    assert all(value.isfinite().all() for value in together.values())


def test_sink_of_no_weight_changes_no_bit() -> None:
    cache = cache_of([80], 2, 16)
    spans = [(0, 3, 5), (0, 70, 80)]
    agree(run(cache, spans, 6, sinks=torch.full((6,), -1e9)), run(cache, spans, 6))


def test_splits_that_depend_on_context_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: splits that depend on the context length."""
    cache = cache_of([80], 1, 16)
    whole = run(cache, [(0, 0, 80)], 2)
    monkeypatch.setattr(attention, "SPLIT", 48)
    with pytest.raises(AssertionError):
        agree(run(cache, [(0, 79, 80)], 2), whole)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order of programs")
def test_program_order_changes_no_bit() -> None:
    cache = cache_of([130, 40], 2, 16)
    spans = [(0, 129, 130), (1, 37, 40)]
    expected = run(cache, spans, 4)
    for order in (
        lambda all_of_them: all_of_them[::-1],
        lambda all_of_them: all_of_them[1::2] + all_of_them[::2],
    ):
        with program_order(order):
            agree(run(cache, spans, 4), expected)


def test_large_workspace_falls_back_to_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of([200], 1, 16)
    expected = run(cache, [(0, 199, 200)], 4)
    monkeypatch.setattr(attention, "MAX_WORKSPACE_BYTES", 0)
    batch = cache.batch([(0, 199, 200)])
    (launch,) = TritonAttnMetadata(batch, None, batch.positions).get_launches(SMALL_TILE, 4, 1, 16)
    assert launch.num_programs == 1
    agree(run(cache, [(0, 199, 200)], 4), expected)


@pytest.mark.parametrize(("streams", "programs"), [(1, 33), (4, 9), (16, 3), (32, 2), (64, 1)])
def test_long_contexts_share_the_splits_of_a_request(
    streams: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3.1-8B in a CUDA graph for 131,072 positions; the workspace has room for all their splits."""
    monkeypatch.setattr(attention, "SPLIT", 256)
    positions = torch.zeros(streams, dtype=torch.int64)
    tables, starts = torch.zeros(streams + 1, 131072 // 16, dtype=torch.int64), tuple(range(streams + 1))
    batch = Batch(positions, positions, positions, tables, starts, (), positions, 16, None, None, positions)
    metadata = TritonAttnMetadata(batch, None, batch.positions)
    (launch,) = metadata.get_launches(TileShape(32, 32, 4, 16), 4, 8, 128)
    assert (launch.num_columns, launch.padded_columns, launch.num_programs) == (4, 32, programs)
    shared = TritonAttention()
    values, stats = shared._get_workspace(positions.device, 264 * metadata.max_splits * 32, 128)
    assert values.numel() >= streams * 8 * 512 * 4 * 128 and stats.numel() >= streams * 8 * 512 * 4 * 2
    assert values.nbytes + stats.nbytes <= attention.MAX_WORKSPACE_BYTES
    assert shared._get_workspace(positions.device, 16, 128)[0].data_ptr() == values.data_ptr()


def test_memory_estimate_has_the_workspace() -> None:
    for total in (24 << 30, 80 << 30):
        with_workspace = estimate_memory(total, total, 0.9, 0, 0, 0, cuda_graphs=False)
        limit = min(total // attention.WORKSPACE_DIVISOR, attention.MAX_WORKSPACE_BYTES)
        assert with_workspace.activations == limit


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")  # of numpy
@pytest.mark.parametrize(
    ("poison", "window", "programs"),
    [
        *((math.nan, None, 1), (math.nan, 20, 528), (math.inf, None, 528)),
        *((math.inf, 20, 1), (-math.inf, None, 1), (-math.inf, 20, 528)),
    ],
)
def test_masked_non_finite_values_do_not_reach_a_row(
    poison: float, window: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TARGET_NUM_PROGRAMS", programs)
    cache = cache_of([60], 1, 16)
    clean = run(cache, [(0, 30, 60)], 2, window=window)
    cache.kv.v[cache.slot(0, 50), 0, 3] = poison
    spoilt = run(cache, [(0, 30, 60)], 2, window=window)
    for position in range(30, 60):
        key = (0, position)
        alone = (
            run(cache, [(0, position, position + 1)], 2, window=window)
            if position in (49, 50)
            else {key: spoilt[key]}
        )
        assert torch.equal(alone[key].isnan(), spoilt[key].isnan())
        if position < 50:
            agree({key: spoilt[key]}, clean)
            agree(alone, clean)
        elif window is None or position < 50 + window:
            assert spoilt[key].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
@pytest.mark.parametrize("stored", ["float32", "int8", "fp8"])
def test_non_finite_vectors_reach_only_visible_rows(stored: str) -> None:
    cache = cache_of([60], 1, 16, stored)
    clean = run(cache, [(0, 40, 60)], 2)
    k, v = randn(2, 1, 16, seed=1), randn(2, 1, 16, seed=2)
    k[0, 0, 3], v[1, 0, 3] = math.nan, math.inf
    REFERENCE.write_kv(k, v, cache.kv, torch.tensor([cache.slot(0, 50), cache.slot(0, 55)]))
    spoilt = run(cache, [(0, 40, 60)], 2)
    agree({key: value for key, value in spoilt.items() if key[1] < 50}, clean)
    assert all(value.isnan().all() for key, value in spoilt.items() if key[1] >= 50)


@pytest.mark.parametrize("programs", [1, 528])
def test_graph_batches_have_padding_and_unknown_lengths(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slots of four rows: one full, one with two padding rows and a single split, one unused."""
    monkeypatch.setattr(attention, "TARGET_NUM_PROGRAMS", programs)
    cache = cache_of([70, 20], 2, 16)
    spans = [(0, 66, 70), (1, 18, 20)]
    known = cache.batch(spans)
    batch = replace(
        known,
        positions=torch.tensor([66, 67, 68, 69, 18, 19, 10**6, 0, 0, 0, 0, 0]),
        query_start_loc=(0, 4, 8, 12),
        seq_lens=(),
        request_index=torch.tensor([0] * 4 + [1] * 2 + [3] * 6),
        block_tables=torch.cat((known.block_tables, known.block_tables[-1:])),
    )
    q = torch.full((12, 4, 16), math.nan)
    q[:6] = cache.queries(known, spans, 4)
    out = TritonAttention().attention(q, cache.kv, batch, 0.25)
    assert not out[6:].any()
    alone = run(cache, spans[:1], 4) | run(cache, spans[1:], 4)
    agree(dict(zip(alone, out, strict=False)), alone)


@settings(max_examples=examples(50))
@given(sizes=st.lists(st.integers(1, 40), max_size=6), heads=st.integers(1, 32), padding=st.integers(0, 5))
def test_every_row_is_in_one_tile(sizes: list[int], heads: int, padding: int) -> None:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    positions = torch.zeros(starts[-1] + padding, dtype=torch.int64)
    tables = torch.zeros(len(sizes) + 1, 4, dtype=torch.int64)
    batch = Batch(
        positions, positions, positions, tables, tuple(starts), (), positions, BLOCK, request_index=positions
    )
    launches = plan_launches(batch, SMALL_TILE, heads, 2, 64, 9)
    tiles = [tile for launch in launches for tile in launch.tiles.tolist()]
    assert sorted(row for first, size in tiles for row in range(first, first + size)) == list(
        range(len(positions))
    )
    for launch in launches:
        assert 16 <= launch.padded_columns <= 32 and 1 <= launch.num_programs <= 9
        assert launch.tiles[:, 1].max() * heads == launch.num_columns <= launch.padded_columns
        assert launch.num_programs == 1 or launch.tiles.shape[0] * 2 < attention.TARGET_NUM_PROGRAMS
    bounds = [*starts, len(positions)]
    assert all(
        any(low <= first and first + size <= high for low, high in pairwise(bounds)) for first, size in tiles
    )


def test_layers_share_metadata() -> None:
    cache = cache_of([40], 2, 16)
    ops, batch = TritonAttention(), cache.batch([(0, 30, 40)])
    plan = ops.build_attention_metadata(batch)
    q = cache.queries(batch, [(0, 30, 40)], 4)
    first = ops.attention(q, cache.kv, batch, 0.25, metadata=plan)
    assert len(plan.launches) == 1
    assert (
        torch.equal(first, ops.attention(q, cache.kv, batch, 0.25, metadata=plan)) and len(plan.launches) == 1
    )
    empty = cache.batch([])
    assert ops.attention(q[:0], cache.kv, empty, 0.25).shape == (0, 4, 16)
