"""Loads the images of requests: fetches files, and decodes and preprocesses them in worker processes.

A file that crashes a decoder fails its own request only. Replies of a worker are not trusted: no pickles;
sizes and lengths are checked; the digest is computed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

from foreword.core.images import PromptImage
from foreword.errors import InvalidRequest
from foreword.multimodal.decode import PIXELS, SIZE
from foreword.multimodal.fetch import Fetcher
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.image_source import ImageSource, MediaLimits
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool

WORKER: Final = "foreword.multimodal.decode"
MAX_REPLY_BYTES: Final = 1 << 16
NUM_WORKERS: Final = 2
DECODE_CPU_S: Final = 10.0  # CPU time to decode and preprocess one image
DECODE_WALL_S: Final = 30.0  # bounds stalls on an overloaded machine
QUEUE_TIMEOUT_S: Final = 30.0  # wait for a worker
BYTES_PER_PIXEL: Final = 24  # RGBA, and copies for rotation and compositing
WORKER_BYTES: Final = 256 << 20  # besides the pixels


class ImageLoader:
    """Loads images for one model, one per worker at a time. Thread-safe; each call blocks its thread."""

    def __init__(
        self, processor: ImageProcessor, media_limits: MediaLimits, num_workers: int = NUM_WORKERS
    ) -> None:
        self._processor = processor
        self._limits = media_limits
        self._fetcher = Fetcher(media_limits)
        pixel_bytes = BYTES_PER_PIXEL * media_limits.max_pixels
        job_limits = JobLimits(
            cpu_s=DECODE_CPU_S,
            wall_s=DECODE_WALL_S,
            num_bytes=WORKER_BYTES + media_limits.max_bytes + pixel_bytes,
            queue_timeout_s=QUEUE_TIMEOUT_S,
        )
        self._workers = WorkerPool(
            WORKER, "decode", lambda: (processor, media_limits), job_limits, num_workers
        )

    def load(self, sources: Sequence[ImageSource]) -> list[PromptImage]:
        """Load images one by one, so that one file of a request is in memory at a time.

        Raises InvalidRequest, which names the field and the reason; Overloaded if no worker is free in time
        or the machine is too busy; RequestFailed if no worker starts; ShuttingDown after `close`.
        """
        return [self.preprocess(self.fetch(source), source.where) for source in sources]

    def fetch(self, source: ImageSource) -> bytes:
        """The bytes of the image's file. Raises as `load`."""
        return self._fetcher.fetch(source)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        """Bytes of the pixels by the file's header, for the larger orientation. Raises as `load`."""
        (height, width), _ = self._run(SIZE, data, where)
        return max(self._num_bytes(height, width), self._num_bytes(width, height))

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        """Pixels of an image file, which is the field `where` of its request. Raises as `load`."""
        (height, width), pixels = self._run(PIXELS, data, where)
        return self._processor.make_image((height, width), pixels)

    def close(self) -> None:
        """Stop downloads and workers; pending calls raise ShuttingDown."""
        self._fetcher.close()
        self._workers.close()

    def _run(self, command: bytes, data: bytes, where: str) -> tuple[tuple[int, int], bytes]:
        """(height, width) of an image and, for PIXELS, its pixels. Raises as `load`."""
        try:
            with self._workers.worker(where) as worker:
                worker.send(command)
                worker.send(data)
                reply = json.loads(worker.receive(MAX_REPLY_BYTES))
                if "reason" not in reply:
                    height, width = reply["size"]
                    assert min(height, width) > 0 and height * width <= self._limits.max_pixels, "bad reply"
                    num_bytes = self._num_bytes(height, width)
                    return (height, width), worker.receive(num_bytes) if command == PIXELS else b""
        except JobFailed as error:
            raise InvalidRequest(f"{where}: {error}", where) from None
        raise InvalidRequest(f"{where}: {reply['reason']}", where)

    def _num_bytes(self, height: int, width: int) -> int:
        return math.prod(self._processor.layout(height, width).shape)
