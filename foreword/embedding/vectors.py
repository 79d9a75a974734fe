"""Operations on embedding vectors: truncation, normalization, cosine. Bytes are float32 in native order."""

from __future__ import annotations

import math
from array import array
from operator import mul

FLOAT_BYTES = 4


def normalize_embedding(vector: bytes, dimensions: int | None = None, normalize: bool = True) -> array[float]:
    """The first `dimensions` values (None: all), scaled to length 1 unless all are zero."""
    values = array("f", vector)[:dimensions]
    length = math.hypot(*values) if normalize else 0.0
    return array("f", [value / length for value in values]) if length else values


def cosine(first: array[float], second: array[float]) -> float:
    """Cosine similarity of two vectors of length 1, from -1 to 1."""
    return max(-1.0, min(1.0, math.fsum(map(mul, first, second))))


def scalar(vector: bytes) -> float:
    """The value of a vector of one dimension."""
    (value,) = array("f", vector)
    return value
