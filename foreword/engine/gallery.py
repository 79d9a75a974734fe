"""Which pictures open requests have, and which of them the engine that lives now was shown. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from foreword.core.request import Request
from foreword.engine.messages import Forget, Show

__all__ = ["Gallery"]


class Gallery:
    """Pixels go to an engine once, however many requests have a picture, and stay there until the last of these has ended."""

    __slots__ = ("_forgotten", "_holders", "_shown")

    def __init__(self) -> None:
        self._holders: Counter[bytes] = Counter()
        self._shown: set[bytes] = set()
        self._forgotten: list[bytes] = []

    def add(self, request: Request) -> None:
        """A request is open."""
        self._holders.update({picture.digest for picture in request.pictures})

    def remove(self, request: Request) -> None:
        """It is open no more."""
        for digest in {picture.digest for picture in request.pictures}:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                if digest in self._shown:
                    self._shown.remove(digest)
                    self._forgotten.append(digest)

    def died(self) -> None:
        """The next engine has seen nothing."""
        self._shown.clear()
        self._forgotten.clear()

    def messages(self, request: Request) -> list[Show | Request]:
        """How a request is handed over: pictures that are new to the engine, and then itself without any pixels."""
        if not request.pictures:
            return [request]
        new = {one.digest: one.pixels for one in request.pictures if one.pixels is not None and one.digest not in self._shown}
        self._shown.update(new)
        shows = [Show(digest, pixels) for digest, pixels in new.items()]
        return [*shows, replace(request, pictures=tuple(picture.bare() for picture in request.pictures))]

    def forgotten(self) -> list[Forget]:
        """What the engine is to forget, told once, and before anything else is handed over."""
        forgotten, self._forgotten = self._forgotten, []
        return [Forget(digest) for digest in forgotten]
