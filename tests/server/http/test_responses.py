from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreword.server.http.responses import json_bytes, json_pieces

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=200)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(VALUES, st.integers(0, 4))
def test_pieces_are_the_whole(value: Any, levels: int) -> None:
    assert b"".join(json_pieces(value, levels)) == json_bytes(value)


def test_pieces_of_an_answer_are_small() -> None:
    token = {str(i): {"logprob": -1.0, "rank": i, "decoded_token": "x"} for i in range(20)}
    scored = {"tokens": ["x"] * 5000, "top_logprobs": [token] * 5000}
    answer = {"choices": [{"index": 0, "prompt_logprobs": [token] * 5000, "logprobs": scored}]}
    assert max(map(len, json_pieces(answer))) < 80 * len(json_bytes(token))
