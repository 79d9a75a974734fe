"""Layers with state on Triton: against the reference, and rows that depend on nothing but their request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch, Chunk, StateLayer, build_batch
from foreword.core.states import NO_ANCHOR, SEGMENT, StateShape
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.backend import TritonOps
from foreword.kernels.triton.states import COLUMN_BLOCK, CONV_BLOCK, NUM_WARPS, ROW_TILES
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.triton_compile import KernelSource, argument_types, compile_all
from tests.support.triton_interpreter import IS_INTERPRETED, program_order

pytestmark = pytest.mark.usefixtures("on_device")

CONV = StateShape(channels=20, kernel_size=3)
DELTA = StateShape(8, 4, key_heads=1, value_heads=1, key_dim=16, value_dim=32)
SCAN = StateShape(9, 4, key_heads=1, value_heads=2, key_dim=16, value_dim=16)  # tested as a scan
GROUPED = StateShape(8, 4, key_heads=2, value_heads=6, key_dim=48, value_dim=16)
REQUESTS = 2
MAX_ROWS = 9
LENGTH = 2 * SEGMENT + 9  # tokens of a request


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed))


class Span(NamedTuple):
    """Rows [start, end) of a request in one step, and rows after them that are computed again later."""

    request: int
    start: int
    end: int
    num_rejected: int = 0


Step = Sequence[Span]
WHOLE: tuple[Step, ...] = ((Span(0, 0, LENGTH),), (Span(1, 0, LENGTH),))  # one request after the other


@dataclass(frozen=True, slots=True)
class Run:
    """An operation over steps of two requests, each with the ring of slot r + 1."""

    ops: ReferenceOps
    state: StateLayer
    every_anchor: bool = True  # False: those that the next step reads

    def run(self, steps: Sequence[Step]) -> Tensor:
        """Outputs of all rows, as computed last, by request and position."""
        outputs: dict[tuple[int, int], Tensor] = {}
        for spans in steps:
            rows = iter(self.step(spans))
            for request, start, end, num_rejected in spans:
                outputs |= {(request, position): next(rows) for position in range(start, end)}
                assert len(list(islice(rows, num_rejected))) == num_rejected
        return torch.stack([outputs[key] for key in sorted(outputs)])

    def step(self, spans: Step, num_padding: int = 0, anchor_tables: Tensor | None = None) -> Tensor:
        shape, dtype, batch = self.state.shape, self.state.inputs.dtype, self._batch(spans)
        assert batch.request_index is not None
        padding = torch.full((num_padding,), len(spans))
        batch = replace(
            batch,
            positions=torch.cat((batch.positions, 0 * padding)),
            request_index=torch.cat((batch.request_index, padding)),
            anchor_tables=batch.anchor_tables if anchor_tables is None else anchor_tables,
        )

        def rows(width: int, seed: int) -> Tensor:
            """A slice of wider rows, as layers have it; rejected rows have other values."""
            known = normal(REQUESTS, LENGTH, width + 3, seed=seed)
            parts = [
                torch.cat((known[request, start:end], normal(rejected, width + 3, seed=end)))
                for request, start, end, rejected in spans
            ]
            return torch.cat((*parts, normal(num_padding, width + 3, seed=0))).to(dtype)[:, :width]

        if not shape.value_heads:
            weight, bias = normal(shape.kernel_size, shape.channels, seed=10), normal(shape.channels, seed=11)
            return self.ops.causal_conv(rows(shape.channels, 12), weight, bias, "silu", self.state, batch)
        width = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
        alpha, beta = rows(shape.value_heads, 13) * 3, rows(shape.value_heads, 14)
        rates, offsets = normal(shape.value_heads, seed=15).exp() / 9, normal(shape.value_heads, seed=16)
        if shape is SCAN:
            skips, limits = normal(shape.value_heads, seed=18), (0.1, 3.0)
            return self.ops.ssm_scan(
                rows(width, 17) / 3, alpha, rates, offsets, skips, limits, self.state, batch
            )
        return self.ops.gated_delta_rule(rows(width, 17), alpha, beta, rates, offsets, self.state, batch)

    def _batch(self, spans: Step) -> Batch:
        chunks = []
        for request, start, stop, num_rejected in spans:
            end = stop + num_rejected
            segments = range(start // SEGMENT, end // SEGMENT + 1)
            anchors = [
                self.anchor(request, segment)
                if segment and (self.every_anchor or segment in (segments[0], segments[-1]))
                else NO_ANCHOR
                for segment in segments
            ]
            token_ids, blocks = [0] * (end - start), range(1, LENGTH)
            chunks.append(Chunk(token_ids, start, blocks, 1, state_slot=request + 1, anchors=anchors))
        return build_batch(chunks, 16, 1, DEVICE, with_request_index=True, with_states=True)

    def anchor(self, request: int, segment: int) -> int:
        return request * (LENGTH // SEGMENT) + segment


def make_run(
    ops: ReferenceOps, shape: StateShape, dtype: torch.dtype = torch.float32, every_anchor: bool = True
) -> Run:
    """With garbage in memory."""
    ring, slots, anchors = shape.ring_size(MAX_ROWS), REQUESTS + 1, REQUESTS * (LENGTH // SEGMENT) + 1
    state = StateLayer(
        shape,
        normal(slots, ring, shape.channels, seed=1).to(dtype),
        normal(anchors, shape.kernel_size - 1, shape.channels, seed=2).to(dtype),
        normal(slots, ring, shape.key_heads, shape.key_dim, seed=3).to(dtype),
        normal(slots, ring, shape.value_heads, shape.value_dim, seed=4).to(dtype),
        normal(slots, ring, shape.value_heads, seed=5),
        normal(anchors, shape.value_heads, shape.key_dim, shape.value_dim, seed=6),
    )
    return Run(ops, state, every_anchor)


def cut(request: int, ends: Sequence[int], num_rejected: int) -> list[Span]:
    """Spans that end at `ends`, or earlier as StateCache.limit_rows() has it."""
    spans, start = [], 0
    for end in sorted({*ends, LENGTH}):
        while start < end:
            anchor = start - start % SEGMENT
            is_too_long = start > anchor and end > anchor + SEGMENT + MAX_ROWS
            stop = anchor + SEGMENT if is_too_long else end
            is_short = stop + num_rejected <= min(start + MAX_ROWS, LENGTH)
            spans.append(Span(request, start, stop, num_rejected if is_short else 0))
            start = stop
    return spans


@st.composite
def cuts(draw: st.DrawFn) -> list[Step]:
    """Steps of both requests, some together."""
    ends = st.lists(st.integers(1, LENGTH), max_size=4)
    singles = range(draw(st.integers(0, LENGTH)), LENGTH)[:3]  # rows one by one
    requests = [
        cut(request, [*draw(ends), *singles], draw(st.integers(0, MAX_ROWS - 1))) for request in range(2)
    ]
    steps = [[span for span in spans if span] for spans in zip_longest(*requests)]
    return [spans[::-1] for spans in steps] if draw(st.booleans()) else steps


@cache
def expected(shape: StateShape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, StateLayer]:
    """Of both requests alone, in one step each."""
    whole = make_run(TritonOps(), shape, dtype)
    return whole.run(WHOLE), whole.state


def check_close(run: Run, outputs: Tensor, steps: Sequence[Step]) -> None:
    """Equal results and memory of the reference, but for rounding."""
    dtype = run.state.inputs.dtype
    reference = make_run(ReferenceOps(), run.state.shape, dtype, run.every_anchor)
    rounding = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(outputs, reference.run(steps), **rounding)
    for name in ("inputs", "tails", "keys", "updates", "decays", "matrices"):
        torch.testing.assert_close(getattr(run.state, name), getattr(reference.state, name), **rounding)


@pytest.mark.parametrize("shape", [CONV, DELTA, SCAN], ids=["conv", "delta", "scan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_match_reference(shape: StateShape, dtype: torch.dtype) -> None:
    outputs, state = expected(shape, dtype)
    check_close(Run(TritonOps(), state), outputs, WHOLE)


def test_grouped_heads_match_reference() -> None:
    """With widths that are no powers of two."""
    run = make_run(TritonOps(), GROUPED)
    steps = [[Span(0, 0, 10)], [Span(0, 10, 66)]]
    check_close(run, run.run(steps), steps)


@settings(max_examples=examples(8))
@given(
    steps=cuts(),
    shape=st.sampled_from([CONV, DELTA, SCAN]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    every_anchor=st.booleans(),
)
@example(steps=WHOLE, shape=DELTA, dtype=torch.float32, every_anchor=False)
def test_rows_do_not_depend_on_the_cut(
    steps: Sequence[Step], shape: StateShape, dtype: torch.dtype, every_anchor: bool
) -> None:
    """Nor on other requests, nor on rows that were rejected; anchors have the same bits."""
    run = make_run(TritonOps(), shape, dtype, every_anchor)
    outputs, state = expected(shape, dtype)
    assert same_bits(run.run(steps), outputs)
    for request in range(REQUESTS):
        last = run.anchor(request, LENGTH // SEGMENT)
        assert same_bits(run.state.tails[last], state.tails[last])
        assert same_bits(run.state.matrices[last], state.matrices[last])


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order of programs")
@pytest.mark.parametrize("shape", [CONV, DELTA, SCAN], ids=["conv", "delta", "scan"])
def test_program_order_changes_no_bit(shape: StateShape) -> None:
    """Of a prompt longer than the ring, which keeps its last rows, and of rows that read a ring."""
    steps = [[Span(0, 0, 73), Span(1, 0, LENGTH)], [Span(0, 73, 128)], [Span(0, 128, LENGTH)]]
    run, (outputs, state) = make_run(TritonOps(), shape), expected(shape)
    with program_order(lambda numbers: numbers[::-1]):
        assert same_bits(run.run(steps), outputs)
    for name in ("inputs", "keys", "updates", "decays"):
        assert same_bits(getattr(run.state, name)[2], getattr(state, name)[2]), name


@pytest.mark.parametrize("shape", [CONV, DELTA, SCAN], ids=["conv", "delta", "scan"])
def test_padding_rows_are_zero(shape: StateShape) -> None:
    """As captured passes have them: after requests of which one has no rows."""
    spans = [Span(0, 0, 2), Span(1, 5, 5), Span(1, 0, 1)]
    outputs = make_run(TritonOps(), shape).step(spans, num_padding=2)
    assert same_bits(outputs[:3], make_run(TritonOps(), shape).step(spans)) and not outputs[3:].any()
    assert outputs[:3].any()
    assert len(make_run(TritonOps(), shape).step([])) == 0


@pytest.mark.parametrize("shape", [CONV, DELTA, SCAN], ids=["conv", "delta", "scan"])
def test_dummy_rows_without_anchor_read_zeros(shape: StateShape) -> None:
    """As warmup batches have them, at any position."""
    run = make_run(TritonOps(), shape)
    for memory in (run.state.tails, run.state.matrices):
        memory.fill_(torch.nan)
    no_anchors = torch.full((1, LENGTH // SEGMENT), NO_ANCHOR)
    for start in (SEGMENT, SEGMENT + 1):
        outputs = run.step([Span(0, start, LENGTH)], anchor_tables=no_anchors)
        assert outputs.isfinite().all()


def test_kernels_compile_without_spilling() -> None:
    rows = "request_index,positions,slots:*i64 num_rows,num_requests,top_step:i32"
    conv = (
        f"x:*bf16 weight,bias:*fp32 out,inputs,tails:*bf16 {rows} anchor_tables:*i64 table_width,x_stride:i32"
    )
    kernels: list[tuple[str, str, dict[str, Any]]] = [
        ("conv_kernel", conv, {"CHANNELS": 8192, "SIZE": 4, "RING": 96, "SILU": True, "BLOCK": CONV_BLOCK})
    ]
    for tile, dim, is_scan in [
        *((tile, 128, is_scan) for tile in ROW_TILES for is_scan in (False, True)),
        (max(ROW_TILES), 256, False),
    ]:
        steps = "steps:*fp32" if is_scan else "steps:*bf16"
        prepare = (
            "qkv,alpha:*bf16 rates,offsets:*fp32 min_step,max_step:fp32 keys:*bf16"
            f" queries,key_dots,query_dots,decays:*fp32 {steps} ring_keys:*bf16 ring_decays:*fp32 {rows}"
            " qkv_stride,alpha_stride:i32"
        )
        delta = (
            f"qkv:*bf16 {steps} {'skips:*fp32 ' if is_scan else ''}keys:*bf16"
            " queries,key_dots,query_dots,decays:*fp32 ring_keys,updates:*bf16"
            f" ring_decays,matrices,unanchored:*fp32 out:*bf16 {rows} anchor_tables:*i64"
            " table_width,qkv_stride,steps_stride:i32"
        )
        heads = {"KEY_HEADS": 1, "GROUP": 48} if is_scan else {"KEY_HEADS": 16, "GROUP": 2}
        sizes = {**heads, "RING": 96, "KEY_DIM": dim, "ROWS": tile, "IS_SCAN": is_scan}
        blocks = {"GROUP_BLOCK": 64 if is_scan else 2, "BLOCK": dim}
        kernels.append(("prepare_kernel", prepare, {**sizes, **blocks}))
        sizes |= {"VALUE_DIM": 64 if is_scan else dim, "KEY_BLOCK": dim, "BLOCK": COLUMN_BLOCK}
        kernels.append(("delta_kernel", delta, sizes if is_scan else {**sizes, "skips": None}))
    sources = [
        KernelSource(
            f"foreword.kernels.triton.states:{name}",
            argument_types(arguments),
            {**constants, "PDL": capability == 90},
            capability,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        for capability in (80, 90)
        for name, arguments, constants in kernels
    ]
    for made in compile_all(sources):
        assert made.stack == made.spills == 0
        assert not made.count(r"fma\.rn\.f|atom\."), "sums are not fused, nor in any order"
