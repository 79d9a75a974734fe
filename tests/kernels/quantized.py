"""Random quantized weights for tests, and the values that the native products multiply with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Blocks, Matrix
from foreword.kernels.quantization import BLOCK, dequantize, rounded

SCALES_AT = {"q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2)}  # bytes of a block where float16 scales stand; (0,) elsewhere
KINDS = ("int8", "int4", *BLOCK)


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> Blocks:
    """Any bytes for values, normally distributed float16 scales."""
    block = BLOCK[kind]
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // block.values)
    data = torch.randint(0, 256, (*shape, block.size), dtype=torch.uint8, generator=generator)
    for place in SCALES_AT.get(kind, (0,)):
        halves = (torch.randn(*shape, 1, generator=generator) * scale).to(torch.float16)
        data[..., place : place + 2] = halves.view(torch.uint8)
    return Blocks(kind, data.reshape(rows, -1), columns)


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    return random(rows, columns, seed) if kind in ("int8", "int4") else random_blocks(kind, rows, columns, seed)


def values_of(matrix: Matrix, kind: str) -> Tensor:
    return dequantize(matrix) if isinstance(matrix, Blocks) else rounded(matrix, kind)


def rounded_activations(x: Tensor, kind: str) -> Tensor:
    """x [T, K] as products with weights of `kind` take it: int8 values with a scale for each row, 32 or 256 values."""
    columns = x.shape[1]
    run = {"int8": columns, "q4_k": 256, "q5_k": 256, "q6_k": 256}.get(kind, 32)
    runs = F.pad(x.float(), (0, -columns % run)).reshape(x.shape[0], -1, run)
    largest = runs.abs().amax(-1, keepdim=True)
    steps = torch.round(runs * torch.where(largest == 0, 0.0, torch.full_like(largest, 127) / largest))
    return (steps.double() * (largest / 127).double()).reshape(x.shape[0], -1)[:, :columns]
