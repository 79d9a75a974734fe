"""Layers with state on Triton: short convolutions, gated delta rules and Mamba-2's scans.

Sums over the channels of a key, and over the places of a segment, add one product after the other, for all
rows and columns of a tile at once. So no bit depends on the size of tiles, and a row computes the same
whether its segment came in one step or in several.

No row writes a place of a ring that another row of the step reads (StateCache.limit_rows), so programs that
read a ring and programs that write it may run at once. Only the last rows of a step that is longer than the
ring go there. Updates of the step are read after they are written, by the same program.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.core import states
from foreword.core.batch import Batch, StateLayer
from foreword.kernels.triton.elementwise import sigmoid
from foreword.kernels.triton.portable_math import log
from foreword.kernels.triton.variants import launches_dependents

CONV_BLOCK = 512  # channels of a program
COLUMN_BLOCK = 32  # columns of a state, of one program
ROW_TILES = (1, 16)  # rows computed at once; wider tiles spill registers
NUM_WARPS = 4  # the order of sums of squares depends on it, and nothing else
SEGMENT = tl.constexpr(states.SEGMENT)
NO_ANCHOR = tl.constexpr(states.NO_ANCHOR)
NORM_EPS = tl.constexpr(1e-6)
VARYING = ["num_rows", "top_step", "num_requests", "table_width"]  # equal 1 or a multiple of 16 by chance


class TritonStates:
    """Mixin of TritonOps."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, state: StateLayer, batch: Batch
    ) -> Tensor:
        """See Ops.causal_conv."""
        (size, channels), anchor_tables = weight.shape, batch.anchor_tables
        assert activation in ("none", "silu") and x.dtype == state.inputs.dtype and x.stride(1) == 1
        assert weight.shape == (state.shape.kernel_size, x.shape[1]) and anchor_tables is not None
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not len(x):
            return out
        pdl = launches_dependents(x.device)
        conv_kernel[len(x), triton.cdiv(channels, CONV_BLOCK)](
            *(x, weight, bias, out, state.inputs, state.tails),
            *(*request_arguments(batch), anchor_tables, anchor_tables.shape[1], x.stride(0)),
            CHANNELS=channels,
            SIZE=size,
            RING=state.inputs.shape[1],
            SILU=activation == "silu",
            BLOCK=CONV_BLOCK,
            PDL=pdl,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
        return out

    def gated_delta_rule(
        self,
        qkv: Tensor,
        alpha: Tensor,
        beta: Tensor,
        rates: Tensor,
        offsets: Tensor,
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """See Ops.gated_delta_rule."""
        assert beta.stride(1) == 1
        return self._run_rule(qkv, alpha, beta, rates, offsets, None, (0.0, 0.0), state, batch)

    def ssm_scan(
        self,
        cbx: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        offsets: Tensor,
        skips: Tensor,
        limits: tuple[float, float],
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """See Ops.ssm_scan."""
        return self._run_rule(cbx, time_steps, None, rates, offsets, skips, limits, state, batch)

    def _run_rule(
        self,
        qkv: Tensor,
        alpha: Tensor,
        beta: Tensor | None,
        rates: Tensor,
        offsets: Tensor,
        skips: Tensor | None,
        limits: tuple[float, float],
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """The gated delta rule, or without beta the scan; limits: of the scan's time steps."""
        shape, num_rows, device = state.shape, len(qkv), qkv.device
        assert qkv.stride(1) == alpha.stride(1) == 1 and qkv.dtype == state.keys.dtype
        assert shape.key_dim % 16 == shape.value_dim % 16 == 0 and batch.anchor_tables is not None
        out = torch.empty(num_rows, shape.value_heads, shape.value_dim, dtype=qkv.dtype, device=device)
        if not num_rows:
            return out
        (requests, segments), pdl = batch.anchor_tables.shape, launches_dependents(device)
        rows_per_request = max((end - start for start, end in pairwise(batch.query_start_loc)), default=1)
        sizes = {
            "KEY_HEADS": shape.key_heads,
            "GROUP": shape.value_heads // shape.key_heads,
            "KEY_DIM": shape.key_dim,
            "RING": state.keys.shape[1],
            "ROWS": next((tile for tile in ROW_TILES if tile >= rows_per_request), ROW_TILES[-1]),
            "IS_SCAN": beta is None,
            "PDL": pdl,
        }
        options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False, "launch_pdl": pdl}
        keys = torch.empty(num_rows, shape.key_heads, shape.key_dim, dtype=qkv.dtype, device=device)
        queries = torch.empty(keys.shape, dtype=torch.float32, device=device)
        dots = torch.empty(2, num_rows, shape.key_heads, states.SEGMENT, dtype=torch.float32, device=device)
        decays = torch.empty(num_rows, shape.value_heads, dtype=torch.float32, device=device)
        steps = torch.empty_like(decays) if beta is None else beta
        prepare_kernel[requests, segments, shape.key_heads](
            *(qkv, alpha, rates, offsets, *limits, keys, queries, *dots, decays, steps),
            *(state.keys, state.decays, *request_arguments(batch), qkv.stride(0), alpha.stride(0)),
            GROUP_BLOCK=triton.next_power_of_2(sizes["GROUP"]),
            BLOCK=triton.next_power_of_2(shape.key_dim),
            **sizes,
            **options,
        )
        block = COLUMN_BLOCK if shape.value_dim % COLUMN_BLOCK == 0 else 16
        # The last program of a head writes zeros to rows of padding.
        delta_kernel[requests + 1, shape.value_heads, shape.value_dim // block](
            *(qkv, steps, skips, keys, queries, *dots, decays, state.keys, state.updates, state.decays),
            *(state.matrices, self._unanchored(state, batch), out),
            *(*request_arguments(batch), batch.anchor_tables, segments, qkv.stride(0), steps.stride(0)),
            VALUE_DIM=shape.value_dim,
            KEY_BLOCK=triton.next_power_of_2(shape.key_dim),
            BLOCK=block,
            **sizes,
            **options,
        )
        return out

    def _unanchored(self, state: StateLayer, batch: Batch) -> Tensor:
        """float32 [B, value heads, key dim, value dim]: states within a step, between segments."""
        assert batch.anchor_tables is not None
        # A request with rows of several segments; captured passes do not know.
        is_used = not batch.seq_lens or any(
            (seq_len - 1) // states.SEGMENT > (seq_len - end + start) // states.SEGMENT
            for (start, end), seq_len in zip(pairwise(batch.query_start_loc), batch.seq_lens, strict=False)
        )
        shape = len(batch.anchor_tables) if is_used else 0, *state.matrices.shape[1:]
        return torch.empty(shape, dtype=torch.float32, device=state.matrices.device)


def request_arguments(batch: Batch) -> tuple[Any, ...]:
    """request_index to top_step, as kernels take them."""
    assert batch.request_index is not None and batch.state_slots is not None, "a batch without states"
    num_rows, slots = len(batch.positions), batch.state_slots
    return batch.request_index, batch.positions, slots, num_rows, len(slots), 1 << num_rows.bit_length() - 1


@triton.jit
def rows_of(request_index, request, num_rows, top_step):
    """int64 first row, and row after the last; request_index ascends, top_step is a power of two."""
    lane = tl.arange(0, 2)
    bounds = tl.zeros([2], tl.int32)
    step = top_step
    while step > 0:
        after = bounds + step
        owner = tl.load(request_index + after - 1, mask=after <= num_rows, other=1 << 30)
        bounds = tl.where(owner < request + lane, after, bounds)
        step = step // 2
    start, end = tl.sum(tl.where(lane == 0, bounds, 0), 0), tl.sum(tl.where(lane == 1, bounds, 0), 0)
    return start.to(tl.int64), end.to(tl.int64)


@triton.jit
def _input_before(
    x, inputs, tails, row, position, slot, anchor, near, offset, x_stride, channel,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The input `offset` rows before a row: of this step if at most `near`, else of the ring or the tail.

    position, slot: of the row; anchor: of the segment of its request's first row, where offset > near.
    """
    source = position - offset
    first = position - near
    segment_start = first - first % SEGMENT
    # A mask is one comparison: Triton's interpreter makes integers of joined ones.
    end = tl.where(offset <= near, CHANNELS, 0)
    value = tl.load(x + (row - offset) * x_stride + channel, mask=channel < end, other=0.0)
    is_old = offset > near
    is_tail = is_old & (source < segment_start) & (source >= 0) & (anchor != NO_ANCHOR)
    place = (slot * RING + source % RING) * CHANNELS
    end = tl.where(is_old & (source >= segment_start), CHANNELS, 0)
    value = tl.where(channel < end, tl.load(inputs + place + channel, mask=channel < end, other=0.0), value)
    place = (anchor * (SIZE - 1) + SIZE - 1 + source - segment_start) * CHANNELS
    end = tl.where(is_tail, CHANNELS, 0)
    return tl.where(channel < end, tl.load(tails + place + channel, mask=channel < end, other=0.0), value)


@triton.jit(do_not_specialize=VARYING)
def conv_kernel(
    x, weight, bias, out, inputs, tails, request_index, positions, slots, num_rows, num_requests, top_step,
    anchor_tables, table_width, x_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, RING: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Ops.causal_conv; grid (rows, blocks of channels)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    owner = tl.load(request_index + row)
    total = tl.zeros([BLOCK], tl.float32)
    if owner < num_requests:
        position = tl.load(positions + row)
        slot = tl.load(slots + owner)
        anchor = tl.load(anchor_tables + owner * table_width)
        near = 0  # inputs of this step before the row, at most SIZE - 1
        for offset in tl.static_range(1, SIZE):
            near += (tl.load(request_index + row - offset, mask=row >= offset, other=-1) == owner).to(
                tl.int32
            )
        if bias is not None:
            total = tl.load(bias + channel, mask=inside, other=0.0)
        for j in tl.static_range(SIZE):
            value = _input_before(
                x, inputs, tails, row, position, slot, anchor, near, SIZE - 1 - j, x_stride, channel,
                CHANNELS, SIZE, RING,
            )  # fmt: skip
            factor = tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0)
            total += value.to(tl.float32) * factor
        later = tl.load(request_index + row + RING, mask=row + RING < num_rows, other=-1)
        own = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
        kept = tl.where(later == owner, 0, CHANNELS)
        place = (slot * RING + position % RING) * CHANNELS
        tl.store(inputs + place + channel, own, mask=channel < kept)
        if (position + 1) % SEGMENT == 0:
            start, _ = rows_of(request_index, owner, num_rows, top_step)
            index = (position + 1) // SEGMENT - (position - row + start) // SEGMENT
            written = tl.load(anchor_tables + owner * table_width + index)
            kept = tl.where(written == NO_ANCHOR, 0, CHANNELS)
            for j in tl.static_range(SIZE - 1):
                value = _input_before(
                    x, inputs, tails, row, position, slot, anchor, near, SIZE - 2 - j, x_stride, channel,
                    CHANNELS, SIZE, RING,
                )  # fmt: skip
                place = (written * (SIZE - 1) + j) * CHANNELS
                tl.store(tails + place + channel, value, mask=channel < kept)
    if SILU:
        total = total * sigmoid(total)
    tl.store(out + row * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    """log(1 + e^x): in float64, as the logarithm's error would add up over a segment."""
    power = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, log(1.0 + power.to(tl.float64)).to(tl.float32))


@triton.jit
def _multiply_keys(
    keys, queries, key_dots, query_dots, ring_keys, slot, head, start, begin, stop, first, segment_start,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    IS_SCAN: tl.constexpr,
):  # fmt: skip
    """Products of keys and queries of rows [begin, stop) with all keys of their segment known so far."""
    j = tl.arange(0, SEGMENT)
    source = segment_start + j  # positions
    old, known = source < first, source < first + stop - start
    old_keys = ring_keys + ((slot * RING + source % RING) * KEY_HEADS + head) * KEY_DIM
    new_keys = keys + ((start + tl.maximum(source - first, 0)) * KEY_HEADS + head) * KEY_DIM
    for tile in range(begin, stop, ROWS):
        rows = tile + tl.arange(0, ROWS)
        used = rows < stop
        vectors = rows.to(tl.int64) * KEY_HEADS + head
        of_keys = tl.zeros([ROWS, SEGMENT], tl.float32)
        of_queries = tl.zeros([ROWS, SEGMENT], tl.float32)
        for at in range(KEY_DIM):
            key = tl.load(new_keys + at, mask=known, other=0.0)
            key = tl.where(old, tl.load(old_keys + at, mask=old, other=0.0), key).to(tl.float32)[None, :]
            if not IS_SCAN:
                k = tl.load(keys + vectors * KEY_DIM + at, mask=used, other=0.0).to(tl.float32)
                of_keys += k[:, None] * key
            of_queries += tl.load(queries + vectors * KEY_DIM + at, mask=used, other=0.0)[:, None] * key
        places = vectors[:, None] * SEGMENT + j[None, :]
        if not IS_SCAN:
            tl.store(key_dots + places, of_keys, mask=used[:, None])
        tl.store(query_dots + places, of_queries, mask=used[:, None])


@triton.jit(do_not_specialize=VARYING)
def prepare_kernel(
    qkv, alpha, rates, offsets, min_step, max_step, keys, queries, key_dots, query_dots, decays, steps,
    ring_keys, ring_decays, request_index, positions, slots, num_rows, num_requests, top_step, qkv_stride,
    alpha_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, IS_SCAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All of a rule or scan that no state is needed for; grid (requests, segments, key heads).

    keys, queries float32    [T, key heads, key dim], those of a rule normalized; keys go to the ring too
    key_dots, query_dots     float32 [T, key heads, SEGMENT]: products with keys of the row's segment up to it
    decays                   float32 [T, value heads]: sums of log decays since the anchor; also to the ring
    steps                    float32 [T, value heads]: time steps of a scan
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(2)
    start, end = rows_of(request_index, tl.program_id(0), num_rows, top_step)
    first = tl.load(positions + start, mask=start < end, other=0).to(tl.int32)
    slot = tl.load(slots + tl.program_id(0))
    segment_start = first - first % SEGMENT + tl.program_id(1) * SEGMENT
    begin = start + tl.maximum(segment_start - first, 0)
    stop = tl.minimum(end, start + segment_start + SEGMENT - first)
    member = tl.arange(0, GROUP_BLOCK)
    heads = head * GROUP + member
    exists = member < GROUP
    rate = tl.load(rates + heads, mask=exists, other=0.0)
    offset = tl.load(offsets + heads, mask=exists, other=0.0)
    d = tl.arange(0, BLOCK)
    inside = d < KEY_DIM
    before = first + begin - start - 1  # position
    resumes = member < tl.where((begin < stop) & (before >= segment_start), GROUP, 0)
    place = (slot * RING + before % RING) * (KEY_HEADS * GROUP)
    total = tl.load(ring_decays + place + heads, mask=resumes, other=0.0)
    for row in range(begin, stop):
        kept = row >= end - RING
        place = slot * RING + (first + row - start) % RING
        q = tl.load(qkv + row * qkv_stride + head * KEY_DIM + d, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(qkv + row * qkv_stride + (KEY_HEADS + head) * KEY_DIM + d, mask=inside, other=0.0)
        if not IS_SCAN:
            k = k.to(tl.float32)
            q = q * (1.0 / tl.sqrt_rn(tl.sum(q * q, 0) + NORM_EPS)) * (KEY_DIM**-0.5)
            k = (k * (1.0 / tl.sqrt_rn(tl.sum(k * k, 0) + NORM_EPS))).to(keys.dtype.element_ty)
        line = (row * KEY_HEADS + head) * KEY_DIM
        tl.store(queries + line + d, q, mask=inside)
        tl.store(keys + line + d, k, mask=inside)
        tl.store(ring_keys + (place * KEY_HEADS + head) * KEY_DIM + d, k, mask=d < tl.where(kept, KEY_DIM, 0))
        values = tl.load(alpha + row * alpha_stride + heads, mask=exists, other=0.0).to(tl.float32)
        step = _softplus(values + offset)
        if IS_SCAN:
            step = tl.minimum(tl.maximum(step, min_step), max_step)
            tl.store(steps + row * (KEY_HEADS * GROUP) + heads, step, mask=exists)
        total -= rate * step
        tl.store(decays + row * (KEY_HEADS * GROUP) + heads, total, mask=exists)
        tl.store(
            ring_decays + place * (KEY_HEADS * GROUP) + heads, total, mask=member < tl.where(kept, GROUP, 0)
        )
    tl.debug_barrier()  # threads read keys that others stored
    _multiply_keys(
        keys, queries, key_dots, query_dots, ring_keys, slot, head, start, begin, stop, first, segment_start,
        KEY_HEADS, KEY_DIM, RING, ROWS, IS_SCAN,
    )  # fmt: skip


@triton.jit
def _state_place(anchor, request, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Offset of a state among anchors, or among states of this step."""
    return (tl.where(anchor == NO_ANCHOR, request, anchor) * HEADS + head) * SIZE


@triton.jit
def _pick_row(tile, is_row):
    """The row of a tile [ROWS, N] where is_row [ROWS] is true, with its bits."""
    bits = tl.where(is_row[:, None], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _add_update(
    of_k, of_q, update, decay, decay_before, key_dots, query_dots, ages, used, IS_SCAN: tl.constexpr
):
    """Sums of rows, each with an update that is ages [ROWS] rows older, if that is not negative.

    Its own update, of age 0, is for the query alone.
    """
    factor = tl.exp(tl.where(ages > 0, decay - decay_before, 0.0))
    q_weight = factor * tl.load(query_dots, mask=used, other=0.0)
    values = update.to(tl.float32)[None, :]
    if not IS_SCAN:
        k_weight = factor * tl.load(key_dots, mask=used, other=0.0)
        of_k = tl.where((ages > 0)[:, None], of_k + k_weight[:, None] * values, of_k)
    return of_k, tl.where((ages >= 0)[:, None], of_q + q_weight[:, None] * values, of_q)


@triton.jit
def _run_rows(
    qkv, steps, skips, keys, queries, key_dots, query_dots, decays, updates, ring_decays, matrix, has_matrix,
    out, slot, tile, stop, new_row, first, segment_start, head, column, qkv_stride, steps_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_SCAN: tl.constexpr,
):  # fmt: skip
    """Updates and outputs of rows [tile, tile + ROWS) before `stop`, of one segment; new_row as below."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    row = tile + tl.arange(0, ROWS)
    used = row < stop
    vectors = row.to(tl.int64) * KEY_HEADS + head // GROUP
    outputs = row.to(tl.int64) * HEADS + head
    of_k = tl.zeros([ROWS, BLOCK], tl.float32)
    of_q = tl.zeros([ROWS, BLOCK], tl.float32)
    decay = tl.load(decays + outputs, mask=used, other=0.0)
    if has_matrix:
        for at in range(KEY_DIM):
            values = tl.load(matrix + at * VALUE_DIM + column)[None, :]
            if not IS_SCAN:
                k = tl.load(keys + vectors * KEY_DIM + at, mask=used, other=0.0).to(tl.float32)
                of_k += k[:, None] * values
            of_q += tl.load(queries + vectors * KEY_DIM + at, mask=used, other=0.0)[:, None] * values
        of_k *= tl.exp(decay)[:, None]
        of_q *= tl.exp(decay)[:, None]
    if IS_SCAN:
        values = qkv + (row.to(tl.int64) * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM)[:, None]
        x = tl.load(values + column[None, :], mask=used[:, None], other=0.0).to(tl.float32)
        of_q += tl.load(skips + head) * x
    tile_place = tile - new_row
    ages = tl.where(used, tile_place + tl.arange(0, ROWS), -1)
    key_dot, query_dot = key_dots + vectors * SEGMENT, query_dots + vectors * SEGMENT
    for j in range(tile_place):
        ring_place = slot * RING + (segment_start + j) % RING
        decay_at = decays + (new_row + j) * HEADS + head
        if segment_start + j < first:
            decay_at = ring_decays + ring_place * HEADS + head
        update = tl.load(updates + (ring_place * HEADS + head) * VALUE_DIM + column)
        of_k, of_q = _add_update(
            of_k, of_q, update, decay, tl.load(decay_at), key_dot + j, query_dot + j, ages - j, used, IS_SCAN
        )
    for j in range(tile_place, tile_place + tl.minimum(stop - tile, ROWS)):
        own = new_row + j
        v = qkv + own * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        rate = tl.load(steps + own * steps_stride + head).to(tl.float32)
        value = tl.load(v + column).to(tl.float32)
        if not IS_SCAN:
            rate = sigmoid(rate)
            value = value - _pick_row(of_k, ages == j)
        update = (rate * value).to(updates.dtype.element_ty)
        ring_place = slot * RING + (segment_start + j) % RING
        tl.store(updates + (ring_place * HEADS + head) * VALUE_DIM + column, update)
        decay_before = tl.load(decays + own * HEADS + head)
        of_k, of_q = _add_update(
            of_k, of_q, update, decay, decay_before, key_dot + j, query_dot + j, ages - j, used, IS_SCAN
        )
    places = (outputs * VALUE_DIM)[:, None] + column[None, :]
    tl.store(out + places, of_q.to(out.dtype.element_ty), mask=used[:, None])


@triton.jit
def _advance(
    matrix, target, has_matrix, keys, ring_keys, updates, decays, ring_decays, slot, new_row, first,
    segment_start, head, column,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the state after a full segment; new_row: row of the segment's start, perhaps before the batch."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    d = tl.arange(0, KEY_BLOCK)
    inside = d < KEY_DIM
    known = d < tl.where(has_matrix, KEY_DIM, 0)
    last = tl.load(decays + (new_row + SEGMENT - 1) * HEADS + head)
    places = (d * VALUE_DIM)[:, None] + column[None, :]
    total = tl.load(matrix + places, mask=known[:, None], other=0.0) * tl.exp(last)
    for j in range(SEGMENT):
        source = segment_start + j
        ring_place = slot * RING + source % RING
        key_at = keys + ((new_row + j) * KEY_HEADS + head // GROUP) * KEY_DIM
        decay_at = decays + (new_row + j) * HEADS + head
        if source < first:
            key_at = ring_keys + (ring_place * KEY_HEADS + head // GROUP) * KEY_DIM
            decay_at = ring_decays + ring_place * HEADS + head
        key = tl.load(key_at + d, mask=inside, other=0.0).to(tl.float32)
        update = tl.load(updates + (ring_place * HEADS + head) * VALUE_DIM + column).to(tl.float32)
        total += (tl.exp(last - tl.load(decay_at)) * key)[:, None] * update[None, :]
    tl.debug_barrier()  # threads read the state that others overwrite
    tl.store(target + places, total, mask=inside[:, None])
    tl.debug_barrier()


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    qkv, steps, skips, keys, queries, key_dots, query_dots, decays, ring_keys, updates, ring_decays, matrices,
    unanchored, out, request_index, positions, slots, num_rows, num_requests, top_step, anchor_tables,
    table_width, qkv_stride, steps_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    IS_SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A rule or scan after prepare_kernel(); grid (requests + 1, value heads, blocks of columns).

    steps      [T, value heads]: beta of a rule, time steps of a scan; skips: of a scan
    unanchored float32 [B, value heads, key dim, value dim]: states that no anchor keeps
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, head = tl.program_id(0), tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, end = rows_of(request_index, request, num_rows, top_step)
    if request == num_requests:
        for padding_row in range(start, num_rows):
            zeros = tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty)
            tl.store(out + (padding_row * HEADS + head) * VALUE_DIM + column, zeros)
        end = start
    first = tl.load(positions + start, mask=start < end, other=0).to(tl.int32)
    slot = tl.load(slots + request, mask=start < end, other=0)
    anchors = anchor_tables + request.to(tl.int64) * table_width
    begin = start
    while begin < end:
        position = first + begin - start
        segment_start = position - position % SEGMENT
        new_row = start + segment_start - first
        stop = tl.minimum(end, start + segment_start + SEGMENT - first)
        anchor = tl.load(anchors + segment_start // SEGMENT - first // SEGMENT)
        place = _state_place(anchor, request, head, HEADS, KEY_DIM * VALUE_DIM)
        matrix = matrices + place
        if anchor == NO_ANCHOR:
            matrix = unanchored + place
        # Dummy rows may begin without an anchor.
        has_matrix = (segment_start > 0) & ((anchor != NO_ANCHOR) | (begin > start))
        for tile in range(begin, stop, ROWS):
            _run_rows(
                qkv, steps, skips, keys, queries, key_dots, query_dots, decays, updates, ring_decays, matrix,
                has_matrix, out, slot, tile, stop, new_row, first, segment_start, head, column, qkv_stride,
                steps_stride, KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, RING, ROWS, BLOCK, IS_SCAN,
            )  # fmt: skip
            tl.debug_barrier()  # threads read updates that others stored
        if start + segment_start + SEGMENT - first == stop:
            next_anchor = tl.load(anchors + segment_start // SEGMENT - first // SEGMENT + 1)
            if (next_anchor != NO_ANCHOR) | (stop < end):
                place = _state_place(next_anchor, request, head, HEADS, KEY_DIM * VALUE_DIM)
                target = matrices + place
                if next_anchor == NO_ANCHOR:
                    target = unanchored + place
                _advance(
                    matrix, target, has_matrix, keys, ring_keys, updates, decays, ring_decays, slot,
                    new_row, first, segment_start, head, column,
                    KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, RING, KEY_BLOCK,
                )  # fmt: skip
        begin = stop
