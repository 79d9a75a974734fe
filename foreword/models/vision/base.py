"""What is common to models that see pictures: a decoder as elsewhere, and a tower whose features stand in for tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, VisionEncoder
from foreword.models.config import ConfigReader, read_json
from foreword.models.decoder import Decoder, DecoderConfig

__all__ = [
    "PREPROCESSOR_FILE",
    "PROCESSOR_FILE",
    "Normalization",
    "VisionModel",
    "read_normalization",
    "read_preprocessor_config",
]

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # holds the same since transformers 5
MAX_PIXEL_VALUE = 255.0  # of a colour


@dataclass(frozen=True, slots=True)
class Normalization:
    """Of colours, one value a channel: (byte * scale - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / MAX_PIXEL_VALUE

    def normalize(self, image: PromptImage, device: str) -> Tensor:
        """float32 [tiles, 3, height, width]"""
        assert image.pixels is not None, "a picture without its pixels"
        values = (
            torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            .view(image.shape)
            .to(device, torch.float32)
        )
        mean, std = (
            torch.tensor(one, dtype=torch.float32, device=device)[:, None, None]
            for one in (self.mean, self.std)
        )
        return (values * self.scale - mean) / std


class VisionModel(ABC):
    """What config.json says of a model that sees. A subclass, one to an architecture, reads it and builds the tower.

    PREFIXES        names of the parts as the tower asks for them ("model.", "lm_head." for the decoder), and beginnings of names
                    that files have for them, the first found holds
    decoder_type, decoder  the decoder
    image_token_id  the placeholder in prompts
    """

    WEIGHT_PREFIXES: ClassVar[Mapping[str, tuple[str, ...]]]

    def __init__(
        self, decoder_type: type[Decoder], decoder_config: DecoderConfig, image_token_id: int
    ) -> None:
        self.decoder_type = decoder_type
        self.decoder_config = decoder_config
        self.image_token_id = image_token_id

    @classmethod
    @abstractmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        """What config.json, and other files in `path`, say. Raises CheckpointError for what is not honoured."""

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Beginnings of names of tensors that are left alone, in the words of PREFIXES."""
        return ()

    @abstractmethod
    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        """Build the tower; `weights` has the parts under the names of PREFIXES."""


def read_preprocessor_config(path: Path) -> Mapping[str, object]:
    """How pictures are prepared, as the checkpoint in `path` says. Raises CheckpointError."""
    if (path / PREPROCESSOR_FILE).is_file():
        return read_json(path / PREPROCESSOR_FILE)
    values = (
        read_json(path / PROCESSOR_FILE).get("image_processor") if (path / PROCESSOR_FILE).is_file() else None
    )
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} lacks {PREPROCESSOR_FILE}, which says how pictures are prepared", "model"
        )
    return values


def read_normalization(values: Mapping[str, object]) -> Normalization:
    """Of a preprocessor_config.json. Raises CheckpointError."""
    mean, std = (_read_channels(values, key) for key in ("image_mean", "image_std"))
    scale = values.get("rescale_factor", 1 / MAX_PIXEL_VALUE)
    if not isinstance(scale, float) or not 0 < scale <= 1:
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: rescale_factor must be above 0 and at most 1, got {scale!r:.80}", "model"
        )
    return Normalization(mean, std, scale)


def _read_channels(values: Mapping[str, object], key: str) -> tuple[float, float, float]:
    given = values.get(key)
    if (
        not isinstance(given, list)
        or len(given) != 3
        or not all(isinstance(item, int | float) for item in given)
    ):
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: {key} must be a list of 3 numbers, got {given!r:.80}", "model"
        )
    red, green, blue = map(float, given)
    if key == "image_std" and min(red, green, blue) <= 0:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: image_std must be positive, got {given!r:.80}", "model")
    return red, green, blue
