"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers in float32: features, logits, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from foreword.core.images import PromptImage, expand_placeholders
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.multimodal.processor_registry import read_processor
from tests.support.budget import some_of
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import (
    IMAGE_TOKEN_ID,
    VISION_FAMILIES,
    random_image,
    write_vision_checkpoint,
)

START, END = 271, 272
SIZES = (
    (40, 30),
    (9, 70),
    (64, 64),
    (23, 8),
)  # odd sizes; in 8 x 8 pixels a token: 5 x 4, 1 x 9, 8 x 8, 3 x 1
WIDER: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "vision_config": {
            "patch_size": 6,
            "temporal_patch_size": 1,
            "embed_dim": 24,
            "hidden_act": "gelu",
            "mlp_ratio": 3,
        }
    },
    "qwen2_5_vl": {
        "vision_config": {
            "window_size": 24,
            "spatial_merge_size": 3,
            "fullatt_block_indexes": [0, 2],
            "depth": 4,
        }
    },
    "qwen3_vl": {"vision_config": {"num_position_embeddings": 4, "deepstack_visual_indexes": [3]}},
}
CASES = {
    **{family: (family, "old", {}) for family in WIDER},
    **{f"{family}-new": (family, "new", {}) for family in WIDER},
    **{f"{family}-wider": (family, "old", overrides) for family, overrides in WIDER.items()},
    "qwen2_vl-tied": (
        "qwen2_vl",
        "new",
        {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True},
    ),
    "qwen3_vl-shallow": ("qwen3_vl", "new", {"vision_config": {"deepstack_visual_indexes": []}}),
    "qwen2_5_vl-yarn": (
        "qwen2_5_vl",
        "old",
        {
            "text_config": {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "mrope_section": [4, 2, 2],
                }
            }
        },
    ),
}


def peer(path: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForImageTextToText.from_pretrained(path, **kinds).eval()


def prompt_of(images: Sequence[PromptImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Token ids with text between images, and the images with their positions."""
    generator = torch.Generator().manual_seed(7)

    def text(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    ids = text(5)
    for number, _ in enumerate(images):
        ids += [START, IMAGE_TOKEN_ID, END, *text(3 + number)]
    prompt, found = expand_placeholders(ids, IMAGE_TOKEN_ID, images)
    return list(prompt), found


class Peer:
    """The model of transformers with the same pixels, in its processor's patch layout."""

    def __init__(self, path: Path) -> None:
        self.model = peer(path)
        vision = self.model.config.vision_config
        self.patch, self.merge, self.frames = (
            vision.patch_size,
            vision.spatial_merge_size,
            vision.temporal_patch_size,
        )
        colours = transformers.AutoImageProcessor.from_pretrained(path, use_fast=False)
        self.colours = [torch.tensor(one)[:, None, None] for one in (colours.image_mean, colours.image_std)]
        self.processor = colours

    def inputs(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> dict[str, Tensor]:
        ids = torch.tensor([prompt])
        grids = [
            [1, rows * self.merge, columns * self.merge]
            for _, rows, columns in (one.grid_thw for one in images)
        ]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int(),
            "pixel_values": torch.cat([self.patches(one) for one in images]),
            "image_grid_thw": torch.tensor(grids),
        }

    def patches(self, image: PromptImage) -> Tensor:
        assert image.pixels is not None
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.shape)[0]
        mean, std = self.colours
        wide = ((pixels.float() / 255 - mean) / std).numpy()
        return torch.from_numpy(self.processor.patchify(wide, self.patch, self.merge, self.frames)[0])

    def features(self, image: PromptImage) -> Tensor:
        """Side by side those that go into the embedding and those that go deeper."""
        inputs = self.inputs([IMAGE_TOKEN_ID], [image])
        found = self.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        (own,) = found.pooler_output
        deeper = [one for (one,) in getattr(found, "deepstack_features", None) or []]
        return torch.cat([own, *deeper], -1)


@pytest.mark.parametrize("case", some_of(CASES, 2))
def test_logits_and_tokens_equal_transformers(case: str, tmp_path: Path):
    family, layout, overrides = CASES[case]
    path = write_vision_checkpoint(tmp_path / family, family, layout=layout, **overrides)
    theirs, ours = Peer(path), ForwardHelper(path)
    assert (
        sum(item.numel() for item in theirs.model.parameters())
        == ours.model.info.parameters
        == read_model_info(path).parameters
    )
    prompt, images = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    with torch.inference_mode():
        for image in images:
            torch.testing.assert_close(ours.encode(image), theirs.features(image), atol=1e-4, rtol=0)
        inputs = theirs.inputs(prompt, images)
        expected = theirs.model(**inputs).logits[0]
        generated = theirs.model.generate(**inputs, max_new_tokens=32, do_sample=False, eos_token_id=None)
    torch.testing.assert_close(ours.logits(prompt, 0, images), expected, atol=1e-3, rtol=0)
    output = ours.greedy(prompt, 32, images)
    assert output == generated[0, len(prompt) :].tolist()
    assert len(set(output)) > 8, "the output loops, so the comparison is weak"


def test_mrope_positions_change_logits(tmp_path: Path):
    """Otherwise the comparison with transformers could not detect wrong positions."""
    path = write_vision_checkpoint(tmp_path, "qwen2_vl")
    ours = ForwardHelper(path)
    prompt, images = prompt_of([random_image(path)])
    flat = [replace(one, grid_thw=(1, 1, one.num_tokens)) for one in images]
    with_positions = ours.logits(prompt, 0, images)
    assert (ours.logits(prompt, 0, flat) - with_positions).abs().amax() > 0.1


@pytest.mark.parametrize("family", WIDER)
def test_image_file_gives_the_same_features(family: str, tmp_path: Path):
    """Our processor and that of transformers give the same grid and features."""
    path = write_vision_checkpoint(tmp_path / family, family)
    theirs, ours, processor = Peer(path), ForwardHelper(path), read_processor(path)
    assert processor is not None
    for height, width in ((37, 91), (130, 33), (5, 9)):
        y, x = numpy.mgrid[0:height, 0:width]
        image = Image.fromarray(
            numpy.stack([x * 5 % 256, y * 7 % 256, (x + y) * 3 % 256], -1).astype(numpy.uint8)
        )
        image, prepared = processor.preprocess(image), theirs.processor(images=[image], return_tensors="pt")
        assert prepared["image_grid_thw"].tolist() == [
            [1, image.grid_thw[1] * theirs.merge, image.grid_thw[2] * theirs.merge]
        ]
        torch.testing.assert_close(theirs.patches(image), prepared["pixel_values"], atol=1e-5, rtol=0)
        with torch.inference_mode():
            torch.testing.assert_close(ours.encode(image), theirs.features(image), atol=1e-4, rtol=0)


class Meta(ReferenceOps):
    """On the meta device, which refuses tensors of other devices."""

    def _position_changes_bits(self, weight: Any) -> bool:
        return False


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tensors_stay_on_the_engines_device(family: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path, family)
    model, image = (
        load_model(path, Meta(), Precision.from_dtypes("float32"), "meta", 64),
        random_image(path),
    )
    assert model.vision_encoder is not None
    work = model.vision_encoder.encode(image)
    with torch.inference_mode(), pytest.raises(StopIteration) as done:
        while True:
            next(work)
    assert done.value.value.device.type == "meta" and done.value.value.shape == (
        image.num_tokens,
        model.vision_encoder.feature_size,
    )
