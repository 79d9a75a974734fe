"""Architectures that see pictures, by the name that checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreword.models.vision.base import VisionModel
from foreword.models.vision.llava import Llava
from foreword.models.vision.llava_next import LlavaNext
from foreword.models.vision.qwen2_5_vl import Qwen25VL
from foreword.models.vision.qwen2_vl import Qwen2VL
from foreword.models.vision.qwen3_vl import Qwen3VL

__all__ = ["VISION_MODELS"]

VISION_MODELS: Mapping[str, type[VisionModel]] = MappingProxyType(
    {
        "llava": Llava,
        "llava_next": LlavaNext,
        "qwen2_vl": Qwen2VL,
        "qwen2_5_vl": Qwen25VL,
        "qwen3_vl": Qwen3VL,
    }
)
