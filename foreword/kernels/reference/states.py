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
    anchor: int  # of the segment; NO_ANCHOR: in memory of this step, or zeros
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
    ring = state.keys.shape[1]
    matrix = torch.zeros(0)
    for span in _spans(batch):
        matrix = _matrix_before(matrix, state, span)
        segment_start = span.first // SEGMENT * SEGMENT
        keys, updates, decays = state.keys[span.slot], state.updates[span.slot], state.decays[span.slot]
        for row, position in enumerate(range(span.first, span.first + len(span.rows)), span.rows.start):
            wide = qkv[row].to(torch.float32)
            q, k = (_normalize(part.view(shape.key_heads, -1)) for part in wide[: 2 * keys_size].chunk(2))
            keys[position % ring] = k
            k = keys[position % ring].to(torch.float32).repeat_interleave(group, 0)
            q = (q * shape.key_dim**-0.5).repeat_interleave(group, 0)
            v = wide[2 * keys_size :].view(shape.value_heads, -1)
            decay = -rates * F.softplus(alpha[row].to(torch.float32) + offsets)
            before = torch.arange(segment_start, position) % ring
            if position > segment_start:
                decay = decays[(position - 1) % ring] + decay
            read_k, read_q = (
                torch.exp(decay)[:, None] * torch.einsum("hkv,hk->hv", matrix, x) for x in (k, q)
            )
            for index in before.tolist():
                factor = torch.exp(decay - decays[index])
                key = keys[index].to(torch.float32).repeat_interleave(group, 0)
                update = updates[index].to(torch.float32)
                read_k = read_k + (factor * (key * k).sum(1))[:, None] * update
                read_q = read_q + (factor * (key * q).sum(1))[:, None] * update
            updates[position % ring] = torch.sigmoid(beta[row].to(torch.float32))[:, None] * (v - read_k)
            update = updates[position % ring].to(torch.float32)
            out[row] = read_q + (k * q).sum(1)[:, None] * update
            decays[position % ring] = decay
        if span.is_full:
            matrix = _advance(matrix, state, span, group)
            if span.next_anchor != NO_ANCHOR:
                state.matrices[span.next_anchor] = matrix
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
    ring = state.keys.shape[1]
    matrix = torch.zeros(0)
    for span in _spans(batch):
        matrix = _matrix_before(matrix, state, span)
        segment_start = span.first // SEGMENT * SEGMENT
        keys, updates, decays = state.keys[span.slot], state.updates[span.slot], state.decays[span.slot]
        for row, position in enumerate(range(span.first, span.first + len(span.rows)), span.rows.start):
            c, b = (part.view(shape.key_heads, -1) for part in cbx[row, : 2 * keys_size].chunk(2))
            c = c.to(torch.float32).repeat_interleave(group, 0)
            x = cbx[row, 2 * keys_size :].to(torch.float32).view(shape.value_heads, -1)
            time_step = F.softplus(time_steps[row].to(torch.float32) + offsets).clamp(*limits)
            decay = -rates * time_step
            if position > segment_start:
                decay = decays[(position - 1) % ring] + decay
            keys[position % ring], updates[position % ring] = b, time_step[:, None] * x
            decays[position % ring] = decay
            total = torch.exp(decay)[:, None] * torch.einsum("hkv,hk->hv", matrix, c)
            for index in (torch.arange(segment_start, position + 1) % ring).tolist():
                factor = torch.exp(decay - decays[index])
                key = keys[index].to(torch.float32).repeat_interleave(group, 0)
                total = total + (factor * (key * c).sum(1))[:, None] * updates[index].to(torch.float32)
            out[row] = total + skips[:, None] * x
        if span.is_full:
            matrix = _advance(matrix, state, span, group)
            if span.next_anchor != NO_ANCHOR:
                state.matrices[span.next_anchor] = matrix
    return out


def _matrix_before(matrix: Tensor, state: StateLayer, span: _Span) -> Tensor:
    """The state before a span: of its anchor, zeros, or `matrix`, that after the span before."""
    if span.anchor != NO_ANCHOR and span.first >= SEGMENT:
        return state.matrices[span.anchor]
    return torch.zeros_like(state.matrices[0]) if span.first < SEGMENT else matrix


def _normalize(x: Tensor) -> Tensor:
    """[heads, D]"""
    return x * torch.rsqrt((x * x).sum(1, keepdim=True) + NORM_EPS)


def _advance(matrix: Tensor, state: StateLayer, span: _Span, group: int) -> Tensor:
    """The state after a full segment."""
    ring, start = state.keys.shape[1], span.first // SEGMENT * SEGMENT
    last = state.decays[span.slot, (start + SEGMENT - 1) % ring]
    result = torch.exp(last)[:, None, None] * matrix
    for index in (torch.arange(start, start + SEGMENT) % ring).tolist():
        factor = torch.exp(last - state.decays[span.slot, index])
        key = state.keys[span.slot, index].to(torch.float32).repeat_interleave(group, 0)
        update = state.updates[span.slot, index].to(torch.float32)
        result = result + (factor[:, None] * key)[:, :, None] * update[:, None, :]
    return result
