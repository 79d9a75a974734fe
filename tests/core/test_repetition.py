"""The guard against runaways, beside a slow and obvious one, and beside texts that repeat themselves for good reason."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core import repetition as runaway
from foreword.core.params import SamplingParams
from foreword.core.repetition import PATTERN_LIMITS, Repetition, RepetitionDetector
from foreword.core.request import FinishResult, Request, RequestState
from foreword.demo import MODEL
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import byte_tokenizer
from tests.support.repetition_samples import sample

NUM_SAMPLES = 200
SMALL = ((4, 8), (16, 32))  # scales that chance can fill
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.from_directory(MODEL),
    "bytes": byte_tokenizer,
}


def obvious(tokens: Sequence[int]) -> Repetition | None:
    """The definition, word for word: every token, every pattern."""
    runs = [0] * (runaway.PATTERN_LIMITS[-1][0] + 1)
    for i, token in enumerate(tokens):
        for pattern in range(1, min(i, len(runs) - 1) + 1):
            runs[pattern] = runs[pattern] + 1 if tokens[i - pattern] == token else 0
        for longest, enough in runaway.PATTERN_LIMITS:
            for pattern in range(1, longest + 1):
                if runs[pattern] >= enough:
                    return Repetition(i + 1, pattern)
    return None


def guarded(tokens: Sequence[int], sizes: Sequence[int] = (1,)) -> Repetition | None:
    """What the guard says, fed with runs of these sizes in turn."""
    guard, fed = RepetitionDetector(), 0
    for size in cycle(sizes):
        run = tokens[fed : fed + size]
        expected = guard.peek(run)
        found = guard.feed(run)
        assert found == expected, "find() is feed() without a trace"
        if found is not None:
            return Repetition(fed + found.num_tokens, found.pattern_len)
        fed += size
        if fed >= len(tokens):
            return None
    return None


def looping(pattern: int, preamble: int, length: int, seed: int) -> list[int]:
    """Chance for a while, then one pattern for ever."""
    chance = random.Random(seed)
    words = [chance.randrange(chance.choice((2, 40, 50_000))) for _ in range(pattern)]
    start = [chance.randrange(50_000) for _ in range(preamble)]
    return start + [words[i % pattern] for i in range(length)]


@pytest.mark.parametrize("preamble", [0, 1, 131, 1000])
def test_every_pattern_is_found_with_its_last_allowed_token(preamble: int) -> None:
    for pattern in range(1, 129):
        found = guarded(looping(pattern, preamble, 600, seed=pattern), (1, 4, 2, 9))
        assert found is not None and found.num_tokens <= preamble + pattern + 256, pattern
        assert found.pattern_len <= pattern


@pytest.mark.parametrize(
    ("pattern", "enough"), [(129, 1024), (500, 1024), (512, 1024), (513, 4096), (2048, 4096)]
)
@pytest.mark.parametrize("preamble", [0, 700, 9000])
def test_long_patterns_have_longer_allowances(pattern: int, enough: int, preamble: int) -> None:
    tokens = [*range(100_000, 100_000 + preamble), *(i % pattern for i in range(10_000))]
    assert guarded(tokens, (3, 64)) == Repetition(preamble + pattern + enough, pattern)


def test_a_longer_pattern_than_any_scale_has_is_not_looked_for() -> None:
    assert guarded([i % 2049 for i in range(9000)], (50,)) is None


def test_one_token_less_is_allowed() -> None:
    for pattern in (1, 2, 127, 128):
        tokens = [i % pattern for i in range(pattern + 255)]
        assert guarded([*tokens, 7777, *tokens]) is None
        assert guarded([*tokens, 255 % pattern]) == Repetition(pattern + 256, pattern)


@given(seed=st.integers(0, 10_000), preamble=st.integers(0, 600), pattern=st.integers(1, 140))
@settings(max_examples=6, deadline=None)
def test_the_guard_is_the_definition(seed: int, preamble: int, pattern: int) -> None:
    tokens = looping(pattern, preamble, 450, seed)
    assert guarded(tokens) == obvious(tokens)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=17), st.integers(1, 9)), max_size=9),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_loops_in_loops_are_what_the_definition_says(
    parts: list[tuple[list[int], int]], sizes: list[int]
) -> None:
    """With scales so small that patterns begin, break off and follow each other; and in runs of every size."""
    tokens = [token for words, times in parts for token in words * times] or [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runaway, "PATTERN_LIMITS", SMALL)
        expected = obvious(tokens)
        assert guarded(tokens) == expected
        assert guarded(tokens, sizes) == expected


def test_tokens_with_equal_bytes_are_told_apart() -> None:
    """Their bytes repeat a pattern of six, which is no whole number of tokens: three tokens are twelve bytes."""
    tokens = [0x00030002, 0x00010003, 0x00020001]
    for order in (tokens, tokens[::-1]):
        assert guarded(order * 100) == Repetition(259, 3)


def test_memory_is_bounded() -> None:
    guard, chance = RepetitionDetector(), random.Random(0)
    for _ in range(300):
        assert guard.feed([chance.randrange(9) for _ in range(100)]) is None
        assert len(guard._tail) <= sum(PATTERN_LIMITS[-1]) + 1024


def test_looks_are_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody breaks each pattern off with the last token that is allowed."""
    looks: list[int] = []
    repeating = RepetitionDetector._longest_run

    def counted(self: RepetitionDetector, longest: int, enough: int) -> tuple[int, int]:
        looks.append(longest)
        return repeating(self, longest, enough)

    monkeypatch.setattr(RepetitionDetector, "_longest_run", counted)
    for block in ([7] * 256, [1, 2] * 128, list(range(128)) * 2, [*range(100), *range(28)] * 2):
        tokens = [token for start in range(200) for token in [*block, 1000 + start]]
        looks.clear()
        assert guarded(tokens, (3,)) is None
        # each look is made twice here, by find() and by feed(); what it reads is 2 * longest tokens
        assert sum(2 * longest for longest in looks) <= 2 * len(PATTERN_LIMITS) * 4 * len(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_alarm_on_what_repeats_itself_for_good_reason(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    alarms = []
    for number in range(NUM_SAMPLES):
        kind, text = sample(number)
        if found := guarded(tokenizer.encode(text, add_special_tokens=False), (16,)):
            alarms.append((number, kind, found))
    assert not alarms


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_same_texts_for_ever_do_alarm(name: str) -> None:
    """What the samples are made of is no reason to be silent."""
    tokenizer = TOKENIZERS[name]()
    for text in ("0, ", "-", "| yes | 0 | ok |\n", "O river stone, O lantern!\n", "    pass\n", "AAAA"):
        assert guarded(tokenizer.encode("It says: " + text * 400, add_special_tokens=False), (16,)), text


# Where an answer ends


def state_of(mode: str | None, delivered: Sequence[int] = (), **params: object) -> RequestState:
    request = Request(
        "a", (1, 2, 3), SamplingParams(on_runaway=mode, **params), 0, (9,), resume_output_ids=tuple(delivered)
    )  # type: ignore[arg-type]
    return RequestState(request, 0, 5000)


def followed(
    state: RequestState, tokens: Sequence[int], size: int
) -> tuple[int, str | None, list[tuple[int, int]]]:
    """(tokens of the answer, why it ended, what was told: (tokens so far, pattern))"""
    told = []
    for start in range(0, len(tokens), size):
        end = state.check_finish(tokens[start : start + size])
        assert state.check_finish(tokens[start : start + size]) == end, "asking changes nothing"
        if end.repetition:
            told.append((state.num_output + end.repetition.num_tokens, end.repetition.pattern_len))
        state.append(tokens[start : start + end.num_kept])
        if end.finish_reason:
            return state.num_output, end.finish_reason, told
    return state.num_output, None, told


LOOP = [5, 6, 7] * 400


@pytest.mark.parametrize("size", [1, 2, 5, 16, 300])
def test_stop_ends_the_answer_at_the_same_token_in_bursts_of_every_size(size: int) -> None:
    assert followed(state_of("stop"), LOOP, size) == (259, "repetition", [(259, 3)])


@pytest.mark.parametrize("size", [1, 2, 5, 16, 300])
def test_warn_tells_once_and_goes_on(size: int) -> None:
    assert followed(state_of("warn"), LOOP + [1] * 600, size) == (1800, None, [(259, 3)])


@pytest.mark.parametrize("mode", ["off", None])
def test_off_is_no_guard(mode: str | None) -> None:
    state = state_of(mode)
    assert state._repetition_detector is None
    assert followed(state, LOOP, 7) == (1200, None, [])


@pytest.mark.parametrize("known", [1, 100, 255, 258])
@pytest.mark.parametrize("size", [1, 9])
def test_delivered_tokens_count(known: int, size: int) -> None:
    """An engine that takes an answer over ends it where the first would have."""
    assert followed(state_of("stop", LOOP[:known]), LOOP[known:], size) == (259, "repetition", [(259, 3)])


def test_what_was_told_before_the_engine_died_is_not_told_again() -> None:
    assert followed(state_of("warn", LOOP[:300]), LOOP[300:], 4) == (1200, None, [])


@pytest.mark.parametrize("size", [1, 8])
def test_the_earliest_token_decides(size: int) -> None:
    assert followed(state_of("stop"), [*LOOP[:257], 9, *LOOP], size) == (258, "stop", [])
    assert followed(state_of("stop", max_tokens=258), LOOP, size) == (258, "length", [])
    assert followed(state_of("stop", max_tokens=259), LOOP, size) == (259, "length", [(259, 3)])
    assert followed(state_of("stop", max_tokens=260), LOOP, size) == (259, "repetition", [(259, 3)])
    assert followed(state_of("warn", max_tokens=262), LOOP, size) == (262, "length", [(259, 3)])


def test_a_run_that_ends_before_the_repetition_is_as_before() -> None:
    assert state_of("stop").check_finish([5, 9, 5]) == FinishResult(2, "stop", 9)


def test_a_vector_has_no_guard() -> None:
    request = Request("a", (1, 2), SamplingParams(on_runaway="stop"), 0, pooling="last")
    assert RequestState(request, 0, 100)._repetition_detector is None
