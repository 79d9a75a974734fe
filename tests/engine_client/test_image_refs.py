"""The images that an engine has, and when it drops them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.messages import AddImage, DropImage
from foreword.engine_client.resume import ImageRefs


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def request_with_images(name: str, numbers: Sequence[int]) -> Request:
    images = [
        PromptImage(digest(n), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", index)
        for index, n in enumerate(numbers)
    ]
    return Request(name, (1,) * len(numbers), SamplingParams(), 0, images=tuple(images))


def test_pixels_are_sent_once_for_all_choices() -> None:
    refs, choices = ImageRefs(), [request_with_images(f"x-{seed}", [1, 2, 1]) for seed in range(8)]
    for choice in choices:
        refs.add(choice)
    messages = [message for choice in choices for message in refs.to_messages(choice)]
    assert messages[:2] == [AddImage(digest(1), b"abc"), AddImage(digest(2), b"abc")] and len(messages) == 10
    assert all(image.pixels is None for request in messages[2:] for image in request.images)  # type: ignore[union-attr]
    for choice in choices[:-1]:
        refs.remove(choice)
    assert refs.pop_released() == []
    refs.remove(choices[-1])
    assert sorted(drop.digest for drop in refs.pop_released()) == [digest(1), digest(2)]
    assert refs.pop_released() == []


def test_new_engine_gets_the_images_again() -> None:
    refs, request = ImageRefs(), request_with_images("a", [1])
    refs.add(request)
    assert len(refs.to_messages(request)) == len(refs.to_messages(request)) + 1 == 2
    refs.reset()
    assert refs.to_messages(request)[0] == AddImage(digest(1), b"abc")


def test_request_without_images_is_sent_unchanged() -> None:
    request, refs = request_with_images("a", []), ImageRefs()
    refs.add(request)
    assert refs.to_messages(request)[0] is request
    refs.remove(request)


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3)), st.booleans()), max_size=40))
def test_engine_has_the_images_of_open_requests(moves: list[tuple[int, set[int], bool]]) -> None:
    """Requests come and end in any order, and engines crash; drops precede additions."""
    refs, open_requests, held = ImageRefs(), dict[int, Request](), set[bytes]()
    for number, images, crashes in moves:
        if crashes:
            refs.reset()
            held = set()
            _send(refs, list(open_requests.values()), held)
        elif number in open_requests:
            refs.remove(open_requests.pop(number))
        else:
            open_requests[number] = request_with_images(str(number), sorted(images))
            refs.add(open_requests[number])
            _send(refs, [open_requests[number]], held)
        assert all(image.digest in held for request in open_requests.values() for image in request.images)
    for request in open_requests.values():
        refs.remove(request)
    _send(refs, [], held)
    assert not held


def _send(refs: ImageRefs, requests: Sequence[Request], held: set[bytes]) -> None:
    added = [message for request in requests for message in refs.to_messages(request)]
    for message in [*refs.pop_released(), *added]:
        if isinstance(message, AddImage):
            assert message.digest not in held, "sent twice"
            held.add(message.digest)
        elif isinstance(message, DropImage):
            held.remove(message.digest)
