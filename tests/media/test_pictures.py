"""From sources to pictures, whatever they are."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL.Image import Resampling

from foreword.errors import InvalidRequest, ShuttingDown
from foreword.media.limits import MediaLimits
from foreword.media.pictures import Pictures
from foreword.media.qwen_vl import QwenVLProcessor
from foreword.media.source import Source
from tests.media.files import drawn, file_of

PROCESSOR = QwenVLProcessor(7, "<picture>", 28, 3136, 100_000, Resampling.BICUBIC)


def test_sources_of_all_kinds_in_their_order(tmp_path: Path) -> None:
    images = [drawn(40, 50, seed) for seed in range(3)]
    (tmp_path / "a.gif").write_bytes(file_of(images[2].quantize(8), "GIF"))
    sources = [
        Source("a", f"data:image/webp;base64,{base64.b64encode(file_of(images[0], 'WEBP', lossless=True)).decode()}"),
        Source("b", data=file_of(images[1])),
        Source("c", f"file://{tmp_path}/a.gif"),
    ]
    pictures = Pictures(PROCESSOR, MediaLimits(local_path=tmp_path.resolve()))
    try:
        found = pictures.read(sources)
    finally:
        pictures.close()
    expected = [images[0], images[1], images[2].quantize(8).convert("RGB")]
    assert found == [PROCESSOR.prepare(image) for image in expected]


def test_the_one_that_is_wrong_is_named() -> None:
    pictures = Pictures(PROCESSOR, MediaLimits())
    try:
        with pytest.raises(InvalidRequest) as caught:
            pictures.read([Source("a", data=file_of(drawn(40, 50))), Source("b", data=b"<svg/>")])
    finally:
        pictures.close()
    assert caught.value.param == "b"
    with pytest.raises(ShuttingDown):
        pictures.read([Source("a", data=b"")])


def test_nothing_is_started_before_it_is_needed() -> None:
    pictures = Pictures(PROCESSOR, MediaLimits())
    assert pictures.read([]) == []
    assert all(worker._process is None for worker in pictures._workers._all)
    pictures.close()


def test_sources_show_nothing_of_what_they_hold() -> None:
    assert "secret" not in repr(Source("a", "https://example.com/?secret"))
