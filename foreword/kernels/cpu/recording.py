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
from foreword.kernels.cpu.drafting import DraftCall
from foreword.kernels.cpu.library import Command, Draft, Inputs, Operand, Space
from foreword.kernels.ops import DraftLane, Guess

__all__ = ["Program", "Recorder", "Result", "inputs_of", "place"]

ALIGNMENT = 64
TRACE_ROWS = 3  # of the batch that is recorded; a result's number of rows tells whether it grows with all rows
TRACE_SAMPLED = 2  # or only with those that are sampled
BATCH_SPACES = {
    "token_ids": Space.TOKEN_IDS,
    "positions": Space.POSITIONS,
    "slots": Space.SLOTS,
    "sample_rows": Space.SAMPLE_ROWS,
    "rope_positions": Space.ROPE_POSITIONS,
}


@dataclass(slots=True)
class Result:
    """What one command wrote, and the commands between which it must be kept."""

    tensor: Tensor
    first: int
    last: int
    per_row: int = 0

    @property
    def row_bytes(self) -> int:
        """Of one row, rounded up."""
        return _aligned(self.tensor.untyped_storage().nbytes() // self.tensor.shape[0])


@dataclass(slots=True)
class Recorder:
    """The commands of one pass over `batch`. Results are kept alive, so that no address is used twice."""

    batch: Batch
    commands: list[Command] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)

    def add(self, command: Command, inputs: tuple[Tensor, ...], out: Tensor | None, keep: tuple[object, ...]) -> None:
        """`inputs` and `out` are the tensors behind the command's operands; `keep` owns what else it points to."""
        number = len(self.commands)
        rows = (inputs[0] if out is None else out).shape[0]
        assert rows in (TRACE_ROWS, TRACE_SAMPLED), f"a result of {rows} rows is neither of all rows nor of the sampled ones"
        copy = Command.from_buffer_copy(command)
        copy.sampled = rows == TRACE_SAMPLED
        if out is not None:
            result = self.results.setdefault(_base(out), Result(out, number, number))
            result.last = number
            copy.out = self._relative(copy.out, out)
        for index, tensor in enumerate(inputs):
            copy.inputs[index] = self._relative(copy.inputs[index], tensor)
            if _base(tensor) in self.results:
                self.results[_base(tensor)].last = number
        self.commands.append(copy)
        self.keep.append((inputs, out, keep))

    def _relative(self, operand: Operand, tensor: Tensor) -> Operand:
        """The address within what the tensor is a view of; a result's place in the arena is not known yet."""
        base = _base(tensor)
        if base in self.results:
            return Operand(Space.ARENA, operand.address - base, base, operand.stride)
        for name, space in BATCH_SPACES.items():
            if base == _base(getattr(self.batch, name)):
                return Operand(space, operand.address - base, 0, operand.stride)
        raise AssertionError("an operand that no recorded operation made: only Ops and views may be used in a forward pass")


class Program:
    """Runs the recorded commands for other batches. The result is overwritten by the next run.

    run    runs commands once
    draft  runs them for every pass of a draft
    """

    def __init__(
        self,
        recorder: Recorder,
        out: Tensor,
        run: Callable[[ctypes.Array[Command], Inputs], None],
        draft: Callable[[ctypes.Array[Command], Inputs, Draft], None],
    ) -> None:
        assert out.shape[0] == TRACE_SAMPLED and out.is_contiguous()
        self._run, self._draft = run, draft
        self._keep = recorder.keep
        self._width, self._dtype = out.shape[1], out.dtype
        self._directions = any(operand.space == Space.ROPE_POSITIONS for c in recorder.commands for operand in c.inputs)
        last = recorder.results.pop(_base(out))
        self._bytes_per_row = place(list(recorder.results.values()))
        self._commands = (Command * len(recorder.commands))(
            *(_placed(command, recorder.results, _base(last.tensor)) for command in recorder.commands)
        )
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._out = torch.empty(0, self._width, dtype=self._dtype)

    def __call__(self, batch: Batch) -> Tensor:
        """-> [R, width], valid until the next call"""
        assert batch.rope_positions is not None or not self._directions, "a batch without positions in several directions"
        inputs, row_starts = inputs_of(batch)
        self._place(inputs, inputs.num_rows, inputs.num_sampled)
        self._run(self._commands, inputs)
        del row_starts  # which `inputs` points to
        return self._out[: inputs.num_sampled]

    def draft(self, lanes: Sequence[DraftLane], block_size: int, unused: Tensor) -> list[Guess]:
        """See DraftLoop. The result is that of a forward pass to logits."""
        assert self._dtype == torch.float32
        call = DraftCall(lanes, block_size)
        inputs = Inputs(block_size=block_size)
        self._place(inputs, call.num_rows, len(lanes))
        self._draft(self._commands, inputs, call.structure(unused, self._width))
        return call.guesses()

    def _place(self, inputs: Inputs, num_rows: int, num_sampled: int) -> None:
        """Room for results: at least that of so many rows."""
        assert num_sampled <= num_rows, "results of sampled rows have as much room as those of all rows"
        if self._arena.numel() < self._bytes_per_row * num_rows + ALIGNMENT:
            self._arena = torch.empty(self._bytes_per_row * num_rows + ALIGNMENT, dtype=torch.uint8)
        if self._out.shape[0] < num_sampled:
            self._out = torch.empty(num_sampled, self._width, dtype=self._dtype)
        inputs.spaces[Space.ARENA] = _aligned(self._arena.data_ptr())
        inputs.spaces[Space.OUTPUT] = self._out.data_ptr()


def inputs_of(batch: Batch) -> tuple[Inputs, Tensor]:
    """The batch as C++ sees it, and what must live as long as that."""
    row_starts = torch.tensor(batch.row_starts, dtype=torch.int64)
    inputs = Inputs(
        num_rows=batch.token_ids.shape[0],
        num_sampled=batch.sample_rows.shape[0],
        num_requests=len(batch.ends),
        table_width=batch.block_tables.shape[1],
        block_size=batch.block_size,
    )
    for name, space in BATCH_SPACES.items():
        tensor: Tensor | None = getattr(batch, name)
        inputs.spaces[space] = None if tensor is None else tensor.data_ptr()
    inputs.spaces[Space.BLOCK_TABLES] = batch.block_tables.data_ptr()
    inputs.spaces[Space.ROW_STARTS] = row_starts.data_ptr()
    return inputs, row_starts


def _base(tensor: Tensor) -> int:
    """Where the memory begins that the tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _aligned(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def place(results: list[Result]) -> int:
    """Give every result its place in the arena, first fit; returns the arena's bytes for each row of the batch."""
    size = 0
    live: list[Result] = []
    for result in sorted(results, key=lambda result: result.first):
        live = [other for other in live if other.last >= result.first]
        result.per_row = _gap(live, result.row_bytes)
        live.append(result)
        size = max(size, result.per_row + result.row_bytes)
    return size


def _gap(live: list[Result], size: int) -> int:
    """The lowest place where `size` bytes overlap none of the live results."""
    place = 0
    for other in sorted(live, key=lambda other: other.per_row):
        if place + size <= other.per_row:
            break
        place = max(place, other.per_row + other.row_bytes)
    return place


def _placed(command: Command, results: dict[int, Result], out_base: int) -> Command:
    """The command with every ARENA operand (whose per_row names its result) as C++ wants it."""
    for operand in (*command.inputs, command.out):
        if operand.space == Space.ARENA and operand.per_row == out_base:
            operand.space, operand.per_row = Space.OUTPUT, 0
        elif operand.space == Space.ARENA:
            operand.per_row = results[operand.per_row].per_row
    return command
