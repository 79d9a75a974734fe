"""Common code of vision-language models."""

import re

import pytest
import torch

from foreword.core.images import PromptImage
from foreword.errors import CheckpointError
from foreword.models.vision.vision_model import read_normalization
from foreword.weights.dummy_weights import MetaWeights
from foreword.weights.renamed_weights import MultipartWeights

CLIP = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.25, 1], "rescale_factor": 1 / 255}


def test_normalization() -> None:
    image = PromptImage(b"", 1, (1, 1, 1), (1, 2), (1, 3, 1, 2), bytes([0, 255, 51, 102, 153, 204]))
    values = read_normalization(CLIP).normalize(image, "cpu")
    expected = torch.tensor([[[[-1.0, 1.0]], [[-0.2, 0.6]], [[0.475, 0.675]]]])
    assert values.dtype == torch.float32 and torch.allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_mean", None, "image_mean must be a list of 3 numbers, got None"),
        ("image_mean", [0.5, 0.5], "image_mean must be a list of 3 numbers"),
        ("image_std", [0.5, 0.5, "1"], "image_std must be a list of 3 numbers"),
        ("image_std", [0.5, 0.5, 0.0], "image_std must be positive"),
        ("rescale_factor", 2.0, "rescale_factor must be above 0 and at most 1, got 2.0"),
    ],
)
def test_invalid_normalization_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_normalization({**CLIP, key: value})


class Named(MetaWeights):
    """Records requested names."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        self.asked.append(name)
        return super().tensor(name, *shape)


def test_weight_prefixes_are_mapped() -> None:
    """The first prefix that the file has is used."""
    files = Named()
    prefixes = {
        "model.": ("model.language_model.", "language_model.model."),
        "lm_head.": ("lm_head.", "language_model.lm_head."),
    }
    weights = MultipartWeights(
        files, frozenset({"language_model.model.norm.weight", "language_model.lm_head.weight"}), prefixes
    )
    weights.tensor("model.norm.weight", 2)
    weights.prefixed("model.").prefixed("layers.0.").tensor("norm.weight", 2)
    with weights.weights({"lm_head.weight": 3}, 2):
        pass
    weights.tensor("image_newline", 2)
    assert files.asked == [
        "language_model.model.norm.weight",
        "language_model.model.layers.0.norm.weight",
        "language_model.lm_head.weight",
        "image_newline",
    ]
