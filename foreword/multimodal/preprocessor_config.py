"""Reads the image preprocessing options of a checkpoint; unsupported options are errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Resampling

from foreword.errors import CheckpointError, shown
from foreword.weights.config_reader import read_json

PREPROCESSOR_FILE = "preprocessor_config.json"
MAX_VALUE = 1 << 24  # sanity limit of sizes and pixels
# Options without effect on the uint8 pixels of one image. The engine normalizes colours.
IGNORED_OPTIONS = (
    *("_valid_processor_keys", "aspect_ratio_setting", "auto_map", "data_format", "default_to_square"),
    *("device", "disable_grouping", "do_convert_rgb", "feature_extractor_type", "image_mean"),
    *("image_processor_type", "image_std", "input_data_format", "processor_class", "rescale_factor"),
    "return_tensors",
)
PROCESSOR_TYPE = re.compile(
    r"(Clip|CLIP|Siglip|Llava|LlavaNext|Qwen2VL|Qwen2_5_VL|Qwen3VL)(ImageProcessor(Fast|Pil)?|FeatureExtractor)"
)
# (height, width), or the shortest edge
ImageSize = tuple[int, int] | int


def read_preprocessor_config(path: Path) -> PreprocessorReader:
    """The options of the checkpoint in `path`. Raises CheckpointError."""
    if (path / PREPROCESSOR_FILE).is_file():
        return PreprocessorReader(read_json(path / PREPROCESSOR_FILE, "model"), str(path / PREPROCESSOR_FILE))
    file = path / "processor_config.json"
    values = read_json(file, "model").get("image_processor") if file.is_file() else None
    if isinstance(values, dict):
        return PreprocessorReader(values, f"{file}: image_processor")
    raise CheckpointError(f"{path} has no {PREPROCESSOR_FILE}, which configures the image processor", "model")


class PreprocessorReader:
    """Reads options strictly: `check_all_read` raises for unread options. A null value counts as missing."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the file in errors."""
        self._values = {key: value for key, value in values.items() if value is not None}
        self._read_keys: set[str] = set()
        self.source = source

    @property
    def processor_family(self) -> str:
        """The processor family, such as CLIP or Siglip, which sets defaults; "" if not named."""
        name = self._values.get("image_processor_type", self._values.get("feature_extractor_type", ""))
        if name == "":
            return ""
        match = PROCESSOR_TYPE.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise CheckpointError(f"{self.source}: image_processor_type {shown(name)} is not known", "model")
        return match[1]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        self._read_keys.add(key)
        return self._values.get(key, default)

    def get_bool(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def get_int(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(key, default)
        if not is_int(value, low):
            raise self.error(key, f"an integer from {low} to {MAX_VALUE}")
        assert isinstance(value, int)
        return value

    def get_size(self, key: str, default: ImageSize) -> ImageSize:
        """{"height", "width"}, {"shortest_edge"} or a number, which is the shortest edge."""
        value = self.get(key, default)
        if isinstance(value, Mapping):
            given = {name: item for name, item in value.items() if item is not None}
            if given.keys() == {"height", "width"}:
                value = given["height"], given["width"]
            elif given.keys() == {"shortest_edge"}:
                value = given["shortest_edge"]
        if not all(is_int(item) for item in (value if isinstance(value, tuple) else (value,))):
            raise self.error(key, 'integers: {"height": ..., "width": ...} or {"shortest_edge": ...}')
        return value  # type: ignore[no-any-return]  # checked above

    def get_resample(self, default: Resampling = Resampling.BICUBIC) -> Resampling:
        value = self.get("resample", default.value)
        if not is_int(value, 0) or value > max(Resampling):
            raise self.error("resample", f"an integer from 0 to {max(Resampling).value}")
        return Resampling(value)

    def check_normalization(self) -> None:
        """Raises CheckpointError if normalization is disabled: the engine always normalizes."""
        for key in ("do_rescale", "do_normalize"):
            if not self.get_bool(key, True):
                raise CheckpointError(f"{self.source}: {key} false is not supported", "model")

    def check_all_read(self) -> None:
        """Raises CheckpointError for an option that was not read."""
        for key in self._values.keys() - self._read_keys - set(IGNORED_OPTIONS):
            raise CheckpointError(f"{self.source}: {key} is not supported", "model")

    def error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key} must be {expected}, got {shown(self._values.get(key))}", "model"
        )


def is_int(value: object, low: int = 1) -> bool:
    """Whether a value is an integer from `low` to MAX_VALUE."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_VALUE


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
DEFAULT_PATCH_SIZE = {CLIP: 32, SIGLIP: 16}  # defaults of transformers
DEFAULT_IMAGE_SIZE = 224
NUM_CLASS_TOKENS = {CLIP: 1, SIGLIP: 0}
NUM_DROPPED_TOKENS = {"default": 1, "full": 0}


@dataclass(frozen=True, slots=True)
class VisionTowerInfo:
    """Shape of the vision encoder's input."""

    image_size: int  # side of a tile in pixels
    grid_size: int  # side of a tile in patches
    num_extra_tokens: int  # tokens of a tile besides its patches; may be negative

    @property
    def num_tokens(self) -> int:
        """Tokens of one tile."""
        return self.grid_size * self.grid_size + self.num_extra_tokens


def read_tower_info(config: dict[str, Any]) -> VisionTowerInfo:
    """Reads config.json. Raises CheckpointError."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config must be an object, got {shown(vision)}", "model")
    kind = str(vision.get("model_type", CLIP))
    strategy = str(config.get("vision_feature_select_strategy", "default"))
    if kind not in DEFAULT_PATCH_SIZE or strategy not in NUM_DROPPED_TOKENS:
        raise CheckpointError(
            f"config.json: the vision encoder {shown(kind, 40)} with "
            f"vision_feature_select_strategy {shown(strategy, 40)} is not supported",
            "model",
        )
    side = vision.get("image_size", DEFAULT_IMAGE_SIZE)
    patch = vision.get("patch_size", DEFAULT_PATCH_SIZE[kind])
    if not is_int(side) or not is_int(patch) or patch > side:
        message = f"patch_size must be at most image_size, got {shown(patch, 40)} and {shown(side, 40)}"
        raise CheckpointError(f"config.json: {message}", "model")
    return VisionTowerInfo(side, side // patch, NUM_CLASS_TOKENS[kind] - NUM_DROPPED_TOKENS[strategy])
