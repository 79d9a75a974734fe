"""Substring search over tokens."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.tokenizer.tokenizer import TokenSearch

TOKENS = st.lists(st.text("ab\n", max_size=5).map(str.encode), max_size=30)


@given(TOKENS, st.text("ab\n", min_size=1, max_size=3).map(str.encode))
def test_token_search_equals_a_linear_scan(tokens: list[bytes], part: bytes) -> None:
    search = TokenSearch(tokens)
    for _ in range(2):
        assert list(search.containing(part)) == [i for i, token in enumerate(tokens) if part in token]
    assert list(search.ending_with(part)) == [i for i, token in enumerate(tokens) if token.endswith(part)]
