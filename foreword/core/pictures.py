"""Pictures of a prompt, as plain values: what a model's tower sees, and where its tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["PromptImage", "expand_placeholders"]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One picture, prepared for one model.

    digest      16 bytes over pixels, shape and size: equal digests mean equal features
    num_tokens  placeholders that stand for it in the prompt
    grid        (frames, rows, columns) of its tokens, for positions in several directions; one frame here
    size        (height, width) before it was resized, as it is looked at
    shape       of the pixels: (tiles, 3, height, width)
    pixels      uint8, resized and cut as the model wants them but not yet normalized; None: the engine has got them already
    start       index of its first placeholder in the prompt
    """

    digest: bytes
    num_tokens: int
    grid_thw: tuple[int, int, int]
    original_size: tuple[int, int]
    shape: tuple[int, int, int, int]
    pixels: bytes | None = field(repr=False)
    start: int = 0

    @property
    def end(self) -> int:
        """Index behind its last placeholder."""
        return self.start + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Of its pixels."""
        tiles, channels, height, width = self.shape
        return tiles * channels * height * width

    def without_pixels(self) -> PromptImage:
        """Without its pixels."""
        return self if self.pixels is None else replace(self, pixels=None)


def expand_placeholders(
    prompt_ids: Sequence[int], placeholder_id: int, images: Sequence[PromptImage]
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """The prompt with as many placeholders for each picture as it has tokens, and the pictures where they stand.

    prompt_ids  with one placeholder for each picture, in their order; the caller has counted them
    """
    ids: list[int] = []
    found: list[PromptImage] = []
    for token_id in prompt_ids:
        if token_id != placeholder_id:
            ids.append(token_id)
            continue
        picture = replace(images[len(found)], start=len(ids))
        found.append(picture)
        ids.extend([placeholder_id] * picture.num_tokens)
    assert len(found) == len(images), "a picture without a placeholder"
    return tuple(ids), tuple(found)
