"""RequestState."""

import pytest

from tests.core.test_finish import state_of


def test_resumed_tokens_are_output() -> None:
    state = state_of(delivered=(7, 7))
    state.append([7, 1])
    assert state.num_output == 4


def test_complete_request_is_refused() -> None:
    with pytest.raises(AssertionError):
        state_of(max_tokens=2, delivered=(5, 6))
    with pytest.raises(AssertionError):
        state_of(max_model_len=3)
