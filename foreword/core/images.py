"""Images of a prompt, and their placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


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
