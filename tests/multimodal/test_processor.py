"""Pixels and numbers of tokens are those of transformers' own processors, for every family, size and kind of picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from foreword.models.base import Precision
from foreword.models.loader import load_model
from foreword.models.vision.registry import VISION_MODELS
from foreword.multimodal.limits import MAX_ASPECT_RATIO
from foreword.multimodal.processor import PROCESSORS, ImageProcessor, read_processor
from tests.support.image_files import random_drawing
from tests.support.vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

TOKEN, TEXT = 7, "<picture>"
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
    """The files that `read_processor` reads."""
    whole = {"model_type": model_type, "image_token_id": TOKEN, "vision_config": VISION_CONFIG, **config}
    written = {"config.json": whole, "preprocessor_config.json": {**COLOURS, **options}}
    written["tokenizer.json"] = {
        "added_tokens": [{"id": TOKEN - 1, "content": "<s>"}, {"id": TOKEN, "content": TEXT}]
    }
    for name, values in written.items():
        (path / name).write_text(json.dumps(values), encoding="utf-8")
    return path


def processor(path: Path, model_type: str, options: dict[str, Any], **config: Any) -> ImageProcessor:
    found = read_processor(checkpoint(path, model_type, options, **config))
    assert found is not None
    return found


def array(picture: PromptImage) -> np.ndarray:
    """uint8 [tiles, 3, height, width]"""
    assert picture.pixels is not None
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.shape)


def theirs(kind: type[PilBackend], options: dict[str, Any]) -> Callable[[Image.Image], np.ndarray]:
    """transformers' processor, up to the normalization."""
    known = {key: value for key, value in options.items() if key != "image_processor_type"}
    made = kind(**{**COLOURS, **known, **RAW})
    return lambda image: np.asarray(made(image)["pixel_values"][0])


def sizes(limit: int = 300) -> st.SearchStrategy[tuple[int, int]]:
    """(height, width) of every shape that is taken."""
    narrow = st.tuples(st.integers(1, 5), st.integers(1, 1000)).filter(
        lambda size: size[1] <= MAX_ASPECT_RATIO * size[0]
    )
    return st.one_of(
        st.tuples(st.integers(1, limit), st.integers(1, limit)),
        narrow,
        narrow.map(lambda size: (size[1], size[0])),
    ).filter(lambda size: max(size) <= MAX_ASPECT_RATIO * min(size))


FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
def test_llava(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    kind, options = LLAVA_KINDS[name]
    image = random_drawing(*size)
    picture = processor(tmp_path, "llava", options).preprocess(image)
    assert np.array_equal(array(picture)[0], theirs(kind, options)(image))
    assert picture.original_size == size


@FEW
@given(size=sizes())
def test_llava_next(tmp_path: Path, size: tuple[int, int]) -> None:
    options = {**CLIP, "image_grid_pinpoints": PINPOINTS, "image_processor_type": "LlavaNextImageProcessor"}
    image = random_drawing(*size)
    picture = processor(tmp_path, "llava_next", options, image_grid_pinpoints=PINPOINTS).preprocess(image)
    assert np.array_equal(array(picture), theirs(LlavaNextImageProcessorPil, options)(image))


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
def test_qwen(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    options = QWEN_KINDS[name]
    patch = options.get("patch_size", 14)
    image = random_drawing(*size)
    picture = processor(
        tmp_path, name, options, vision_config={**QWEN_VISION, "patch_size": patch}
    ).preprocess(image)
    made = Qwen2VLImageProcessorPil(
        **{**COLOURS, **{k: v for k, v in options.items() if "type" not in k}, **RAW}
    )
    patches, grid = (made(image)[key] for key in ("pixel_values", "image_grid_thw"))
    assert np.array_equal(grid[0], [1, picture.grid_thw[1] * 2, picture.grid_thw[2] * 2])
    assert picture.num_tokens == np.prod(grid[0]) // 4
    rows, columns = picture.grid_thw[1:]
    split = array(picture)[0].reshape(3, rows, 2, patch, columns, 2, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    doubled = np.repeat(split[:, :, :, :, :, None], 2, axis=5)
    assert np.array_equal(doubled.reshape(patches.shape), patches)


@pytest.fixture(
    scope="module", params=["llava", "llava_siglip", "llava_next"]
)  # Qwen's whole processor needs torchvision
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ImageProcessor, Any]:
    """Ours and theirs, read from the same checkpoint."""
    path = write_vision_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)
    found = read_processor(path)
    assert found is not None
    return found, AutoProcessor.from_pretrained(path)


@settings(max_examples=40, deadline=None)
@given(size=sizes())
def test_tokens_are_as_many_as_transformers_says(
    both: tuple[ImageProcessor, Any], size: tuple[int, int]
) -> None:
    ours, other = both
    picture = ours.preprocess(random_drawing(*size))
    made = other(text=f"see {ours.placeholder_text}!", images=random_drawing(*size))
    ids = list(np.ravel(made["input_ids"]))
    assert ids.count(ours.placeholder_id) == picture.num_tokens == math.prod(picture.grid_thw)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("size", [(40, 30), (1, 150), (150, 1), (61, 17), (300, 300)])
def test_the_tower_makes_as_many_features(tmp_path: Path, family: str, size: tuple[int, int]) -> None:
    path = write_vision_checkpoint(tmp_path, family)
    found = read_processor(path)
    assert found is not None
    picture = found.preprocess(random_drawing(*size))
    tower = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64).vision_encoder
    assert tower is not None
    assert len(_finished(tower.encode(picture))) == picture.num_tokens


def _finished(steps: Generator[int, None, Tensor]) -> Tensor:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: Tensor = stop.value
            return found


# What is said in files


def test_a_model_that_sees_nothing_has_no_processor(tmp_path: Path) -> None:
    assert read_processor(tmp_path) is None
    assert read_processor(checkpoint(tmp_path, "llama", CLIP)) is None


def test_who_sees_has_a_processor_and_nobody_else() -> None:
    assert PROCESSORS.keys() == VISION_MODELS.keys()


def test_the_placeholder_is_the_models(tmp_path: Path) -> None:
    found = processor(tmp_path, "llava", CLIP)
    assert (found.placeholder_id, found.placeholder_text) == (TOKEN, TEXT)


def test_options_may_stand_in_processor_config(tmp_path: Path) -> None:
    """Where transformers 5 writes them."""
    whole = processor(tmp_path, "llava", CLIP)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {**COLOURS, **CLIP}}), encoding="utf-8"
    )
    assert read_processor(tmp_path) == whole


def test_old_names_mean_the_same(tmp_path: Path) -> None:
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
    "side": ("llava", {**CLIP, "crop_size": 48}, "56 x 56 pixels of the model's tower; crop_size"),
    "uncut": ("llava", {**CLIP, "do_center_crop": False}, "56 x 56 pixels of the model's tower; size"),
    "size": ("llava", {**CLIP, "size": {"longest_edge": 56}}, "size must be whole numbers"),
    "resample": ("llava", {**CLIP, "resample": 9}, "resample must be"),
    "next": ("llava_next", {**CLIP, "size": {"shortest_edge": 60}}, "size must be the 56 pixels"),
    "pinpoints": ("llava_next", {**CLIP, "image_grid_pinpoints": [[56, 56]]}, "not those of config.json"),
    "no-size": ("llava", {**CLIP, "size": {}}, "size must be whole numbers"),
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
def test_what_is_not_honoured_is_refused(tmp_path: Path, name: str) -> None:
    model_type, options, message = WRONG[name]
    config = {"vision_config": QWEN_VISION} if model_type == "qwen2_vl" else {}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        processor(tmp_path, model_type, options, **config)


@pytest.mark.parametrize(
    "pinpoints", [[[60, 56]], [], [56], [[56, 56, 56]], [[0, 56]], [[56 * 1000, 56 * 1000]]]
)
def test_resolutions_must_be_made_of_tiles(tmp_path: Path, pinpoints: list[Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"multiples of the tower's 56 pixels|not those of config\.json"
    ):
        processor(
            tmp_path,
            "llava_next",
            {**CLIP, "image_grid_pinpoints": pinpoints},
            image_grid_pinpoints=pinpoints,
        )


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    checkpoint(tmp_path, "llava", CLIP)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        read_processor(tmp_path)


def test_a_placeholder_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no added token has the id 99"):
        processor(tmp_path, "llava", CLIP, image_token_id=99)


# Digests


def test_digests_tell_pictures_apart(tmp_path: Path) -> None:
    """By pixels and by size; what is equal for the model has one digest, whatever file it came from."""
    options = {**CLIP, "image_grid_pinpoints": PINPOINTS}
    made = processor(tmp_path, "llava_next", options, image_grid_pinpoints=PINPOINTS)
    black, grey = Image.new("RGB", (60, 60)), Image.new("RGB", (60, 60), (1, 1, 1))
    pictures = [
        made.preprocess(image)
        for image in (black, grey, Image.new("RGB", (60, 61)), Image.new("RGB", (61, 60)))
    ]
    assert len({picture.digest for picture in pictures}) == 4
    assert made.preprocess(black.copy()).digest == pictures[0].digest
    assert all(len(picture.digest) == 16 for picture in pictures)
