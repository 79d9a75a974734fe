"""LLaVA models of transformers as a reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from foreword.core.images import PromptImage, expand_placeholders
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image

SIZES = ((33, 77), (90, 20), (50, 50))  # of images, before preprocessing


class TransformersReference:
    """The model of transformers in `path`, in float32, with the same preprocessed images."""

    def __init__(self, path: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        values = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
        self._mean, self._std = (
            torch.tensor(values[key])[:, None, None] for key in ("image_mean", "image_std")
        )

    @property
    def num_parameters(self) -> int:
        return sum(item.numel() for item in self.model.parameters())

    def features(self, images: Sequence[PromptImage]) -> list[Tensor]:
        with torch.inference_mode():
            return list(self.model.get_image_features(**self._inputs(images)).pooler_output)

    def logits(self, ids: Sequence[int], images: Sequence[PromptImage]) -> Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), **self._inputs(images)).logits[0]

    def greedy(self, ids: Sequence[int], count: int, images: Sequence[PromptImage]) -> list[int]:
        known = torch.tensor([ids])
        with torch.inference_mode():
            output = self.model.generate(
                known,
                attention_mask=torch.ones_like(known),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                **self._inputs(images),
            )
        return output[0, len(ids) :].tolist()

    def _inputs(self, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Missing tiles are zeros, as padded by transformers' processor."""
        tiles = [self._normalize(image) for image in images]
        if self.model.config.model_type == "llava":
            return {"pixel_values": torch.cat(tiles)}
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True),
            "image_sizes": torch.tensor([image.original_size for image in images]),
        }

    def _normalize(self, image: PromptImage) -> Tensor:
        assert image.pixels is not None
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.shape)
        return (pixels / 255 - self._mean) / self._std


def backends() -> list[Ops]:
    """The reference, and the best native kernels of this CPU, if there are any."""
    return [ReferenceOps(), *(CpuOps(isa, threads=1) for isa in supported_isas()[-1:])]


def prompt_of(path: Path, seed: int = 0) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Three images of odd sizes within a text, two of them adjacent."""
    text = [1, 2, 3, IMAGE_TOKEN_ID, 7, 8, 9, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 10, 11, 12]
    return expand_placeholders(
        text, IMAGE_TOKEN_ID, [random_image(path, seed + index, *size) for index, size in enumerate(SIZES)]
    )


def check_chunked_prefill(ours: ForwardHelper, path: Path) -> None:
    """Chunks that end within images, and single rows, have the bits of one chunk."""
    ids, images = prompt_of(path)
    expected = ours.logits(ids, 0, images)
    cuts = [0, 1, 10, 28, len(ids) - 5, *range(len(ids) - 4, len(ids) + 1)]
    pieces = [ours.logits(ids[left:right], left, images) for left, right in pairwise(cuts)]
    assert expected.isfinite().all()
    assert torch.equal(torch.cat(pieces).view(torch.int32), expected.view(torch.int32))
