"""Pictures of requests, from where they are to what the engine wants.

Where a picture of a request is.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.images import PromptImage
from foreword.multimodal.base import ImageProcessor
from foreword.multimodal.decode_pool import ImageDecodePool
from foreword.multimodal.fetch import Fetcher, ImageSource
from foreword.multimodal.limits import MediaLimits

__all__ = ["ImageLoader"]


class ImageLoader:
    """Of all requests for one model. May be used from any thread; each call blocks its own."""

    def __init__(self, processor: ImageProcessor, limits: MediaLimits) -> None:
        self._fetcher = Fetcher(limits)
        self._workers = ImageDecodePool(processor, limits)

    def load(self, sources: Sequence[ImageSource]) -> list[PromptImage]:
        """In their order, one after the other: only one file of a request is held at a time.

        Raises InvalidRequest, which names the field and says why; Overloaded if too many wait for a worker, RequestFailed if
        there is none.
        """
        return [self.preprocess(self.fetch(source), source.where) for source in sources]

    def fetch(self, source: ImageSource) -> bytes:
        """The file, as it is. Raises as read()."""
        return self._fetcher.fetch(source)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        """Bytes that the pixels of a file take, as its head says; a picture that is to be turned may take others. Raises as
        read()."""
        return self._workers.pixel_bytes(data, where)

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        """From the bytes of a file. Raises as read()."""
        return self._workers.preprocess(data, where)

    def close(self) -> None:
        """End what was started; calls that wait fail."""
        self._fetcher.close()
        self._workers.close()
