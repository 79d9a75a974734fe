"""LLaVA-NeXT (LLaVA-1.6): the image scaled down as one tile, then in tiles of a higher resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foreword.core.images import (
    DEFAULT_PINPOINTS,
    MAX_TILES,
    PromptImage,
    Size,
    compute_tiling,
    parse_pinpoints,
)
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.interfaces import Precision
from foreword.models.vision.llava import LlavaConfig, LlavaTower, read_llava_model
from foreword.models.vision.vision_model import BuildTower, VisionModel
from foreword.weights.config_reader import ConfigReader


class LlavaNextTower(LlavaTower):
    """Joins tiles as they lie in the image, cuts off padding, and ends each row with a newline feature."""

    def __init__(
        self,
        config: LlavaConfig,
        resolutions: Sequence[Size],
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
    ) -> None:
        super().__init__(config, ops, precision, weights, device)
        self._resolutions = resolutions
        self._image_newline = weights.tensor("image_newline", config.hidden_size).to(precision.dtype)

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """An image of the largest resolution."""
        vit = self.config.vit
        size = max(self._resolutions, key=math.prod)
        layout = compute_tiling(size, self._resolutions, vit.image_size, vit.patches_per_side)
        rows, columns = layout.feature_grid
        num_tokens = self.config.tokens_per_tile + rows * (columns + 1)
        return self._make_black_image(num_tokens, size, 1 + math.prod(layout.tile_grid))

    def arrange(self, tiles: Sequence[Tensor], image: PromptImage) -> Tensor:
        """The first tile, which is the whole image, then the joined features of the others, row by row."""
        overview, *parts = tiles
        vit = self.config.vit
        layout = compute_tiling(image.original_size, self._resolutions, vit.image_size, vit.patches_per_side)
        assert len(parts) == math.prod(layout.tile_grid), "number of tiles differs from the layout"
        (top, left), (rows, columns) = layout.padding, layout.feature_grid
        joined = _join_tiles(parts, layout.tile_grid, vit.patches_per_side)
        area = joined[top : top + rows, left : left + columns]
        lines = torch.cat((area, self._image_newline.expand(rows, 1, -1)), 1)
        return torch.cat((overview, lines.flatten(0, 1)))


def read_llava_next(config: ConfigReader, path: Path) -> VisionModel:
    """model_type `llava_next`"""
    config.require_value("use_image_newline_parameter", True)

    def make_tower(llava: LlavaConfig) -> BuildTower:
        if llava.tokens_per_tile != llava.vit.patches_per_side**2:
            reason = "must leave exactly the patches of a tile: LLaVA-NeXT joins them by position"
            raise config.error("vision_feature_select_strategy", reason)
        return partial(LlavaNextTower, llava, _read_resolutions(config, llava.vit.image_size))

    return read_llava_model(config, path, make_tower)


def _join_tiles(tiles: Sequence[Tensor], grid: Size, side: int) -> Tensor:
    """Join tiles [side * side, H], given row by row, into one area [rows * side, columns * side, H]."""
    rows, columns = grid
    area = torch.stack(list(tiles)).view(rows, columns, side, side, -1)
    return area.transpose(1, 2).reshape(rows * side, columns * side, -1)


def _read_resolutions(config: ConfigReader, tile_size: int) -> tuple[Size, ...]:
    """Read `image_grid_pinpoints`: (height, width) pairs."""
    value = config.get("image_grid_pinpoints", DEFAULT_PINPOINTS)
    resolutions = parse_pinpoints(value, tile_size)
    if not resolutions:
        raise config.error(
            "image_grid_pinpoints",
            f"must be a list of [height, width], multiples of the tower's {tile_size} pixels and {MAX_TILES} "
            f"tiles at most, got {value!r:.80}",
        )
    return resolutions
