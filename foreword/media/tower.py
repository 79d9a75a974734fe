"""What LLaVA's processors must know of the tower: its side, its patches, and how many tokens come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreword.errors import CheckpointError
from foreword.media.options import is_int

__all__ = ["VisionTowerInfo", "read_tower_info"]

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
DEFAULT_PATCH_SIZE = {CLIP: 32, SIGLIP: 16}  # where config.json does not say
DEFAULT_IMAGE_SIZE = 224
NUM_CLASS_TOKENS = {CLIP: 1, SIGLIP: 0}  # the class token
NUM_DROPPED_TOKENS = {"default": 1, "full": 0}


@dataclass(frozen=True, slots=True)
class VisionTowerInfo:
    """side   of the square that the tower takes, in pixels
    grid      patches along it
    num_more  tokens of a tile beside its patches
    """

    image_size: int
    grid_size: int
    num_extra_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of one tile."""
        return self.grid_size * self.grid_size + self.num_extra_tokens


def read_tower_info(config: dict[str, Any]) -> VisionTowerInfo:
    """From config.json. Raises CheckpointError."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config must be an object, got {vision!r:.80}", "model")
    kind = str(vision.get("model_type", CLIP))
    strategy = str(config.get("vision_feature_select_strategy", "default"))
    if kind not in DEFAULT_PATCH_SIZE or strategy not in NUM_DROPPED_TOKENS:
        raise CheckpointError(
            f"config.json: a {kind!r:.40} as tower with vision_feature_select_strategy {strategy!r:.40} is not supported", "model"
        )
    side, patch = vision.get("image_size", DEFAULT_IMAGE_SIZE), vision.get("patch_size", DEFAULT_PATCH_SIZE[kind])
    if not is_int(side) or not is_int(patch) or patch > side:
        raise CheckpointError(f"config.json: a tower of {side!r:.40} pixels in patches of {patch!r:.40} is impossible", "model")
    return VisionTowerInfo(side, side // patch, NUM_CLASS_TOKENS[kind] - NUM_DROPPED_TOKENS[strategy])
