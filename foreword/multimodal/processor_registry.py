"""Selects and configures the image processor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError, shown
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.llava_processor import LlavaNextProcessor, LlavaProcessor
from foreword.multimodal.preprocessor_config import (
    MAX_VALUE,
    PreprocessorReader,
    is_int,
    read_preprocessor_config,
)
from foreword.multimodal.qwen_vl_processor import QwenVLProcessor
from foreword.weights.config_reader import read_json

FromConfig = Callable[[int, str, dict[str, Any], PreprocessorReader], ImageProcessor]
PROCESSORS: Mapping[str, FromConfig] = MappingProxyType(
    {
        "llava": LlavaProcessor.from_config,
        "llava_next": LlavaNextProcessor.from_config,
        "qwen2_vl": QwenVLProcessor.from_config,
        "qwen2_5_vl": QwenVLProcessor.from_config,
        "qwen3_vl": QwenVLProcessor.from_config,
    }
)
PLACEHOLDER_KEYS = ("image_token_id", "image_token_index")
VIDEO_KEY = "video_token_id"


def read_processor(path: Path) -> ImageProcessor | None:
    """The image processor of a checkpoint directory; None for a text-only model. Raises CheckpointError."""
    file = path / "config.json"
    if not file.is_file():
        return None
    config = read_json(file, "model")
    read = PROCESSORS.get(str(config.get("model_type")))
    if read is None:
        return None
    placeholder = _read_placeholder_id(config, file)
    options = read_preprocessor_config(path)
    options.check_normalization()
    processor = read(placeholder, _read_placeholder_text(placeholder, path), config, options)
    options.check_all_read()
    return processor


def read_placeholder_ids(path: Path, vocab_size: int) -> frozenset[int]:
    """Ids of the image and video placeholders of a multimodal model. Raises CheckpointError."""
    file = path / "config.json"
    config = read_json(file, "model")
    ids = {"image_token_id": _read_placeholder_id(config, file)}
    if config.get(VIDEO_KEY) is not None:
        ids[VIDEO_KEY] = config[VIDEO_KEY]
    for key, value in ids.items():
        if not is_int(value, 0) or value >= vocab_size:
            problem = f"{key} must be a token id from 0 to {vocab_size - 1}, got {shown(value, 40)}"
            raise CheckpointError(f"{file}: {problem}", "model")
    return frozenset(ids.values())


def _read_placeholder_id(config: dict[str, Any], file: Path) -> int:
    value = next((config[key] for key in PLACEHOLDER_KEYS if config.get(key) is not None), None)
    if not is_int(value, 0):
        raise CheckpointError(
            f"{file}: image_token_id must be an integer from 0 to {MAX_VALUE}, got {shown(value, 40)}",
            "model",
        )
    assert isinstance(value, int)
    return value


def _read_placeholder_text(placeholder_id: int, path: Path) -> str:
    """The text of a token in tokenizer.json."""
    file = path / "tokenizer.json"
    added = read_json(file, "model").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        text = token.get("content") if isinstance(token, dict) and token.get("id") == placeholder_id else None
        if isinstance(text, str):
            return text
    message = f"{file}: no added token has the id {placeholder_id}, the image token of config.json"
    raise CheckpointError(message, "model")
