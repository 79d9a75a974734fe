"""The operations on Triton kernels, and their fast-math variant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Matrix, PackedExperts, PackedHeads, PackedLinear
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton import elementwise
from foreword.kernels.triton.attention import TritonAttention
from foreword.kernels.triton.decode_ops import TritonDecodeOps
from foreword.kernels.triton.experts import TritonExperts
from foreword.kernels.triton.lora import add_lora
from foreword.kernels.triton.precompile import precompile
from foreword.kernels.triton.rope import rope, rope_and_cache, write_kv
from foreword.kernels.triton.sampling import TritonSampling
from foreword.kernels.triton.states import TritonStates

logger = logging.getLogger(__name__)

UNQUANTIZED_FORMATS = ("float32", "bfloat16", "float16")


class TritonOps(TritonExperts, TritonStates, TritonAttention, TritonSampling, ReferenceOps):
    """Inherits the reference's operations that round at most once or never run within a step."""

    name = "triton"
    supports_graphs = True

    def __init__(self, eager: bool = False) -> None:
        """eager: capture no CUDA graphs."""
        super().__init__(row_tile=1)
        self.eager = eager
        self.decode_ops = TritonDecodeOps()

    def precompile(
        self, run: Callable[[], object], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        logger.info("model: %s", precompile(run, on_progress))

    rms_norm = staticmethod(elementwise.rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    gated_act = staticmethod(elementwise.gated_act)
    act = staticmethod(elementwise.act)
    scale_by_sigmoid = staticmethod(elementwise.scale_by_sigmoid)
    gate = staticmethod(elementwise.gate)
    softcap = staticmethod(elementwise.softcap)
    add_lora = staticmethod(add_lora)
    rope = staticmethod(rope)
    rope_and_cache = staticmethod(rope_and_cache)
    write_kv = staticmethod(write_kv)

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return super().add(a, b) if scale == 1.0 else elementwise.add_scaled(a, b, scale)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight in the type of the activations."""

    matrix: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    def first_rows(self, count: int) -> DenseWeight:
        """See Ops.first_rows."""
        return DenseWeight(self.matrix[:count], None if self.bias is None else self.bias[:count])


class TritonFastMath(TritonOps):
    """`--fast-math`: matrix products of cuBLAS, whose bits depend on the batch.

    Quantized weights and experts keep the kernels of TritonOps: cuBLAS has no product for them.
    """

    name = "triton-fast-math"

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if weight_format not in UNQUANTIZED_FORMATS or len(tensors) < len(parts):
            return super().pack_linear(parts, weight_format, bias)
        dtype = getattr(torch, weight_format)
        matrix = torch.cat([part.to(dtype) for part in tensors])
        return DenseWeight(matrix, None if bias is None else bias.to(dtype))

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> PackedExperts:
        first, second = ([self._pack_dense(part) for part in parts] for parts in (gate_up, down))
        return super().pack_experts(first, second, bias, scales)

    def pack_heads(self, heads: Sequence[PackedLinear]) -> PackedHeads:
        return super().pack_heads([self._pack_dense(head) for head in heads])

    def _pack_dense(self, weight: PackedLinear) -> PackedLinear:
        if not isinstance(weight, DenseWeight):
            return weight
        dtype = str(weight.matrix.dtype).removeprefix("torch.")
        return super().pack_linear([weight.matrix], dtype, weight.bias)

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, DenseWeight):
            return super().linear(x, weight, dtype, add_to)
        product = F.linear(x.to(weight.matrix.dtype), weight.matrix, weight.bias).to(dtype or x.dtype)
        return product if add_to is None else add_to + product

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        if not isinstance(weight, DenseWeight):
            return super().linear_gated_act(x, weight, activation)
        return self.gated_act(self.linear(x, weight), activation)

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        if not isinstance(weight, DenseWeight):
            return super().embedding(token_ids, weight, dtype, scale)
        rows = weight.matrix.index_select(0, token_ids)
        return (rows if scale == 1.0 else rows.to(torch.float32) * scale).to(dtype)
