"""LLaVA-NeXT (LLaVA-1.6): a picture as a whole, and then in tiles that show more of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foreword.core.images import PromptImage, Size, compute_tiling
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, VisionEncoder
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.vision.llava import Llava, LlavaConfig, LlavaTower, read_llava_config

__all__ = ["LlavaNext"]

DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
MAX_PINPOINTS = 1024
MAX_TILES = 1024


class LlavaNextTower(LlavaTower):
    """Tiles are put together as they lie in the picture, margins are cut off, and each row ends with a newline."""

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
        """The largest resolution, filled; its tiles are seen one by one."""
        vit = self.config.vit
        size = max(self._resolutions, key=math.prod)
        layout = compute_tiling(size, self._resolutions, vit.image_size, vit.patches_per_side)
        rows, columns = layout.feature_grid
        return self._make_black_image(
            self.config.tokens_per_tile + rows * (columns + 1), size, 1 + math.prod(layout.tile_grid)
        )

    def arrange(self, tiles: Sequence[Tensor], image: PromptImage) -> Tensor:
        """The first tile, the whole picture, as it is; then row by row what lies in the others."""
        whole, *parts = tiles
        vit = self.config.vit
        layout = compute_tiling(image.original_size, self._resolutions, vit.image_size, vit.patches_per_side)
        assert len(parts) == math.prod(layout.tile_grid), "a picture cut into other tiles"
        (top, left), (rows, columns) = layout.padding, layout.feature_grid
        area = _join_tiles(parts, layout.tile_grid, vit.patches_per_side)[
            top : top + rows, left : left + columns
        ]
        lines = torch.cat((area, self._image_newline.expand(rows, 1, -1)), 1)
        return torch.cat((whole, lines.flatten(0, 1)))


class LlavaNext(Llava):
    """model_type `llava_next`"""

    def __init__(
        self,
        decoder_type: type[Decoder],
        decoder_config: DecoderConfig,
        image_token_id: int,
        config: LlavaConfig,
        resolutions: Sequence[Size],
    ) -> None:
        super().__init__(decoder_type, decoder_config, image_token_id, config)
        self._resolutions = resolutions

    @classmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        config.require_value("use_image_newline_parameter", True)
        decoder_type, decoder, image_token_id, read = read_llava_config(config, path)
        if read.tokens_per_tile != read.vit.patches_per_side**2:
            raise config.error(
                "vision_feature_select_strategy",
                "must leave the patches of a tile, all of them and nothing else",
            )
        return cls(
            decoder_type, decoder, image_token_id, read, _read_resolutions(config, read.vit.image_size)
        )

    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        """Build the tower."""
        return LlavaNextTower(self.config, self._resolutions, ops, precision, weights, device)


def _join_tiles(tiles: Sequence[Tensor], grid: Size, side: int) -> Tensor:
    """Tiles [side * side, H], row by row, as one area [rows * side, columns * side, H]"""
    rows, columns = grid
    area = torch.stack(list(tiles)).view(rows, columns, side, side, -1)
    return area.transpose(1, 2).reshape(rows * side, columns * side, -1)


def _read_resolutions(config: ConfigReader, tile_size: int) -> tuple[Size, ...]:
    """`image_grid_pinpoints`: (height, width) pairs."""
    value = config.get("image_grid_pinpoints", DEFAULT_PINPOINTS)
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= MAX_PINPOINTS
        or not all(_is_resolution(one, tile_size) for one in value)
    ):
        raise config.error(
            "image_grid_pinpoints",
            f"must be a list of [height, width], multiples of the tower's {tile_size} pixels and {MAX_TILES} tiles at most, "
            f"got {value!r:.80}",
        )
    return tuple((height, width) for height, width in value)


def _is_resolution(value: object, tile_size: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(length, int) and length > 0 and length % tile_size == 0 for length in value)
        and value[0] * value[1] <= MAX_TILES * tile_size * tile_size
    )
