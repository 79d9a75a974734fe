"""Which pictures an engine has got, and when it is to forget them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.pictures import Picture
from foreword.core.request import Request
from foreword.engine.gallery import Gallery
from foreword.engine.messages import Forget, Show


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def showing(name: str, numbers: Sequence[int]) -> Request:
    pictures = [Picture(digest(n), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", place) for place, n in enumerate(numbers)]
    return Request(name, (1,) * len(numbers), SamplingParams(), 0, pictures=tuple(pictures))


def test_pixels_are_shown_once_however_many_choices_have_them() -> None:
    gallery, choices = Gallery(), [showing(f"x-{seed}", [1, 2, 1]) for seed in range(8)]
    for choice in choices:
        gallery.add(choice)
    messages = [message for choice in choices for message in gallery.messages(choice)]
    assert messages[:2] == [Show(digest(1), b"abc"), Show(digest(2), b"abc")] and len(messages) == 10
    assert all(picture.pixels is None for one in messages[2:] for picture in one.pictures)  # type: ignore[union-attr]
    for choice in choices[:-1]:
        gallery.remove(choice)
    assert gallery.forgotten() == []
    gallery.remove(choices[-1])
    assert sorted(one.digest for one in gallery.forgotten()) == [digest(1), digest(2)] and gallery.forgotten() == []


def test_the_next_engine_is_shown_them_again() -> None:
    gallery, one = Gallery(), showing("a", [1])
    gallery.add(one)
    assert len(gallery.messages(one)) == len(gallery.messages(one)) + 1 == 2
    gallery.died()
    assert gallery.messages(one)[0] == Show(digest(1), b"abc")


def test_a_request_without_pictures_is_handed_over_as_it_is() -> None:
    request = showing("a", [])
    gallery = Gallery()
    gallery.add(request)
    assert gallery.messages(request)[0] is request
    gallery.remove(request)


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3)), st.booleans()), max_size=40))
def test_an_engine_always_has_what_it_needs_and_in_the_end_nothing(moves: list[tuple[int, set[int], bool]]) -> None:
    """Requests come and end in any order, and engines die; what is forgotten is told before what is shown."""
    gallery, live, shown = Gallery(), dict[int, Request](), set[bytes]()
    for number, pictures, dies in moves:
        if dies:
            gallery.died()
            shown = set()
            _hand_over(gallery, list(live.values()), shown)
        elif number in live:
            gallery.remove(live.pop(number))
        else:
            live[number] = showing(str(number), sorted(pictures))
            gallery.add(live[number])
            _hand_over(gallery, [live[number]], shown)
        assert all(picture.digest in shown for request in live.values() for picture in request.pictures)
    for request in live.values():
        gallery.remove(request)
    _hand_over(gallery, [], shown)
    assert not shown


def _hand_over(gallery: Gallery, requests: Sequence[Request], shown: set[bytes]) -> None:
    for message in [*gallery.forgotten(), *(message for request in requests for message in gallery.messages(request))]:
        if isinstance(message, Show):
            assert message.digest not in shown, "shown twice"
            shown.add(message.digest)
        elif isinstance(message, Forget):
            shown.remove(message.digest)
