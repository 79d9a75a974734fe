from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreword.server.http.responses import json_bytes, json_pieces

IDS = st.lists(st.integers(), max_size=200)
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | IDS | IDS.map(tuple)
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


def test_pieces_of_token_ids_are_small() -> None:
    """A conversation's are a tuple: a million of them held the interpreter's lock for 0.2 s."""
    ids = range(100_000, 110_000)
    for value in (list(ids), tuple(ids)):
        assert max(map(len, json_pieces({"tokens": value}, levels=1))) <= 64 * len("100000,")
