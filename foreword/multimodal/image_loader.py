"""Loads the images of requests: fetches files and preprocesses them."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.images import PromptImage
from foreword.multimodal.decode_pool import ImageDecodePool
from foreword.multimodal.fetch import Fetcher
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.image_source import ImageSource
from foreword.multimodal.limits import MediaLimits


class ImageLoader:
    """Loads images for one model. Thread-safe; each call blocks its thread."""

    def __init__(self, processor: ImageProcessor, limits: MediaLimits) -> None:
        self._fetcher = Fetcher(limits)
        self._decode_pool = ImageDecodePool(processor, limits)

    def load(self, sources: Sequence[ImageSource]) -> list[PromptImage]:
        """Load images one by one, so that one file of a request is in memory at a time.

        Raises InvalidRequest, which names the field and the reason; Overloaded if no worker is free in time;
        RequestFailed if no worker starts; ShuttingDown after `close`.
        """
        return [self.preprocess(self.fetch(source), source.where) for source in sources]

    def fetch(self, source: ImageSource) -> bytes:
        """The bytes of the image's file. Raises as `load`."""
        return self._fetcher.fetch(source)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        """`ImageDecodePool.pixel_bytes`."""
        return self._decode_pool.pixel_bytes(data, where)

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        """`ImageDecodePool.preprocess`."""
        return self._decode_pool.preprocess(data, where)

    def close(self) -> None:
        """Stop downloads and workers; pending calls raise ShuttingDown."""
        self._fetcher.close()
        self._decode_pool.close()
