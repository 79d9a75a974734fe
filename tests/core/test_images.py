"""Placeholders of a prompt and the pictures that they stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage, expand_placeholders

PLACEHOLDER = 9


def picture(num_tokens: int, digest: bytes = b"") -> PromptImage:
    return PromptImage(digest, num_tokens, (1, 1, num_tokens), (4, 2), (1, 3, 4, 2), bytes(24))


@given(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4), st.data())
def test_placed(texts: list[list[int]], data: st.DataObject) -> None:
    """Every picture has its run of placeholders where its one placeholder stood; the text is what it was."""
    pictures = [picture(data.draw(st.integers(1, 5)), bytes([number])) for number in range(len(texts) - 1)]
    prompt = [*texts[0], *(token_id for text in texts[1:] for token_id in (PLACEHOLDER, *text))]
    ids, found = expand_placeholders(prompt, PLACEHOLDER, pictures)
    assert [one.digest for one in found] == [one.digest for one in pictures]
    covered = [index for one in found for index in range(one.start, one.end)]
    assert [index for index, token_id in enumerate(ids) if token_id == PLACEHOLDER] == covered
    assert [token_id for token_id in ids if token_id != PLACEHOLDER] == [
        token_id for text in texts for token_id in text
    ]


def test_a_picture_too_many() -> None:
    with pytest.raises(AssertionError, match="without a placeholder"):
        expand_placeholders([1, PLACEHOLDER], PLACEHOLDER, [picture(2), picture(2)])


def test_bare() -> None:
    """What crosses the seam a second time has no pixels, and is the same picture."""
    one = picture(2, b"d")
    assert (
        one.without_pixels().pixels is None
        and one.without_pixels().digest == one.digest
        and one.without_pixels().without_pixels() == one.without_pixels()
    )
    assert one.num_bytes == len(one.pixels or b"") and "pixels" not in repr(one)
