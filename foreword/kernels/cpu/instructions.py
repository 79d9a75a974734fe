"""Instructions of the native kernels: run at once, or recorded into a program."""

from __future__ import annotations

import ctypes
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.cpu.library import (
    AddressSpace,
    DraftArgs,
    Instruction,
    Opcode,
    Operand,
    ProgramInputs,
)
from foreword.kernels.cpu.program import ProgramBuilder, build_inputs
from foreword.kernels.cpu.sampling import NativeSampling

DTYPE_IDS = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.int8: 2})  # enum Type
NULL_OPERAND = Operand(AddressSpace.ABSOLUTE, 0, 0, 0)


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
