"""A recordable backend that needs no GPU, and graphs that are captured and launched again without one.

`Recordable` is the reference, but that nothing in it looks at values on the host. `Tape` notes every operation of torch that
is dispatched, and refuses those that a CUDA graph could not hold: so whatever is replayed depends on tensors at fixed addresses
alone, as on a GPU.
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

from foreword.cache.storage import KVStorage
from foreword.core.batch import Batch
from foreword.core.kv import KVLayer
from foreword.kernels.graphs import Graphs
from foreword.kernels.ops import Ops
from foreword.kernels.recorded import RecordedForward
from foreword.kernels.reference import Reference
from foreword.kernels.reference_sampling import gumbel
from foreword.models.base import Precision
from foreword.models.loader import load_model

__all__ = ["Bed", "Recordable", "Tape", "TapedGraphs"]

BLOCK_SIZE, MAX_BLOCKS = 4, 16
CONTEXT = BLOCK_SIZE * MAX_BLOCKS
HOST_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.lift_fresh.default)


class Recordable(Reference):
    """Every row attends alone to CONTEXT positions, of which it sees some: one shape, whatever the batch."""

    name = "recordable"
    recordable = True

    def __init__(self) -> None:
        super().__init__(row_tile=1)

    def compile(self, forward: Callable[[Batch], Tensor]) -> RecordedForward:
        return RecordedForward(self, forward)

    def plan_attention(self, batch: Batch, window: int | None = None) -> int | None:  # type: ignore[override]
        """The window: all else is in the batch."""
        assert batch.owners is not None
        return window

    def attention(  # type: ignore[override]
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: int | None = None,
    ) -> Tensor:
        assert batch.owners is not None and softcap is None
        tables = batch.block_tables
        tables = torch.cat((tables, tables.new_zeros(len(tables), MAX_BLOCKS - tables.shape[1])), 1)
        at = torch.arange(CONTEXT, device=q.device)
        slots = tables.index_select(0, batch.owners)[:, at // batch.block_size] * batch.block_size + at % batch.block_size
        position = batch.positions[:, None]
        seen = (at <= position) & (at > position - (window or CONTEXT))
        owned = batch.owners < len(tables) - 1
        rows = [_attend(q[t], cache, slots[t], seen[t], scale) for t in range(len(q))]
        return torch.where(owned[:, None, None], torch.stack(rows), 0.0).to(q.dtype)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        noise = gumbel(seeds, positions, logits.shape[1])
        best = (logits + torch.where(greedy[:, None], 0.0, noise)).argmax(dim=1)
        return torch.where(logits.amax(dim=1).isfinite(), best, -1)


def _attend(q: Tensor, cache: KVLayer, slots: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [Hq, D], slots and seen [CONTEXT] -> [Hq, D]"""
    group = q.shape[0] // cache.k.shape[1]
    keys, values = (part.index_select(0, slots).float() for part in (cache.k, cache.v))
    keys, values = (
        torch.where(seen[:, None, None], part, 0.0).repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values)
    )
    scores = torch.where(seen, (keys @ q.float()[:, :, None])[..., 0] * scale, -torch.inf)
    return (torch.softmax(scores, -1)[:, None] @ values)[:, 0]


@dataclass(frozen=True, slots=True)
class _Call:
    """func(*args, **kwargs) whose results lie in `outs`, but for those that are views of what it got."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Tensor, ...]


class Tape(TorchDispatchMode):
    """What was dispatched, to be done again with the same tensors in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        assert func not in HOST_LOOKS, f"{func} cannot be part of a graph"
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        outs = tuple(one for one in tree_leaves(result) if isinstance(one, Tensor))
        new = outs if not any(one.untyped_storage().data_ptr() in given for one in outs) else ()
        self.calls.append(_Call(func, args, kwargs or {}, new))
        return result

    def note(self, run: Callable[[], None]) -> None:
        """What does its work beside torch: done again as it is."""
        self.calls.append(_Call(run, (), {}, ()))

    def replay(self) -> None:
        """Memory of results may have held anything meanwhile."""
        for call in self.calls:
            for out in call.outs:
                out.fill_(True if out.dtype == torch.bool else -77)
        for call in self.calls:
            found = [one for one in tree_leaves(call.func(*call.args, **call.kwargs)) if isinstance(one, Tensor)]
            for out, again in zip(call.outs, found, strict=False):
                out.copy_(again)


class TapedGraphs(Graphs):
    """Warms up, captures and replays as on a GPU."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        run()
        with Tape() as tape:
            run()
        self.count += 1
        return tape.replay


class Bed:
    """A checkpoint on a recordable backend, its KV and its forward pass, which is captured once reserve() was called."""

    def __init__(self, path: Path, ops: Ops | None = None) -> None:
        self.ops = Recordable() if ops is None else ops
        self.model = load_model(path, self.ops, Precision.of("float32"), "cpu", CONTEXT)
        self.kv = KVStorage(6 * MAX_BLOCKS, BLOCK_SIZE, self.model.kv_layers, "float32")
        forward = self.model.compiled(self.kv)
        assert isinstance(forward, RecordedForward)
        self.forward = forward

    def reserve(self, rows: int) -> None:
        self.forward.reserve(rows, MAX_BLOCKS, self.model.directions, "cpu", BLOCK_SIZE)

    def forget(self) -> None:
        """Nothing is in the cache; a value that nobody wrote is no number."""
        for part in self._parts():
            part.fill_(torch.nan)

    def cached(self) -> list[Tensor]:
        """K and V of all layers but for the scratch block, a copy."""
        return [part[BLOCK_SIZE:].clone() for part in self._parts()]

    def _parts(self) -> Sequence[Tensor]:
        layers = [self.kv.layer(index) for index in range(len(self.model.kv_layers))]
        return [part for layer in layers for part in (layer.k, layer.v)]
