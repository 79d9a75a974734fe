"""Which model prepares its pictures how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError
from foreword.media.base import Processor
from foreword.media.llava import LlavaProcessor
from foreword.media.llava_next import LlavaNextProcessor
from foreword.media.options import HIGHEST, Options, is_whole, read_object, read_options
from foreword.media.qwen_vl import QwenVLProcessor

__all__ = ["PROCESSORS", "Processor", "read_placeholders", "read_processor"]

Read = Callable[[int, str, dict[str, Any], Options], Processor]
PROCESSORS: Mapping[str, Read] = MappingProxyType(
    {
        "llava": LlavaProcessor.read,
        "llava_next": LlavaNextProcessor.read,
        "qwen2_vl": QwenVLProcessor.read,
        "qwen2_5_vl": QwenVLProcessor.read,
        "qwen3_vl": QwenVLProcessor.read,
    }
)
PLACEHOLDER_KEYS = ("image_token_id", "image_token_index")
VIDEO_KEY = "video_token_id"


def read_processor(path: Path) -> Processor | None:
    """Of the checkpoint in the directory `path`; None: its model takes no pictures. Raises CheckpointError."""
    file = path / "config.json"
    if not file.is_file():
        return None
    config = read_object(file)
    read = PROCESSORS.get(str(config.get("model_type")))
    if read is None:
        return None
    placeholder = _placeholder(config, file)
    options = read_options(path)
    options.colours()
    processor = read(placeholder, _text(placeholder, path), config, options)
    options.finish()
    return processor


def read_placeholders(path: Path) -> frozenset[int]:
    """Ids that stand for pictures and videos in prompts, where read_processor() finds a processor. Raises CheckpointError."""
    file = path / "config.json"
    config = read_object(file)
    video = config.get(VIDEO_KEY)
    return frozenset({_placeholder(config, file), *([video] if is_whole(video, 0) else ())})


def _placeholder(config: dict[str, Any], file: Path) -> int:
    value = next((config[key] for key in PLACEHOLDER_KEYS if config.get(key) is not None), None)
    if not is_whole(value, 0):
        raise CheckpointError(f"{file}: image_token_id must be a whole number from 0 to {HIGHEST}, got {value!r:.40}", "model")
    assert isinstance(value, int)
    return value


def _text(placeholder: int, path: Path) -> str:
    """How tokenizer.json writes a token."""
    file = path / "tokenizer.json"
    tokenizer = read_object(file)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("id") == placeholder and isinstance(token.get("content"), str):
            return str(token["content"])
    raise CheckpointError(f"{file}: no added token has the id {placeholder}, which stands for a picture in config.json", "model")
