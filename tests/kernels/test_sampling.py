"""The reference sampler against published vectors, plain Python and statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.portable_math import exp_fixed_point, log
from foreword.kernels.reference.sampling import ReferenceSampling, gumbel, noise, philox
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.kernel_rows import NON_FINITE_KINDS, ROW_KINDS, make_row, random_rows

OPS = ReferenceSampling()
SEEDS = (0, 1, 2**63, 2**64 - 1)
# Random123 1.14, kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def ints(*values: int) -> Tensor:
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in values])


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ranked(row: Tensor) -> list[int]:
    """Finite ids by (value descending, id ascending)."""
    values = row.tolist()
    return sorted((i for i, value in enumerate(values) if value > -math.inf), key=lambda i: (-values[i], i))


def kept(row: Tensor) -> list[int]:
    return row.isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_published_answers(counter: str, key: str, result: str) -> None:
    assert philox(words(counter), words(key)) == words(result)  # type: ignore[arg-type]


def test_log_and_exp_match_high_precision() -> None:
    x = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.cat(
        [x, 1 - x * 2.0**-30, x * 2.0**-40, x * 2.0**40, doubles(1.0, 0.5, math.sqrt(0.5), 2.0**-33)]
    )
    assert torch.allclose(log(x), torch.from_numpy(np.log(x.numpy())), rtol=1e-15, atol=0)
    distance = torch.cat([-50 * x[:20_000], doubles(0.0, -64.0, -1e30, -math.inf)])
    exact = np.exp(distance.numpy().astype(np.longdouble)) * 2.0**42
    assert float(np.abs(exp_fixed_point(distance).numpy() - exact).max()) < 0.51


def test_noise_is_finite_and_exact_at_both_ends() -> None:
    ends = noise(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])).tolist()
    exact = [-math.log(33 * math.log(2)), *[-math.log(-math.log((x + 0.5) * 2.0**-32)) for x in (1, 2**31)]]
    exact += [-math.log(-math.log1p(-1.5 * 2.0**-32)), -math.log(-math.log1p(-0.5 * 2.0**-32))]
    assert ends == pytest.approx(exact, rel=1e-7)
    assert ends == sorted(ends)


def test_noise_depends_on_seed_position_and_id_alone() -> None:
    whole = gumbel(ints(*SEEDS), torch.tensor([0, 5, 5, 2**32 - 1]), 1001)
    assert len({tuple(line.tolist()) for line in whole}) == 4
    assert same_bits(gumbel(ints(2**63), torch.tensor([5]), 7), whole[2:3, :7])
    assert whole.mean().item() == pytest.approx(0.5772, abs=0.1)
    first = philox(words("00000001 00000005 0 0"), words("00000000 80000000"))
    assert whole[2, 4:8].tolist() == noise(torch.cat(first)).tolist()


@given(random_rows(ROW_KINDS))
@settings(max_examples=examples(60))
def test_log_sum_exp_matches_high_precision(logits: Tensor) -> None:
    exact = torch.logsumexp(logits.double(), dim=1)
    assert torch.allclose(OPS.log_sum_exp(logits).double(), exact, rtol=1e-6, atol=1e-6)


@given(random_rows(ROW_KINDS), st.integers(1, 20))
@settings(max_examples=examples(60))
def test_top_ids_and_top_k_rank_by_value_then_id(logits: Tensor, k: int) -> None:
    k = min(k, logits.shape[1])
    top = OPS.top_ids(logits, k).tolist()
    cut = logits.clone()
    OPS.apply_top_k(cut, torch.full((len(cut),), k))
    for line, row in enumerate(logits):
        first = ranked(row)[:k]
        assert top[line][: len(first)] == first
        assert kept(cut[line]) == sorted(first)
        assert same_bits(cut[line, first], row[first])


@given(random_rows(), st.data())
@settings(max_examples=examples(60))
def test_mask_keeps_ids_whose_bit_is_set(logits: Tensor, data: st.DataObject) -> None:
    """NaN and +inf stay for any mask."""
    width = logits.shape[1]
    allowed = data.draw(st.sets(st.integers(0, width - 1)))
    words = [
        sum(1 << i % 32 for i in allowed if i // 32 == word)
        for word in range(max(allowed, default=0) // 32 + 1)
    ]
    masks = torch.tensor(words).to(torch.int32).expand(len(logits), -1)
    cut = logits.clone()
    OPS.apply_mask(cut, masks)
    for line, row in zip(cut.tolist(), logits.tolist(), strict=True):
        wanted = [value if i in allowed or not value < math.inf else -math.inf for i, value in enumerate(row)]
        assert repr(line) == repr(wanted)


@given(random_rows(ROW_KINDS), st.floats(0.001, 0.999))
@settings(max_examples=examples(60))
def test_top_p_keeps_the_id_that_crosses_the_bound(logits: Tensor, p: float) -> None:
    cut = logits.clone()
    OPS.apply_top_p(cut, torch.full((len(cut),), p, dtype=torch.float64))
    for line, row in zip(cut, logits, strict=True):
        order = ranked(row)
        probabilities = torch.softmax(row.double(), 0)[order]
        size = len(kept(line))
        assert kept(line) == sorted(order[:size])
        assert probabilities[:size].sum() >= p - 1e-6
        assert size == 1 or probabilities[: size - 1].sum() < p + 1e-6


@given(random_rows(ROW_KINDS), st.floats(0.0, 1.0))
@settings(max_examples=examples(60))
def test_min_p_compares_with_the_maximum(logits: Tensor, p: float) -> None:
    cut = logits.clone()
    OPS.apply_min_p(cut, torch.full((len(cut),), p, dtype=torch.float64))
    for line, row in zip(cut, logits, strict=True):
        ratio = torch.exp(row.double() - row.amax())
        clear = (ratio - p).abs() > 1e-12
        wanted = (ratio > p) & row.isfinite()
        assert torch.equal(line.isfinite()[clear], wanted[clear])


@given(random_rows(ROW_KINDS), st.floats(0.001, 0.999))
@settings(max_examples=examples(60))
def test_typical_p_keeps_typical_ids(logits: Tensor, p: float) -> None:
    cut = logits.clone()
    OPS.apply_typical_p(cut, torch.full((len(cut),), p, dtype=torch.float64))
    for line, row in zip(cut, logits, strict=True):
        probabilities = torch.softmax(row.double(), 0)
        surprise = -probabilities.log()
        distance = (surprise - torch.where(probabilities > 0, probabilities * surprise, 0.0).sum()).abs()
        inside = line.isfinite()
        assert probabilities[inside].sum() >= p - 1e-6
        slack = 1e-5 * (1 + row[row.isfinite()].abs().max())  # distances and their mean are rounded
        furthest = distance[inside].max()
        outside = distance[~inside & row.isfinite()]
        assert not len(outside) or furthest <= outside.min() + slack


@given(random_rows(ROW_KINDS), st.floats(0.01, 4.0))
@settings(max_examples=examples(60))
def test_top_n_sigma_counts_deviations(logits: Tensor, n: float) -> None:
    cut = logits.clone()
    OPS.apply_top_n_sigma(cut, torch.full((len(cut),), n, dtype=torch.float64))
    for line, row in zip(cut, logits, strict=True):
        below = row[row.isfinite()].double() - row.amax()
        below = below.clamp(min=-1024)
        deviation = below.std(correction=0)
        distance = row.double() - row.amax() + n * deviation
        clear = distance.abs() > 1e-2 * (1 + n)  # deviations are counted in units of 1 / 1024
        assert torch.equal(line.isfinite()[clear], ((distance > 0) & row.isfinite())[clear])
        assert line[int(row.argmax())] == row.amax()


@given(random_rows(ROW_KINDS), st.floats(0.0, 1.0), st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_xtc_excludes_all_likely_ids_but_the_last(logits: Tensor, threshold: float, seed: int) -> None:
    count = len(logits)
    cut, never = logits.clone(), logits.clone()
    keys, thresholds = (
        (torch.arange(count) + seed, torch.arange(count)),
        torch.full((count,), threshold).double(),
    )
    OPS.apply_xtc(cut, *keys, torch.ones(count).double(), thresholds)
    OPS.apply_xtc(never, *keys, torch.zeros(count).double(), thresholds)
    assert same_bits(never, logits)
    for line, row in zip(cut, logits, strict=True):
        probabilities = torch.softmax(row.double(), 0)
        likely = [i for i in ranked(row) if probabilities[i] >= threshold]
        if ((probabilities - threshold).abs() > 1e-9).all():
            assert kept(line) == sorted(set(ranked(row)) - set(likely[:-1]))


def test_xtc_coin_has_its_probability_and_its_own_noise() -> None:
    count = 4000
    rows_, zero = torch.zeros(count, 8), torch.zeros(count, dtype=torch.int64)
    OPS.apply_xtc(rows_, zero, torch.arange(count), torch.full((count,), 0.3).double(), zero.double())
    excluded = rows_[:, 0].isinf()
    assert excluded.sum().item() == pytest.approx(0.3 * count, abs=5 * math.sqrt(0.21 * count))
    noise_of_first = gumbel(zero, torch.arange(count), 8)[:, 0]
    assert torch.corrcoef(torch.stack((excluded.float(), noise_of_first)))[0, 1].abs() < 0.08


@given(random_rows(), st.data())
@settings(max_examples=examples(60))
def test_biases_are_added_and_penalties_applied(logits: Tensor, data: st.DataObject) -> None:
    count, width = logits.shape
    ids = [data.draw(st.lists(st.integers(-3, width + 3), unique=True, max_size=5)) for _ in range(count)]
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0)
    flat = torch.tensor([token_id for own in ids for token_id in own], dtype=torch.int64)
    amounts = torch.linspace(-3, 3, len(flat))
    added, penalized = logits.clone(), logits.clone()
    OPS.add_bias(added, starts, flat, amounts)
    OPS.apply_repetition_penalty(penalized, starts, flat, torch.full((count,), 1.3))
    place = 0
    for r, own in enumerate(ids):
        for token_id in own:
            if 0 <= token_id < width:
                logit = logits[r, token_id]
                assert same_bits(added[r, token_id], logit + amounts[place])
                assert same_bits(penalized[r, token_id], logit * 1.3 if logit < 0 else logit / 1.3)
                added[r, token_id] = penalized[r, token_id] = logit
            place += 1
    assert same_bits(added, logits) and same_bits(penalized, logits)


def test_extreme_parameters_keep_all_or_one_id() -> None:
    row = make_row("steep", 300, 1)[None]
    for operation, neutral in (
        (OPS.apply_top_p, doubles(1.0)),
        (OPS.apply_typical_p, doubles(1.0)),
        (OPS.apply_top_n_sigma, doubles(1e9)),
        (OPS.apply_min_p, doubles(0.0)),
        (OPS.apply_top_k, ints(300)),
    ):
        same = row.clone()
        operation(same, neutral)
        assert same_bits(same, row)
    for operation, single in (
        (OPS.apply_top_p, doubles(1e-300)),
        (OPS.apply_min_p, doubles(1.0)),
        (OPS.apply_top_k, ints(1)),
    ):
        one = row.clone()
        operation(one, single)
        assert kept(one[0]) == [int(row.argmax())]


def test_ties_go_to_the_lowest_id() -> None:
    equal = torch.zeros(1, 100)
    equal[0, 50] = -0.0
    assert OPS.top_ids(equal, 3).tolist() == [[0, 1, 2]]
    assert OPS.sample(equal[:, 40:], ints(0), ints(0), torch.tensor([True])).tolist() == [0]
    for cut, operation, bound in ((3, OPS.apply_top_k, ints(3)), (50, OPS.apply_top_p, doubles(0.5))):
        row = equal.clone()
        operation(row, bound)
        assert kept(row[0]) == list(range(cut))


@pytest.mark.parametrize("kind", NON_FINITE_KINDS)
def test_non_finite_rows_stay_unchanged_and_yield_no_token(kind: str) -> None:
    row = make_row(kind, 70, 3)[None]
    before = row.clone()
    OPS.apply_top_k(row, ints(2))
    OPS.apply_top_p(row, doubles(0.5))
    OPS.apply_min_p(row, doubles(0.5))
    OPS.apply_typical_p(row, doubles(0.5))
    OPS.apply_top_n_sigma(row, doubles(0.5))
    OPS.apply_xtc(row, ints(0), ints(0), doubles(1.0), doubles(0.0))
    assert same_bits(row, before)
    assert OPS.log_sum_exp(row).isnan().all()
    for greedy in (True, False):
        assert OPS.sample(row, ints(0), ints(0), torch.tensor([greedy])).tolist() == [-1]


def test_token_is_argmax_of_logit_plus_noise() -> None:
    logits = torch.stack([make_row("plain", 500, seed) for seed in range(4)])
    positions = torch.tensor([0, 1, 2, 2**32 - 1])
    greedy = torch.tensor([False, True, False, False])
    scores = logits + torch.where(greedy[:, None], 0.0, gumbel(ints(*SEEDS), positions, 500))
    assert OPS.sample(logits, ints(*SEEDS), positions, greedy).tolist() == [
        max(range(500), key=line.tolist().__getitem__) for line in scores
    ]


def test_single_unmasked_token_is_sampled() -> None:
    row = torch.full((1, 1000), -torch.inf)
    row[0, 777] = -3e38
    assert OPS.sample(row, ints(2**64 - 1), ints(9), torch.tensor([False])).tolist() == [777]


@pytest.mark.parametrize("seed", SEEDS)
def test_frequencies_match_softmax(seed: int) -> None:
    """Chi-square with 7 degrees of freedom over positions; p(> 29.9) = 1e-4."""
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -1.5, 1.8])
    count = 5000
    drawn = OPS.sample(
        row.expand(count, -1).contiguous(),
        ints(seed).expand(count),
        torch.arange(count),
        torch.zeros(count).bool(),
    )
    expected = torch.softmax(row, 0) * count
    assert float(((drawn.bincount(minlength=8) - expected) ** 2 / expected).sum()) < 29.9


def test_adjacent_positions_and_seeds_are_independent() -> None:
    """Chi-square with 15 degrees of freedom over pairs of tokens; p(> 44.3) = 1e-4."""
    row = torch.tensor([0.3, 0.0, -0.4, 0.1])
    count = 6000
    greedy, flat = torch.zeros(count).bool(), row.expand(count, -1).contiguous()
    by_position = OPS.sample(flat, ints(7).expand(count), torch.arange(count), greedy)
    by_seed = OPS.sample(flat, torch.arange(count), ints(3).expand(count), greedy)
    expected = torch.outer(torch.softmax(row, 0), torch.softmax(row, 0)).flatten() * (count // 2)
    for drawn in (by_position, by_seed):
        pairs = drawn[0::2] * 4 + drawn[1::2]
        assert float(((pairs.bincount(minlength=16) - expected) ** 2 / expected).sum()) < 44.3
