"""RequestState and the end of its output: stop ids, limits and repetition."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core import finish
from foreword.core.finish import PATTERN_LIMITS, FinishResult, Repetition, RepetitionDetector
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
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


def state_of(max_model_len: int = 100, delivered: tuple[int, ...] = (), **params: object) -> RequestState:
    return RequestState(
        Request("a", (1, 2, 3), SamplingParams(**params), 0, (9,), resume_output_ids=delivered),
        0,
        max_model_len,
    )  # type: ignore[arg-type]


def test_resumed_tokens_are_output() -> None:
    state = state_of(delivered=(7, 7))
    state.append([7, 1])
    assert state.num_output == 4


def test_complete_request_is_refused() -> None:
    with pytest.raises(AssertionError):
        state_of(max_tokens=2, delivered=(5, 6))
    with pytest.raises(AssertionError):
        state_of(max_model_len=3)


def test_the_earliest_token_decides() -> None:
    for params, run, ending in [
        ({}, [5, 6], (2, None, None)),
        ({}, [5, 9, 6], (2, "stop", 9)),
        ({"ignore_eos": True}, [5, 9, 6], (3, None, None)),
        ({"ignore_eos": True, "stop_token_ids": (6,)}, [5, 9, 6, 6], (3, "stop", 6)),
        ({"max_tokens": 2}, [5, 6, 7], (2, "length", None)),
        ({"max_tokens": 2}, [5, 9], (2, "stop", 9)),
        ({"max_tokens": 2}, [5, 6, 9], (2, "length", None)),
        ({"max_tokens": 50, "max_model_len": 5}, [5, 6, 7], (2, "length", None)),
    ]:
        assert state_of(**params).check_finish(run) == FinishResult(*ending)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(0, 10), min_size=1, max_size=12),
    st.integers(1, 12),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_finish_does_not_depend_on_run_sizes(tokens: list[int], max_tokens: int, sizes: list[int]) -> None:
    """Run lengths never change where a request finishes."""
    single, burst = state_of(max_tokens=max_tokens), state_of(max_tokens=max_tokens)
    assert _follow(single, [[token] for token in tokens]) == _follow(burst, _runs(tokens, sizes))


def _runs(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    runs = []
    for size in sizes:
        runs.append(tokens[:size])
        tokens = tokens[size:]
    return [run for run in runs if run]


def _follow(state: RequestState, runs: list[list[int]]) -> tuple[list[int], str | None]:
    for run in runs:
        end = state.check_finish(run)
        state.append(run[: end.num_kept])
        if end.finish_reason:
            return state.tokens, end.finish_reason
    return state.tokens, None


# Repetition


def repeating_state(mode: str | None, delivered: Sequence[int] = (), **params: object) -> RequestState:
    request = Request(
        "a", (1, 2, 3), SamplingParams(on_runaway=mode, **params), 0, (9,), resume_output_ids=tuple(delivered)
    )  # type: ignore[arg-type]
    return RequestState(request, 0, 5000)


def run_request(
    state: RequestState, tokens: Sequence[int], size: int
) -> tuple[int, str | None, list[tuple[int, int]]]:
    """(output tokens, finish reason, reports of (tokens so far, pattern))"""
    reported = []
    for start in range(0, len(tokens), size):
        end = state.check_finish(tokens[start : start + size])
        assert state.check_finish(tokens[start : start + size]) == end, (
            "check_finish() must not change the state"
        )
        if end.repetition:
            reported.append((state.num_output + end.repetition.num_tokens, end.repetition.pattern_len))
        state.append(tokens[start : start + end.num_kept])
        if end.finish_reason:
            return state.num_output, end.finish_reason, reported
    return state.num_output, None, reported


LOOP = [5, 6, 7] * 400


@pytest.mark.parametrize("size", [1, 2, 5, 16, 300])
def test_stop_ends_at_the_same_token_for_any_run_size(size: int) -> None:
    assert run_request(repeating_state("stop"), LOOP, size) == (259, "repetition", [(259, 3)])


@pytest.mark.parametrize("size", [1, 2, 5, 16, 300])
def test_warn_reports_once_and_continues(size: int) -> None:
    assert run_request(repeating_state("warn"), LOOP + [1] * 600, size) == (1800, None, [(259, 3)])


@pytest.mark.parametrize("mode", ["off", None])
def test_off_has_no_detector(mode: str | None) -> None:
    state = repeating_state(mode)
    assert not state.finish_checker.detects_repetition
    assert run_request(state, LOOP, 7) == (1200, None, [])


@pytest.mark.parametrize("known", [1, 100, 255, 258])
@pytest.mark.parametrize("size", [1, 9])
def test_resumed_output_counts_for_repetition(known: int, size: int) -> None:
    """A restarted engine finishes at the same token."""
    resumed = repeating_state("stop", LOOP[:known])
    assert run_request(resumed, LOOP[known:], size) == (259, "repetition", [(259, 3)])


def test_repetition_is_not_reported_again_after_restart() -> None:
    assert run_request(repeating_state("warn", LOOP[:300]), LOOP[300:], 4) == (1200, None, [])


@pytest.mark.parametrize("size", [1, 8])
def test_the_earliest_token_decides_about_repetition(size: int) -> None:
    assert run_request(repeating_state("stop"), [*LOOP[:257], 9, *LOOP], size) == (258, "stop", [])
    assert run_request(repeating_state("stop", max_tokens=258), LOOP, size) == (258, "length", [])
    assert run_request(repeating_state("stop", max_tokens=259), LOOP, size) == (259, "length", [(259, 3)])
    assert run_request(repeating_state("stop", max_tokens=260), LOOP, size) == (259, "repetition", [(259, 3)])
    assert run_request(repeating_state("warn", max_tokens=262), LOOP, size) == (262, "length", [(259, 3)])


def test_stop_id_before_the_repetition_wins() -> None:
    assert repeating_state("stop").check_finish([5, 9, 5]) == FinishResult(2, "stop", 9)


def test_embedding_request_has_no_detector() -> None:
    request = Request("a", (1, 2), SamplingParams(on_runaway="stop"), 0, pooling="last")
    assert not RequestState(request, 0, 100).finish_checker.detects_repetition


def brute_force(tokens: Sequence[int]) -> Repetition | None:
    """Brute force: check every pattern at every token."""
    runs = [0] * (finish.PATTERN_LIMITS[-1][0] + 1)
    for i, token in enumerate(tokens):
        for pattern in range(1, min(i, len(runs) - 1) + 1):
            runs[pattern] = runs[pattern] + 1 if tokens[i - pattern] == token else 0
        for longest, enough in finish.PATTERN_LIMITS:
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


def test_long_patterns_have_higher_limits() -> None:
    for pattern, enough in [(129, 1024), (500, 1024), (512, 1024), (513, 4096), (2048, 4096)]:
        for preamble in [0, 700, 9000]:
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
        patch.setattr(finish, "PATTERN_LIMITS", SMALL)
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
