"""Images are decoded in worker processes."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL.Image import Resampling

from foreword.errors import InvalidRequest
from foreword.multimodal.image_loader import ImageLoader
from foreword.multimodal.image_source import MediaLimits
from foreword.multimodal.qwen_vl_processor import QwenVLProcessor
from foreword.workers.pool import Worker
from tests.multimodal.test_decode import SOUND
from tests.support.image_files import black_png, encode_image, random_drawing
from tests.support.waiting import WAIT_S, stop_process

WHERE = "messages[0].content[1].image_url.url"
PROCESSOR = QwenVLProcessor(7, "<image>", 28, 3136, 100_000, Resampling.BICUBIC)
LIMITS = MediaLimits(max_bytes=1_000_000, max_pixels=4_000_000)
GOOD = encode_image(random_drawing(60, 90))


@pytest.fixture(scope="module")
def loader() -> Iterator[ImageLoader]:
    loader = ImageLoader(PROCESSOR, LIMITS, num_workers=1)
    loader.preprocess(GOOD, WHERE)
    yield loader
    loader.close()


@pytest.fixture
def job_sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a pool waits for the reply of a worker."""
    sent, receive = threading.Event(), Worker.receive

    def receive_after_sent(worker: Worker, max_bytes: int) -> bytes:
        sent.set()
        return receive(worker, max_bytes)

    monkeypatch.setattr(Worker, "receive", receive_after_sent)
    return sent


def _pid(loader: ImageLoader) -> int:
    (worker,) = loader._workers.workers
    assert worker.process is not None
    return worker.process.pid


@pytest.mark.parametrize("name", SOUND)
def test_worker_decodes_all_formats(loader: ImageLoader, name: str) -> None:
    """The worker cannot open files, so all of Pillow's plugins must be loaded before."""
    image = loader.preprocess(SOUND[name], WHERE)
    height, width = image.original_size
    assert image.shape == PROCESSOR.layout(height, width).shape
    assert image.pixels is not None
    assert len(image.pixels) == image.num_bytes


def test_image_equals_that_of_the_processor(loader: ImageLoader) -> None:
    assert loader.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_pixel_bytes_are_read_from_the_header(loader: ImageLoader) -> None:
    """For the larger orientation; the pixels may be missing."""
    data = encode_image(random_drawing(60, 90))
    expected = max(math.prod(PROCESSOR.layout(*size).shape) for size in ((60, 90), (90, 60)))
    assert loader.pixel_bytes(data, WHERE) == loader.pixel_bytes(data[:-50], WHERE) == expected
    for name in SOUND:
        assert loader.pixel_bytes(SOUND[name], WHERE) >= loader.preprocess(SOUND[name], WHERE).num_bytes
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        loader.pixel_bytes(black_png(20_000, 15_000), WHERE)
    with pytest.raises(InvalidRequest, match="another format"):
        loader.pixel_bytes(b"none", WHERE)
    assert loader.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_rejected_image_names_the_field_and_keeps_the_worker(loader: ImageLoader) -> None:
    before = _pid(loader)
    with pytest.raises(InvalidRequest, match="truncated or broken") as caught:
        loader.preprocess(GOOD[:200], WHERE)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    loader.preprocess(GOOD, WHERE)
    assert _pid(loader) == before


def test_300_megapixels_are_refused(loader: ImageLoader) -> None:
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        loader.preprocess(black_png(20_000, 15_000), WHERE)


def test_image_at_the_limit_fits_into_memory(loader: ImageLoader) -> None:
    """Alpha and rotation take the most memory."""
    image = random_drawing(2000, 2000)
    image.putalpha(128)
    exif = image.getexif()
    exif[0x0112] = 6
    data = encode_image(image, "WEBP", exif=exif, quality=1)
    assert loader.preprocess(data, WHERE).original_size == (2000, 2000)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_crash_of_a_worker_fails_one_image(
    loader: ImageLoader, number: signal.Signals, job_sent: threading.Event
) -> None:
    loader.preprocess(GOOD, WHERE)  # the worker runs
    job_sent.clear()
    before = _pid(loader)
    stop_process(before)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(loader.preprocess, GOOD, WHERE)
        job_sent.wait(WAIT_S)
        os.kill(before, number)
        os.kill(before, signal.SIGCONT)
        with pytest.raises(InvalidRequest, match="worker crashed"):
            pending.result(WAIT_S)
    assert loader.preprocess(GOOD, WHERE).pixels is not None
    assert _pid(loader) != before


def test_cpu_limit_rejects_the_image(job_sent: threading.Event) -> None:
    """The signal of the worker's timer, sent early."""
    loader = ImageLoader(PROCESSOR, MediaLimits(max_pixels=60_000_000), 1)
    try:
        loader.preprocess(GOOD, WHERE)
        job_sent.clear()
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(loader.preprocess, black_png(7500, 7500), WHERE)
            job_sent.wait(WAIT_S)
            os.kill(_pid(loader), signal.SIGPROF)
            with pytest.raises(InvalidRequest, match="to decode"):
                pending.result(WAIT_S)
    finally:
        loader.close()


def test_memory_stays_flat(loader: ImageLoader) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{_pid(loader)}/statm").read_text().split()[1])

    data = encode_image(random_drawing(500, 700), "JPEG")
    for _ in range(20):
        loader.preprocess(data, WHERE)
    before = resident()
    for _ in range(60):
        loader.preprocess(data, WHERE)
    assert resident() < before * 1.2


def test_wrong_number_of_pixels_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        PROCESSOR.make_image((60, 90), np.zeros(5, np.uint8).tobytes())


def test_worker_does_not_import_torch(loader: ImageLoader) -> None:
    loader.preprocess(GOOD, WHERE)
    assert "torch" not in Path(f"/proc/{_pid(loader)}/maps").read_text()
