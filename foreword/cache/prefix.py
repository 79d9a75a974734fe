"""Names for the content of full blocks: a chain of hashes over tokens, from the first block on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["extend_hashes"]


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, namespace: str) -> None:
    """Append the hash of each full block of `tokens` that `hashes` does not cover yet.

    A hash names a block's tokens, all tokens before them, and the namespace (the tenant): equal
    hashes mean equal KV. blake2b with 16 bytes: no two prompts can be made to collide.
    """
    for index in range(len(hashes), len(tokens) // block_size):
        parent = hashes[-1] if hashes else namespace.encode()
        block = array("q", tokens[index * block_size : (index + 1) * block_size])
        hashes.append(blake2b(parent + block.tobytes(), digest_size=16).digest())
