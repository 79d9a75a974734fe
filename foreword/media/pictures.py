"""Pictures of requests, from where they are to what the engine wants."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.pictures import Picture
from foreword.media.base import Processor
from foreword.media.fetch import Fetcher
from foreword.media.limits import MediaLimits
from foreword.media.source import Source
from foreword.media.workers import Workers

__all__ = ["Pictures"]


class Pictures:
    """Of all requests for one model. May be used from any thread; each call blocks its own."""

    def __init__(self, processor: Processor, limits: MediaLimits) -> None:
        self._fetcher = Fetcher(limits)
        self._workers = Workers(processor, limits)

    def read(self, sources: Sequence[Source]) -> list[Picture]:
        """In their order, one after the other: only one file of a request is held at a time.

        Raises InvalidRequest, which names the field and says why; Overloaded if too many wait for a worker, RequestFailed if
        there is none.
        """
        return [self.prepare(self.fetch(source), source.where) for source in sources]

    def fetch(self, source: Source) -> bytes:
        """The file, as it is. Raises as read()."""
        return self._fetcher.fetch(source)

    def measure(self, data: bytes, where: str) -> int:
        """Bytes that the pixels of a file take, as its head says; a picture that is to be turned may take others. Raises as
        read()."""
        return self._workers.measure(data, where)

    def prepare(self, data: bytes, where: str) -> Picture:
        """From the bytes of a file. Raises as read()."""
        return self._workers.prepare(data, where)

    def close(self) -> None:
        """End what was started; calls that wait fail."""
        self._fetcher.close()
        self._workers.close()
