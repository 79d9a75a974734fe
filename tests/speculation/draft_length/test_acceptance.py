"""Acceptance probabilities."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.outputs import Draft
from foreword.speculation.draft_length.acceptance import MODEL_PRIORS, AcceptanceModel, RequestAcceptance


def draft_of(*right: bool, confidence: float | None = None) -> Draft:
    """A draft of right (1) and wrong (0) tokens."""
    return Draft(tuple(map(int, right)), "suffix", () if confidence is None else (confidence,) * len(right))


def taught(
    rates: AcceptanceModel,
    record: RequestAcceptance,
    chance: float,
    trials: int,
    confidence: float | None = None,
    seed: int = 0,
) -> None:
    rng = random.Random(seed)
    for _ in range(trials):
        draft = draft_of(rng.random() < chance, confidence=confidence)
        rates.prefix_probs(draft, record, 0.0)  # each step asks before it learns
        rates.update(draft, (1, 1), record)


def first(rates: AcceptanceModel, record: RequestAcceptance, confidence: float | None = None) -> float:
    return rates.prefix_probs(draft_of(True, confidence=confidence), record, 0.0)[0]


def test_only_reached_positions_are_learned() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    prior = rates.hit_rates(8)[1]
    for _ in range(50):
        rates.update(draft_of(False, True, True), (1, 1, 1), record)
    assert rates.num_trials == pytest.approx(50, rel=0.15)
    assert rates.hit_rates(8)[0] < 0.1
    assert rates.hit_rates(8)[1] == pytest.approx(rates.hit_rates(8)[0]), (
        "an unreached group must follow the one before it"
    )
    assert prior == 0.5


def test_correct_end_is_no_miss() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    assert rates.update(draft_of(True, True, True), (1, 1), record) == 2
    assert rates.update(draft_of(True, True), (1, 1, 1), record) == 2
    assert rates.num_trials == pytest.approx(4, rel=0.05)
    assert min(rates.hit_rates(8)[:2]) > 0.5


def test_prefix_probs_multiply_down_to_min_prob() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    probs = rates.prefix_probs(draft_of(*[True] * 10), record, 0.2)
    assert probs == pytest.approx([0.5, 0.25])
    assert rates.prefix_probs(draft_of(True), record, 0.6) == []


def test_confidence_is_calibrated() -> None:
    rates = AcceptanceModel()
    for seed in range(20):
        taught(rates, RequestAcceptance(), 0.3, 20, confidence=0.9, seed=seed)
        taught(rates, RequestAcceptance(), 0.95, 20, confidence=0.5, seed=seed + 100)
    assert first(rates, RequestAcceptance(), 0.9) == pytest.approx(0.3, abs=0.1)
    assert first(rates, RequestAcceptance(), 0.5) == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("usual", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("own", [0.0, 0.5, 1.0])
def test_request_may_differ_from_the_mean_both_ways(usual: float, own: float) -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    for seed in range(30):
        taught(rates, RequestAcceptance(), usual, 20, seed=seed)
    taught(rates, record, own, 40, seed=99)
    assert first(rates, record) == pytest.approx(own, abs=0.2)
    taught(rates, RequestAcceptance(), usual, 200, seed=7)
    assert first(rates, RequestAcceptance()) == pytest.approx(usual, abs=0.15)


def test_hard_request_is_known_before_its_draft_has_a_confidence() -> None:
    """Its confidences say the truth: its drafts are as right as those of others with the same."""
    rates, record = AcceptanceModel(), RequestAcceptance()
    for seed in range(30):
        taught(rates, RequestAcceptance(), 0.9, 20, confidence=0.9, seed=seed)
        taught(rates, record, 0.1, 20, confidence=0.1, seed=seed + 100)
    assert first(rates, record, confidence=0.9) > 0.7
    assert rates.expected_prefix_probs(record, 1)[0] == pytest.approx(0.1, abs=0.15)
    assert rates.expected_prefix_probs(RequestAcceptance(), 1)[0] > 0.4


def test_empty_draft_is_a_miss_before_a_draft_is_made() -> None:
    """A model that finds no token for a request would run for ever; its confidences stay as right."""
    rates, record = AcceptanceModel(MODEL_PRIORS), RequestAcceptance()
    before = first(rates, record)
    for _ in range(30):
        assert rates.update(Draft((), "draft"), (), record) == 0
    assert rates.expected_prefix_probs(record, 2)[0] < 0.1
    assert first(rates, record) == before


def test_request_acceptance_forgets() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    taught(rates, record, 0.0, 300)
    taught(rates, record, 1.0, 40)
    assert first(rates, record) > 0.6


def test_underconfidence_is_translated() -> None:
    rates = AcceptanceModel()
    assert rates.to_confidence(0.5) == pytest.approx(0.5)
    taught(rates, RequestAcceptance(), 0.95, 2000, confidence=0.6)
    assert rates.to_confidence(0.9) < 0.5
    assert rates.to_confidence(1.0) == 1.0


def test_draft_model_has_higher_priors() -> None:
    assert AcceptanceModel(MODEL_PRIORS).expected_prefix_probs(RequestAcceptance(), 2) == pytest.approx(
        [0.85, 0.85**2]
    )


@given(
    st.lists(
        st.tuples(
            st.lists(st.booleans(), min_size=1, max_size=40), st.floats(allow_nan=True), st.integers(0, 40)
        ),
        max_size=30,
    )
)
def test_probabilities_are_valid_for_any_confidence(scored: list[tuple[list[bool], float, int]]) -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    for right, confidence, length in scored:
        draft = draft_of(*right, confidence=confidence)
        rates.update(draft, (1,) * length, record)
        probs = rates.prefix_probs(draft, record, 0.0)
        assert all(0.0 <= chance <= 1.0 for chance in probs)
        assert probs == sorted(probs, reverse=True)
        assert 0.0 <= rates.to_confidence(0.3) <= 1.0
