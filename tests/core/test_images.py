"""Images of a prompt and their placeholders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage, expand_placeholders

PLACEHOLDER = 9


def make_image(num_tokens: int, digest: bytes = b"") -> PromptImage:
    return PromptImage(digest, num_tokens, (1, 1, num_tokens), (4, 2), (1, 3, 4, 2), bytes(24))


@given(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4), st.data())
def test_expand_placeholders_keeps_the_text(texts: list[list[int]], data: st.DataObject) -> None:
    """Each placeholder becomes a run of its image's length; the text is unchanged."""
    images = [make_image(data.draw(st.integers(1, 5)), bytes([number])) for number in range(len(texts) - 1)]
    prompt = [*texts[0], *(token_id for text in texts[1:] for token_id in (PLACEHOLDER, *text))]
    ids, found = expand_placeholders(prompt, PLACEHOLDER, images)
    assert [image.digest for image in found] == [image.digest for image in images]
    covered = [index for image in found for index in range(image.start, image.end)]
    assert [index for index, token_id in enumerate(ids) if token_id == PLACEHOLDER] == covered
    assert [token_id for token_id in ids if token_id != PLACEHOLDER] == [
        token_id for text in texts for token_id in text
    ]


def test_image_without_placeholder_is_refused() -> None:
    with pytest.raises(AssertionError, match="without a placeholder"):
        expand_placeholders([1, PLACEHOLDER], PLACEHOLDER, [make_image(2), make_image(2)])


def test_without_pixels_keeps_the_rest() -> None:
    """Images sent to the engine a second time carry no pixels."""
    image = make_image(2, b"d")
    assert (
        image.without_pixels().pixels is None
        and image.without_pixels().digest == image.digest
        and image.without_pixels().without_pixels() == image.without_pixels()
    )
    assert image.num_bytes == len(image.pixels or b"") and "pixels" not in repr(image)
