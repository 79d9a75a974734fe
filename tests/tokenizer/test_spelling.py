"""Tokens are found by what stands in them."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.tokenizer.tokenizer import TokenSearch

TOKENS = st.lists(st.text("ab\n", max_size=5).map(str.encode), max_size=30)


@given(TOKENS, st.text("ab\n", min_size=1, max_size=3).map(str.encode))
def test_all_and_none_but_those(tokens: list[bytes], part: bytes) -> None:
    spelling = TokenSearch(tokens)
    for _ in range(2):
        assert list(spelling.containing(part)) == [i for i, token in enumerate(tokens) if part in token]
    assert list(spelling.ending_with(part)) == [i for i, token in enumerate(tokens) if token.endswith(part)]
