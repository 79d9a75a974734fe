"""How likely a guess is right."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.outputs import Draft
from foreword.speculation.control.acceptance import MODEL_PRIORS, AcceptanceModel, RequestAcceptance


def draft_of(*right: bool, confidence: float | None = None) -> Draft:
    """Guesses against a run of ones."""
    return Draft(tuple(map(int, right)), "suffix", () if confidence is None else (confidence,) * len(right))


def taught(
    rates: AcceptanceModel,
    record: RequestAcceptance,
    chance: float,
    trials: int,
    confidence: float | None = None,
    seed: int = 0,
) -> None:
    luck = random.Random(seed)
    for _ in range(trials):
        rates.update(draft_of(luck.random() < chance, confidence=confidence), (1, 1), record)


def first(rates: AcceptanceModel, record: RequestAcceptance, confidence: float | None = None) -> float:
    return rates.prefix_probs(draft_of(True, confidence=confidence), record, 0.0)[0]


def test_only_positions_that_were_reached_are_learned() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    prior = rates.hit_rates(8)[1]
    for _ in range(50):
        rates.update(draft_of(False, True, True), (1, 1, 1), record)
    assert rates.num_trials == pytest.approx(50, rel=0.15)
    assert rates.hit_rates(8)[0] < 0.1
    assert rates.hit_rates(8)[1] == pytest.approx(rates.hit_rates(8)[0]), (
        "nothing is known of the second but what the first tells"
    )
    assert prior == 0.5


def test_an_end_that_was_right_is_no_miss() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    assert rates.update(draft_of(True, True, True), (1, 1), record) == 2
    assert rates.update(draft_of(True, True), (1, 1, 1), record) == 2
    assert rates.num_trials == pytest.approx(4, rel=0.05)
    assert min(rates.hit_rates(8)[:2]) > 0.5


def test_chances_multiply_and_end_at_the_floor() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    chances = rates.prefix_probs(draft_of(*[True] * 10), record, 0.2)
    assert chances == pytest.approx([0.5, 0.25])
    assert rates.prefix_probs(draft_of(True), record, 0.6) == []


def test_confidence_is_calibrated_by_what_happens() -> None:
    rates = AcceptanceModel()
    for seed in range(20):
        taught(rates, RequestAcceptance(), 0.3, 20, confidence=0.9, seed=seed)
        taught(rates, RequestAcceptance(), 0.95, 20, confidence=0.5, seed=seed + 100)
    assert first(rates, RequestAcceptance(), 0.9) == pytest.approx(0.3, abs=0.1)
    assert first(rates, RequestAcceptance(), 0.5) == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("usual", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("own", [0.0, 0.5, 1.0])
def test_a_request_may_differ_from_the_usual_in_both_directions(usual: float, own: float) -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    for seed in range(30):
        taught(rates, RequestAcceptance(), usual, 20, seed=seed)
    taught(rates, record, own, 40, seed=99)
    assert first(rates, record) == pytest.approx(own, abs=0.2)
    taught(rates, RequestAcceptance(), usual, 200, seed=7)
    assert first(rates, RequestAcceptance()) == pytest.approx(usual, abs=0.15)


def test_a_record_forgets_within_dozens_of_guesses() -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    taught(rates, record, 0.0, 300)
    taught(rates, record, 1.0, 40)
    assert first(rates, record) > 0.6


def test_confidence_that_understates_is_translated() -> None:
    rates = AcceptanceModel()
    assert rates.to_confidence(0.5) == pytest.approx(0.5)
    taught(rates, RequestAcceptance(), 0.95, 2000, confidence=0.6)
    assert rates.to_confidence(0.9) < 0.5
    assert rates.to_confidence(1.0) == 1.0


def test_a_model_that_somebody_chose_is_trusted_more_at_first() -> None:
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
def test_chances_are_chances_whatever_drafters_say(scored: list[tuple[list[bool], float, int]]) -> None:
    rates, record = AcceptanceModel(), RequestAcceptance()
    for right, confidence, length in scored:
        draft = draft_of(*right, confidence=confidence)
        rates.update(draft, (1,) * length, record)
        chances = rates.prefix_probs(draft, record, 0.0)
        assert all(0.0 <= chance <= 1.0 for chance in chances)
        assert chances == sorted(chances, reverse=True)
        assert 0.0 <= rates.to_confidence(0.3) <= 1.0
