"""CUDA graphs without a GPU: a backend that never reads values on the host, and captures as tapes.

A tape of torch operations refuses those that a CUDA graph cannot hold: a replay reads only fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foreword.core.batch import Batch, KVLayer
from foreword.cuda_graphs.capture import CudaGraphPool
from foreword.cuda_graphs.graph_runner import GraphRunner, with_graphs
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.reference.decode_ops import DecodeOps
from foreword.kernels.reference.sampling import gumbel
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model

BLOCK_SIZE, MAX_BLOCKS = 4, 16
CONTEXT_LEN = BLOCK_SIZE * MAX_BLOCKS
HOST_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.lift_fresh.default,
)


class GraphCapturableOps(ReferenceOps):
    """The reference with attention of one shape: each row over CONTEXT_LEN masked positions."""

    name = "graph-capturable"
    supports_graphs = True

    def __init__(self) -> None:
        super().__init__(row_tile=1)
        self.eager = False
        self.decode_ops = DecodeOps()

    def build_attention_metadata(  # type: ignore[override]
        self, batch: Batch, window: int | None = None, first: int = 0, causal: bool = True
    ) -> int | None:
        """Only the window: the rest is in the batch."""
        assert batch.request_index is not None
        return window

    def attention(  # type: ignore[override]
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: int | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
        causal: bool = True,
    ) -> Tensor:
        assert causal and not first and batch.request_index is not None and softcap is None and sinks is None
        tables = batch.block_tables
        tables = torch.cat((tables, tables.new_zeros(len(tables), MAX_BLOCKS - tables.shape[1])), 1)
        at = torch.arange(CONTEXT_LEN, device=q.device)
        slots = (
            tables.index_select(0, batch.request_index)[:, at // batch.block_size] * batch.block_size
            + at % batch.block_size
        )
        position = batch.positions[:, None]
        mask = (at <= position) & (at > position - (window or CONTEXT_LEN))
        owned = batch.request_index < len(tables) - 1
        rows = [_attend(q[t], cache, slots[t], mask[t], scale) for t in range(len(q))]
        return torch.where(owned[:, None, None], torch.stack(rows), 0.0).to(q.dtype)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        noise = gumbel(seeds, positions, logits.shape[1])
        best = (logits + torch.where(greedy[:, None], 0.0, noise)).argmax(dim=1)
        return torch.where(logits.amax(dim=1).isfinite(), best, -1)


def _attend(q: Tensor, cache: KVLayer, slots: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [Hq, D], slots and mask [CONTEXT_LEN] -> [Hq, D]"""
    group = q.shape[0] // cache.k.shape[1]
    keys, values = (part.index_select(0, slots).float() for part in (cache.k, cache.v))
    keys, values = (
        torch.where(mask[:, None, None], part, 0.0).repeat_interleave(group, 1).transpose(0, 1)
        for part in (keys, values)
    )
    scores = torch.where(mask, (keys @ q.float()[:, :, None])[..., 0] * scale, -torch.inf)
    return (torch.softmax(scores, -1)[:, None] @ values)[:, 0]


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A call func(*args, **kwargs); `outs` are its results, without views of its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Tensor, ...]


class OpTape(TorchDispatchMode):
    """Records dispatched operations, to replay them on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_RecordedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in HOST_READS, f"a CUDA graph cannot hold {func}"
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        outs = _tensors(result)
        is_view = any(tensor.untyped_storage().data_ptr() in inputs for tensor in outs)
        self.calls.append(_RecordedCall(func, args, kwargs or {}, () if is_view else outs))
        return result

    def record_call(self, run: Callable[[], None]) -> None:
        """Record a call that bypasses torch."""
        self.calls.append(_RecordedCall(run, (), {}, ()))

    def replay(self) -> None:
        """Overwrite all results first: their memory may have been reused."""
        for call in self.calls:
            for out in call.outs:
                out.fill_(True if out.dtype == torch.bool else -77)
        for call in self.calls:
            results = _tensors(call.func(*call.args, **call.kwargs))
            for out, result in zip(call.outs, results, strict=False):
                out.copy_(result)


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class TapedGraphPool(CudaGraphPool):
    """Warms up, captures and replays as a CudaGraphPool on a GPU."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        run()
        with OpTape() as tape:
            run()
        self.num_graphs += 1
        return tape.replay


class GraphTestBed:
    """A model on a graph-capturable backend with its KV cache; passes are captured after reserve()."""

    def __init__(self, path: Path, ops: Ops | None = None) -> None:
        self.ops = GraphCapturableOps() if ops is None else ops
        self.model = load_model(path, self.ops, Precision.from_dtypes("float32"), "cpu", CONTEXT_LEN)
        self.kv = KVStorage(6 * MAX_BLOCKS, BLOCK_SIZE, self.model.cache_shapes, "float32")
        forward = with_graphs(self.ops, self.model.compile_logits(self.kv))
        assert isinstance(forward, GraphRunner)
        self.forward = forward

    def reserve(self, rows: int) -> None:
        self.forward.reserve(rows, rows, MAX_BLOCKS, self.model.uses_mrope, "cpu", BLOCK_SIZE)

    def clear_cache(self) -> None:
        """Fill the KV cache with NaN, so reads of unwritten values show."""
        for part in self._parts():
            part.fill_(torch.nan)

    def copy_cache(self) -> list[Tensor]:
        """K and V of all layers without the null block."""
        return [part[BLOCK_SIZE:].clone() for part in self._parts()]

    def _parts(self) -> Sequence[Tensor]:
        layers = [self.kv.layer(index) for index in range(len(self.model.cache_shapes))]
        return [part for layer in layers for part in (layer.k, layer.v)]
