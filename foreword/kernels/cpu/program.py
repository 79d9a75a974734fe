"""Instructions of the native kernels: run at once, or traced into a program that runs for any batch.

While tracing, the instruction of each operation is recorded, and nothing is computed. Then every intermediate
result gets an offset in an arena, in bytes per batch row, and every address becomes relative to the arena or
to an input of the batch. A forward pass is then one call, without Python or torch.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.cpu.library import AddressSpace, DraftArgs, Instruction, Opcode, Operand, ProgramInputs
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.ops import DraftJob, DraftTokens

DTYPE_IDS = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.int8: 2})  # enum Type
NULL_OPERAND = Operand(AddressSpace.ABSOLUTE, 0, 0, 0)
ALIGNMENT = 64
# Rows of the traced batch, and those sampled: a result's row count shows which of the two it grows with.
TRACE_ROWS = 3
TRACE_SAMPLED = 2
BATCH_SPACES = {
    "token_ids": AddressSpace.TOKEN_IDS,
    "positions": AddressSpace.POSITIONS,
    "slots": AddressSpace.SLOTS,
    "sample_rows": AddressSpace.SAMPLE_ROWS,
    "mrope_positions": AddressSpace.MROPE_POSITIONS,
    "lora_slots": AddressSpace.LORA_SLOTS,
    "state_slots": AddressSpace.STATE_SLOTS,
    "anchor_tables": AddressSpace.ANCHOR_TABLES,
    "prev_slots": AddressSpace.PREV_SLOTS,
}

JOB_STRUCT = struct.Struct("=9qQ2q4d")  # struct DraftJob


@dataclass(slots=True)
class Buffer:
    """A result, and the first and last instruction that use it."""

    tensor: Tensor
    first_use: int
    last_use: int
    offset_per_row: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, rounded up."""
        return _align_up(self.tensor.untyped_storage().nbytes() // self.tensor.shape[0])


@dataclass(slots=True)
class ProgramBuilder:
    """The instructions of one pass over `batch`. Results are kept alive, so that no address repeats."""

    batch: Batch
    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    keep_alive: list[object] = field(default_factory=list)

    def add(
        self,
        instruction: Instruction,
        inputs: tuple[Tensor, ...],
        out: Tensor | None,
        keep_alive: tuple[object, ...],
    ) -> None:
        """Append an instruction with operands inputs and out; keep_alive owns all other memory it uses."""
        number = len(self.instructions)
        rows = (inputs[0] if out is None else out).shape[0]
        assert rows in (TRACE_ROWS, TRACE_SAMPLED), f"a result with {rows} rows: not all and not the sampled"
        copy = Instruction.from_buffer_copy(instruction)
        copy.sampled = rows == TRACE_SAMPLED
        if out is not None:
            buffer = self.buffers.setdefault(_storage_address(out), Buffer(out, number, number))
            buffer.last_use = number
            copy.out = self._relocate(copy.out, out)
        for index, tensor in enumerate(inputs):
            copy.inputs[index] = self._relocate(copy.inputs[index], tensor)
            if _storage_address(tensor) in self.buffers:
                self.buffers[_storage_address(tensor)].last_use = number
        self.instructions.append(copy)
        self.keep_alive.append((inputs, out, keep_alive))

    def _relocate(self, operand: Operand, tensor: Tensor) -> Operand:
        """The address relative to the tensor's storage; arena offsets are not known yet."""
        base = _storage_address(tensor)
        if base in self.buffers:
            return Operand(AddressSpace.ARENA, operand.address - base, base, operand.stride)
        for name, space in BATCH_SPACES.items():
            tensor_of_batch = getattr(self.batch, name)
            if tensor_of_batch is not None and base == _storage_address(tensor_of_batch):
                return Operand(space, operand.address - base, 0, operand.stride)
        raise AssertionError("an operand from outside: a forward pass may use only Ops and views")


class InstructionRunner(NativeSampling):
    """Base of CpuOps; csrc/common/forward_program.h."""

    _builder: ProgramBuilder | None = None  # while a program is traced

    def _execute(
        self,
        opcode: Opcode,
        inputs: tuple[Tensor, ...],
        out: Tensor | None,
        *,
        target: ctypes.Structure | int | None = None,
        keep_alive: object = None,
        sizes: tuple[int, ...] = (),
        scalars: tuple[float, ...] = (),
        batch: Batch | None = None,
    ) -> Tensor:
        """Run one instruction, or record it while tracing, where only the shape of its result counts.

        keep_alive owns the memory of `target`.
        """
        first = inputs[0] if inputs else out
        assert first is not None
        written = first if out is None else out
        instruction = Instruction(
            op=opcode,
            type=DTYPE_IDS.get(first.dtype, 0),
            out_type=DTYPE_IDS[written.dtype],
            inputs=tuple(_make_operand(tensor) for tensor in inputs),
            out=NULL_OPERAND if out is None else _make_operand(out),
            object=ctypes.addressof(target) if isinstance(target, ctypes.Structure) else target,
            sizes=sizes,
            numbers=scalars,
        )
        if self._builder is not None:
            self._builder.add(instruction, inputs, out, (target, keep_alive))
        elif batch is None:
            self._run_program((Instruction * 1)(instruction), ProgramInputs(num_rows=written.shape[0]))
        else:
            program_inputs, _query_start_loc = build_inputs(batch)  # the array must outlive the call
            self._run_program((Instruction * 1)(instruction), program_inputs)
        return written

    def _run_program(self, program: ctypes.Array[Instruction], inputs: ProgramInputs) -> None:
        self._library.foreword_run(self._cpu_context, program, len(program), ctypes.byref(inputs))

    def _run_draft(
        self, program: ctypes.Array[Instruction], inputs: ProgramInputs, draft_args: DraftArgs
    ) -> None:
        self._library.foreword_draft(
            self._cpu_context, program, len(program), ctypes.byref(inputs), ctypes.byref(draft_args)
        )


def _make_operand(tensor: Tensor) -> Operand:
    """Rows along the first dimension, each contiguous."""
    assert tensor.device.type == "cpu" and tensor[:1].is_contiguous(), "values of a row must be consecutive"
    return Operand(AddressSpace.ABSOLUTE, tensor.data_ptr(), 0, tensor.stride(0) * tensor.itemsize)


class Program:
    """Runs the traced instructions for other batches; each run overwrites the last result.

    run_program runs the instructions once, run_draft once for each pass of a draft.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        out: Tensor,
        run_program: Callable[[ctypes.Array[Instruction], ProgramInputs], None],
        run_draft: Callable[[ctypes.Array[Instruction], ProgramInputs, DraftArgs], None],
    ) -> None:
        assert out.shape[0] == TRACE_SAMPLED and out.is_contiguous()
        self._run_program, self._run_draft = run_program, run_draft
        self._keep_alive = builder.keep_alive
        self._width, self._dtype = out.shape[1], out.dtype
        operands = [operand for instruction in builder.instructions for operand in instruction.inputs]
        spaces = {operand.space for operand in operands}
        self._uses_mrope = AddressSpace.MROPE_POSITIONS in spaces
        self._uses_lora = AddressSpace.LORA_SLOTS in spaces
        self._uses_prev_slots = AddressSpace.PREV_SLOTS in spaces
        output_address = _storage_address(out)
        del builder.buffers[output_address]
        self._bytes_per_row = plan_arena(list(builder.buffers.values()))
        for instruction in builder.instructions:
            _assign_addresses(instruction, builder.buffers, output_address)
        self._instructions = (Instruction * len(builder.instructions))(*builder.instructions)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._output = torch.empty(0, self._width, dtype=self._dtype)

    def __call__(self, batch: Batch) -> Tensor:
        """-> [R, width], valid until the next call"""
        assert batch.mrope_positions is not None or not self._uses_mrope, "a batch without M-RoPE positions"
        assert batch.lora_slots is not None or not self._uses_lora, "a batch without adapters' slots"
        assert batch.prev_slots is not None or not self._uses_prev_slots, "a batch without prev_slots"
        inputs, _query_start_loc = build_inputs(batch)  # the array must outlive the call
        self._allocate(inputs, inputs.num_rows, inputs.num_sampled)
        output = self._output[: inputs.num_sampled]  # a pass evicts torch's code: faster before than after
        self._run_program(self._instructions, inputs)
        return output

    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """See DraftLoop; the program must compute logits."""
        assert self._dtype == torch.float32
        call = DraftCall(jobs, block_size)
        inputs = ProgramInputs(block_size=block_size)
        self._allocate(inputs, call.num_rows, max(sum(job.num_sampled for job in jobs), len(jobs)))
        self._run_draft(self._instructions, inputs, call.build_args(never_sampled_ids, self._width))
        return call.read_drafts()

    def _allocate(self, inputs: ProgramInputs, num_rows: int, num_sampled: int) -> None:
        """Grow the arena and the output for this many rows."""
        assert num_sampled <= num_rows, "arena space is reserved for num_rows"
        if self._arena.numel() < self._bytes_per_row * num_rows + ALIGNMENT:
            self._arena = torch.empty(self._bytes_per_row * num_rows + ALIGNMENT, dtype=torch.uint8)
        if self._output.shape[0] < num_sampled:
            self._output = torch.empty(num_sampled, self._width, dtype=self._dtype)
        inputs.spaces[AddressSpace.ARENA] = _align_up(self._arena.data_ptr())
        inputs.spaces[AddressSpace.OUTPUT] = self._output.data_ptr()


def build_inputs(batch: Batch) -> tuple[ProgramInputs, array[int]]:
    """The batch for C++, and an array that must outlive it."""
    row_starts = array("q", batch.query_start_loc)
    inputs = ProgramInputs(
        batch.token_ids.shape[0],
        batch.sample_rows.shape[0],
        len(batch.seq_lens),
        batch.block_tables.shape[1],
        batch.block_size,
        1 if batch.anchor_tables is None else batch.anchor_tables.shape[1],
    )
    spaces = inputs.spaces
    for name, space in BATCH_SPACES.items():
        tensor: Tensor | None = getattr(batch, name)
        spaces[space] = None if tensor is None else tensor.data_ptr()
    spaces[AddressSpace.BLOCK_TABLES] = batch.block_tables.data_ptr()
    spaces[AddressSpace.QUERY_START_LOC] = row_starts.buffer_info()[0]
    return inputs, row_starts


def _storage_address(tensor: Tensor) -> int:
    """Start of the memory that the tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _align_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def plan_arena(buffers: list[Buffer]) -> int:
    """Assign arena offsets, first fit; returns the arena's bytes per batch row."""
    size = 0
    live: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.first_use):
        live = [other for other in live if other.last_use >= buffer.first_use]
        offset = 0
        for other in sorted(live, key=lambda other: other.offset_per_row):
            if offset + buffer.row_bytes <= other.offset_per_row:
                break
            offset = max(offset, other.offset_per_row + other.row_bytes)
        buffer.offset_per_row = offset
        live.append(buffer)
        size = max(size, offset + buffer.row_bytes)
    return size


def _assign_addresses(instruction: Instruction, buffers: dict[int, Buffer], output_address: int) -> None:
    """Replace the storage address in per_row of each ARENA operand by its offset per row."""
    for operand in (*instruction.inputs, instruction.out):
        if operand.space == AddressSpace.ARENA and operand.per_row == output_address:
            operand.space, operand.per_row = AddressSpace.OUTPUT, 0
        elif operand.space == AddressSpace.ARENA:
            operand.per_row = buffers[operand.per_row].offset_per_row


class DraftCall:
    """The memory that one call reads and writes; draft rows are as wide as the largest max_tokens."""

    def __init__(self, jobs: Sequence[DraftJob], block_size: int) -> None:
        self._num_jobs = len(jobs)
        self._max_tokens = max((job.max_tokens for job in jobs), default=0)
        self._jobs = array("q", bytes(JOB_STRUCT.size * self._num_jobs))
        self._token_ids = array("q")
        self._block_tables = array("q")
        self._draft_ids = array("q", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_logprobs = array("d", bytes(8 * self._num_jobs * self._max_tokens))
        self._draft_lengths = array("q", bytes(8 * self._num_jobs))
        for index, job in enumerate(jobs):
            end = job.start_position + job.num_rows
            assert len(job.block_table) * block_size >= end, "a row without a slot"
            self._pack(index, job)

    @property
    def num_rows(self) -> int:
        """Rows of the first pass, which has the most."""
        return len(self._token_ids)

    def build_args(self, never_sampled_ids: Tensor, vocab_size: int) -> DraftArgs:
        """Pointers into this object, which must outlive the call; never_sampled_ids int64 [U]."""
        return DraftArgs(
            jobs=_address(self._jobs),
            num_jobs=self._num_jobs,
            token_ids=_address(self._token_ids),
            block_tables=_address(self._block_tables),
            never_sampled_ids=never_sampled_ids.data_ptr(),
            num_never_sampled=never_sampled_ids.numel(),
            vocab_size=vocab_size,
            max_tokens=self._max_tokens,
            draft_ids=_address(self._draft_ids),
            draft_logprobs=_address(self._draft_logprobs),
            draft_lengths=_address(self._draft_lengths),
        )

    def read_drafts(self) -> list[DraftTokens]:
        """The results, after the call."""
        drafts: list[DraftTokens] = []
        for index, count in enumerate(self._draft_lengths):
            row = slice(index * self._max_tokens, index * self._max_tokens + count)
            drafts.append(DraftTokens(tuple(self._draft_ids[row]), tuple(self._draft_logprobs[row])))
        return drafts

    def _pack(self, index: int, job: DraftJob) -> None:
        sampling = job.sampling
        self._token_ids.extend(job.token_ids)
        self._block_tables.extend(job.block_table)
        JOB_STRUCT.pack_into(
            self._jobs,
            index * JOB_STRUCT.size,
            len(job.token_ids),
            job.start_position,
            len(job.block_table),
            job.mrope_offset,
            job.first_draft_index,
            job.max_tokens,
            -1 if job.fixed_position is None else job.fixed_position,
            job.in_one_pass,
            -1 if job.mask_slot is None else job.mask_slot,
            sampling.seed,
            sampling.greedy,
            sampling.top_k,
            job.min_logprob_sum,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
        )


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
