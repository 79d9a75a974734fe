"""The operations of the engine on Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreword.core.batch import Batch
from foreword.executor.graph_runner import GraphRunner
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.attention import TritonAttention
from foreword.kernels.triton.decode_ops import TritonDecodeOps
from foreword.kernels.triton.linear import TritonLinear
from foreword.kernels.triton.rows import TritonRows
from foreword.kernels.triton.sampling import TritonSampling

__all__ = ["TritonOps"]


class TritonOps(TritonLinear, TritonAttention, TritonRows, TritonSampling, ReferenceOps):
    """What no mixin has is the reference's: exact in itself, or never in a step."""

    name = "triton"
    supports_graphs = True

    def __init__(self, eager: bool = False) -> None:
        """eager: nothing is put into a graph."""
        super().__init__(row_tile=1)
        self.eager = eager

    def compile(self, forward: Callable[[Batch], Tensor]) -> GraphRunner:
        """Captured in graphs, but for passes of many rows."""
        return GraphRunner(self, forward, self.eager, TritonDecodeOps())
