"""Which pictures an engine has got, and when it is to forget them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.inflight import ImageRefs
from foreword.engine_client.messages import AddImage, DropImage


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def showing(name: str, numbers: Sequence[int]) -> Request:
    pictures = [
        PromptImage(digest(n), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", place)
        for place, n in enumerate(numbers)
    ]
    return Request(name, (1,) * len(numbers), SamplingParams(), 0, images=tuple(pictures))


def test_pixels_are_shown_once_however_many_choices_have_them() -> None:
    gallery, choices = ImageRefs(), [showing(f"x-{seed}", [1, 2, 1]) for seed in range(8)]
    for choice in choices:
        gallery.add(choice)
    messages = [message for choice in choices for message in gallery.to_messages(choice)]
    assert messages[:2] == [AddImage(digest(1), b"abc"), AddImage(digest(2), b"abc")] and len(messages) == 10
    assert all(picture.pixels is None for one in messages[2:] for picture in one.images)  # type: ignore[union-attr]
    for choice in choices[:-1]:
        gallery.remove(choice)
    assert gallery.pop_released() == []
    gallery.remove(choices[-1])
    assert (
        sorted(one.digest for one in gallery.pop_released()) == [digest(1), digest(2)]
        and gallery.pop_released() == []
    )


def test_the_next_engine_is_shown_them_again() -> None:
    gallery, one = ImageRefs(), showing("a", [1])
    gallery.add(one)
    assert len(gallery.to_messages(one)) == len(gallery.to_messages(one)) + 1 == 2
    gallery.reset()
    assert gallery.to_messages(one)[0] == AddImage(digest(1), b"abc")


def test_a_request_without_pictures_is_handed_over_as_it_is() -> None:
    request = showing("a", [])
    gallery = ImageRefs()
    gallery.add(request)
    assert gallery.to_messages(request)[0] is request
    gallery.remove(request)


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3)), st.booleans()), max_size=40))
def test_an_engine_always_has_what_it_needs_and_in_the_end_nothing(
    moves: list[tuple[int, set[int], bool]],
) -> None:
    """Requests come and end in any order, and engines die; what is forgotten is told before what is shown."""
    gallery, live, shown = ImageRefs(), dict[int, Request](), set[bytes]()
    for number, pictures, dies in moves:
        if dies:
            gallery.reset()
            shown = set()
            _hand_over(gallery, list(live.values()), shown)
        elif number in live:
            gallery.remove(live.pop(number))
        else:
            live[number] = showing(str(number), sorted(pictures))
            gallery.add(live[number])
            _hand_over(gallery, [live[number]], shown)
        assert all(picture.digest in shown for request in live.values() for picture in request.images)
    for request in live.values():
        gallery.remove(request)
    _hand_over(gallery, [], shown)
    assert not shown


def _hand_over(gallery: ImageRefs, requests: Sequence[Request], shown: set[bytes]) -> None:
    for message in [
        *gallery.pop_released(),
        *(message for request in requests for message in gallery.to_messages(request)),
    ]:
        if isinstance(message, AddImage):
            assert message.digest not in shown, "shown twice"
            shown.add(message.digest)
        elif isinstance(message, DropImage):
            shown.remove(message.digest)
