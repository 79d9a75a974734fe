"""Drafts from the prediction, and resynchronization after an edit."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.drafters.prediction import (
    FORWARD_PREFERENCE,
    MAX_DRAFT_LEN,
    PredictionDrafter,
    _find_nearest,
    _to_chars,
)
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.budget import examples
from tests.support.fakes import extended

PROMPT = (7, 8, 9)
TEXT = tuple(range(100, 400))  # distinct tokens


def state_of(prediction: Sequence[int], name: str = "a", delivered: Sequence[int] = ()) -> RequestState:
    request = Request(
        name,
        PROMPT,
        SamplingParams(),
        0,
        resume_output_ids=tuple(delivered),
        prediction_ids=tuple(prediction),
    )
    return RequestState(request, 0, 10_000)


class Output:
    """A growing output and its drafts."""

    def __init__(self, prediction: Sequence[int], never: Sequence[int] = ()) -> None:
        self.drafter = PredictionDrafter(frozenset(never))
        self.state = state_of(prediction)
        self.drafter.start(self.state)

    def say(self, *run: int, max_tokens: int = 4) -> tuple[int, ...]:
        draft = self.draft(*run, max_tokens=max_tokens)
        return draft.token_ids if draft else ()

    def draft(self, *run: int, max_tokens: int = 4) -> Draft | None:
        (draft,) = self.drafter.propose([DraftRequest(extended(self.state, run), max_tokens)])
        return draft


def test_drafts_from_the_first_token_on() -> None:
    output = Output(TEXT)
    assert output.say(100) == (101, 102, 103, 104)
    assert output.say(101, 102, max_tokens=2) == (103, 104)


def test_drafts_end_with_the_prediction() -> None:
    output = Output((1, 2, 3))
    assert output.say(1) == (2, 3)
    assert output.say(2, 3) == ()
    assert output.say(4) == ()


def test_no_prediction_no_draft() -> None:
    output = Output(())
    assert output.say(1) == ()
    assert not output.drafter._cursors


@pytest.mark.parametrize(
    ("edit", "back"),
    [
        ((900, 901, 902), 120),  # inserted
        ((), 125),  # deleted
        ((900,), 121),  # one replaced
        ((900, 901, 902), 124),  # four replaced by three
        ((900,), 180),  # a long part deleted
        ((900,), 350),  # continues far ahead
        ((900,), 101),  # continues further back
    ],
)
def test_position_is_found_after_an_edit(edit: Sequence[int], back: int) -> None:
    output = Output(TEXT)
    output.say(*TEXT[:20])
    output.say(*edit)
    needed = next(
        count
        for count in range(1, 10)
        if output.say(back + count - 1) == tuple(range(back + count, back + count + 4))
    )
    assert needed <= 3


@pytest.mark.parametrize(
    ("token_id", "expected"), [(123, (124, 125, 126, 127)), (300, ()), (110, ())], ids=["near", "far", "back"]
)
def test_only_a_near_match_needs_one_token(token_id: int, expected: tuple[int, ...]) -> None:
    output = Output(TEXT)
    output.say(*TEXT[:20], 900)
    assert output.say(token_id) == expected


def test_nearest_match_ahead_wins() -> None:
    text = (1, 2, 3, 51, 10, 11, 12, 1, 2, 3, 52, 20, 21, 22, 1, 2, 3, 53)
    output = Output(text)
    output.say(*text[:5])
    assert output.say(99, 1, 2, max_tokens=2) == (3, 52)
    output = Output(text)
    output.say(*text[:12])
    assert output.say(99, 1, 2, max_tokens=2) == (3, 53)


def test_wrong_match_keeps_the_anchor() -> None:
    """An insertion quotes the prediction's start; then the output continues where it was."""
    output = Output(TEXT)
    output.say(*TEXT[:200])
    output.say(900, 100, 101, 102, 901)
    assert output.say(301)[:1] == (302,)


def test_follows_drafts_of_other_drafters() -> None:
    """A request may be skipped for any number of steps."""
    output = Output(TEXT)
    output.state.append(TEXT[:50])
    assert output.say(150) == (151, 152, 153, 154)


def test_resumed_tokens_are_output() -> None:
    drafter, state = PredictionDrafter(), state_of(TEXT, delivered=TEXT[:5])
    drafter.start(state)
    (draft,) = drafter.propose([DraftRequest(extended(state, (105,)), 2)])
    assert draft is not None and draft.token_ids == (106, 107)


def test_placeholders_are_skipped_not_drafted() -> None:
    output = Output((1, 2, 3, 4, 5, 6), never=[4])
    assert output.say(1) == (2, 3)
    assert output.say(2, 3) == ()
    assert output.say(5) == (6,)


def test_confidence_grows_with_matched_tokens() -> None:
    output = Output(TEXT)
    first = output.draft(100)
    later = output.draft(*TEXT[1:40])
    lost = output.draft(900, 143)
    far = output.draft(901, 902, 200, 201)
    assert first and later and lost and far
    assert list(first.confidence) == sorted(first.confidence)
    assert far.confidence[0] < lost.confidence[0] < later.confidence[0] < 1
    assert 0 < far.confidence[0] < 0.5


def test_requests_are_isolated_and_leave_no_state() -> None:
    drafter = PredictionDrafter()
    a, b, plain = state_of((1, 2, 3), "a"), state_of((1, 5, 6), "b"), state_of((), "c")
    for state in (a, b, plain):
        drafter.start(state)
    drafts = drafter.propose([DraftRequest(extended(state, (1,)), 2) for state in (a, plain, b)])
    assert [draft and draft.token_ids for draft in drafts] == [(2, 3), None, (5, 6)]
    with pytest.raises(AssertionError):
        drafter.check({"a"})
    for name in "abc":
        drafter.finish(name, (1, 2))
    drafter.check(())
    assert not drafter._cursors


small = st.lists(st.integers(0, 5), max_size=60)


@given(
    text=small,
    runs=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=7), max_size=12),
    length=st.integers(0, 80),
)
def test_draft_length_is_bounded(text: list[int], runs: list[list[int]], length: int) -> None:
    output = Output(text, never=[5])
    for run in runs:
        draft = output.draft(*run, max_tokens=length)
        if draft is not None:
            assert 0 < len(draft.token_ids) <= min(length, MAX_DRAFT_LEN)
            assert len(draft.confidence) == len(draft.token_ids)
            assert all(0 < chance < 1 for chance in draft.confidence)
            assert 5 not in draft.token_ids


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(1, 32))
def test_correct_prediction_is_drafted_completely(text: list[int], length: int) -> None:
    """One step: verify the draft, and emit one more token."""
    output, done = Output(text), 0
    while done < len(text):
        run = text[done : done + 1] if done == 0 else text[done : done + length + 1]
        done += len(run)
        assert output.say(*run, max_tokens=length) == tuple(text[done : done + length])


@given(
    text=st.lists(st.integers(0, 2), max_size=30),
    gram=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    anchor=st.integers(0, 30),
    least=st.integers(-9, 1),
    most=st.integers(1, 12),
)
def test_nearest_match_equals_a_scan(
    text: list[int], gram: list[int], anchor: int, least: int, most: int
) -> None:
    ends = [
        end
        for end in range(len(gram), len(text) + 1)
        if text[end - len(gram) : end] == gram and least <= end - anchor <= most
    ]
    by_definition = min(
        ends,
        key=lambda end: (
            end - anchor if end >= anchor else FORWARD_PREFERENCE * (anchor - end),
            end < anchor,
        ),
        default=None,
    )
    assert _find_nearest(_to_chars(text), _to_chars(gram), anchor, least, most) == by_definition


def test_every_token_id_is_a_character() -> None:
    """Including surrogates and the byte order mark."""
    ids = (0, 10, 0xD800, 0xDFFF, 0xFEFF, 0xFFFE, 0x10FFFF)
    assert list(map(ord, _to_chars(ids))) == list(ids)
    output = Output(ids)
    assert output.say(0) == ids[1:5]


@st.composite
def edits(draw: st.DrawFn) -> list[Sequence[int]]:
    """An output of spans of TEXT of at least 10 tokens, in any order, with other tokens in between."""
    pieces: list[Sequence[int]] = []
    for number in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(TEXT) - 11))
        pieces.append(TEXT[start : start + draw(st.integers(10, 40))])
        pieces.append([1000 + 50 * number + i for i in range(draw(st.integers(0, 12)))])
    return pieces


@settings(max_examples=examples(60))
@given(edits())
def test_resyncs_within_four_tokens_after_any_edit(pieces: list[Sequence[int]]) -> None:
    output = Output(TEXT)
    for piece in pieces:
        for place, token_id in enumerate(piece):
            draft_ids = output.say(token_id, max_tokens=1)
            if token_id < 1000 and place >= 2 and place + 1 < len(piece):
                assert draft_ids == (piece[place + 1],)
