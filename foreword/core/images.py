"""Images of a prompt: placeholders, M-RoPE positions (arXiv 2409.12191), and anyres tiles of LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foreword.errors import InvalidRequest

Size = tuple[int, int]  # (height, width)
MAX_SIZE: Final = 1 << 24  # above the tiles, pixels of a side or tokens of any image
DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # LLaVA-NeXT's
MAX_PINPOINTS = 1024
MAX_TILES: Final = 1024  # limit of an image
ROUND_DIGITS = 7  # digits kept before a length is truncated: 2.9999999999 counts as 3


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image, preprocessed for one model."""

    digest: bytes  # 16 bytes over pixels, shape and size: equal digests mean equal features
    num_tokens: int  # placeholders of the image in the prompt
    grid_thw: tuple[int, int, int]  # (frames, rows, columns) of its tokens, for M-RoPE; one frame here
    original_size: tuple[int, int]  # (height, width) before it was resized, upright
    shape: tuple[int, int, int, int]  # shape of the pixels: (tiles, 3, height, width)
    pixels: bytes | None = field(repr=False)  # uint8, resized and tiled; None: the engine has them
    start: int = 0  # index of its first placeholder in the prompt

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.start + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Size of its pixels in bytes."""
        tiles, channels, height, width = self.shape
        return tiles * channels * height * width

    def check_bounds(self, prompt_len: int) -> None:
        """Raises InvalidRequest unless it lies in the prompt, with sizes that an image may have."""
        problem = ""
        if self.num_tokens < 1:
            problem = f"an image has {self.num_tokens:.40g} tokens, needs at least 1"
        elif not 0 <= self.start <= prompt_len - self.num_tokens:
            problem = f"image at token {self.start:.40g} exceeds the prompt ({prompt_len} tokens)"
        elif not all(1 <= size <= MAX_SIZE for size in (*self.grid_thw, *self.original_size, *self.shape)):
            problem = f"the sizes of an image must be between 1 and {MAX_SIZE}"
        if problem:
            raise InvalidRequest(problem, "messages")  # the field that images come from

    def without_pixels(self) -> PromptImage:
        return self if self.pixels is None else replace(self, pixels=None)


def expand_placeholders(
    prompt_ids: Sequence[int], placeholder_id: int, images: Sequence[PromptImage]
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Repeat each image's placeholder `num_tokens` times, and set the `start` of the images.

    prompt_ids  one placeholder per image, in their order; the caller has checked the count
    """
    ids: list[int] = []
    placed: list[PromptImage] = []
    for token_id in prompt_ids:
        if token_id != placeholder_id:
            ids.append(token_id)
            continue
        image = replace(images[len(placed)], start=len(ids))
        placed.append(image)
        ids.extend([placeholder_id] * image.num_tokens)
    assert len(placed) == len(images), "an image without a placeholder"
    return tuple(ids), tuple(placed)


class MRopePositions:
    """Time, row and column of each token of one request.

    A text token has three equal coordinates. Tokens of an image share their time, not row and column.
    Text after an image continues at max(position) + 1, so later positions are smaller than token indices.
    """

    __slots__ = ("_prompt", "offset")

    def __init__(self, images: Sequence[PromptImage]) -> None:
        parts: list[NDArray[np.int64]] = []
        index = position = 0
        for image in images:
            parts.append(_text_positions(position, image.start - index))
            position += image.start - index
            grid = np.indices(image.grid_thw, dtype=np.int64)
            parts.append(position + grid.reshape(3, -1).T)
            position += max(image.grid_thw)
            index = image.end
        self._prompt = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
        self.offset = position - index  # position minus index of a token after the last image

    def rows(self, start: int, end: int) -> NDArray[np.int64]:
        """int64 [end - start, 3]: time, row, column of the tokens from index `start` to `end`."""
        if start >= len(self._prompt):
            return _text_positions(start + self.offset, end - start)
        known = self._prompt[start:end]
        first = start + len(known)
        return np.concatenate((known, _text_positions(first + self.offset, end - first)))


def _text_positions(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64).repeat(3).reshape(count, 3)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Anyres tiles of one image, without the overview tile. All fields are (rows, columns).

    The image is scaled into one of a few resolutions, padded, and cut into tiles of the encoder's size.
    An overview tile of the complete image comes first. Features of the padding are dropped.
    """

    tile_grid: Size
    padding: Size  # features dropped on each side
    feature_grid: Size  # features that remain

    @property
    def num_tokens(self) -> int:
        """Tokens after those of the overview tile: each row of features ends with a newline."""
        rows, columns = self.feature_grid
        return rows * (columns + 1)


def choose_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most of the image's pixels; of equals the smallest, then the first."""

    def kept_pixels(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return pixels, -resolution[0] * resolution[1]

    return max(resolutions, key=kept_pixels)


def parse_pinpoints(value: object, tile_size: int) -> tuple[Size, ...]:
    """`image_grid_pinpoints`: (height, width) pairs in whole tiles; (): the value is invalid."""
    if not isinstance(value, list) or len(value) > MAX_PINPOINTS:
        return ()
    for pinpoint in value:
        if not isinstance(pinpoint, list) or len(pinpoint) != 2:
            return ()
        if not all(type(length) is int and length > 0 and length % tile_size == 0 for length in pinpoint):
            return ()
        if pinpoint[0] * pinpoint[1] > MAX_TILES * tile_size**2:
            return ()
    return tuple((height, width) for height, width in value)


def compute_tiling(size: Size, resolutions: Sequence[Size], tile_size: int, features_per_side: int) -> Tiling:
    """Tiles of `tile_size` pixels, with `features_per_side` features per side, for an image of this size."""
    best = choose_resolution(size, resolutions)
    tiles = (best[0] // tile_size, best[1] // tile_size)
    rows, columns = tiles[0] * features_per_side, tiles[1] * features_per_side
    padding = _padding(size, (rows, columns))
    return Tiling(tiles, padding, (rows - 2 * padding[0], columns - 2 * padding[1]))


def _padding(size: Size, area: Size) -> Size:
    """Rows or columns of the area that the image, scaled to fit, leaves empty on each side."""
    (height, width), (rows, columns) = size, area
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), ROUND_DIGITS))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), ROUND_DIGITS))) // 2
