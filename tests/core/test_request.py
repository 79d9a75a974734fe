"""RequestState."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState


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
