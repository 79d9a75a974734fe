"""Vision-language models: a decoder, and a tower whose features replace placeholder embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision, VisionEncoder
from foreword.weights.config_reader import ConfigReader, read_json

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # holds the preprocessor's options since transformers 5
MAX_PIXEL_VALUE = 255.0  # largest value of a colour channel


@dataclass(frozen=True, slots=True)
class Normalization:
    """Per-channel normalization of pixels: (byte * scale - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / MAX_PIXEL_VALUE

    def normalize(self, image: PromptImage, device: str) -> Tensor:
        """float32 [tiles, 3, height, width]"""
        assert image.pixels is not None, "image has no pixels"
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.shape)
        mean = torch.tensor(self.mean, dtype=torch.float32, device=device)[:, None, None]
        std = torch.tensor(self.std, dtype=torch.float32, device=device)[:, None, None]
        return (pixels.to(device, torch.float32) * self.scale - mean) / std


BuildTower = Callable[[Ops, Precision, Weights, str], VisionEncoder]


@dataclass(frozen=True, slots=True)
class VisionModel:
    """Config of a vision-language model, and how its tower is built."""

    decoder_type: type[Decoder]
    decoder_config: DecoderConfig
    image_token_id: int  # placeholder in prompts
    # Prefix that our modules use ("model." and "lm_head." for the decoder) -> prefixes in files, by priority.
    weight_prefixes: Mapping[str, tuple[str, ...]]
    build_tower: BuildTower  # on a device; the weights have the parts under the keys of weight_prefixes
    ignored_prefixes: tuple[str, ...] = ()  # prefixes of tensors that are not loaded, in terms of these keys


def read_image_token_id(config: ConfigReader, decoder_config: DecoderConfig) -> int:
    """The placeholder's id. It needs a row in the embedding, which is looked up and then overwritten."""
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    token_id = config.get_int(key, low=0)
    if token_id >= decoder_config.vocab_size:
        limit = decoder_config.vocab_size
        raise config.error(key, f"{token_id} must be below the vocab_size {limit} of the text_config")
    return token_id


def read_preprocessor_config(path: Path) -> Mapping[str, object]:
    """Image preprocessing options of the checkpoint in `path`. Raises CheckpointError."""
    if (path / PREPROCESSOR_FILE).is_file():
        return read_json(path / PREPROCESSOR_FILE)
    processor = read_json(path / PROCESSOR_FILE) if (path / PROCESSOR_FILE).is_file() else {}
    values = processor.get("image_processor")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} lacks {PREPROCESSOR_FILE}, which defines image preprocessing", "model")
    return values


def read_normalization(values: Mapping[str, object]) -> Normalization:
    """Read the normalization of a preprocessor_config.json. Raises CheckpointError."""
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
