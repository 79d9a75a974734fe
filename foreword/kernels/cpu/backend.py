"""The operations on the native CPU kernels."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.kernels.cpu.library import (
    ISAS,
    AttentionLayer,
    KVPointers,
    LoraPointers,
    NormVectors,
    Opcode,
    RopeTable,
    load_library,
    supported_isas,
)
from foreword.kernels.cpu.packing import CpuExperts, CpuHeads, CpuLinear, Packer, join_experts, join_heads
from foreword.kernels.cpu.program import DTYPE_IDS, TRACE_ROWS, TRACE_SAMPLED, Program, ProgramBuilder
from foreword.kernels.cpu.sampling import delete_context
from foreword.kernels.cpu.states import GATES, NativeStates
from foreword.kernels.ops import NO_ALPHAS, ExpertsConfig, LoraTable, Matrix, MRopeSections, Ops
from foreword.kernels.reference.backend import cu_seqlens_to_lens

ACTIVATIONS = MappingProxyType(  # enum Activation
    {"silu": 0, "gelu": 1, "gelu_tanh": 2, "gpt_oss": 3, "relu2": 4, "xielu": 5}
)
SCORINGS = MappingProxyType({"softmax": 0, "sigmoid": 1, "sparse_mixer": 2})  # enum Scoring
NUM_AXES = 3  # axes of M-RoPE positions


class CpuOps(NativeStates, Ops):
    """Runs each operation at once (csrc/common/forward_program.h); a compiled function is a program.

    Activations are float32 or bfloat16. One caller at a time.
    """

    row_tile = 1
    supports_graphs = False

    def __init__(self, isa: str = "auto", threads: int = 1) -> None:
        """isa is one of supported_isas(), or "auto" for the best of them."""
        library, reason = load_library()
        if library is None:
            raise RuntimeError(reason)
        self.isa = supported_isas()[-1] if isa == "auto" else isa
        assert self.isa in supported_isas(), f"{self.isa} does not run here"
        super().__init__(library, self.isa, threads)
        self.name = f"cpu-{self.isa}"
        self._contexts = {threads: self._cpu_context}  # by number of threads
        self._packer = Packer(library, self._cpu_context)

    def num_torch_threads(self, max_threads: int) -> int:
        """One: the kernels have their own threads."""
        return 1

    def set_threads(self, num_threads: int) -> None:
        """In a context of its own, whose threads sleep while another is in use.

        Without effect if the system does not grant the threads.
        """
        if num_threads not in self._contexts:
            library = self._library
            context = library.foreword_machine_new(ISAS.index(self.isa), num_threads)
            if not context:
                return
            weakref.finalize(self, delete_context, library, context, os.getpid()).atexit = False
            self._contexts[num_threads] = context
        self._cpu_context = self._contexts[num_threads]

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Trace `forward` over three rows of the null block; each call overwrites the last result."""
        chunk = Chunk([0] * TRACE_ROWS, 0, [0] * TRACE_ROWS, TRACE_SAMPLED)
        batch = build_batch([chunk], 1, self.row_tile, "cpu", True, False, True, True, True)
        assert batch.mrope_positions is not None
        for positions in (batch.positions, batch.mrope_positions):
            positions.zero_()  # a model may have fewer positions than there are rows here
        self._builder = ProgramBuilder(batch)
        try:
            return Program(self._builder, forward(batch), self._run_program, self._run_draft)
        finally:
            self._builder = None

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> CpuLinear:
        return self._packer.pack(parts, weight_format, bias)

    def first_rows(self, weight: CpuLinear, count: int) -> CpuLinear:
        return weight.first_rows(count)

    def linear(
        self, x: Tensor, weight: CpuLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == weight.in_features, "inputs of another width"
        out = torch.empty(x.shape[0], weight.out_features, dtype=dtype or x.dtype)
        for block in weight.blocks:
            columns = out[:, block.first_row : block.first_row + block.weight.n]
            inputs = x if block.input_order is None else self._gather_columns(x, block.input_order)
            self._execute(Opcode.LINEAR, (inputs,), columns, target=block.weight, keep_alive=block)
        return out if add_to is None else self.add(add_to, out)

    pack_experts = staticmethod(join_experts)
    pack_heads = staticmethod(join_heads)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: CpuExperts,
        config: ExpertsConfig,
        add_to: Tensor | None = None,
    ) -> Tensor:
        assert logits.dtype == torch.float32 and logits.shape == (x.shape[0], config.num_experts)
        assert x.shape[1] == weights.pointers.hidden and config.num_experts == weights.pointers.count
        assert 0 < config.top_k <= config.num_experts and (add_to is None or add_to.dtype == x.dtype)
        return self._execute(
            Opcode.EXPERTS,
            (x, logits) if add_to is None else (x, logits, add_to),
            torch.empty(x.shape, dtype=x.dtype),
            target=weights.pointers,
            keep_alive=weights,
            sizes=(
                config.top_k,
                config.renormalize,
                ACTIVATIONS[config.activation],
                SCORINGS[config.scoring],
                config.num_groups,
                config.topk_groups,
            ),
            scalars=(config.scale, config.tolerance),
        )

    def linear_by_head(self, x: Tensor, weights: CpuHeads, append: Tensor | None = None) -> Tensor:
        rows, heads = x.shape[0], weights.pointers.heads
        assert x.shape[1:] == (heads, weights.in_features), "heads of another shape"
        assert append is None or (append.shape[:2] == x.shape[:2] and append.dtype == x.dtype)
        appended = 0 if append is None else append.shape[2]
        return self._execute(
            Opcode.LINEAR_BY_HEAD,
            (x,) if append is None else (x, append),
            torch.empty(rows, heads, weights.out_features + appended, dtype=x.dtype),
            target=weights.pointers,
            keep_alive=weights,
            sizes=(appended,),
        )

    def scale_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        assert gate.shape == (x.shape[0], 1)
        sizes = (x.shape[1], DTYPE_IDS[gate.dtype])
        return self._execute(
            Opcode.SCALE_BY_SIGMOID, (x, gate), torch.empty(x.shape, dtype=x.dtype), sizes=sizes
        )

    def gate(self, x: Tensor, gate: Tensor, activation: str) -> Tensor:
        assert x.shape == gate.shape and x.dtype == gate.dtype
        sizes = (x.shape[1], GATES[activation])
        return self._execute(Opcode.GATE, (x, gate), torch.empty(x.shape, dtype=x.dtype), sizes=sizes)

    def add_lora(self, y: Tensor, x: Tensor, table: LoraTable, batch: Batch) -> Tensor:
        """In place."""
        slots = batch.lora_slots
        assert slots is not None and x.dtype == y.dtype == table.a.dtype == table.b.dtype
        assert slots.dtype == table.ranks.dtype == torch.int64 and slots.shape == x.shape[:1] == y.shape[:1]
        part_sizes = (ctypes.c_int64 * len(table.part_sizes))(*table.part_sizes)
        num_slots, num_parts, max_rank, in_features = table.a.shape
        assert (x.shape[1], y.shape[1]) == (in_features, sum(table.part_sizes)), "a layer of other widths"
        pointers = LoraPointers(
            num_slots,
            num_parts,
            max_rank,
            in_features,
            sum(table.part_sizes),
            table.a.data_ptr(),
            table.b.data_ptr(),
            table.ranks.data_ptr(),
            table.scales.data_ptr(),
            ctypes.cast(part_sizes, ctypes.c_void_p),
        )
        return self._execute(Opcode.ADD_LORA, (x, slots), y, target=pointers, keep_alive=(table, part_sizes))

    def embedding(
        self, token_ids: Tensor, weight: CpuLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        (block,) = weight.blocks
        assert block.input_order is None and token_ids.dtype == torch.int64
        out = torch.empty(token_ids.shape[0], weight.in_features, dtype=dtype)
        return self._execute(
            Opcode.EMBEDDING, (token_ids,), out, target=block.weight, keep_alive=block, scalars=(scale,)
        )

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        assert a.shape == b.shape and a.dtype == b.dtype
        out, sizes = torch.empty(a.shape, dtype=a.dtype), (a[0].numel(),)
        return self._execute(Opcode.ADD, (a, b), out, sizes=sizes, scalars=(scale,))

    def index_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        assert rows.dtype == torch.int64
        assert self._builder is None or x.shape[0] == TRACE_ROWS, "only rows of the whole batch have numbers"
        out = torch.empty(rows.shape[0], x.shape[1], dtype=x.dtype)
        num_rows = x.shape[0] if self._builder is None else 0
        return self._execute(Opcode.INDEX_ROWS, (x, rows), out, sizes=(x.shape[1] * x.itemsize, num_rows))

    def scatter_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        assert self._builder is None, "image embeddings cannot be part of a compiled pass"
        x.index_copy_(0, rows, values)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        assert weight.shape == x.shape[x.dim() - weight.dim() :] and weight.dim() <= 2
        heads, width = x[0].numel() // x.shape[-1], x.shape[-1]
        out, sizes = torch.empty(x.shape, dtype=x.dtype), (heads, width, width * (weight.dim() - 1))
        address = weight.data_ptr()
        return self._execute(
            Opcode.RMS_NORM, (x,), out, target=address, keep_alive=weight, sizes=sizes, scalars=(eps,)
        )

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        vectors = [vector for vector in (weight, bias) if vector is not None]
        assert all(vector.dtype == torch.float32 and vector.is_contiguous() for vector in vectors)
        by_head = weight.dim() - 1
        assert all(vector.shape == x.shape[x.dim() - weight.dim() :] for vector in vectors)
        assert by_head == 0 or (by_head == 1 and bias is None)
        return self._execute(
            Opcode.LAYER_NORM,
            (x,),
            torch.empty(x.shape, dtype=x.dtype),
            target=NormVectors(weight.data_ptr(), None if bias is None else bias.data_ptr()),
            keep_alive=vectors,
            sizes=(x[0].numel() // x.shape[-1], x.shape[-1], x.shape[-1] * by_head),
            scalars=(eps,),
        )

    def rope(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
    ) -> Tensor:
        assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
        assert positions.dtype == torch.int64 and positions.shape[0] == x.shape[0]
        assert positions.shape[1:] == (() if mrope_sections is None else (NUM_AXES,))
        assert cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= x.shape[2], "more angles than pairs"
        axes = None if mrope_sections is None else _axes_array(mrope_sections)
        assert axes is None or len(axes) == cos_sin.shape[1] // 2, "an angle without an axis"
        table = RopeTable(cos_sin.data_ptr(), ctypes.cast(axes, ctypes.c_void_p) if axes else None)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = (x.shape[1], x.shape[2], cos_sin.shape[1], cos_sin.shape[0])
        return self._execute(
            Opcode.ROPE, (x, positions), out, target=table, keep_alive=(cos_sin, axes), sizes=sizes
        )

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype)
        return self._execute(Opcode.GATED_ACT, (gate_up,), out, sizes=(width, ACTIVATIONS[activation], 1))

    def act(self, x: Tensor, activation: str, alphas: tuple[float, float] = NO_ALPHAS) -> Tensor:
        assert activation != "gpt_oss"
        sizes, out = (x.shape[1], ACTIVATIONS[activation], 0), torch.empty(x.shape, dtype=x.dtype)
        return self._execute(Opcode.GATED_ACT, (x,), out, sizes=sizes, scalars=alphas)

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        assert k.shape == (*slots.shape, *cache.own_keys.shape[1:]) and slots.dtype == torch.int64
        assert v.shape == (*slots.shape, *cache.v.shape[1:]), "values of another shape"
        num_slots = (cache.k.shape[0],)
        target = _kv_pointers(cache)
        self._execute(Opcode.WRITE_KV, (k, v, slots), None, target=target, keep_alive=cache, sizes=num_slots)

    def build_attention_metadata(
        self, batch: Batch, window: int | None = None, first: int = 0, causal: bool = True
    ) -> None:
        """None: the kernel reads the batch itself."""

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: None = None,
        sinks: Tensor | None = None,
        first: int = 0,
        causal: bool = True,
    ) -> Tensor:
        assert first >= 0 and (
            sinks is None or (sinks.dtype == torch.float32 and sinks.shape == q.shape[1:2])
        )
        _slots, kv_heads, head_dim = cache.k.shape
        assert q.shape[1] % kv_heads == 0 and q.shape[2] == head_dim, "queries of another shape"
        head_sinks = None if sinks is None else sinks.contiguous()
        return self._execute(
            Opcode.ATTENTION,
            (q,),
            torch.zeros(*q.shape[:2], cache.v.shape[2], dtype=q.dtype),
            target=AttentionLayer(_kv_pointers(cache), None if head_sinks is None else head_sinks.data_ptr()),
            keep_alive=(cache, head_sinks),
            sizes=(q.shape[1], window or 0, cache.k.shape[0], first, not causal),
            scalars=(scale, softcap or 0.0),
            batch=batch,
        )

    def varlen_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Paged attention with k and v as the cache, one row per block, and all rows at the last position."""
        assert self._builder is None, "image embeddings cannot be part of a compiled pass"
        assert cu_seqlens_q[-1] == len(q) and cu_seqlens_k[-1] == len(k)
        first, lengths = torch.tensor(cu_seqlens_k[:-1]), torch.tensor(cu_seqlens_to_lens(cu_seqlens_k))
        positions = (lengths - 1).repeat_interleave(torch.tensor(cu_seqlens_to_lens(cu_seqlens_q)))
        tables = first[:, None] + torch.arange(int(lengths.max()))  # entries beyond a section are not read
        starts, seq_lens = tuple(cu_seqlens_q), tuple(lengths.tolist())
        batch = Batch(positions, positions, positions, tables, starts, seq_lens, positions, block_size=1)
        return self.attention(q, KVLayer(k.contiguous(), v.contiguous()), batch, scale)

    def write_hidden(self, x: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert x.shape == (*slots.shape, *cache.shape[1:]) and x.dtype == cache.dtype
        assert slots.dtype == torch.int64 and cache.is_contiguous()
        sizes = (cache.shape[1] * cache.itemsize, cache.shape[0])
        address = cache.data_ptr()
        self._execute(Opcode.WRITE_HIDDEN, (x, slots), None, target=address, keep_alive=cache, sizes=sizes)

    def read_hidden(self, cache: Tensor, slots: Tensor) -> Tensor:
        assert slots.dtype == torch.int64 and cache.is_contiguous()
        out, sizes = (
            torch.empty(slots.shape[0], cache.shape[1], dtype=cache.dtype),
            (cache[0].nbytes, len(cache)),
        )
        address = cache.data_ptr()
        return self._execute(Opcode.READ_HIDDEN, (slots,), out, target=address, keep_alive=cache, sizes=sizes)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        out = torch.empty(parts[0].shape[0], sum(part.shape[1] for part in parts), dtype=parts[0].dtype)
        first = 0
        for part in parts:
            assert part.dtype == out.dtype and part.shape[0] == out.shape[0]
            columns = out[:, first : first + part.shape[1]]
            self._execute(Opcode.COPY, (part,), columns, sizes=(part.shape[1] * part.itemsize,))
            first += part.shape[1]
        return out

    def expand_vocab(self, logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        assert logits.dtype == torch.float32 and ids.dtype == torch.int64 and ids.is_contiguous()
        assert logits.shape[1:] == ids.shape and 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
        out, sizes = torch.empty(logits.shape[0], vocab_size), (len(ids), vocab_size)
        address = ids.data_ptr()
        return self._execute(Opcode.EXPAND_VOCAB, (logits,), out, target=address, keep_alive=ids, sizes=sizes)

    def _gather_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """x[:, order]"""
        out, address = torch.empty(x.shape[0], len(order), dtype=x.dtype), order.data_ptr()
        sizes = (len(order),)
        return self._execute(Opcode.GATHER_COLUMNS, (x,), out, target=address, keep_alive=order, sizes=sizes)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        return self._execute(Opcode.SOFTCAP, (), x, sizes=(x.shape[1],), scalars=(cap,))


@functools.cache
def _axes_array(mrope_sections: MRopeSections) -> ctypes.Array[ctypes.c_int32]:
    axes = mrope_sections.angle_axes()
    return (ctypes.c_int32 * len(axes))(*axes)


def _kv_pointers(cache: KVLayer) -> KVPointers:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    assert cache.k.is_contiguous() and (cache.is_latent or cache.v.is_contiguous())
    scales = [scale for scale in (cache.k_scale, cache.v_scale) if scale is not None]
    assert all(scale.shape == cache.k.shape[:2] and scale.is_contiguous() for scale in scales)
    return KVPointers(
        type=DTYPE_IDS[cache.k.dtype],
        is_latent=cache.is_latent,
        k=address(cache.k),
        v=address(cache.v),
        k_scale=address(cache.k_scale),
        v_scale=address(cache.v_scale),
        heads=cache.k.shape[1],
        dim=cache.k.shape[2],
        value_dim=cache.v.shape[2],
    )
