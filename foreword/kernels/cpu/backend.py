"""The operations of the engine on native kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.kv import KVLayer
from foreword.kernels.composed import Composed
from foreword.kernels.cpu.library import TYPES, Command, Draft, Inputs, KVPointers, Op, Operand, Space, Turns, isas, load_library
from foreword.kernels.cpu.packing import CpuLinear, Packer
from foreword.kernels.cpu.recording import TRACE_ROWS, TRACE_SAMPLED, Program, Recorder, inputs_of
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.ops import Axes, Matrix
from foreword.kernels.reference import sizes_of

__all__ = ["CpuOps"]

ACTIVATIONS = MappingProxyType({"silu": 0, "gelu": 1, "gelu_tanh": 2})  # enum Activation
NOWHERE = Operand(Space.ABSOLUTE, 0, 0, 0)


class CpuOps(NativeSampling, Composed):
    """Each operation is a command (csrc/program.h) that runs at once; a compiled function is a list of them.

    Activations are float32 or bfloat16. One caller at a time.
    """

    row_tile = 1
    recordable = False

    def __init__(self, isa: str = "auto", threads: int = 1) -> None:
        """isa is one of isas(), or "auto" for the best of them."""
        library, reason = load_library()
        if library is None:
            raise RuntimeError(reason)
        self.isa = isas()[-1] if isa == "auto" else isa
        assert self.isa in isas(), f"{self.isa} does not run here"
        super().__init__(library, self.isa, threads)
        self.name = f"cpu-{self.isa}"
        self._packer = Packer(library, self._machine)
        self._recorder: Recorder | None = None

    def threads(self, wanted: int) -> int:
        """Torch gets one: the threads of the kernels are their own."""
        return 1

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Recorded over three rows that read and write the scratch block; the result is overwritten by the next call."""
        chunk = Chunk([0] * TRACE_ROWS, 0, [0] * TRACE_ROWS, TRACE_SAMPLED)
        batch = build_batch([chunk], 1, self.row_tile, "cpu", directions=True)
        assert batch.rope_positions is not None
        for positions in (batch.positions, batch.rope_positions):
            positions.zero_()  # a model may have fewer positions than there are rows here
        self._recorder = Recorder(batch)
        try:
            return Program(self._recorder, forward(batch), self._run, self._draft)
        finally:
            self._recorder = None

    def pack_linear(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None = None) -> CpuLinear:
        """See CpuLinear."""
        return self._packer.pack(parts, kind, bias)

    def linear(self, x: Tensor, weight: CpuLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]"""
        out = torch.empty(x.shape[0], weight.outputs, dtype=dtype or x.dtype)
        for piece in weight.pieces:
            columns = out[:, piece.first : piece.first + piece.weight.n]
            self._execute(Op.LINEAR, (x,), columns, target=piece.weight, keep=piece)
        return out if add_to is None else self.add(add_to, out)

    def embedding(self, ids: Tensor, weight: CpuLinear, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """ids [T] -> [T, H]"""
        (piece,) = weight.pieces
        out = torch.empty(ids.shape[0], weight.inputs, dtype=dtype)
        return self._execute(Op.EMBEDDING, (ids,), out, target=piece.weight, keep=piece, numbers=(scale,))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._execute(Op.ADD, (a, b), torch.empty(a.shape, dtype=a.dtype), sizes=(a[0].numel(),))

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows [R] -> [R, H]"""
        out = torch.empty(rows.shape[0], x.shape[1], dtype=x.dtype)
        return self._execute(Op.TAKE_ROWS, (x, rows), out, sizes=(x.shape[1] * x.itemsize,))

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """x [T, H], rows [N], values [N, H]"""
        assert self._recorder is None, "pictures do not come through what is compiled"
        x.index_copy_(0, rows, values)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, ..., H] -> the same"""
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        width = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = (x[0].numel() // width, width)
        return self._execute(Op.NORM, (x,), out, target=weight.data_ptr(), keep=weight, sizes=sizes, numbers=(eps,))

    def rope(self, x: Tensor, table: Tensor, positions: Tensor, axes: Axes | None = None) -> Tensor:
        """x [T, heads, D] -> the same"""
        assert table.dtype == torch.float32 and table.is_contiguous()
        assert positions.dtype == torch.int64 and positions.dim() == (1 if axes is None else 2)
        directions = None if axes is None else _directions(axes)
        assert directions is None or len(directions) == table.shape[1] // 2, "an angle without a direction"
        turns = Turns(table.data_ptr(), ctypes.cast(directions, ctypes.c_void_p) if directions else None)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = (x.shape[1], x.shape[2], table.shape[1])
        return self._execute(Op.ROPE, (x, positions), out, target=turns, keep=(table, directions), sizes=sizes)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2I] -> [T, I]"""
        width = gate_up.shape[1] // 2
        out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype)
        return self._execute(Op.GATED, (gate_up,), out, sizes=(width, ACTIVATIONS[activation]))

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        """k, v [T, Hk, D]"""
        self._execute(Op.WRITE_KV, (k, v, slots), None, target=_pointers(cache), keep=cache)

    def plan_attention(self, batch: Batch, window: int | None = None) -> None:
        """The kernel reads the batch itself."""

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> the same"""
        return self._execute(
            Op.ATTENTION,
            (q,),
            torch.zeros(q.shape, dtype=q.dtype),
            target=_pointers(cache),
            keep=cache,
            sizes=(q.shape[1], window or 0),
            numbers=(scale, softcap or 0.0),
            batch=batch,
        )

    def attend_sections(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Sequence[int], kv_starts: Sequence[int], scale: float
    ) -> Tensor:
        """q [N, heads, D], k and v [M, heads, D] -> [N, heads, D]: requests whose cache is k and v, one row a block, and whose
        rows all stand at the last position."""
        assert self._recorder is None, "pictures do not come through what is compiled"
        assert q_starts[-1] == len(q) and kv_starts[-1] == len(k)
        first, lengths = torch.tensor(kv_starts[:-1]), torch.tensor(sizes_of(kv_starts))
        positions = (lengths - 1).repeat_interleave(torch.tensor(sizes_of(q_starts)))
        tables = first[:, None] + torch.arange(int(lengths.max()))  # beyond a section nobody reads
        batch = Batch(positions, positions, positions, tables, tuple(q_starts), tuple(lengths.tolist()), positions, block_size=1)
        return self.attention(q, KVLayer(k.contiguous(), v.contiguous()), batch, scale)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        return self._execute(Op.SOFTCAP, (), x, sizes=(x.shape[1],), numbers=(cap,))

    def _execute(
        self,
        op: Op,
        inputs: tuple[Tensor, ...],
        out: Tensor | None,
        *,
        target: ctypes.Structure | int | None = None,
        keep: object = None,
        sizes: tuple[int, ...] = (),
        numbers: tuple[float, ...] = (),
        batch: Batch | None = None,
    ) -> Tensor:
        """Run one command, and note it while something is recorded. `keep` owns what `target` points to."""
        first = inputs[0] if inputs else out
        assert first is not None
        written = first if out is None else out
        command = Command(
            op=op,
            type=TYPES.get(first.dtype, 0),
            out_type=TYPES[written.dtype],
            inputs=tuple(_operand(tensor) for tensor in inputs),
            out=NOWHERE if out is None else _operand(out),
            object=ctypes.addressof(target) if isinstance(target, ctypes.Structure) else target,
            sizes=sizes,
            numbers=numbers,
        )
        rows, row_starts = (Inputs(num_rows=written.shape[0]), None) if batch is None else inputs_of(batch)
        self._run((Command * 1)(command), rows)
        del row_starts
        if self._recorder is not None:
            self._recorder.add(command, inputs, out, (target, keep))
        return written

    def _run(self, commands: ctypes.Array[Command], inputs: Inputs) -> None:
        self._library.foreword_run(self._machine, commands, len(commands), ctypes.byref(inputs))

    def _draft(self, commands: ctypes.Array[Command], inputs: Inputs, draft: Draft) -> None:
        self._library.foreword_draft(self._machine, commands, len(commands), ctypes.byref(inputs), ctypes.byref(draft))


@functools.cache
def _directions(axes: Axes) -> ctypes.Array[ctypes.c_int32]:
    """Of every angle."""
    directions = axes.directions()
    return (ctypes.c_int32 * len(directions))(*directions)


def _operand(tensor: Tensor) -> Operand:
    """Rows of the first dimension; what one row holds must be consecutive."""
    assert tensor.device.type == "cpu" and tensor[:1].is_contiguous(), "values of a row must be consecutive"
    return Operand(Space.ABSOLUTE, tensor.data_ptr(), 0, tensor.stride(0) * tensor.itemsize)


def _pointers(cache: KVLayer) -> KVPointers:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    return KVPointers(
        type=TYPES[cache.k.dtype],
        k=address(cache.k),
        v=address(cache.v),
        k_scale=address(cache.k_scale),
        v_scale=address(cache.v_scale),
        heads=cache.k.shape[1],
        dim=cache.k.shape[2],
    )
