"""Dequantization against the `gguf` package, also of random bytes."""

import gguf
import numpy as np
import pytest

from foreword.models.gguf.dequantize import DEQUANTIZERS, dequantize
from foreword.models.gguf.header import TENSOR_TYPES

BY_NAME = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items()}


@pytest.mark.parametrize("name", sorted(DEQUANTIZERS.keys() - {"q8_k"}))
def test_dequantize_equals_gguf_package(name: str) -> None:
    number, kind = BY_NAME[name]
    rows = np.random.default_rng(3).integers(0, 256, (7, 5 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours, theirs = dequantize(name, rows), gguf.dequantize(rows, gguf.GGMLQuantizationType(number))
    assert ours.shape == (7, 5 * kind.block_values) and ours.dtype == np.float32
    assert np.isfinite(ours).mean() > 0.5
    assert np.array_equal(ours.view(np.uint32)[np.isfinite(ours)], theirs.view(np.uint32)[np.isfinite(ours)])
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))


def test_dequantize_q8_k() -> None:
    """A float32 scale, 256 values, and unused sums; the gguf package cannot read it."""
    scales, values = np.array([[0.5], [-2.0]], np.float32), np.arange(-128, 128, dtype=np.int8)
    rows = np.concatenate(
        (scales.view(np.uint8), np.tile(values.view(np.uint8), (2, 1)), np.zeros((2, 32), np.uint8)), 1
    )
    assert np.array_equal(dequantize("q8_k", rows), scales * values.astype(np.float32))
