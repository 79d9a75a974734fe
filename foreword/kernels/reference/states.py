"""Layers with state, one row after the other: every operation has the shape of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch, StateLayer
from foreword.core.states import NO_ANCHOR, SEGMENT

NORM_EPS = 1e-6
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "none": lambda x: x,
}


class _Span(NamedTuple):
    """Rows of one request within one segment."""

    rows: range  # in the batch
    first: int  # position of the first row
    slot: int
    anchor: int  # anchor of the segment; NO_ANCHOR: in memory of this step, or zeros
    next_anchor: int  # where the state after the last row goes, if the segment is full
    is_full: bool
    starts_request: bool  # the first span of its request in this step


def _spans(batch: Batch) -> Iterator[_Span]:
    assert batch.state_slots is not None and batch.anchor_tables is not None, "a batch without states"
    slots, tables, positions = batch.state_slots.tolist(), batch.anchor_tables.tolist(), batch.positions
    for request, slot in enumerate(slots):
        start, end = batch.query_start_loc[request : request + 2]
        if start == end:
            continue
        first = int(positions[start])
        row, table = start, tables[request]
        while row < end:
            position = first + row - start
            stop = min(end, row + SEGMENT - position % SEGMENT)
            index = position // SEGMENT - first // SEGMENT
            is_full = (position + stop - row) % SEGMENT == 0
            next_anchor = table[index + 1] if is_full else NO_ANCHOR
            yield _Span(range(row, stop), position, slot, table[index], next_anchor, is_full, row == start)
            row = stop


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, state: StateLayer, batch: Batch
) -> Tensor:
    """See Ops.causal_conv."""
    size, ring = weight.shape[0], state.inputs.shape[1]
    out = torch.zeros_like(x)
    window = x.new_zeros(0)
    for span in _spans(batch):
        if span.starts_request:
            window = _inputs_before(state, span, size - 1)
        inputs = state.inputs[span.slot]
        for row, position in enumerate(range(span.first, span.first + len(span.rows)), span.rows.start):
            window = torch.cat((window, x[row : row + 1]))
            total = torch.zeros(x.shape[1]) if bias is None else bias.clone()
            for value, factor in zip(window.to(torch.float32), weight, strict=True):
                total = total + value * factor
            out[row] = GATES[activation](total)
            inputs[position % ring] = x[row]
            window = window[1:]
        if span.next_anchor != NO_ANCHOR:
            state.tails[span.next_anchor] = window
    return out


def _inputs_before(state: StateLayer, span: _Span, count: int) -> Tensor:
    """The `count` inputs before the span: zeros, of the tail of its anchor, or of the ring."""
    ring, anchor_position = state.inputs.shape[1], span.first // SEGMENT * SEGMENT
    before = state.inputs.new_zeros(count, state.inputs.shape[2])
    for index, position in enumerate(range(span.first - count, span.first)):
        if position >= anchor_position:
            before[index] = state.inputs[span.slot, position % ring]
        elif position >= 0:
            before[index] = state.tails[span.anchor, position - anchor_position]
    return before


class _Row(NamedTuple):
    """A row of a step, and what the earlier rows of its segment left in the ring of its request."""

    batch_row: int
    place: int  # in the ring
    before: list[int]  # places of the earlier rows, in order
    keys: Tensor  # [ring, key heads, key dim], like the next two
    updates: Tensor
    decays: Tensor
    matrix: Tensor  # the state before the segment

    def add_decay(self, decay: Tensor) -> Tensor:
        """The decay since the begin of the segment."""
        return self.decays[self.before[-1]] + decay if self.before else decay


def _walk_rows(state: StateLayer, batch: Batch) -> Iterator[_Row]:
    """Rows in order; each must be written to the ring before the next one is taken."""
    ring, matrix = state.keys.shape[1], torch.zeros(0)
    for span in _spans(batch):
        matrix = _matrix_before(matrix, state, span)
        segment_start = span.first // SEGMENT * SEGMENT
        parts = state.keys[span.slot], state.updates[span.slot], state.decays[span.slot]
        for index, position in enumerate(range(span.first, span.first + len(span.rows)), span.rows.start):
            before = (torch.arange(segment_start, position) % ring).tolist()
            yield _Row(index, position % ring, before, *parts, matrix)
        if span.is_full:
            matrix = _advance(matrix, state, span)
            if span.next_anchor != NO_ANCHOR:
                state.matrices[span.next_anchor] = matrix


def gated_delta_rule(
    qkv: Tensor,
    alpha: Tensor,
    beta: Tensor,
    rates: Tensor,
    offsets: Tensor,
    state: StateLayer,
    batch: Batch,
) -> Tensor:
    """See Ops.gated_delta_rule."""
    shape = state.shape
    out = qkv.new_zeros(qkv.shape[0], shape.value_heads, shape.value_dim)
    keys_size, group = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    for row in _walk_rows(state, batch):
        wide = qkv[row.batch_row].to(torch.float32)
        q, k = (_normalize(part.view(shape.key_heads, -1)) for part in wide[: 2 * keys_size].chunk(2))
        row.keys[row.place] = k
        k = row.keys[row.place].to(torch.float32).repeat_interleave(group, 0)
        q = (q * shape.key_dim**-0.5).repeat_interleave(group, 0)
        v = wide[2 * keys_size :].view(shape.value_heads, -1)
        decay = row.add_decay(-rates * F.softplus(alpha[row.batch_row].to(torch.float32) + offsets))
        read_k, read_q = (
            torch.exp(decay)[:, None] * torch.einsum("hkv,hk->hv", row.matrix, x) for x in (k, q)
        )
        for index in row.before:
            factor = torch.exp(decay - row.decays[index])
            key = row.keys[index].to(torch.float32).repeat_interleave(group, 0)
            update = row.updates[index].to(torch.float32)
            read_k = read_k + (factor * (key * k).sum(1))[:, None] * update
            read_q = read_q + (factor * (key * q).sum(1))[:, None] * update
        row.updates[row.place] = torch.sigmoid(beta[row.batch_row].to(torch.float32))[:, None] * (v - read_k)
        update = row.updates[row.place].to(torch.float32)
        out[row.batch_row] = read_q + (k * q).sum(1)[:, None] * update
        row.decays[row.place] = decay
    return out


def ssm_scan(
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
    shape = state.shape
    out = cbx.new_zeros(cbx.shape[0], shape.value_heads, shape.value_dim)
    keys_size, group = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    for row in _walk_rows(state, batch):
        c, b = (part.view(shape.key_heads, -1) for part in cbx[row.batch_row, : 2 * keys_size].chunk(2))
        c = c.to(torch.float32).repeat_interleave(group, 0)
        x = cbx[row.batch_row, 2 * keys_size :].to(torch.float32).view(shape.value_heads, -1)
        time_step = F.softplus(time_steps[row.batch_row].to(torch.float32) + offsets).clamp(*limits)
        decay = row.add_decay(-rates * time_step)
        row.keys[row.place], row.updates[row.place] = b, time_step[:, None] * x
        row.decays[row.place] = decay
        total = torch.exp(decay)[:, None] * torch.einsum("hkv,hk->hv", row.matrix, c)
        for index in (*row.before, row.place):
            factor = torch.exp(decay - row.decays[index])
            key = row.keys[index].to(torch.float32).repeat_interleave(group, 0)
            total = total + (factor * (key * c).sum(1))[:, None] * row.updates[index].to(torch.float32)
        out[row.batch_row] = total + skips[:, None] * x
    return out


def _matrix_before(matrix: Tensor, state: StateLayer, span: _Span) -> Tensor:
    """The state before a span: of its anchor, zeros, or `matrix`, that after the span before."""
    if span.anchor != NO_ANCHOR and span.first >= SEGMENT:
        return state.matrices[span.anchor]
    return torch.zeros_like(state.matrices[0]) if span.first < SEGMENT else matrix


def _normalize(x: Tensor) -> Tensor:
    """[heads, D]"""
    return x * torch.rsqrt((x * x).sum(1, keepdim=True) + NORM_EPS)


def _advance(matrix: Tensor, state: StateLayer, span: _Span) -> Tensor:
    """The state after a full segment."""
    group = state.shape.value_heads // state.shape.key_heads
    ring, start = state.keys.shape[1], span.first // SEGMENT * SEGMENT
    last = state.decays[span.slot, (start + SEGMENT - 1) % ring]
    result = torch.exp(last)[:, None, None] * matrix
    for index in (torch.arange(start, start + SEGMENT) % ring).tolist():
        factor = torch.exp(last - state.decays[span.slot, index])
        key = state.keys[span.slot, index].to(torch.float32).repeat_interleave(group, 0)
        update = state.updates[span.slot, index].to(torch.float32)
        result = result + (factor[:, None] * key)[:, :, None] * update[:, None, :]
    return result
