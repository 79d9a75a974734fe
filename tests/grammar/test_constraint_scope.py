"""Where a constraint begins in an answer, and the budget of the reasoning."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.structured_output import ConstraintScope, Vocabulary
from foreword.grammar.constraint_scope import PROMPT_TAIL_TOKENS, ScopeTracker, reasoning_ended_in_prompt
from foreword.grammar.vocab import GrammarVocab

IDS = st.lists(st.integers(0, 2), max_size=12).map(tuple)
ENDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
THINK, END, CALL, EOS = 256, 257, 258, 259
MARKERS = ConstraintScope(reasoning_begin=(THINK,), reasoning_end=(END,))
TEXTS = ConstraintScope(reasoning_begin=("<a>",), reasoning_end=("</a>",), holds_reasoning=True)


@cache
def _vocab() -> GrammarVocab:
    tokens = (*(bytes([i]) for i in range(256)), b"<think>", b"</think>", b"<call>", b"")
    return GrammarVocab(Vocabulary(tokens, (EOS,), (EOS,)), 260)


def _end_of_first(text: tuple[int, ...], ends: list[tuple[int, ...]]) -> int | None:
    """Length of the shortest prefix that ends with an end sequence."""
    return next(
        (n for n in range(1, len(text) + 1) if any(text[:n][-len(end) :] == end for end in ends)), None
    )


@given(parts=st.lists(IDS, max_size=4), last=IDS, ends=ENDS)
def test_first_end_is_found_for_any_split_of_the_output(
    parts: list[tuple[int, ...]], last: tuple[int, ...], ends: list[tuple[int, ...]]
) -> None:
    scope = ScopeTracker(ConstraintScope(starts_in_reasoning=True), _vocab(), ends)
    before: tuple[int, ...] = ()
    for part in parts:
        if scope.walk(part)[0] is not None:
            break
        assert scope.accept(part) is None
        before += part
    expected = _end_of_first(before + last, ends)
    assert scope.walk(last)[0] == (None if expected is None else expected - len(before))


def test_end_in_the_prompt_counts_near_its_end() -> None:
    assert reasoning_ended_in_prompt((1, 2, 3), [(2, 3)]) and reasoning_ended_in_prompt(
        (1, 2, 3, 4), [(9,), (2, 3)]
    )
    assert not reasoning_ended_in_prompt((1, 2, 4, 3), [(2, 3)])
    assert reasoning_ended_in_prompt((7, 8, *[0] * PROMPT_TAIL_TOKENS), [(7, 8)])
    assert not reasoning_ended_in_prompt((7, 8, *[0] * (PROMPT_TAIL_TOKENS + 1)), [(7, 8)])
