"""Paged flash attention with one order of operations however the work is divided.

Positions are cut into splits of SPLIT, and these into tiles of BLOCK_KV, both aligned to absolute position.
A row's softmax runs over the tiles of a split in order, and over its splits in order, by one formula
(`_merge`); masked tiles and splits leave its bits unchanged. So it makes no difference whether one program
walks all splits or each split has its own program.

Keys and values are the M side of the products: scores are [BLOCK_KV, NQ], values [BLOCK_D, NQ], with a
column for each (row, head). Columns are independent. A GPU computes all tiles with one shape of tensor core
instruction: on Hopper its n follows from NQ, so NQ is fixed and columns are padded. Sums over positions have
one layout for every NQ while all warps lie along M. float32 has no such layouts: its sum is a product with
ones, which has one order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.kernels.triton.gemm_pack import from_float8

MIN_SCORE = tl.constexpr(-3.0e38)  # maximum of no scores: finite, so that differences are too
INFINITY = tl.constexpr(float("inf"))
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(top, total, values, next_top, next_total, next_values):
    """Merge the softmax of some positions with that of later ones; empty ones change no bit."""
    highest = tl.maximum(top, next_top)
    keep = tl.exp2(top - highest)
    add = tl.exp2(next_top - highest)
    return highest, total * keep + next_total * add, values * keep[None, :] + next_values * add[None, :]


@triton.jit
def _upcast(values, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    if values.dtype != tl.uint8:
        return values.to(dtype)
    elif FLOAT8:
        # By way of float32: direct conversion of float16 to bfloat16 has a quarter of the rate.
        return values.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    else:
        return from_float8(values, dtype)


@triton.jit
def _sum_positions(sums, dtype: tl.constexpr, BLOCK_KV: tl.constexpr):
    """[BLOCK_KV, NQ] -> [NQ]"""
    if dtype == tl.float32:
        ones = tl.full([16, BLOCK_KV], 1.0, tl.float32)
        return tl.max(tl.dot(ones, sums, input_precision="ieee"), 0)
    else:
        return tl.sum(sums, 0)


@triton.jit
def _attend_positions(
    q, q_rest, k, v, k_scale, v_scale, block_table, begin, end, low, high, positions, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, NQ: tl.constexpr, SPLIT: tl.constexpr,
    FLOAT8: tl.constexpr, FLUSH: tl.constexpr, MASK_NON_FINITE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax of q [BLOCK_D, NQ] over the positions from begin, a multiple of BLOCK_KV, to end.

    q_rest           [BLOCK_REST, NQ] for the REST values of K after those that are V, or None
    FIRST            position before which nothing is seen
    low, high        range of positions that any column attends to; no others are read
    FLUSH            there may be more than one split
    MASK_NON_FINITE  masked non-finite values do not reach a column; a visible one makes its total NaN
    Returns top and total [NQ] and values [BLOCK_D, NQ].
    """
    d = tl.arange(0, BLOCK_D)
    rest = tl.arange(0, BLOCK_REST)
    top = tl.full([NQ], MIN_SCORE, tl.float32)
    sums = tl.zeros(
        [BLOCK_KV, NQ], tl.float32
    )  # sums of weights BLOCK_KV positions apart; added up once a split
    values = tl.zeros([BLOCK_D, NQ], tl.float32)
    all_top, all_total, all_values = top, tl.zeros([NQ], tl.float32), values
    for start in tl.range(begin, end, BLOCK_KV, num_stages=STAGES):
        if FLUSH:  # noqa: SIM102 (a constexpr)
            if start % SPLIT == 0:
                total = _sum_positions(sums, q.dtype, BLOCK_KV)
                all_top, all_total, all_values = _merge(all_top, all_total, all_values, top, total, values)
                top = tl.full([NQ], MIN_SCORE, tl.float32)
                sums = tl.zeros([BLOCK_KV, NQ], tl.float32)
                values = tl.zeros([BLOCK_D, NQ], tl.float32)
        at = start + tl.arange(0, BLOCK_KV)
        in_range = at <= high
        if WINDOW > 0:
            in_range = in_range & (at >= low)
        block = tl.load(block_table + at // BLOCK_SIZE, mask=in_range, other=0)
        slot = (block.to(tl.int32) * BLOCK_SIZE + at % BLOCK_SIZE).to(tl.int64)
        vector = slot * KV_HEADS
        places = (slot * (KV_HEADS * (D + REST)))[:, None] + d[None, :]
        loaded_mask = in_range[:, None] if D == BLOCK_D else in_range[:, None] & (d < D)[None, :]
        keys = tl.load(k + places, mask=loaded_mask, other=0)
        scores = tl.dot(_upcast(keys, q.dtype, FLOAT8), q, input_precision="ieee")
        if REST > 0:
            rest_places = (slot * (D + REST) + D)[:, None] + rest[None, :]
            rest_mask = in_range[:, None] & (rest < REST)[None, :]
            own = _upcast(tl.load(k + rest_places, mask=rest_mask, other=0), q.dtype, FLOAT8)
            if k_scale is None:
                scores = tl.dot(own, q_rest, scores, input_precision="ieee")
            else:
                scores = scores * tl.load(v_scale + vector, mask=in_range, other=0.0)[:, None]
                own_scores = tl.dot(own, q_rest, input_precision="ieee")
                scores += own_scores * tl.load(k_scale + vector, mask=in_range, other=0.0)[:, None]
        elif k_scale is not None:
            scores = scores * tl.load(k_scale + vector, mask=in_range, other=0.0)[:, None]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scale * (2.0 * LOG2_E)) + 1.0))
        visible = at[:, None] <= positions[None, :]
        if WINDOW > 0:
            visible = visible & (at[:, None] > positions[None, :] - WINDOW)
        if FIRST > 0:
            visible = visible & (at >= FIRST)[:, None]
        scores = tl.where(visible, scores, -INFINITY)
        factor = 1.0 if SOFTCAP else scale
        highest = tl.maximum(top, tl.max(scores, 0) * factor)
        weights = tl.exp2(tl.fma(scores, factor, -highest[None, :]))
        keep = tl.exp2(top - highest)
        top = highest
        sums = sums * keep[None, :] + weights
        loaded = keys if REST > 0 else tl.load(v + places, mask=loaded_mask, other=0)
        if v_scale is not None:
            weights = tl.where(
                visible, weights * tl.load(v_scale + vector, mask=in_range, other=0.0)[:, None], 0.0
            )
        if MASK_NON_FINITE:
            finite = tl.abs(loaded.to(tl.float32)) < INFINITY
            loaded = tl.where(finite, loaded, 0.0).to(loaded.dtype)
            non_finite = tl.min(finite.to(tl.int32), 1) == 0
            sums = tl.where(visible & non_finite[:, None], float("nan"), sums)
        loaded = tl.trans(_upcast(loaded, q.dtype, FLOAT8))
        values = tl.dot(loaded, weights.to(q.dtype), values * keep[None, :], input_precision="ieee")
    total = _sum_positions(sums, q.dtype, BLOCK_KV)
    if FLUSH:
        return _merge(all_top, all_total, all_values, top, total, values)
    else:
        return top, total, values


@triton.jit
def _is_finite(total, values):
    """total [NQ] and values [BLOCK_D, NQ] -> int32 [NQ]"""
    finite_values = tl.min((tl.abs(values) < INFINITY).to(tl.int32), 0)
    return tl.minimum((tl.abs(total) < INFINITY).to(tl.int32), finite_values)


@triton.jit
def _magnitude(values):
    """float32 -> int32 in the order of magnitudes, then infinity, then NaN."""
    return values.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def _attend_split(
    q, q_rest, k, v, k_scale, v_scale, block_table, begin, end, low, high, positions, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, NQ: tl.constexpr, SPLIT: tl.constexpr,
    FLOAT8: tl.constexpr, FLUSH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """_attend_positions(), repeated with MASK_NON_FINITE if needed; quantized values are finite."""
    top, total, values = _attend_positions(
        q, q_rest, k, v, k_scale, v_scale, block_table, begin, end, low, high, positions, scale, softcap,
        KV_HEADS, D, REST, BLOCK_SIZE, WINDOW, FIRST, SOFTCAP, BLOCK_KV, BLOCK_D, BLOCK_REST, NQ, SPLIT,
        FLOAT8, FLUSH, False, STAGES,
    )  # fmt: skip
    if v_scale is None:
        largest = tl.maximum(tl.max(_magnitude(values)), tl.max(_magnitude(total)))
        if largest >= INFINITY_BITS:
            top, total, values = _attend_positions(
                q, q_rest, k, v, k_scale, v_scale, block_table, begin, end, low, high, positions, scale,
                softcap, KV_HEADS, D, REST, BLOCK_SIZE, WINDOW, FIRST, SOFTCAP, BLOCK_KV, BLOCK_D,
                BLOCK_REST, NQ, SPLIT, FLOAT8, FLUSH, True, 1,
            )  # fmt: skip
    return top, total, values


@triton.jit
def _store_output(
    out, places, exists, valid, top, total, values, sinks, heads, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store columns at out + places [NQ]; padding is 0. A head's sink joins its softmax as the last score.

    A non-finite column becomes all NaN, as which values were NaN depends on the division of work. Adding 0
    turns -0 into +0, as the sign of a zero depends on it too.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0) * LOG2_E
        _, total, values = _merge(top, total, values, sink, 1.0, tl.zeros_like(values))
    d = tl.arange(0, BLOCK_D)
    sees_any = valid & (total != 0.0)  # else its values are 0
    result = values / tl.where(sees_any, total, 1.0)[None, :] + 0.0
    result = tl.where((_is_finite(total, values) == 1)[None, :], result, float("nan"))
    result = tl.where(valid[None, :], result, 0.0).to(out.dtype.element_ty)
    tl.store(out + places[:, None] + d[None, :], tl.trans(result), mask=exists[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_requests", "table_width", "max_splits", "num_columns"])
def attend(
    q, k, v, k_scale, v_scale, sinks, out, partials, split_stats, counters, tiles, request_index, positions,
    block_tables, num_requests, table_width, max_splits, num_columns, q_row, q_head, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    NQ: tl.constexpr, FLOAT8: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of rows, some heads of one group, and some splits.

    q              [T, KV_HEADS * GROUP, D + REST] with strides q_row and q_head
    out            [T, KV_HEADS * GROUP, D]
    k, v           [S, KV_HEADS, D], uint8 for float8 bits; k_scale, v_scale float32 [S, KV_HEADS] or None
    REST           0, or with latent attention K is [S, 1, D + REST], and V its first D values: see KVLayer
    sinks          float32 [KV_HEADS * GROUP] or None: a further score of each head, without a value
    tiles          int32 [tiles, 2]: first row and number of rows, of one request except padding
    partials       float32 [pairs, max_splits, num_columns, D]: values of each split, unless WHOLE
    split_stats    float32 [pairs, max_splits, 2, num_columns]: maximum and sum of each split, unless WHOLE
    counters       int32 [pairs], zeros before and after: programs done with a (tile, heads) pair
    request_index, positions, block_tables   as in Batch; table_width is M
    num_columns    columns of the largest tile
    HEADS          heads of a group in one tile
    FLOAT8         this GPU converts float8_e4m3fn itself; bits are the same
    PDL            see launches_dependents()
    scale          factor from products to scores, times log2(e); with SOFTCAP, divided by the cap, and
                   softcap is the cap times log2(e)
    Grid (pairs, programs): program p has splits p, p + programs, ...; the last one of a pair merges all in
    order.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pair = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    tile = pair // (KV_HEADS * head_tiles)
    kv_head = pair // head_tiles % KV_HEADS
    column = tl.arange(0, NQ)
    head = pair % head_tiles * HEADS + column % HEADS
    first = tl.load(tiles + 2 * tile)
    row = first + column // HEADS
    exists = (column // HEADS < tl.load(tiles + 2 * tile + 1)) & (head < GROUP)
    owner = tl.load(request_index + row, mask=exists, other=num_requests).to(tl.int32)
    request = tl.min(owner)
    valid = exists & (owner == request) & (owner < num_requests)
    at = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
    high = tl.max(at)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.min(tl.where(valid, at, high)) - WINDOW + 1, 0)
    begin = low // BLOCK_KV * BLOCK_KV
    first_split = low // SPLIT
    num_splits = (high + SPLIT) // SPLIT - first_split

    d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + head
    q_places = q + row.to(tl.int64)[:, None] * q_row + heads[:, None] * q_head + d[None, :]
    q_mask = valid[:, None] & (d < D)[None, :]
    rest = tl.arange(0, BLOCK_REST)
    q_rest_places = q + row.to(tl.int64)[:, None] * q_row + heads[:, None] * q_head + D + rest[None, :]
    q_rest_mask = valid[:, None] & (rest < REST)[None, :]
    places = (row.to(tl.int64) * (KV_HEADS * GROUP) + heads) * D
    table = block_tables + request.to(tl.int64) * table_width
    k += kv_head * (D + REST)
    v += kv_head * D
    if k_scale is not None:
        k_scale += kv_head
        v_scale += kv_head
    queries_rest = None
    if WHOLE:
        queries = tl.trans(tl.load(q_places, mask=q_mask, other=0.0))
        if REST > 0:
            queries_rest = tl.trans(tl.load(q_rest_places, mask=q_rest_mask, other=0.0))
        top, total, values = _attend_split(
            queries, queries_rest, k, v, k_scale, v_scale, table, begin, high + 1, low, high, at, scale,
            softcap, KV_HEADS, D, REST, BLOCK_SIZE, WINDOW, FIRST, SOFTCAP, BLOCK_KV, BLOCK_D, BLOCK_REST, NQ,
            SPLIT, FLOAT8, True, STAGES,
        )  # fmt: skip
        _store_output(out, places, exists, valid, top, total, values, sinks, heads, D, BLOCK_D)
    else:
        if (program == 0) & (num_splits <= 0):
            zeros = tl.zeros([NQ, BLOCK_D], tl.float32).to(out.dtype.element_ty)
            tl.store(out + places[:, None] + d[None, :], zeros, mask=exists[:, None] & (d < D)[None, :])
        base = pair.to(tl.int64) * max_splits
        inner = column[None, :] * D + d[:, None]
        kept = (d < D)[:, None] & exists[None, :]
        if program < num_splits:
            queries = tl.trans(tl.load(q_places, mask=q_mask, other=0.0))
            if REST > 0:
                queries_rest = tl.trans(tl.load(q_rest_places, mask=q_rest_mask, other=0.0))
            for split in range(program, num_splits, programs):
                start = (first_split + split) * SPLIT
                top, total, values = _attend_split(
                    queries, queries_rest, k, v, k_scale, v_scale, table,
                    tl.maximum(start, begin), tl.minimum(start + SPLIT, high + 1), low, high, at,
                    scale, softcap, KV_HEADS, D, REST, BLOCK_SIZE, WINDOW, FIRST, SOFTCAP, BLOCK_KV, BLOCK_D,
                    BLOCK_REST, NQ, SPLIT, FLOAT8, False, STAGES,
                )  # fmt: skip
                if num_splits == 1:
                    _store_output(out, places, exists, valid, top, total, values, sinks, heads, D, BLOCK_D)
                else:
                    first_column = (base + split) * num_columns
                    tl.store(partials + first_column * D + inner, values, mask=kept)
                    tl.store(split_stats + 2 * first_column + column, top, mask=exists)
                    tl.store(split_stats + 2 * first_column + num_columns + column, total, mask=exists)
        if (program < num_splits) & (num_splits > 1):
            tl.debug_barrier()
            num_done = tl.atomic_add(counters + pair, 1, sem="acq_rel")
            if num_done == tl.minimum(programs, num_splits) - 1:
                top = tl.full([NQ], MIN_SCORE, tl.float32)
                total = tl.zeros([NQ], tl.float32)
                values = tl.zeros([BLOCK_D, NQ], tl.float32)
                for split in tl.range(0, num_splits, num_stages=3):
                    # ".cg" reads past the L1 cache, as other multiprocessors wrote these.
                    first_column = (base + split) * num_columns
                    stats = split_stats + 2 * first_column + column
                    next_top = tl.load(stats, mask=exists, other=MIN_SCORE, cache_modifier=".cg")
                    next_total = tl.load(stats + num_columns, mask=exists, other=0.0, cache_modifier=".cg")
                    places_of_split = partials + first_column * D + inner
                    partial = tl.load(places_of_split, mask=kept, other=0.0, cache_modifier=".cg")
                    top, total, values = _merge(top, total, values, next_top, next_total, partial)
                _store_output(out, places, exists, valid, top, total, values, sinks, heads, D, BLOCK_D)
                tl.store(counters + pair, 0)
