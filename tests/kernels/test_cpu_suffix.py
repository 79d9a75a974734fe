"""The C++ suffix index proposes the drafts of the Python oracle, with bounded work on any text."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.speculation.drafters.suffix import SuffixIndex
from tests.support.budget import examples
from tests.support.suffix_index import MAX_CHAIN, PythonSuffixIndex, TokenRing

NUM_TOKENS = 6  # few, so that much matches
tokens = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=80)


class Both:
    """Both indexes with the same texts."""

    def __init__(self, library: ctypes.CDLL, corpus_slots: int, never: Sequence[int]) -> None:
        self.indexes = (PythonSuffixIndex(corpus_slots, never), SuffixIndex(library, corpus_slots, never))
        self.texts: list[tuple[int, int]] = []

    def start(self, namespace: int) -> None:
        first, second = self.indexes
        self.texts.append((first.start(namespace), second.start(namespace)))

    def finish(self, which: int, output: Sequence[int]) -> None:
        for index, text in zip(self.indexes, self.texts.pop(which), strict=True):
            index.finish(text, output)

    def propose(self, max_tokens: int, new: Sequence[int]) -> None:
        """Both propose the same tokens and bit-identical confidences."""
        python, native = (
            index.propose([(pair[number], max_tokens + i, new[i:]) for i, pair in enumerate(self.texts)])
            for number, index in enumerate(self.indexes)
        )
        assert python == native
        assert len({index.num_texts() for index in self.indexes}) == 1


actions = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(0, 5), tokens),
    st.tuples(st.just("learn"), st.integers(0, 1), tokens),
    st.tuples(st.just("learn"), st.integers(0, 1), st.builds(lambda t, n: t * n, tokens, st.integers(1, 4))),
    st.tuples(st.just("propose"), st.integers(0, 12), tokens),
    st.tuples(
        st.just("propose"), st.integers(1, 40), st.builds(lambda t, n: t * n, tokens, st.integers(1, 4))
    ),
)


@settings(max_examples=examples(150))
@given(
    st.sampled_from([0, 64, 65, 100, 500]),
    st.lists(st.integers(0, NUM_TOKENS), max_size=1),
    st.lists(actions, max_size=25),
)
def test_native_equals_python(
    library: ctypes.CDLL, corpus_slots: int, never: list[int], script: list[tuple]
) -> None:  # type: ignore[type-arg]
    both = Both(library, corpus_slots, never)
    both.start(0)
    for action in script:
        if action[0] == "start":
            both.start(action[1])
        elif action[0] == "learn":
            both.start(action[1])
            both.finish(-1, action[2])
        elif action[0] == "propose":
            both.propose(*action[1:])
        elif both.texts:
            both.finish(action[1] % len(both.texts), action[2])


@pytest.mark.parametrize("corpus_slots", [64, 200])
def test_native_equals_python_during_corpus_eviction(library: ctypes.CDLL, corpus_slots: int) -> None:
    """Links to slots that were overwritten."""
    random = Random(corpus_slots)
    both = Both(library, corpus_slots, ())
    for _ in range(200):
        both.start(0)
        both.propose(8, [random.randrange(NUM_TOKENS) for _ in range(random.randrange(1, 12))])
        both.finish(0, [random.randrange(NUM_TOKENS) for _ in range(random.randrange(40))])


@given(tokens, tokens)
def test_incremental_growth_equals_one_append(
    library: ctypes.CDLL, first: list[int], second: list[int]
) -> None:
    index = SuffixIndex(library, 0, ())
    pieces, once = index.start(0), index.start(0)
    for token in first:
        index.propose([(pieces, 0, [token])])
    assert index.propose([(pieces, 9, second)]) == index.propose([(once, 9, first + second)])


PATTERNS = {
    "one token": lambda count: [5] * count,
    "a period": lambda count: [i % 7 for i in range(count)],
    "a long period": lambda count: [i % 5000 for i in range(count)],
    "all different": lambda count: list(range(count)),
    "one in two": lambda count: [5 if i % 2 else i for i in range(count)],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_text_makes_proposing_slow(library: ctypes.CDLL, pattern: str) -> None:
    """The bound is 20 s of CPU time for milliseconds of work; an unbounded walk takes hours."""
    text = PATTERNS[pattern](1_000_000)
    index = SuffixIndex(library, 100_000, ())
    index.finish(index.start(0), text)
    handle = index.start(0)
    started = time.thread_time()
    index.propose([(handle, 32, text)])
    for token in text[:1000]:
        index.propose([(handle, 32, [token])])
    assert time.thread_time() - started < 20
    index.finish(handle, ())
    assert index.num_texts() == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walk_is_bounded(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places visited for one draft token are bounded for any text."""
    looked = 0
    common = TokenRing._match_len

    def counted(self: TokenRing, slot: int, text: TokenRing) -> int:
        nonlocal looked
        looked += 1
        return common(self, slot, text)

    monkeypatch.setattr(TokenRing, "_match_len", counted)
    text = PATTERNS[pattern](2000)
    index = PythonSuffixIndex(1000, ())
    index.finish(index.start(0), text)
    index.propose([(index.start(0), 32, text)])
    assert looked <= 2 * 4 * MAX_CHAIN


def test_out_of_memory_is_an_error(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        """A library whose allocations fail."""

        foreword_suffix_propose = library.foreword_suffix_propose

        def foreword_suffix_new(self, *arguments: object) -> None:
            return None

    with pytest.raises(MemoryError, match="suffix index"):
        SuffixIndex(Short(), 100, ())  # type: ignore[arg-type]
