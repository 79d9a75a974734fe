"""Which pictures open requests have, and which of them the engine that lives now was shown. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from foreword.core.request import Request
from foreword.engine.messages import DropImage, AddImage

__all__ = ["ImageRefs"]


class ImageRefs:
    """Pixels go to an engine once, however many requests have a picture, and stay there until the last of these has ended."""

    __slots__ = ("_released", "_ref_counts", "_sent")

    def __init__(self) -> None:
        self._ref_counts: Counter[bytes] = Counter()
        self._sent: set[bytes] = set()
        self._released: list[bytes] = []

    def add(self, request: Request) -> None:
        """A request is open."""
        self._ref_counts.update({picture.digest for picture in request.images})

    def remove(self, request: Request) -> None:
        """It is open no more."""
        for digest in {picture.digest for picture in request.images}:
            self._ref_counts[digest] -= 1
            if not self._ref_counts[digest]:
                del self._ref_counts[digest]
                if digest in self._sent:
                    self._sent.remove(digest)
                    self._released.append(digest)

    def reset(self) -> None:
        """The next engine has seen nothing."""
        self._sent.clear()
        self._released.clear()

    def to_messages(self, request: Request) -> list[AddImage | Request]:
        """How a request is handed over: pictures that are new to the engine, and then itself without any pixels."""
        if not request.images:
            return [request]
        new = {one.digest: one.pixels for one in request.images if one.pixels is not None and one.digest not in self._sent}
        self._sent.update(new)
        shows = [AddImage(digest, pixels) for digest, pixels in new.items()]
        return [*shows, replace(request, images=tuple(picture.without_pixels() for picture in request.images))]

    def pop_released(self) -> list[DropImage]:
        """What the engine is to forget, told once, and before anything else is handed over."""
        forgotten, self._released = self._released, []
        return [DropImage(digest) for digest in forgotten]
