"""Names for the content of full blocks: a chain of hashes over tokens, from the first block on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from foreword.core.pictures import PromptImage

__all__ = ["extend_hashes"]

DIGEST_BYTES = 16
IMAGE_PERSON = b"pictures"  # a block with pictures has no name in common with any without


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, namespace: str, images: Sequence[PromptImage] = ()
) -> None:
    """Append the hash of each full block of `tokens` that `hashes` does not cover yet.

    A hash names a block's tokens and pictures, all before them, and the namespace (the tenant): equal
    hashes mean equal KV. blake2b with 16 bytes: no two prompts can be made to collide.
    """
    for index in range(len(hashes), len(tokens) // block_size):
        start, end = index * block_size, (index + 1) * block_size
        content = (hashes[-1] if hashes else namespace.encode()) + array("q", tokens[start:end]).tobytes()
        seen = _image_content(images, start, end)
        hashes.append(blake2b(content + seen, digest_size=DIGEST_BYTES, person=IMAGE_PERSON if seen else b"").digest())


def _image_content(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """What is seen in a block: every picture that reaches into it, and where that begins, which tells the part."""
    inside = [picture for picture in images if picture.start < end and picture.end > start]
    return b"".join(picture.digest + array("q", [picture.start]).tobytes() for picture in inside)
