"""Decodes images in worker processes: a file that crashes a decoder fails its own request only.

Replies of a worker are not trusted: no pickles; sizes and lengths are checked; the digest is computed here.
"""

from __future__ import annotations

import json
import math
from typing import Final

from foreword.core.images import PromptImage
from foreword.errors import InvalidRequest
from foreword.multimodal import limits
from foreword.multimodal.decode_worker import PIXELS, SIZE
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.limits import MediaLimits
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool

WORKER: Final = "foreword.multimodal.decode_worker"
MAX_REPLY_BYTES: Final = 1 << 16


class ImageDecodePool:
    """Preprocesses images for one model, one per worker at a time. Thread-safe."""

    def __init__(
        self, processor: ImageProcessor, media_limits: MediaLimits, num_workers: int = limits.NUM_WORKERS
    ) -> None:
        self._processor = processor
        self._limits = media_limits
        pixel_bytes = limits.BYTES_PER_PIXEL * media_limits.max_pixels
        job_limits = JobLimits(
            cpu_s=limits.DECODE_CPU_S,
            wall_s=limits.DECODE_WALL_S,
            num_bytes=limits.WORKER_BYTES + media_limits.max_bytes + pixel_bytes,
            queue_timeout_s=limits.QUEUE_TIMEOUT_S,
        )
        self._pool = WorkerPool(WORKER, "decode", lambda: (processor, media_limits), job_limits, num_workers)

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        """Pixels of an image file.

        Raises InvalidRequest, which names the field `where` and the reason; Overloaded if no worker is free
        in time or the machine is too busy; RequestFailed if no worker starts; ShuttingDown after `close`.
        """
        (height, width), pixels = self._run(PIXELS, data, where)
        return self._processor.make_image((height, width), pixels)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        """Bytes of the pixels by the file's header, for the larger orientation. Raises as `preprocess`."""
        (height, width), _ = self._run(SIZE, data, where)
        return max(self._num_bytes(height, width), self._num_bytes(width, height))

    def close(self) -> None:
        """End the workers; images in progress are given up."""
        self._pool.close()

    def _run(self, command: bytes, data: bytes, where: str) -> tuple[tuple[int, int], bytes]:
        """(height, width) of an image and, for PIXELS, its pixels. Raises as `preprocess`."""
        try:
            with self._pool.worker(where) as worker:
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
