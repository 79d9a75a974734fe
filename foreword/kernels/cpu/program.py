"""From the operations of one forward pass to a program that C++ runs for any batch.

While a function is recorded, each operation runs as always and its command is noted. Afterwards every
result that was computed on the way gets a place in an arena, so many bytes for each row of the batch, and
every address in the commands becomes relative to the arena or to an input of the batch. Then a forward
pass is one call, without an operation of Python or torch in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.cpu.draft import DraftCall
from foreword.kernels.cpu.library import AddressSpace, DraftArgs, Instruction, Operand, ProgramInputs
from foreword.kernels.ops import DraftJob, DraftTokens

__all__ = ["Buffer", "Program", "ProgramBuilder", "build_inputs", "plan_arena"]

ALIGNMENT = 64
TRACE_ROWS = (
    3  # of the batch that is recorded; a result's number of rows tells whether it grows with all rows
)
TRACE_SAMPLED = 2  # or only with those that are sampled
BATCH_SPACES = {
    "token_ids": AddressSpace.TOKEN_IDS,
    "positions": AddressSpace.POSITIONS,
    "slots": AddressSpace.SLOTS,
    "sample_rows": AddressSpace.SAMPLE_ROWS,
    "mrope_positions": AddressSpace.MROPE_POSITIONS,
}


@dataclass(slots=True)
class Buffer:
    """What one command wrote, and the commands between which it must be kept."""

    tensor: Tensor
    first_use: int
    last_use: int
    offset_per_row: int = 0

    @property
    def row_bytes(self) -> int:
        """Of one row, rounded up."""
        return _align_up(self.tensor.untyped_storage().nbytes() // self.tensor.shape[0])


@dataclass(slots=True)
class ProgramBuilder:
    """The commands of one pass over `batch`. Results are kept alive, so that no address is used twice."""

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
        """`inputs` and `out` are the tensors behind the command's operands; `keep` owns what else it points to."""
        number = len(self.instructions)
        rows = (inputs[0] if out is None else out).shape[0]
        assert rows in (TRACE_ROWS, TRACE_SAMPLED), (
            f"a result of {rows} rows is neither of all rows nor of the sampled ones"
        )
        copy = Instruction.from_buffer_copy(instruction)
        copy.sampled = rows == TRACE_SAMPLED
        if out is not None:
            result = self.buffers.setdefault(_storage_address(out), Buffer(out, number, number))
            result.last_use = number
            copy.out = self._relocate(copy.out, out)
        for index, tensor in enumerate(inputs):
            copy.inputs[index] = self._relocate(copy.inputs[index], tensor)
            if _storage_address(tensor) in self.buffers:
                self.buffers[_storage_address(tensor)].last_use = number
        self.instructions.append(copy)
        self.keep_alive.append((inputs, out, keep_alive))

    def _relocate(self, operand: Operand, tensor: Tensor) -> Operand:
        """The address within what the tensor is a view of; a result's place in the arena is not known yet."""
        base = _storage_address(tensor)
        if base in self.buffers:
            return Operand(AddressSpace.ARENA, operand.address - base, base, operand.stride)
        for name, space in BATCH_SPACES.items():
            if base == _storage_address(getattr(self.batch, name)):
                return Operand(space, operand.address - base, 0, operand.stride)
        raise AssertionError(
            "an operand that no recorded operation made: only Ops and views may be used in a forward pass"
        )


class Program:
    """Runs the recorded commands for other batches. The result is overwritten by the next run.

    run    runs commands once
    draft  runs them for every pass of a draft
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
        self._uses_mrope = any(
            operand.space == AddressSpace.MROPE_POSITIONS
            for c in builder.instructions
            for operand in c.inputs
        )
        last = builder.buffers.pop(_storage_address(out))
        self._bytes_per_row = plan_arena(list(builder.buffers.values()))
        self._instructions = (Instruction * len(builder.instructions))(
            *(
                _assign_addresses(command, builder.buffers, _storage_address(last.tensor))
                for command in builder.instructions
            )
        )
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._output = torch.empty(0, self._width, dtype=self._dtype)

    def __call__(self, batch: Batch) -> Tensor:
        """-> [R, width], valid until the next call"""
        assert batch.mrope_positions is not None or not self._uses_mrope, (
            "a batch without positions in several directions"
        )
        inputs, row_starts = build_inputs(batch)
        self._allocate(inputs, inputs.num_rows, inputs.num_sampled)
        self._run_program(self._instructions, inputs)
        del row_starts  # which `inputs` points to
        return self._output[: inputs.num_sampled]

    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """See DraftLoop. The result is that of a forward pass to logits."""
        assert self._dtype == torch.float32
        call = DraftCall(jobs, block_size)
        inputs = ProgramInputs(block_size=block_size)
        self._allocate(inputs, call.num_rows, len(jobs))
        self._run_draft(self._instructions, inputs, call.build_args(never_sampled_ids, self._width))
        return call.read_drafts()

    def _allocate(self, inputs: ProgramInputs, num_rows: int, num_sampled: int) -> None:
        """Room for results: at least that of so many rows."""
        assert num_sampled <= num_rows, "results of sampled rows have as much room as those of all rows"
        if self._arena.numel() < self._bytes_per_row * num_rows + ALIGNMENT:
            self._arena = torch.empty(self._bytes_per_row * num_rows + ALIGNMENT, dtype=torch.uint8)
        if self._output.shape[0] < num_sampled:
            self._output = torch.empty(num_sampled, self._width, dtype=self._dtype)
        inputs.spaces[AddressSpace.ARENA] = _align_up(self._arena.data_ptr())
        inputs.spaces[AddressSpace.OUTPUT] = self._output.data_ptr()


def build_inputs(batch: Batch) -> tuple[ProgramInputs, Tensor]:
    """The batch as C++ sees it, and what must live as long as that."""
    row_starts = torch.tensor(batch.query_start_loc, dtype=torch.int64)
    inputs = ProgramInputs(
        num_rows=batch.token_ids.shape[0],
        num_sampled=batch.sample_rows.shape[0],
        num_requests=len(batch.seq_lens),
        table_width=batch.block_tables.shape[1],
        block_size=batch.block_size,
    )
    for name, space in BATCH_SPACES.items():
        tensor: Tensor | None = getattr(batch, name)
        inputs.spaces[space] = None if tensor is None else tensor.data_ptr()
    inputs.spaces[AddressSpace.BLOCK_TABLES] = batch.block_tables.data_ptr()
    inputs.spaces[AddressSpace.QUERY_START_LOC] = row_starts.data_ptr()
    return inputs, row_starts


def _storage_address(tensor: Tensor) -> int:
    """Where the memory begins that the tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _align_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def plan_arena(buffers: list[Buffer]) -> int:
    """Give every result its place in the arena, first fit; returns the arena's bytes for each row of the batch."""
    size = 0
    live: list[Buffer] = []
    for result in sorted(buffers, key=lambda result: result.first_use):
        live = [other for other in live if other.last_use >= result.first_use]
        result.offset_per_row = _find_gap(live, result.row_bytes)
        live.append(result)
        size = max(size, result.offset_per_row + result.row_bytes)
    return size


def _find_gap(live_buffers: list[Buffer], num_bytes: int) -> int:
    """The lowest place where `size` bytes overlap none of the live results."""
    place = 0
    for other in sorted(live_buffers, key=lambda other: other.offset_per_row):
        if place + num_bytes <= other.offset_per_row:
            break
        place = max(place, other.offset_per_row + other.row_bytes)
    return place


def _assign_addresses(
    instruction: Instruction, buffers: dict[int, Buffer], output_address: int
) -> Instruction:
    """The command with every ARENA operand (whose per_row names its result) as C++ wants it."""
    for operand in (*instruction.inputs, instruction.out):
        if operand.space == AddressSpace.ARENA and operand.per_row == output_address:
            operand.space, operand.per_row = AddressSpace.OUTPUT, 0
        elif operand.space == AddressSpace.ARENA:
            operand.per_row = buffers[operand.per_row].offset_per_row
    return instruction
