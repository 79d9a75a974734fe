"""What LLaVA's processors must know of the tower: its side, its patches, and how many tokens come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreword.errors import CheckpointError
from foreword.media.options import is_whole

__all__ = ["TowerFacts", "read_tower"]

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
PATCH = {CLIP: 32, SIGLIP: 16}  # where config.json does not say
SIDE = 224
EXTRA = {CLIP: 1, SIGLIP: 0}  # the class token
DROPPED = {"default": 1, "full": 0}


@dataclass(frozen=True, slots=True)
class TowerFacts:
    """side   of the square that the tower takes, in pixels
    grid      patches along it
    num_more  tokens of a tile beside its patches
    """

    side: int
    grid: int
    num_more: int

    @property
    def num_tokens(self) -> int:
        """Of one tile."""
        return self.grid * self.grid + self.num_more


def read_tower(config: dict[str, Any]) -> TowerFacts:
    """From config.json. Raises CheckpointError."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config must be an object, got {vision!r:.80}", "model")
    kind = str(vision.get("model_type", CLIP))
    strategy = str(config.get("vision_feature_select_strategy", "default"))
    if kind not in PATCH or strategy not in DROPPED:
        raise CheckpointError(
            f"config.json: a {kind!r:.40} as tower with vision_feature_select_strategy {strategy!r:.40} is not supported", "model"
        )
    side, patch = vision.get("image_size", SIDE), vision.get("patch_size", PATCH[kind])
    if not is_whole(side) or not is_whole(patch) or patch > side:
        raise CheckpointError(f"config.json: a tower of {side!r:.40} pixels in patches of {patch!r:.40} is impossible", "model")
    return TowerFacts(side, side // patch, EXTRA[kind] - DROPPED[strategy])
