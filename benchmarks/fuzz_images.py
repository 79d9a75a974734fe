"""Targets of fuzz_parsers.py that read images and image processor configs."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image
from PIL.Image import Resampling

from benchmarks.fuzz_mutate import change_json
from benchmarks.fuzz_targets import FuzzTarget
from foreword.errors import CheckpointError, InvalidRequest, Overloaded
from foreword.multimodal.decode import ImageError, decode
from foreword.multimodal.fetch import Fetcher
from foreword.multimodal.image_loader import ImageLoader
from foreword.multimodal.image_source import ImageSource, MediaLimits
from foreword.multimodal.llava_processor import LlavaNextProcessor
from foreword.multimodal.preprocessor_config import VisionTowerInfo
from foreword.multimodal.processor_registry import read_processor

MAX_PIXELS = 1 << 20
PROCESSOR = LlavaNextProcessor(
    7, "<picture>", VisionTowerInfo(28, 4, 0), ((28, 56), (56, 28), (56, 56)), Resampling.BICUBIC
)
SIZES = ((1, 1), (30, 40), (200, 1), (1, 200), (777, 333))
FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json")


def image_targets() -> Mapping[str, Callable[[], FuzzTarget]]:
    """Constructors by name."""
    return {
        "picture": _image_target,
        "picture-worker": _image_worker_target,
        "picture-url": _image_url_target,
        "picture-options": _image_options_target,
    }


def _image_target() -> FuzzTarget:
    """From bytes to pixels, in the fuzzing process itself."""

    def run(data: bytes, folder: Path) -> None:
        PROCESSOR.preprocess(decode(data, MAX_PIXELS))

    return FuzzTarget(_seeds(), run, (ImageError,), ("multimodal/",))


def _image_worker_target() -> FuzzTarget:
    """The same in a worker, as in a server: its parent survives any crash."""
    workers = ImageLoader(PROCESSOR, MediaLimits(max_pixels=MAX_PIXELS), num_workers=1)

    def run(data: bytes, folder: Path) -> None:
        workers.preprocess(data, "x")

    return FuzzTarget(
        _seeds(), run, (InvalidRequest, Overloaded), ("multimodal/",), share=0.3, close=workers.close
    )


def _image_url_target() -> FuzzTarget:
    """URLs; nothing is resolved or connected."""
    patch = mock.patch.object(socket, "getaddrinfo", side_effect=socket.gaierror)
    patch.start()
    fetcher = Fetcher(
        MediaLimits(
            max_bytes=10_000, allowed_hosts=("a.test", ".b.test", "::1"), local_path=Path(__file__).parent
        )
    )

    def run(data: bytes, folder: Path) -> None:
        fetcher.fetch(ImageSource("x", data.decode("utf-8", "surrogateescape")))

    def close() -> None:
        fetcher.close()
        patch.stop()

    image = base64.b64encode(_encode_image(Image.new("RGB", (2, 2)), "PNG")).decode()
    urls = [
        f"data:image/png;base64,{image}",
        "data:,%41b",
        f"file://{__file__}",
        "https://a.test/x?y#z",
        "http://x.b.test:80",
    ]
    more = ["http://[::1]:8/", "http://u:p@a.test/", "http://A.TEST./%00", "http://ä.b.test/"]
    return FuzzTarget(
        [url.encode() for url in (*urls, *more)], run, (InvalidRequest,), ("multimodal/",), close=close
    )


def _image_options_target() -> FuzzTarget:
    """The checkpoint files of `read_processor`, as one JSON object by name."""

    def run(data: bytes, folder: Path) -> None:
        try:
            files = json.loads(data)
        except (ValueError, RecursionError):
            files = None
        for name in FILES:
            content = files.get(name) if isinstance(files, dict) else None
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")
        processor = read_processor(folder)
        for size in SIZES if processor is not None else ():
            assert processor is not None
            processor.layout(*size)

    return FuzzTarget(_options(), run, (CheckpointError,), ("multimodal/",), change_json)


def _options() -> list[bytes]:
    tokenizer = {"added_tokens": [{"id": 3, "content": "<image>"}]}
    clip = {
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "image_processor_type": "CLIPImageProcessor",
    }
    pad = {
        **clip,
        "do_pad": True,
        "image_processor_type": "LlavaImageProcessorFast",
        "image_mean": [0.5, 0.5, 0.5],
        "resample": 2,
    }
    siglip = {"size": {"height": 28, "width": 28}, "image_processor_type": "SiglipImageProcessor"}
    points = [[28, 56], [56, 28]]
    qwen = {
        "min_pixels": 3136,
        "max_pixels": 9999,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    tower = {"image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model_type": "llava", "vision_config": tower}, clip),
        ({"model_type": "llava", "vision_config": tower, "vision_feature_select_strategy": "full"}, pad),
        ({"model_type": "llava", "vision_config": {**tower, "model_type": "siglip_vision_model"}}, siglip),
        (
            {"model_type": "llava_next", "vision_config": tower, "image_grid_pinpoints": points},
            clip | {"image_grid_pinpoints": points},
        ),
        ({"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}}, qwen),
        ({"model_type": "qwen3_vl"}, {"size": {"shortest_edge": 10, "longest_edge": 99999}}),
    ]
    return [
        json.dumps(
            {"config.json": {"image_token_id": 3, **config}, name: made, "tokenizer.json": tokenizer}
        ).encode()
        for config, options in kinds
        for name, made in (
            ("preprocessor_config.json", options),
            ("processor_config.json", {"image_processor": options}),
        )
    ]


def _seeds() -> list[bytes]:
    """Small files of all formats and modes, as Pillow writes them."""
    image = Image.linear_gradient("L").resize((20, 14)).convert("RGB")
    image.paste((200, 30, 60), (3, 3, 9, 8))
    clear, turned = image.copy(), Image.Exif()
    clear.putalpha(image.convert("L"))
    turned[0x0112] = 6
    palette = image.quantize(8)
    frames: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(180)]}
    return [
        *(_encode_image(image.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *(_encode_image(clear, kind, exif=turned) for kind in ("PNG", "WEBP")),
        *(
            _encode_image(image, "PNG", **options)
            for options in ({"interlace": 1}, {"icc_profile": bytes(99)}, frames)
        ),
        *(
            _encode_image(image.convert(mode), "JPEG", progressive=mode == "L", exif=turned)
            for mode in ("L", "RGB", "CMYK")
        ),
        *(_encode_image(image, kind, **frames) for kind in ("MPO", "WEBP", "GIF")),
        *(_encode_image(clear, "WEBP", **options) for options in ({"lossless": True}, {"quality": 10})),
        _encode_image(palette, "GIF", transparency=2),
        _encode_image(palette, "PNG", transparency=bytes(range(0, 240, 30))),
    ]


def _encode_image(image: Image.Image, image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()
