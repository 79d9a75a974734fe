"""TritonDecodeOps against DecodeOps in torch."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.reference.decode_ops import DecodeOps, DraftLoopState, SlotField
from foreword.kernels.triton.decode_ops import SLOTS_PER_ITERATION, TritonDecodeOps
from tests.support.budget import examples
from tests.support.device import DEVICE
from tests.support.triton_compile import KernelSource, argument_types, compile_all

pytestmark = pytest.mark.usefixtures("on_device")

PLAIN, FUSED = DecodeOps(), TritonDecodeOps()
BLOCK_SIZE, BLOCKS = 4, 8
counts, widths, seeds = st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@given(count=counts, width=widths, seed=seeds, directions=st.booleans(), last=st.booleans())
@settings(max_examples=examples(25))
def test_flatten_rows_matches_torch(count: int, width: int, seed: int, directions: bool, last: bool) -> None:
    rng = torch.Generator(DEVICE).manual_seed(seed)
    tables = torch.randint(1, 99, (count + 1, BLOCKS), generator=rng)
    valid = torch.rand(count, width, generator=rng) < 0.7
    first = torch.randint(0, BLOCKS * BLOCK_SIZE - width, (count,), generator=rng)
    tokens = torch.randint(-1, 300, (width, count), generator=rng).t()
    shifts = torch.randint(-5, 5, (count,), generator=rng)
    first[0], valid[0, 0] = -1, False  # there is nothing before the first token
    wanted, found = (
        s.build_batch(tokens, first, valid, tables, shifts, BLOCK_SIZE, directions, last)
        for s in (PLAIN, FUSED)
    )
    assert wanted.query_start_loc == found.query_start_loc
    for name in (
        one.name
        for one in fields(Batch)
        if one.name not in ("query_start_loc", "seq_lens", "block_size", "image_features")
    ):
        assert equal(getattr(wanted, name), getattr(found, name)), name


@given(count=counts, seed=seeds)
@example(count=SLOTS_PER_ITERATION + 3, seed=0)
@settings(max_examples=examples(25))
def test_record_draft_matches_torch(count: int, seed: int) -> None:
    states = [make_draft_state(count, torch.Generator(DEVICE).manual_seed(seed)) for _ in range(2)]
    rng = torch.Generator(DEVICE).manual_seed(seed + 1)
    for _ in range(3):
        token_ids = torch.randint(-1, 9, (count,), generator=rng)
        logits = torch.randn(count, 9, generator=rng)
        logits[0, 3] = torch.nan
        log_sum = torch.randn(count, generator=rng)
        for steps, state in zip((PLAIN, FUSED), states, strict=True):
            steps.record_draft(state, token_ids, logits, log_sum)
        for one in fields(DraftLoopState):
            assert equal(
                getattr(states[0], one.name).nan_to_num(5), getattr(states[1], one.name).nan_to_num(5)
            ), one.name


def make_draft_state(count: int, rng: torch.Generator) -> DraftLoopState:
    def whole(*shape: int) -> Tensor:
        return torch.randint(0, 5, shape, generator=rng)

    return DraftLoopState(
        draft_step=torch.zeros(1, dtype=torch.int64),
        draft_ids=whole(4, count + 3)[:, :count],
        logprobs=whole(4, count + 3).double()[:, :count],
        last_token=whole(count),
        position=whole(count),
        sample_index=whole(count),
        active=whole(count) > 0,
        logprob_sum=torch.zeros(count, dtype=torch.float64),
        min_logprob_sum=-whole(count).double() * 1.5,
        max_tokens=whole(count),
    )


@given(count=counts, num_draft=st.integers(0, 4), seed=seeds)
@settings(max_examples=examples(40))
def test_commit_matches_torch(count: int, num_draft: int, seed: int) -> None:
    """Few ids, so that drafts are accepted; the last two slots are padding."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    tables = [torch.zeros(len(SlotField), 8, dtype=torch.int64) for _ in range(2)]
    tables[0][:, :7] = torch.randint(0, 4, (len(SlotField), 7), generator=rng)
    tables[0][SlotField.ALIVE] = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0])
    tables[1].copy_(tables[0])
    chosen = torch.tensor([*torch.randperm(7, generator=rng)[:count].tolist(), 7, 7])
    sampled = torch.randint(0, 2, (count + 2, 1 + num_draft), generator=rng)
    sampled[torch.rand(sampled.shape, generator=rng) < 0.1] = -1
    drafts = torch.randint(0, 2, (num_draft, count + 2), generator=rng)
    drafts[torch.rand(drafts.shape, generator=rng) < 0.1] = -1
    drafts = torch.where((drafts >= 0).long().cumprod(0) > 0, drafts, -1).t()
    logprobs = torch.randn(num_draft, count + 2, dtype=torch.float64, generator=rng).t()
    results = [torch.full((3 + 3 * num_draft, count + 2), -9) for _ in range(2)]
    for steps, table, result in zip((PLAIN, FUSED), tables, results, strict=True):
        steps.commit(table, chosen, sampled, drafts, logprobs, result)
    assert torch.equal(*tables)
    assert torch.equal(*results)


KERNELS = (  # name, arguments, constants, warps
    (
        "flatten_rows_kernel",
        "token_ids:*i64 token_row,token_column:i64 first_position:*i64 valid:*i1 block_tables:*i64 "
        "table_width:i32 mrope_offsets,out_tokens,out_positions,out_slots:*i64 "
        "out_request_index,out_mrope_positions:*i64 width:i32",
        {"BLOCK_W": 8, "BLOCK_SIZE": 16},
        1,
    ),
    (
        "record_draft_kernel",
        "token_ids:*i64 logits:*fp32 width:i64 log_sum:*fp32 draft_step,draft_ids:*i64 draft_row:i64 "
        "logprobs:*fp64 logprob_row:i64 last_token,position,sample_index:*i64 active:*i1 "
        "logprob_sum,min_logprob_sum:*fp64 max_tokens:*i64 num_requests:i32",
        {"SLOTS": SLOTS_PER_ITERATION},
        4,
    ),
    (
        "commit_kernel",
        "slot_table:*i64 table_row:i64 active_slots,sampled_ids,draft_ids:*i64 draft_row,draft_column:i64 "
        "logprobs:*i64 logprob_row,logprob_column:i64 result:*i64 width:i32",
        {"BLOCK_W": 8},
        1,
    ),
)


def test_decode_ops_compile_without_spilling() -> None:
    sources = [
        KernelSource(
            f"foreword.kernels.triton.decode_ops:{name}",
            argument_types(arguments),
            constants,
            capability,
            num_warps=warps,
            enable_fp_fusion=False,
        )
        for capability in (80, 90)
        for name, arguments, constants, warps in KERNELS
    ]
    for compiled in compile_all(sources):
        assert compiled.spills == 0
