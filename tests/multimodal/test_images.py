"""From sources to pictures, whatever they are."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL.Image import Resampling

from foreword.errors import InvalidRequest, ShuttingDown
from foreword.multimodal.fetch import ImageSource
from foreword.multimodal.images import ImageLoader
from foreword.multimodal.limits import MediaLimits
from foreword.multimodal.qwen_vl import QwenVLProcessor
from tests.support.image_files import encode_image, random_drawing

PROCESSOR = QwenVLProcessor(7, "<picture>", 28, 3136, 100_000, Resampling.BICUBIC)


def test_sources_of_all_kinds_in_their_order(tmp_path: Path) -> None:
    images = [random_drawing(40, 50, seed) for seed in range(3)]
    (tmp_path / "a.gif").write_bytes(encode_image(images[2].quantize(8), "GIF"))
    sources = [
        ImageSource(
            "a",
            f"data:image/webp;base64,{base64.b64encode(encode_image(images[0], 'WEBP', lossless=True)).decode()}",
        ),
        ImageSource("b", data=encode_image(images[1])),
        ImageSource("c", f"file://{tmp_path}/a.gif"),
    ]
    pictures = ImageLoader(PROCESSOR, MediaLimits(local_path=tmp_path.resolve()))
    try:
        found = pictures.load(sources)
    finally:
        pictures.close()
    expected = [images[0], images[1], images[2].quantize(8).convert("RGB")]
    assert found == [PROCESSOR.preprocess(image) for image in expected]


def test_the_one_that_is_wrong_is_named() -> None:
    pictures = ImageLoader(PROCESSOR, MediaLimits())
    try:
        with pytest.raises(InvalidRequest) as caught:
            pictures.load(
                [
                    ImageSource("a", data=encode_image(random_drawing(40, 50))),
                    ImageSource("b", data=b"<svg/>"),
                ]
            )
    finally:
        pictures.close()
    assert caught.value.param == "b"
    with pytest.raises(ShuttingDown):
        pictures.load([ImageSource("a", data=b"")])


def test_nothing_is_started_before_it_is_needed() -> None:
    pictures = ImageLoader(PROCESSOR, MediaLimits())
    assert pictures.load([]) == []
    assert all(worker._process is None for worker in pictures._workers._workers)
    pictures.close()


def test_sources_show_nothing_of_what_they_hold() -> None:
    assert "secret" not in repr(ImageSource("a", "https://example.com/?secret"))
