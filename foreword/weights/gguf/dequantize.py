"""Dequantizes GGUF types without kernels to float32, in numpy."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

# Their codebooks and unpacking are those of the `gguf` package, an optional dependency.
GGUF_PACKAGE_TYPES = (
    "iq1_s",
    "iq1_m",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
    "tq1_0",
    "tq2_0",
    "nvfp4",
)
DEQUANTIZED_TYPES = ("q8_k", *GGUF_PACKAGE_TYPES)
Q8_K_BYTES = 292  # a float32 scale, 256 values, and sums of values, which serve dot products


def has_gguf_package() -> bool:
    return find_spec("gguf") is not None


def dequantize(type_name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 [N, bytes of a row] -> float32 [N, K]; type_name is one of DEQUANTIZED_TYPES."""
    if type_name == "q8_k":
        return _dequantize_q8_k(rows)
    gguf: Any = import_module("gguf")
    with np.errstate(all="ignore"):  # scales that are not finite
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(
            rows, gguf.GGMLQuantizationType[type_name.upper()]
        )
    return values


def _dequantize_q8_k(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = rows.reshape(-1, Q8_K_BYTES)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    values: npt.NDArray[np.float32] = scales * blocks[:, 4:260].view(np.int8)
    return values.reshape(len(rows), -1)
