"""Types of tensors in GGUF files: their names and the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["KINDS", "TensorKind"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """name         as GGUF's tools write it, in lower case
    block_values  values that stand together, along a row
    block_bytes   bytes of them
    """

    name: str
    block_values: int
    block_bytes: int


KINDS: Mapping[int, TensorKind] = MappingProxyType(
    {
        0: TensorKind("f32", 1, 4),
        1: TensorKind("f16", 1, 2),
        2: TensorKind("q4_0", 32, 18),
        3: TensorKind("q4_1", 32, 20),
        6: TensorKind("q5_0", 32, 22),
        7: TensorKind("q5_1", 32, 24),
        8: TensorKind("q8_0", 32, 34),
        9: TensorKind("q8_1", 32, 36),
        10: TensorKind("q2_k", 256, 84),
        11: TensorKind("q3_k", 256, 110),
        12: TensorKind("q4_k", 256, 144),
        13: TensorKind("q5_k", 256, 176),
        14: TensorKind("q6_k", 256, 210),
        15: TensorKind("q8_k", 256, 292),
        16: TensorKind("iq2_xxs", 256, 66),
        17: TensorKind("iq2_xs", 256, 74),
        18: TensorKind("iq3_xxs", 256, 98),
        19: TensorKind("iq1_s", 256, 50),
        20: TensorKind("iq4_nl", 32, 18),
        21: TensorKind("iq3_s", 256, 110),
        22: TensorKind("iq2_s", 256, 82),
        23: TensorKind("iq4_xs", 256, 136),
        24: TensorKind("i8", 1, 1),
        25: TensorKind("i16", 1, 2),
        26: TensorKind("i32", 1, 4),
        27: TensorKind("i64", 1, 8),
        28: TensorKind("f64", 1, 8),
        29: TensorKind("iq1_m", 256, 56),
        30: TensorKind("bf16", 1, 2),
        34: TensorKind("tq1_0", 256, 54),
        35: TensorKind("tq2_0", 256, 66),
        39: TensorKind("mxfp4", 32, 17),
        40: TensorKind("nvfp4", 64, 36),
    }
)
