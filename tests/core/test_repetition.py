"""Repetition detection against a brute-force definition and legitimate repetitive texts."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core import repetition
from foreword.core.repetition import PATTERN_LIMITS, Repetition, RepetitionDetector
from foreword.demo import MODEL
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.budget import examples
from tests.support.fakes import byte_tokenizer
from tests.support.repetition_samples import sample

NUM_SAMPLES = 200
SMALL = ((4, 8), (16, 32))  # limits that random texts reach
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.from_directory(MODEL),
    "bytes": byte_tokenizer,
}


def brute_force(tokens: Sequence[int]) -> Repetition | None:
    """Brute force: check every pattern at every token."""
    runs = [0] * (repetition.PATTERN_LIMITS[-1][0] + 1)
    for i, token in enumerate(tokens):
        for pattern in range(1, min(i, len(runs) - 1) + 1):
            runs[pattern] = runs[pattern] + 1 if tokens[i - pattern] == token else 0
        for longest, enough in repetition.PATTERN_LIMITS:
            for pattern in range(1, longest + 1):
                if runs[pattern] >= enough:
                    return Repetition(i + 1, pattern)
    return None


def detect(tokens: Sequence[int], sizes: Sequence[int] = (1,)) -> Repetition | None:
    """The detector's result, fed with runs of these sizes in turn."""
    detector, fed = RepetitionDetector(), 0
    for size in cycle(sizes):
        run = tokens[fed : fed + size]
        expected = detector.peek(run)
        found = detector.feed(run)
        assert found == expected, "peek() must equal feed() and change nothing"
        if found is not None:
            return Repetition(fed + found.num_tokens, found.pattern_len)
        fed += size
        if fed >= len(tokens):
            return None
    return None


def looping(pattern: int, preamble: int, length: int, seed: int) -> list[int]:
    """Random tokens, then one repeated pattern."""
    chance = random.Random(seed)
    words = [chance.randrange(chance.choice((2, 40, 50_000))) for _ in range(pattern)]
    start = [chance.randrange(50_000) for _ in range(preamble)]
    return start + [words[i % pattern] for i in range(length)]


@pytest.mark.parametrize("preamble", [0, 1, 131, 1000])
def test_pattern_is_detected_at_its_last_allowed_token(preamble: int) -> None:
    for pattern in range(1, 129):
        found = detect(looping(pattern, preamble, 600, seed=pattern), (1, 4, 2, 9))
        assert found is not None and found.num_tokens <= preamble + pattern + 256, pattern
        assert found.pattern_len <= pattern


@pytest.mark.parametrize(
    ("pattern", "enough"), [(129, 1024), (500, 1024), (512, 1024), (513, 4096), (2048, 4096)]
)
@pytest.mark.parametrize("preamble", [0, 700, 9000])
def test_long_patterns_have_higher_limits(pattern: int, enough: int, preamble: int) -> None:
    tokens = [*range(100_000, 100_000 + preamble), *(i % pattern for i in range(10_000))]
    assert detect(tokens, (3, 64)) == Repetition(preamble + pattern + enough, pattern)


def test_pattern_above_all_limits_is_ignored() -> None:
    assert detect([i % 2049 for i in range(9000)], (50,)) is None


def test_one_token_below_the_limit_is_allowed() -> None:
    for pattern in (1, 2, 127, 128):
        tokens = [i % pattern for i in range(pattern + 255)]
        assert detect([*tokens, 7777, *tokens]) is None
        assert detect([*tokens, 255 % pattern]) == Repetition(pattern + 256, pattern)


@given(seed=st.integers(0, 10_000), preamble=st.integers(0, 600), pattern=st.integers(1, 140))
@settings(max_examples=examples(6))
def test_detector_matches_the_definition(seed: int, preamble: int, pattern: int) -> None:
    tokens = looping(pattern, preamble, 450, seed)
    assert detect(tokens) == brute_force(tokens)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=17), st.integers(1, 9)), max_size=9),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
@settings(max_examples=examples(300))
def test_nested_loops_match_the_definition(parts: list[tuple[list[int], int]], sizes: list[int]) -> None:
    """Small limits, so that patterns start and break off often; fed in runs of any size."""
    tokens = [token for words, times in parts for token in words * times] or [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "PATTERN_LIMITS", SMALL)
        expected = brute_force(tokens)
        assert detect(tokens) == expected
        assert detect(tokens, sizes) == expected


def test_unaligned_equal_bytes_are_no_pattern() -> None:
    """The bytes repeat every 6, which is no multiple of the token size: three tokens are 12 bytes."""
    tokens = [0x00030002, 0x00010003, 0x00020001]
    for order in (tokens, tokens[::-1]):
        assert detect(order * 100) == Repetition(259, 3)


def test_detector_memory_is_bounded() -> None:
    detector, chance = RepetitionDetector(), random.Random(0)
    for _ in range(300):
        assert detector.feed([chance.randrange(9) for _ in range(100)]) is None
        assert len(detector._tail) <= sum(PATTERN_LIMITS[-1]) + 1024


def test_checks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if each pattern breaks off at the last allowed token."""
    checks: list[int] = []
    repeating = RepetitionDetector._longest_run

    def counted(self: RepetitionDetector, longest: int, enough: int) -> tuple[int, int]:
        checks.append(longest)
        return repeating(self, longest, enough)

    monkeypatch.setattr(RepetitionDetector, "_longest_run", counted)
    for block in ([7] * 256, [1, 2] * 128, list(range(128)) * 2, [*range(100), *range(28)] * 2):
        tokens = [token for start in range(200) for token in [*block, 1000 + start]]
        checks.clear()
        assert detect(tokens, (3,)) is None
        # each check runs twice here, in peek() and feed(), and reads 2 * max_pattern tokens
        assert sum(2 * longest for longest in checks) <= 2 * len(PATTERN_LIMITS) * 4 * len(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_legitimate_repetition_is_not_detected(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    alarms = []
    for number in range(NUM_SAMPLES):
        kind, text = sample(number)
        if found := detect(tokenizer.encode(text, add_special_tokens=False), (16,)):
            alarms.append((number, kind, found))
    assert not alarms


@pytest.mark.parametrize("name", TOKENIZERS)
def test_endless_repetition_is_detected(name: str) -> None:
    """The elements of the samples are detected if they repeat endlessly."""
    tokenizer = TOKENIZERS[name]()
    for text in ("0, ", "-", "| yes | 0 | ok |\n", "O river stone, O lantern!\n", "    pass\n", "AAAA"):
        assert detect(tokenizer.encode("It says: " + text * 400, add_special_tokens=False), (16,)), text
