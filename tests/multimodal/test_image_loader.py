"""Images from sources of all kinds."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL.Image import Resampling

from foreword.errors import InvalidRequest, ShuttingDown
from foreword.multimodal.image_loader import ImageLoader
from foreword.multimodal.image_source import ImageSource, MediaLimits
from foreword.multimodal.qwen_vl_processor import QwenVLProcessor
from tests.support.image_files import encode_image, random_drawing

PROCESSOR = QwenVLProcessor(7, "<image>", 28, 3136, 100_000, Resampling.BICUBIC)


def test_sources_are_loaded_in_order(tmp_path: Path) -> None:
    images = [random_drawing(40, 50, seed) for seed in range(3)]
    (tmp_path / "a.gif").write_bytes(encode_image(images[2].quantize(8), "GIF"))
    webp = base64.b64encode(encode_image(images[0], "WEBP", lossless=True)).decode()
    sources = [
        ImageSource("a", f"data:image/webp;base64,{webp}"),
        ImageSource("b", data=encode_image(images[1])),
        ImageSource("c", f"file://{tmp_path}/a.gif"),
    ]
    loader = ImageLoader(PROCESSOR, MediaLimits(local_path=tmp_path.resolve()))
    try:
        loaded = loader.load(sources)
    finally:
        loader.close()
    expected = [images[0], images[1], images[2].quantize(8).convert("RGB")]
    assert loaded == [PROCESSOR.preprocess(image) for image in expected]


def test_error_names_the_image() -> None:
    loader = ImageLoader(PROCESSOR, MediaLimits())
    try:
        with pytest.raises(InvalidRequest) as caught:
            good = ImageSource("a", data=encode_image(random_drawing(40, 50)))
            loader.load([good, ImageSource("b", data=b"<svg/>")])
    finally:
        loader.close()
    assert caught.value.param == "b"
    with pytest.raises(ShuttingDown):
        loader.load([ImageSource("a", data=b"")])


def test_workers_start_on_demand() -> None:
    loader = ImageLoader(PROCESSOR, MediaLimits())
    assert loader.load([]) == []
    assert all(worker.process is None for worker in loader._workers.workers)
    loader.close()


def test_repr_of_a_source_hides_its_url() -> None:
    assert "secret" not in repr(ImageSource("a", "https://example.com/?secret"))
