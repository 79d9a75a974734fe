"""Hashes of blocks with images."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.kv_cache.prefix_cache import extend_hashes

PLACEHOLDER = 9


def image(digest: int, start: int, num_tokens: int = 6) -> PromptImage:
    return PromptImage(
        bytes([digest]) * 16, num_tokens, (1, 1, num_tokens), (1, 1), (1, 3, 1, 1), None, start
    )


def hash_blocks(
    tokens: Sequence[int], images: Sequence[PromptImage] = (), cache_salt: str = "", size: int = 4
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, size, cache_salt, images)
    return hashes


TOKENS = [1, 2, 3, *[PLACEHOLDER] * 6, 4, 5, *[PLACEHOLDER] * 6, 6, 7, 8, 1, 2, 3, 4]
ONE, TWO = image(1, 3), image(2, 11)


def test_hashes_are_stable_while_tokens_are_appended() -> None:
    hashes: list[bytes] = []
    for length in range(len(TOKENS) + 1):
        extend_hashes(hashes, TOKENS[:length], 4, "", (ONE, TWO))
        assert len(hashes) == length // 4
    assert hashes == hash_blocks(TOKENS, (ONE, TWO))


def test_token_changes_the_hashes_from_its_block_on() -> None:
    """One bit of one token, at both ends of a block."""
    plain = hash_blocks(TOKENS)
    for index in (4, 7):
        for bit in (0, 40):
            other = [*TOKENS[:index], TOKENS[index] ^ 1 << bit, *TOKENS[index + 1 :]]
            changed = hash_blocks(other)
            assert changed[:1] == plain[:1] and not set(changed[1:]) & set(plain)


def test_image_changes_the_hashes_from_its_block_on() -> None:
    plain = hash_blocks(TOKENS, (ONE, TWO))
    assert len(set(plain)) == len(TOKENS) // 4 == 6
    other_second = hash_blocks(TOKENS, (ONE, image(3, 11)))
    assert other_second[:2] == plain[:2] and not set(other_second[2:]) & set(plain)
    for others in ((), (image(2, 3), image(1, 11)), (image(3, 3), TWO)):
        assert not set(hash_blocks(TOKENS, others)) & set(plain), (
            "the first block holds a token of the first image"
        )
    assert not set(hash_blocks(TOKENS, (ONE, TWO), "tenant")) & set(plain)


def test_hash_covers_the_part_of_an_image() -> None:
    """A block of placeholders: the first four of an image, or the last four."""
    tokens = [PLACEHOLDER] * 6
    early, late = hash_blocks(tokens, (image(1, 0),)), hash_blocks(tokens, (image(1, -2, 8),))
    assert early != late


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3)), max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3)), max_size=4),
    st.integers(1, 5),
)
def test_equal_hashes_mean_equal_prefixes(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], size: int
) -> None:
    """Prompts of images (number, length, text after): hashes are equal exactly as far as the prefixes are."""
    both = [_layout(first), _layout(second)]
    hashes = [
        hash_blocks([PLACEHOLDER if one else 0 for one in sources], images, size=size)
        for sources, images in both
    ]
    for index, (one, two) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * size
        assert (one == two) == (both[0][0][:end] == both[1][0][:end])


def _layout(parts: Sequence[tuple[int, int, int]]) -> tuple[list[tuple[int, int] | None], list[PromptImage]]:
    """For each token its image and the offset in it; and the images."""
    sources: list[tuple[int, int] | None] = []
    images: list[PromptImage] = []
    for which, length, text in parts:
        images.append(image(which, len(sources), length))
        sources += [(which, place) for place in range(length)] + [None] * text
    return sources, images
