"""Image processors against transformers: pixels and token counts of all families, for any size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor
from transformers.image_processing_backends import PilBackend
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from foreword.core.images import PromptImage
from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import VISION_MODELS, load_model
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.image_source import MAX_ASPECT_RATIO
from foreword.multimodal.processor_registry import PROCESSORS, read_processor
from tests.support.budget import SHARED_FIXTURES, examples
from tests.support.image_files import random_drawing
from tests.support.vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

TOKEN, TEXT = 7, "<image>"
VISION_CONFIG = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "rescale_factor": 1 / 255}
CLIP = {
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "image_processor_type": "CLIPImageProcessor",
}
QWEN_VISION = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN = {"min_pixels": 3136, "max_pixels": 40000, "image_processor_type": "Qwen2VLImageProcessor"}
RAW: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


def checkpoint(path: Path, model_type: str, options: dict[str, Any], **config: Any) -> Path:
    """Write the files that `read_processor` reads."""
    whole = {"model_type": model_type, "image_token_id": TOKEN, "vision_config": VISION_CONFIG, **config}
    written = {"config.json": whole, "preprocessor_config.json": {**COLOURS, **options}}
    written["tokenizer.json"] = {
        "added_tokens": [{"id": TOKEN - 1, "content": "<s>"}, {"id": TOKEN, "content": TEXT}]
    }
    for name, values in written.items():
        (path / name).write_text(json.dumps(values), encoding="utf-8")
    return path


def processor(path: Path, model_type: str, options: dict[str, Any], **config: Any) -> ImageProcessor:
    return require_processor(checkpoint(path, model_type, options, **config))


def require_processor(path: Path) -> ImageProcessor:
    processor = read_processor(path)
    assert processor is not None
    return processor


def array(prompt_image: PromptImage) -> np.ndarray:
    """uint8 [tiles, 3, height, width]"""
    assert prompt_image.pixels is not None
    return np.frombuffer(prompt_image.pixels, np.uint8).reshape(prompt_image.shape)


def reference(kind: type[PilBackend], options: dict[str, Any]) -> Callable[[Image.Image], np.ndarray]:
    """transformers' processor, without normalization."""
    known = {key: value for key, value in options.items() if key != "image_processor_type"}
    hf_processor = kind(**{**COLOURS, **known, **RAW})
    return lambda image: np.asarray(hf_processor(image)["pixel_values"][0])


def sizes(limit: int = 300) -> st.SearchStrategy[tuple[int, int]]:
    """(height, width) of all accepted aspect ratios."""
    narrow = st.tuples(st.integers(1, 5), st.integers(1, 1000)).filter(
        lambda size: size[1] <= MAX_ASPECT_RATIO * size[0]
    )
    return st.one_of(
        st.tuples(st.integers(1, limit), st.integers(1, limit)),
        narrow,
        narrow.map(lambda size: (size[1], size[0])),
    ).filter(lambda size: max(size) <= MAX_ASPECT_RATIO * min(size))


FEW = settings(
    max_examples=examples(30),
    suppress_health_check=SHARED_FIXTURES,
)
LLAVA_KINDS: dict[str, tuple[type[PilBackend], dict[str, Any]]] = {
    "clip": (CLIPImageProcessorPil, CLIP),
    "clip-padded": (CLIPImageProcessorPil, {**CLIP, "size": {"shortest_edge": 40}}),
    "clip-bilinear": (CLIPImageProcessorPil, {**CLIP, "resample": 2}),
    "clip-unsized": (CLIPImageProcessorPil, {**CLIP, "do_resize": False}),
    "clip-uncut": (
        CLIPImageProcessorPil,
        {**CLIP, "size": {"height": 56, "width": 56}, "do_center_crop": False},
    ),
    "llava-pad": (
        LlavaImageProcessorPil,
        {**CLIP, "do_pad": True, "image_processor_type": "LlavaImageProcessorFast"},
    ),
    "siglip": (
        SiglipImageProcessorPil,
        {"size": {"height": 56, "width": 56}, "image_processor_type": "SiglipImageProcessor"},
    ),
}


@pytest.mark.parametrize("name", LLAVA_KINDS)
@FEW
@given(size=sizes())
def test_llava_pixels_equal_transformers(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    kind, options = LLAVA_KINDS[name]
    image = random_drawing(*size)
    prompt_image = processor(tmp_path, "llava", options).preprocess(image)
    assert np.array_equal(array(prompt_image)[0], reference(kind, options)(image))
    assert prompt_image.original_size == size


@FEW
@given(size=sizes())
def test_llava_next_pixels_equal_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    options = {**CLIP, "image_grid_pinpoints": PINPOINTS, "image_processor_type": "LlavaNextImageProcessor"}
    image = random_drawing(*size)
    prompt_image = processor(tmp_path, "llava_next", options, image_grid_pinpoints=PINPOINTS).preprocess(
        image
    )
    assert np.array_equal(array(prompt_image), reference(LlavaNextImageProcessorPil, options)(image))


QWEN_KINDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": {
        "size": {"shortest_edge": 3136, "longest_edge": 40000},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "qwen3_vl": {"size": {"shortest_edge": 4096, "longest_edge": 60000}, "patch_size": 16},
}


@pytest.mark.parametrize("name", QWEN_KINDS)
@FEW
@given(size=sizes())
def test_qwen_pixels_equal_transformers(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    options = QWEN_KINDS[name]
    patch = options.get("patch_size", 14)
    image = random_drawing(*size)
    prompt_image = processor(
        tmp_path, name, options, vision_config={**QWEN_VISION, "patch_size": patch}
    ).preprocess(image)
    known = {key: value for key, value in options.items() if "type" not in key}
    hf_processor = Qwen2VLImageProcessorPil(**{**COLOURS, **known, **RAW})
    patches, grid = (hf_processor(image)[key] for key in ("pixel_values", "image_grid_thw"))
    assert np.array_equal(grid[0], [1, prompt_image.grid_thw[1] * 2, prompt_image.grid_thw[2] * 2])
    assert prompt_image.num_tokens == np.prod(grid[0]) // 4
    rows, columns = prompt_image.grid_thw[1:]
    split = (
        array(prompt_image)[0].reshape(3, rows, 2, patch, columns, 2, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    )
    doubled = np.repeat(split[:, :, :, :, :, None], 2, axis=5)
    assert np.array_equal(doubled.reshape(patches.shape), patches)


# Qwen's AutoProcessor needs torchvision.
@pytest.fixture(scope="module", params=["llava", "llava_siglip", "llava_next"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ImageProcessor, Any]:
    """Our processor and transformers' for one checkpoint."""
    path = write_vision_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)
    return require_processor(path), AutoProcessor.from_pretrained(path)


@settings(max_examples=examples(40))
@given(size=sizes())
def test_num_tokens_equals_transformers(both: tuple[ImageProcessor, Any], size: tuple[int, int]) -> None:
    ours, hf_processor = both
    prompt_image = ours.preprocess(random_drawing(*size))
    encoded = hf_processor(text=f"see {ours.placeholder_text}!", images=random_drawing(*size))
    ids = list(np.ravel(encoded["input_ids"]))
    assert ids.count(ours.placeholder_id) == prompt_image.num_tokens == math.prod(prompt_image.grid_thw)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("size", [(40, 30), (1, 150), (150, 1), (61, 17), (300, 300)])
def test_num_tokens_equals_features_of_the_vision_encoder(
    tmp_path: Path, family: str, size: tuple[int, int]
) -> None:
    path = write_vision_checkpoint(tmp_path, family)
    prompt_image = require_processor(path).preprocess(random_drawing(*size))
    tower = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64).vision_encoder
    assert tower is not None
    assert len(_run_to_end(tower.encode(prompt_image))) == prompt_image.num_tokens


def _run_to_end(steps: Generator[int, None, Tensor]) -> Tensor:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            features: Tensor = stop.value
            return features


def test_text_model_has_no_processor(tmp_path: Path) -> None:
    assert read_processor(tmp_path) is None
    assert read_processor(checkpoint(tmp_path, "llama", CLIP)) is None


def test_each_vision_model_has_a_processor() -> None:
    assert PROCESSORS.keys() == VISION_MODELS.keys()


def test_placeholder_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    llava = processor(tmp_path, "llava", CLIP)
    assert (llava.placeholder_id, llava.placeholder_text) == (TOKEN, TEXT)


def test_options_are_read_from_processor_config(tmp_path: Path) -> None:
    """transformers 5 writes them there."""
    expected = processor(tmp_path, "llava", CLIP)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {**COLOURS, **CLIP}}), encoding="utf-8"
    )
    assert read_processor(tmp_path) == expected


def test_old_option_names_are_read(tmp_path: Path) -> None:
    old = {"size": 56, "crop_size": 56, "feature_extractor_type": "CLIPFeatureExtractor"}
    assert processor(tmp_path, "llava", old) == processor(tmp_path, "llava", CLIP)
    names = {"size": {"min_pixels": 3136, "max_pixels": 40000}}
    assert processor(tmp_path, "qwen2_vl", names, vision_config={}) == processor(
        tmp_path, "qwen2_vl", QWEN, vision_config={}
    )


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("llava", {**CLIP, "do_thumbnail": True}, "do_thumbnail is not supported"),
    "kind": ("llava", {**CLIP, "image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor"),
    "colours": ("llava", {**CLIP, "do_normalize": False}, "do_normalize"),
    "flag": ("llava", {**CLIP, "do_resize": "yes"}, "do_resize must be true or false"),
    "side": ("llava", {**CLIP, "crop_size": 48}, "crop_size must give 56 x 56 pixels"),
    "uncut": ("llava", {**CLIP, "do_center_crop": False}, "size must give 56 x 56 pixels"),
    "size": ("llava", {**CLIP, "size": {"longest_edge": 56}}, "size must be integers"),
    "resample": ("llava", {**CLIP, "resample": 9}, "resample must be"),
    "next": ("llava_next", {**CLIP, "size": {"shortest_edge": 60}}, "size must be the 56 pixels"),
    "pinpoints": ("llava_next", {**CLIP, "image_grid_pinpoints": [[56, 56]]}, "not those of config.json"),
    "no-size": ("llava", {**CLIP, "size": {}}, "size must be integers"),
    "margin": (
        "llava",
        {
            **CLIP,
            "do_pad": True,
            "image_processor_type": "LlavaImageProcessor",
            "image_mean": [0.5, 1e308, 0.5],
        },
        "image_mean must be a list of 3 numbers from 0 to 1",
    ),
    "patch": ("qwen2_vl", {**QWEN, "patch_size": 16}, "patch_size is 16, but 14 in config.json"),
    "bounds": ("qwen2_vl", {**QWEN, "min_pixels": 50000}, "min 50000 to max 40000"),
    "unsized": ("qwen2_vl", {**QWEN, "do_resize": False}, "do_resize false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_option_is_named(tmp_path: Path, name: str) -> None:
    model_type, options, message = WRONG[name]
    config = {"vision_config": QWEN_VISION} if model_type == "qwen2_vl" else {}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        processor(tmp_path, model_type, options, **config)


@pytest.mark.parametrize(
    "pinpoints", [[[60, 56]], [], [56], [[56, 56, 56]], [[0, 56]], [[56 * 1000, 56 * 1000]]]
)
def test_pinpoints_must_be_multiples_of_the_tile(tmp_path: Path, pinpoints: list[Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"multiples of the vision encoder's 56 pixels|not those of config\.json"
    ):
        processor(
            tmp_path,
            "llava_next",
            {**CLIP, "image_grid_pinpoints": pinpoints},
            image_grid_pinpoints=pinpoints,
        )


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "tokenizer.json"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    checkpoint(tmp_path, "llava", CLIP)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        read_processor(tmp_path)


def test_placeholder_must_be_an_added_token(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no added token has the id 99"):
        processor(tmp_path, "llava", CLIP, image_token_id=99)


def test_digest_depends_on_pixels_and_size(tmp_path: Path) -> None:
    options = {**CLIP, "image_grid_pinpoints": PINPOINTS}
    llava_next = processor(tmp_path, "llava_next", options, image_grid_pinpoints=PINPOINTS)
    black, grey = Image.new("RGB", (60, 60)), Image.new("RGB", (60, 60), (1, 1, 1))
    prompt_images = [
        llava_next.preprocess(image)
        for image in (black, grey, Image.new("RGB", (60, 61)), Image.new("RGB", (61, 60)))
    ]
    assert len({prompt_image.digest for prompt_image in prompt_images}) == 4
    assert llava_next.preprocess(black.copy()).digest == prompt_images[0].digest
    assert all(len(prompt_image.digest) == 16 for prompt_image in prompt_images)
