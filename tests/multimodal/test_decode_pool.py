"""Pictures are prepared in processes that may fall."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL.Image import Resampling

from foreword.errors import InvalidRequest, Overloaded, RequestFailed, ShuttingDown
from foreword.multimodal import limits
from foreword.multimodal.decode_pool import ImageDecodePool
from foreword.multimodal.limits import MediaLimits
from foreword.multimodal.qwen_vl import QwenVLProcessor
from tests.multimodal.test_decode import SOUND
from tests.support.image_files import black_png, encode_image, random_drawing

WHERE = "messages[0].content[1].image_url.url"
PROCESSOR = QwenVLProcessor(7, "<picture>", 28, 3136, 100_000, Resampling.BICUBIC)
LIMITS = MediaLimits(max_bytes=1_000_000, max_pixels=4_000_000)
GOOD = encode_image(random_drawing(60, 90))


@pytest.fixture(scope="module")
def workers() -> Iterator[ImageDecodePool]:
    workers = ImageDecodePool(PROCESSOR, LIMITS, num_workers=1)
    workers.preprocess(GOOD, WHERE)
    yield workers
    workers.close()


def _pid(workers: ImageDecodePool) -> int:
    (worker,) = workers._workers
    assert worker._process is not None
    return worker._process.pid


@pytest.mark.parametrize("name", SOUND)
def test_pictures_are_what_the_processor_makes_of_them(workers: ImageDecodePool, name: str) -> None:
    """With every part of Pillow that is needed: the worker can open no file to load one later."""
    picture = workers.preprocess(SOUND[name], WHERE)
    height, width = picture.original_size
    assert picture.shape == PROCESSOR.layout(height, width).shape
    assert picture.pixels is not None
    assert len(picture.pixels) == picture.num_bytes


def test_pixels_and_digest_come_through(workers: ImageDecodePool) -> None:
    assert workers.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_the_head_tells_how_much_the_pixels_take(workers: ImageDecodePool) -> None:
    """Before it is known how the picture is turned; and without looking further: the rest may be missing."""
    data = encode_image(random_drawing(60, 90))
    expected = max(math.prod(PROCESSOR.layout(*size).shape) for size in ((60, 90), (90, 60)))
    assert workers.pixel_bytes(data, WHERE) == workers.pixel_bytes(data[:-50], WHERE) == expected
    for name in SOUND:
        assert workers.pixel_bytes(SOUND[name], WHERE) >= workers.preprocess(SOUND[name], WHERE).num_bytes
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        workers.pixel_bytes(black_png(20_000, 15_000), WHERE)
    with pytest.raises(InvalidRequest, match="another format"):
        workers.pixel_bytes(b"none", WHERE)
    assert workers.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_a_refusal_names_the_field_and_costs_no_process(workers: ImageDecodePool) -> None:
    before = _pid(workers)
    with pytest.raises(InvalidRequest, match="truncated or broken") as caught:
        workers.preprocess(GOOD[:200], WHERE)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    workers.preprocess(GOOD, WHERE)
    assert _pid(workers) == before


def test_300_megapixels_are_refused(workers: ImageDecodePool) -> None:
    with pytest.raises(InvalidRequest, match="--max-image-pixels"):
        workers.preprocess(black_png(20_000, 15_000), WHERE)


def test_a_picture_at_the_limit_is_prepared(workers: ImageDecodePool) -> None:
    """With alpha, turned: what takes most memory."""
    image = random_drawing(2000, 2000)
    image.putalpha(128)
    exif = image.getexif()
    exif[0x0112] = 6
    data = encode_image(image, "WEBP", exif=exif, quality=1)
    assert workers.preprocess(data, WHERE).original_size == (2000, 2000)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_worker_that_falls_costs_one_picture(workers: ImageDecodePool, number: signal.Signals) -> None:
    """In the middle of one: a decoder that crashes."""
    before = _pid(workers)
    os.kill(before, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(workers.preprocess, GOOD, WHERE)
        time.sleep(0.2)
        os.kill(before, number)
        os.kill(before, signal.SIGCONT)
        with pytest.raises(InvalidRequest, match="ends the process which decodes it"):
            pending.result(30)
    assert workers.preprocess(GOOD, WHERE).pixels is not None
    assert _pid(workers) != before


def test_a_worker_that_is_killed_says_nothing_against_the_picture(workers: ImageDecodePool) -> None:
    os.kill(_pid(workers), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(workers.preprocess, GOOD, WHERE)
        time.sleep(0.2)
        os.kill(_pid(workers), signal.SIGKILL)
        with pytest.raises(Overloaded):
            pending.result(30)


def test_a_worker_that_hangs_is_replaced(workers: ImageDecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.preprocess(GOOD, WHERE)
    monkeypatch.setattr(limits, "DECODE_WALL_S", 0.3)
    before = _pid(workers)
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(Overloaded, match="too busy"):
        workers.preprocess(GOOD, WHERE)
    monkeypatch.undo()
    workers.preprocess(GOOD, WHERE)
    assert _pid(workers) != before


def test_a_worker_that_died_in_the_meantime_is_replaced(workers: ImageDecodePool) -> None:
    os.kill(_pid(workers), signal.SIGKILL)
    time.sleep(0.1)
    workers.preprocess(GOOD, WHERE)


def test_too_much_processor_time_is_the_pictures_fault() -> None:
    """The timer that a worker sets for each picture, run down at once."""
    worker = ImageDecodePool(PROCESSOR, MediaLimits(max_pixels=60_000_000), 1)
    try:
        worker.preprocess(GOOD, WHERE)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(worker.preprocess, black_png(7500, 7500), WHERE)
            time.sleep(0.02)
            os.kill(_pid(worker), signal.SIGPROF)
            with pytest.raises(InvalidRequest, match="to decode"):
                pending.result(30)
    finally:
        worker.close()


def test_an_interrupt_leaves_no_answer_behind(
    workers: ImageDecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next picture would be given the pixels of the one before."""

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("foreword.multimodal.decode_pool._Worker._receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.preprocess(encode_image(random_drawing(40, 40, 5)), WHERE)
    assert workers.preprocess(GOOD, WHERE) == PROCESSOR.preprocess(random_drawing(60, 90))


def test_pictures_wait_for_each_other(workers: ImageDecodePool) -> None:
    files = [encode_image(random_drawing(40, 40, seed)) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda data: workers.preprocess(data, WHERE), files))
    assert found == [PROCESSOR.preprocess(random_drawing(40, 40, seed)) for seed in range(12)]


def test_who_waits_too_long_is_sent_away(workers: ImageDecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUE_TIMEOUT_S", 0.1)
    busy = workers._idle.get()
    with pytest.raises(Overloaded, match="too many pictures"):
        workers.preprocess(GOOD, WHERE)
    workers._idle.put(busy)


def test_closing_ends_what_waits() -> None:
    workers = ImageDecodePool(PROCESSOR, LIMITS, 1)
    workers.preprocess(GOOD, WHERE)
    pid = _pid(workers)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(workers.preprocess, GOOD, WHERE)
        time.sleep(0.1)
        workers.close()
        with pytest.raises(ShuttingDown):
            pending.result(30)
    with pytest.raises(ShuttingDown):
        workers.preprocess(GOOD, WHERE)
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_does_not_start_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.multimodal.decode_pool.WORKER", ("-c", "import sys; sys.exit(3)"))
    workers = ImageDecodePool(PROCESSOR, LIMITS, 1)
    with pytest.raises(RequestFailed, match="does not start"):
        workers.preprocess(GOOD, WHERE)
    workers.close()


def test_threads_may_close_at_any_time() -> None:
    workers = ImageDecodePool(PROCESSOR, LIMITS, 2)
    thread = threading.Thread(target=workers.close)
    thread.start()
    with pytest.raises(ShuttingDown):
        while True:
            workers.preprocess(GOOD, WHERE)
    thread.join()


ORPHAN = """
import os
from PIL.Image import Resampling
from foreword.multimodal.limits import MediaLimits
from foreword.multimodal.qwen_vl import QwenVLProcessor
from foreword.multimodal.decode_pool import Workers
from tests.support.image_files import drawn, file_of
workers = Workers(QwenVLProcessor(7, "x", 28, 3136, 100_000, Resampling.BICUBIC), MediaLimits(), 1)
workers.prepare(file_of(drawn(60, 90)), "x")
print(workers._all[0]._process.pid, flush=True)
os._exit(9)
"""


def test_a_worker_ends_with_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_the_worker_is_small_and_confined(workers: ImageDecodePool) -> None:
    """No torch, and no file or connection beside the ones that it has."""
    workers.preprocess(GOOD, WHERE)
    folder = Path(f"/proc/{_pid(workers)}")
    assert "torch" not in (folder / "maps").read_text()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in (folder / "limits").read_text().splitlines()}
    assert rows["Max open files"] == ["0", "0"]
    assert rows["Max core file size"] == ["0", "0"]
    assert rows["Max address space"][0].isdigit()


def test_memory_stays_flat(workers: ImageDecodePool) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{_pid(workers)}/statm").read_text().split()[1])

    data = encode_image(random_drawing(500, 700), "JPEG")
    for _ in range(20):
        workers.preprocess(data, WHERE)
    before = resident()
    for _ in range(60):
        workers.preprocess(data, WHERE)
    assert resident() < before * 1.2


def test_what_a_worker_says_is_not_trusted() -> None:
    """Numbers of pixels that do not fit are a bug that is seen, not features of another picture."""
    with pytest.raises(AssertionError, match="do not fit"):
        PROCESSOR.make_image((60, 90), np.zeros(5, np.uint8).tobytes())
