"""Triton sampling has the bits of the reference: every operation, row kind and per-row parameter."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.reference.sampling import gumbel
from foreword.kernels.triton.sampling import TritonSampling
from foreword.sampling.logits_processors import active_processors
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.kernel_rows import make_row
from tests.support.sample_rows import VOCAB_SIZE, apply
from tests.support.sample_rows import make_row as make_sample_row
from tests.support.triton_sample_rows import (
    OPS,
    REFERENCE,
    SmallBlockSampling,
    assert_same,
    mixed_rows,
    random_few_rows,
    repeat_to,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # infinite results are right here
WIDTH = 75
FILTERS = ("apply_top_k", "apply_top_p", "apply_typical_p", "apply_min_p", "apply_top_n_sigma")
BOUNDS: dict[str, tuple[float, ...]] = {
    "apply_top_k": (1, 3, 40, WIDTH - 1, WIDTH, 10**6),
    "apply_top_p": (0.5, 0.9, 1.0, 1e-300, 0.999999, 0.01),
    "apply_typical_p": (0.5, 0.9, 1.0, 1e-300, 0.999999, 0.2),
    "apply_min_p": (0.1, 0.0, 1.0, 1e-320, 0.5),
    "apply_top_n_sigma": (1.0, 0.1, 3.0, 1e9),
}
NEUTRAL = {"apply_top_k": WIDTH, "apply_top_p": 1.0, "apply_typical_p": 1.0, "apply_min_p": 0.0}


def bounds(operation: str, count: int, first: int = 0) -> Tensor:
    """[count], different for every row."""
    values = BOUNDS[operation][first % len(BOUNDS[operation]) :] + BOUNDS[operation]
    return repeat_to(values, count, torch.int64 if operation == "apply_top_k" else torch.float64)


@pytest.mark.parametrize("operation", FILTERS)
def test_filters_match_reference_on_all_row_kinds(operation: str) -> None:
    logits = mixed_rows(WIDTH)
    assert_same(operation, logits, bounds(operation, len(logits)))


def test_other_ops_match_reference_on_all_row_kinds() -> None:
    logits = mixed_rows(WIDTH)
    count = len(logits)
    seeds, positions = (
        repeat_to((0, 1, -(2**63), 2**63 - 1, -1), count, torch.int64),
        repeat_to((0, 2**32 - 1, 77), count, torch.int64),
    )
    assert_same("log_sum_exp", logits)
    assert_same("sample", logits, seeds, positions, torch.arange(count) % 4 == 0)
    assert_same("apply_temperature", logits, repeat_to((0.7, 1.0, 1e-5, 3e38), count, torch.float32))
    chances, thresholds = (
        repeat_to((1.0, 0.5, 0.0), count, torch.float64),
        repeat_to((0.1, 0.0, 1e-3, 1.0), count, torch.float64),
    )
    assert_same("apply_xtc", logits, seeds, positions, chances, thresholds)
    for k in (1, 5):
        assert_same("top_ids", logits, k)


@given(random_few_rows(), st.sampled_from(FILTERS), st.integers(0, 5))
@settings(max_examples=examples(12))
def test_filters_match_reference_on_random_rows(logits: Tensor, operation: str, first: int) -> None:
    assert_same(operation, logits, bounds(operation, len(logits), first))


@given(random_few_rows(), st.integers(-(2**63), 2**63 - 7), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(12))
def test_tokens_match_reference_on_random_rows(logits: Tensor, seed: int, position: int) -> None:
    seeds, positions = torch.arange(len(logits)) + seed, torch.full((len(logits),), position)
    assert_same("sample", logits, seeds, positions, torch.arange(len(logits)) == 1)


@pytest.mark.parametrize(("scale", "ulps"), [(1.0, 0), (1.0, 2**9), (64.0, 3), (2.0**20, 1)])
def test_near_ties_match_reference(scale: float, ulps: int) -> None:
    """Scores of all ids are within a few units in the last place, or within the error of float32 noise."""
    count, width = 3, 520
    seeds, positions = torch.arange(count) - 3, torch.arange(count) * 1000
    generator = torch.Generator().manual_seed(ulps)
    nudges = torch.randint(-ulps, ulps + 1, (count, width), generator=generator) * scale * 2.0**-23
    logits = (scale - gumbel(seeds, positions, width)).float() + nudges
    greedy = torch.arange(count) == 2
    for block in (128, 512):  # one search of a block, and several
        ops = SmallBlockSampling()
        ops.sampling_block = block
        for rows in (logits, logits.bfloat16().float()):
            assert_same("sample", rows, seeds, positions, greedy, ops=ops)


@given(random_few_rows(), st.permutations(FILTERS), st.integers(0, 5))
@settings(max_examples=examples(4))
def test_filters_match_reference_in_any_order(logits: Tensor, order: list[str], first: int) -> None:
    ours, theirs = logits.to(DEVICE), logits.clone()
    for place, operation in enumerate(order):
        bound = bounds(operation, len(logits), first + place)
        getattr(OPS, operation)(ours, bound.to(DEVICE))
        getattr(REFERENCE, operation)(theirs, bound)
        assert same_bits(ours.cpu(), theirs), operation


@pytest.mark.parametrize("operation", NEUTRAL)
def test_neutral_rows_stay_unchanged(operation: str) -> None:
    logits = torch.stack([make_row("plain", WIDTH, seed) for seed in range(3)])
    bound = bounds(operation, 3)
    bound[1] = NEUTRAL[operation]
    wanted = logits.clone()
    getattr(REFERENCE, operation)(wanted, bound)
    ours = logits.to(DEVICE, copy=True)
    getattr(OPS, operation)(ours, bound.to(DEVICE))
    assert same_bits(ours.cpu(), wanted) and same_bits(wanted[1], logits[1])
    assert not same_bits(wanted, logits)


def test_full_pipeline_matches_reference() -> None:
    """Every sampling step in order."""
    params = {
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "top_n_sigma": 3.0,
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "logit_bias": {7: 2.0, 9: -100.0}, "xtc_probability": 1.0, "xtc_threshold": 0.1, "min_tokens": 9,
        "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
    }  # fmt: skip
    row = make_sample_row(output=(9, 6, 9, 120), draft=(9, 40), **params)
    theirs = make_row("plain", VOCAB_SIZE, 1)[None]
    ours = theirs.to(DEVICE, copy=True)
    steps = active_processors(row.state.request)
    assert len(steps) > 10
    for step in steps:
        apply(step, TritonSampling(), ours, [row])  # type: ignore[arg-type]
        apply(step, REFERENCE, theirs, [row])  # type: ignore[arg-type]
        assert same_bits(ours.cpu(), theirs), type(step).__name__


def test_large_vocabulary_matches_reference() -> None:
    class LargeParts(TritonSampling):
        sampling_block = 32_768

    logits = torch.stack([make_row("plain", 151_936, 5), make_row("ties", 151_936, 6)])
    keys = torch.tensor([7, -1]), torch.tensor([4096, 1])
    assert_same("apply_top_k", logits, torch.tensor([50, 20_000]), ops=LargeParts())
    assert_same("apply_top_p", logits, torch.tensor([0.95, 0.5]).double(), ops=LargeParts())
    assert_same("sample", logits, *keys, torch.tensor([False, False]), ops=LargeParts())
    assert_same("log_sum_exp", logits, ops=LargeParts())


def test_rows_may_be_strided() -> None:
    wide = torch.stack([make_row("plain", 3 * WIDTH, seed) for seed in range(2)]).to(DEVICE)
    rows, before = wide[:, WIDTH : 2 * WIDTH], wide.clone()
    wanted = rows.cpu().contiguous()
    REFERENCE.apply_top_k(wanted, torch.tensor([4, 5]))
    OPS.apply_top_k(rows, torch.tensor([4, 5], device=DEVICE))
    assert same_bits(rows.cpu().contiguous(), wanted)
    before[:, WIDTH : 2 * WIDTH] = rows
    assert torch.equal(wide, before)


def test_wrong_parameter_dtype_is_an_assertion() -> None:
    rows = torch.zeros(2, 9, device=DEVICE)
    with pytest.raises(AssertionError, match=r"torch.int64 \[2\]"):
        OPS.apply_top_k(rows, torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError):
        OPS.sample(
            rows.double(), *itertools.repeat(torch.zeros(2, dtype=torch.int64), 2), torch.zeros(2).bool()
        )
