"""RequestState: where a run of tokens finishes a request."""

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


def test_resumed_tokens_are_output() -> None:
    state = state_of(delivered=(7, 7))
    state.append([7, 1])
    assert state.num_output == 4


def test_complete_request_is_refused() -> None:
    with pytest.raises(AssertionError):
        state_of(max_tokens=2, delivered=(5, 6))
    with pytest.raises(AssertionError):
        state_of(max_model_len=3)
