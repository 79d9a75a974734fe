"""The end of an output: stop ids, limits and repetition."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.finish import FinishResult
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState


def state_of(max_model_len: int = 100, delivered: tuple[int, ...] = (), **params: object) -> RequestState:
    return RequestState(
        Request("a", (1, 2, 3), SamplingParams(**params), 0, (9,), resume_output_ids=delivered),
        0,
        max_model_len,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "run", "ending"),
    [
        ({}, [5, 6], (2, None, None)),
        ({}, [5, 9, 6], (2, "stop", 9)),
        ({"ignore_eos": True}, [5, 9, 6], (3, None, None)),
        ({"ignore_eos": True, "stop_token_ids": (6,)}, [5, 9, 6, 6], (3, "stop", 6)),
        ({"max_tokens": 2}, [5, 6, 7], (2, "length", None)),
        ({"max_tokens": 2}, [5, 9], (2, "stop", 9)),
        ({"max_tokens": 2}, [5, 6, 9], (2, "length", None)),
        ({"max_tokens": 50, "max_model_len": 5}, [5, 6, 7], (2, "length", None)),
    ],
)
def test_the_earliest_token_decides(
    params: dict[str, object], run: list[int], ending: tuple[object, ...]
) -> None:
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
