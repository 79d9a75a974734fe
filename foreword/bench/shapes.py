"""Matrices of known models, and weight formats. Imports nothing heavy, since the command line reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from foreword.errors import ConfigError

PARTS = ("linear", "experts", "attention", "rows", "sampler")  # values of --parts of `foreword bench kernels`


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight [n, k]."""

    name: str
    n: int
    k: int
    copies: int  # read in turn, so that none is still in a cache


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    matrices: tuple[WeightMatrix, ...]
    layers: int = 0  # this and the following sizes are 0 for one matrix alone
    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    tie_word_embeddings: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One layer of a mixture of experts."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def matrices(self) -> tuple[WeightMatrix, WeightMatrix]:
        """Matrices of one expert."""
        gate_up = WeightMatrix("gate_up", 2 * self.inner, self.hidden, self.num_experts)
        return gate_up, WeightMatrix("down", self.hidden, self.inner, self.num_experts)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    block_values: int
    block_bytes: int
    peak_format: str  # product that bounds it with many rows, one of roofline.PEAK_TYPES
    scale_offsets: tuple[
        int, ...
    ] = ()  # bytes of the float16 scales in a GGUF block; (): packed from tensors

    @property
    def is_blocks(self) -> bool:
        return bool(self.scale_offsets)

    def num_bytes(self, matrix: WeightMatrix) -> float:
        return matrix.n * matrix.k * self.block_bytes / self.block_values

    def fits(self, matrix: WeightMatrix) -> bool:
        return not self.is_blocks or matrix.k % self.block_values == 0


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat(1, 4, "float32"),
    "bfloat16": WeightFormat(1, 2, "bfloat16"),
    "float16": WeightFormat(1, 2, "float32"),
    "int8": WeightFormat(1, 1, "int8"),
    "int4": WeightFormat(32, 18, "int4"),
    "q8_0": WeightFormat(32, 34, "int8", (0,)),
    "q5_0": WeightFormat(32, 22, "int4", (0,)),
    "q4_0": WeightFormat(32, 18, "int4", (0,)),
    "q4_1": WeightFormat(32, 20, "int4", (0, 2)),
    "q5_1": WeightFormat(32, 24, "int4", (0, 2)),
    "iq4_nl": WeightFormat(32, 18, "int8", (0,)),
    "mxfp4": WeightFormat(32, 17, "int4", (0,)),
    "q4_k": WeightFormat(256, 144, "int4", (0, 2)),
    "q5_k": WeightFormat(256, 176, "int4", (0, 2)),
    "q6_k": WeightFormat(256, 210, "int4", (208,)),
    "q2_k": WeightFormat(256, 84, "int4", (80, 82)),
    "q3_k": WeightFormat(256, 110, "int4", (108,)),
    "iq4_xs": WeightFormat(256, 136, "int8", (0,)),
}


def model_shape(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    head_dim: int = 64,
    tie_word_embeddings: bool = True,
) -> ModelShape:
    """The shape of a model with Llama's layers."""
    matrices = (
        WeightMatrix("qkv", (heads + 2 * kv_heads) * head_dim, hidden, layers),
        WeightMatrix("o", hidden, heads * head_dim, layers),
        WeightMatrix("gate_up", 2 * intermediate, hidden, layers),
        WeightMatrix("down", hidden, intermediate, layers),
        WeightMatrix("head", vocab, hidden, 1),
    )
    sizes = (layers, hidden, intermediate, heads, kv_heads, head_dim, vocab)
    return ModelShape(name, matrices, *sizes, tie_word_embeddings)


EXPERTS_SHAPE = ExpertsShape(num_experts=128, top_k=8, hidden=2048, inner=768)  # Qwen3-30B-A3B

SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        model_shape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936),
        model_shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 128256),
        model_shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128256, head_dim=128, tie_word_embeddings=False),
    )
}


def read_shape(text: str, working_set: int) -> ModelShape:
    """A name of SHAPES, or "NxK": copies of one matrix that fill `working_set` bytes of bfloat16.

    Raises ConfigError.
    """
    if text in SHAPES:
        return SHAPES[text]
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) and int(k)):
        raise ConfigError(f"--shape must be {', '.join(SHAPES)} or NxK such as 4864x896, got {text!r}")
    copies = math.ceil(working_set / (2 * int(n) * int(k)))
    return ModelShape(text, (WeightMatrix(text, int(n), int(k), copies),))
