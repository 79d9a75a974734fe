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
from foreword.multimodal.decode_pool import ImageDecodePool
from foreword.multimodal.limits import MediaLimits
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
def decode_pool() -> Iterator[ImageDecodePool]:
    decode_pool = ImageDecodePool(PROCESSOR, LIMITS, num_workers=1)
    decode_pool.preprocess(GOOD, WHERE)
    yield decode_pool
    decode_pool.close()


@pytest.fixture
def job_sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a pool waits for the reply of a worker."""
    sent, receive = threading.Event(), Worker.receive

    def receive_after_sent(worker: Worker, max_bytes: int) -> bytes:
        sent.set()
        return receive(worker, max_bytes)

    monkeypatch.setattr(Worker, "receive", receive_after_sent)
    return sent


def _pid(decode_pool: ImageDecodePool) -> int:
    (worker,) = decode_pool._pool.workers
    assert worker.process is not None
    return worker.process.pid


@pytest.mark.parametrize("name", SOUND)
def test_worker_decodes_all_formats(decode_pool: ImageDecodePool, name: str) -> None:
    """The worker cannot open files, so all of Pillow's plugins must be loaded before."""
    image = decode_pool.preprocess(SOUND[name], WHERE)
    height, width = image.original_size
    assert image.shape == PROCESSOR.layout(height, width).shape
    assert image.pixels is not None
    assert len(image.pixels) == image.num_bytes


def test_image_equals_that_of_the_processor(decode_pool: ImageDecodePool) -> None:
    assert decode_pool.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_pixel_bytes_are_read_from_the_header(decode_pool: ImageDecodePool) -> None:
    """For the larger orientation; the pixels may be missing."""
    data = encode_image(random_drawing(60, 90))
    expected = max(math.prod(PROCESSOR.layout(*size).shape) for size in ((60, 90), (90, 60)))
    assert decode_pool.pixel_bytes(data, WHERE) == decode_pool.pixel_bytes(data[:-50], WHERE) == expected
    for name in SOUND:
        assert (
            decode_pool.pixel_bytes(SOUND[name], WHERE)
            >= decode_pool.preprocess(SOUND[name], WHERE).num_bytes
        )
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        decode_pool.pixel_bytes(black_png(20_000, 15_000), WHERE)
    with pytest.raises(InvalidRequest, match="another format"):
        decode_pool.pixel_bytes(b"none", WHERE)
    assert decode_pool.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_rejected_image_names_the_field_and_keeps_the_worker(decode_pool: ImageDecodePool) -> None:
    before = _pid(decode_pool)
    with pytest.raises(InvalidRequest, match="truncated or broken") as caught:
        decode_pool.preprocess(GOOD[:200], WHERE)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    decode_pool.preprocess(GOOD, WHERE)
    assert _pid(decode_pool) == before


def test_300_megapixels_are_refused(decode_pool: ImageDecodePool) -> None:
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        decode_pool.preprocess(black_png(20_000, 15_000), WHERE)


def test_image_at_the_limit_fits_into_memory(decode_pool: ImageDecodePool) -> None:
    """Alpha and rotation take the most memory."""
    image = random_drawing(2000, 2000)
    image.putalpha(128)
    exif = image.getexif()
    exif[0x0112] = 6
    data = encode_image(image, "WEBP", exif=exif, quality=1)
    assert decode_pool.preprocess(data, WHERE).original_size == (2000, 2000)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_crash_of_a_worker_fails_one_image(
    decode_pool: ImageDecodePool, number: signal.Signals, job_sent: threading.Event
) -> None:
    decode_pool.preprocess(GOOD, WHERE)  # the worker runs
    job_sent.clear()
    before = _pid(decode_pool)
    stop_process(before)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(decode_pool.preprocess, GOOD, WHERE)
        job_sent.wait(WAIT_S)
        os.kill(before, number)
        os.kill(before, signal.SIGCONT)
        with pytest.raises(InvalidRequest, match="worker crashed"):
            pending.result(WAIT_S)
    assert decode_pool.preprocess(GOOD, WHERE).pixels is not None
    assert _pid(decode_pool) != before


def test_cpu_limit_rejects_the_image(job_sent: threading.Event) -> None:
    """The signal of the worker's timer, sent early."""
    decode_pool = ImageDecodePool(PROCESSOR, MediaLimits(max_pixels=60_000_000), 1)
    try:
        decode_pool.preprocess(GOOD, WHERE)
        job_sent.clear()
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(decode_pool.preprocess, black_png(7500, 7500), WHERE)
            job_sent.wait(WAIT_S)
            os.kill(_pid(decode_pool), signal.SIGPROF)
            with pytest.raises(InvalidRequest, match="to decode"):
                pending.result(WAIT_S)
    finally:
        decode_pool.close()


def test_concurrent_images_share_a_worker(decode_pool: ImageDecodePool) -> None:
    files = [encode_image(random_drawing(40, 40, seed)) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        images = list(pool.map(lambda data: decode_pool.preprocess(data, WHERE), files))
    assert images == [PROCESSOR.preprocess(random_drawing(40, 40, seed)) for seed in range(12)]


def test_memory_stays_flat(decode_pool: ImageDecodePool) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{_pid(decode_pool)}/statm").read_text().split()[1])

    data = encode_image(random_drawing(500, 700), "JPEG")
    for _ in range(20):
        decode_pool.preprocess(data, WHERE)
    before = resident()
    for _ in range(60):
        decode_pool.preprocess(data, WHERE)
    assert resident() < before * 1.2


def test_wrong_number_of_pixels_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        PROCESSOR.make_image((60, 90), np.zeros(5, np.uint8).tobytes())


def test_worker_does_not_import_torch(decode_pool: ImageDecodePool) -> None:
    decode_pool.preprocess(GOOD, WHERE)
    assert "torch" not in Path(f"/proc/{_pid(decode_pool)}/maps").read_text()
