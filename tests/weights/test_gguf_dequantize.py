"""Types without kernels, of random bytes."""

import numpy as np
import pytest

from foreword.weights.gguf.dequantize import GGUF_PACKAGE_TYPES, dequantize
from foreword.weights.gguf.header import TENSOR_TYPES


@pytest.mark.parametrize("name", GGUF_PACKAGE_TYPES)
def test_package_reads_every_type(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    rows = np.random.default_rng(3).integers(0, 256, (7, 5 * kind.block_bytes), dtype=np.uint8)
    values = dequantize(name, rows)
    assert values.shape == (7, 5 * kind.block_values) and values.dtype == np.float32
    assert np.isfinite(values).mean() > 0.5
    assert np.array_equal(dequantize(name, rows[2:3]), values[2:3], equal_nan=True)


def test_dequantize_q8_k() -> None:
    """A float32 scale, 256 values, and unused sums; the gguf package cannot read it."""
    scales, values = np.array([[0.5], [-2.0]], np.float32), np.arange(-128, 128, dtype=np.int8)
    rows = np.concatenate(
        (scales.view(np.uint8), np.tile(values.view(np.uint8), (2, 1)), np.zeros((2, 32), np.uint8)), 1
    )
    assert np.array_equal(dequantize("q8_k", rows), scales * values.astype(np.float32))
