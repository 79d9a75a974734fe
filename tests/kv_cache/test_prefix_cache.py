"""Names of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.kv_cache.prefix_cache import extend_hashes

PLACEHOLDER = 9


def picture(digest: int, start: int, num_tokens: int = 6) -> PromptImage:
    return PromptImage(
        bytes([digest]) * 16, num_tokens, (1, 1, num_tokens), (1, 1), (1, 3, 1, 1), None, start
    )


def names(
    tokens: Sequence[int], pictures: Sequence[PromptImage] = (), tenant: str = "", size: int = 4
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, size, tenant, pictures)
    return hashes


TOKENS = [1, 2, 3, *[PLACEHOLDER] * 6, 4, 5, *[PLACEHOLDER] * 6, 6, 7, 8, 1, 2, 3, 4]
ONE, TWO = picture(1, 3), picture(2, 11)


def test_names_do_not_change_as_tokens_come() -> None:
    hashes: list[bytes] = []
    for length in range(len(TOKENS) + 1):
        extend_hashes(hashes, TOKENS[:length], 4, "", (ONE, TWO))
        assert len(hashes) == length // 4
    assert hashes == names(TOKENS, (ONE, TWO))


def test_what_is_seen_names_a_block_and_all_behind_it() -> None:
    plain = names(TOKENS, (ONE, TWO))
    assert len(set(plain)) == len(TOKENS) // 4 == 6
    other_second = names(TOKENS, (ONE, picture(3, 11)))
    assert other_second[:2] == plain[:2] and not set(other_second[2:]) & set(plain)
    for others in ((), (picture(2, 3), picture(1, 11)), (picture(3, 3), TWO)):
        assert not set(names(TOKENS, others)) & set(plain), (
            "the first block holds a token of the first picture"
        )
    assert not set(names(TOKENS, (ONE, TWO), "tenant")) & set(plain)


def test_the_part_of_a_picture_is_told_too() -> None:
    """A block full of placeholders: its first four, or its last four."""
    tokens = [PLACEHOLDER] * 6
    early, late = names(tokens, (picture(1, 0),)), names(tokens, (picture(1, -2, 8),))
    assert early != late


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3)), max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3)), max_size=4),
    st.integers(1, 5),
)
def test_equal_names_mean_equal_beginnings(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], size: int
) -> None:
    """Prompts of pictures (which, length, text behind): a name is shared only as far as everything before is the same."""
    both = [_seen(first), _seen(second)]
    hashes = [names([PLACEHOLDER if one else 0 for one in seen], shown, size=size) for seen, shown in both]
    for index, (one, two) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * size
        assert (one == two) == (both[0][0][:end] == both[1][0][:end])


def _seen(parts: Sequence[tuple[int, int, int]]) -> tuple[list[tuple[int, int] | None], list[PromptImage]]:
    """Per token, which picture and where in it; and the pictures."""
    seen: list[tuple[int, int] | None] = []
    shown: list[PromptImage] = []
    for which, length, text in parts:
        shown.append(picture(which, len(seen), length))
        seen += [(which, place) for place in range(length)] + [None] * text
    return seen, shown
