"""LLaVA-NeXT (LLaVA-1.6): a picture as a whole, and then in tiles that show more of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foreword.core.anyres import Size, tiling
from foreword.core.pictures import Picture
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, Tower
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.vision.llava import Llava, LlavaConfig, LlavaTower, read_llava

__all__ = ["LlavaNext"]

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
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
        self._newline = weights.take("image_newline", config.hidden).to(precision.dtype)

    def largest(self, max_tokens: int) -> Picture:
        """The largest resolution, filled; its tiles are seen one by one."""
        vit = self.config.vit
        size = max(self._resolutions, key=math.prod)
        layout = tiling(size, self._resolutions, vit.image_size, vit.side)
        rows, columns = layout.kept
        return self._black(self.config.tile_tokens + rows * (columns + 1), size, 1 + math.prod(layout.tiles))

    def arranged(self, tiles: Sequence[Tensor], picture: Picture) -> Tensor:
        """The first tile, the whole picture, as it is; then row by row what lies in the others."""
        whole, *parts = tiles
        vit = self.config.vit
        layout = tiling(picture.size, self._resolutions, vit.image_size, vit.side)
        assert len(parts) == math.prod(layout.tiles), "a picture cut into other tiles"
        (top, left), (rows, columns) = layout.margin, layout.kept
        area = _joined(parts, layout.tiles, vit.side)[top : top + rows, left : left + columns]
        lines = torch.cat((area, self._newline.expand(rows, 1, -1)), 1)
        return torch.cat((whole, lines.flatten(0, 1)))


class LlavaNext(Llava):
    """model_type `llava_next`"""

    def __init__(
        self,
        decoder_type: type[Decoder],
        decoder: DecoderConfig,
        image_token_id: int,
        config: LlavaConfig,
        resolutions: Sequence[Size],
    ) -> None:
        super().__init__(decoder_type, decoder, image_token_id, config)
        self._resolutions = resolutions

    @classmethod
    def read(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        config.expect("use_image_newline_parameter", True)
        decoder_type, decoder, image_token_id, read = read_llava(config, path)
        if read.tile_tokens != read.vit.side**2:
            raise config.refuse(
                "vision_feature_select_strategy", "must leave the patches of a tile, all of them and nothing else"
            )
        return cls(decoder_type, decoder, image_token_id, read, _read_resolutions(config, read.vit.image_size))

    def tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> Tower:
        """Build the tower."""
        return LlavaNextTower(self.config, self._resolutions, ops, precision, weights, device)


def _joined(tiles: Sequence[Tensor], shape: Size, side: int) -> Tensor:
    """Tiles [side * side, H], row by row, as one area [rows * side, columns * side, H]"""
    rows, columns = shape
    area = torch.stack(list(tiles)).view(rows, columns, side, side, -1)
    return area.transpose(1, 2).reshape(rows * side, columns * side, -1)


def _read_resolutions(config: ConfigReader, tile: int) -> tuple[Size, ...]:
    """`image_grid_pinpoints`: (height, width) pairs."""
    value = config.raw("image_grid_pinpoints", PINPOINTS)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PINPOINTS or not all(_is_resolution(one, tile) for one in value):
        raise config.refuse(
            "image_grid_pinpoints",
            f"must be a list of [height, width], multiples of the tower's {tile} pixels and {MAX_TILES} tiles at most, "
            f"got {value!r:.80}",
        )
    return tuple((height, width) for height, width in value)


def _is_resolution(value: object, tile: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(length, int) and length > 0 and length % tile == 0 for length in value)
        and value[0] * value[1] <= MAX_TILES * tile * tile
    )
