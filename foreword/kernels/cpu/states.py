"""Layers with state on the native kernels: short convolutions, gated delta rules and Mamba-2's scans."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.batch import Batch, StateLayer
from foreword.core.states import HEAD_DIM_MULTIPLE, MAX_KERNEL_SIZE, StateShape
from foreword.kernels.cpu.library import Opcode, StateOperation
from foreword.kernels.cpu.program import DTYPE_IDS, InstructionRunner

GATES = MappingProxyType({"none": 0, "silu": 1, "sigmoid": 2, "gelu_tanh": 3})  # enum Gate


class NativeStates(InstructionRunner):
    """Base of CpuOps."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, state: StateLayer, batch: Batch
    ) -> Tensor:
        shape = state.shape
        assert activation in ("none", "silu") and x.dtype == state.inputs.dtype
        assert x.shape[1:] == (shape.channels,) and weight.shape == (shape.kernel_size, shape.channels)
        assert 1 < shape.kernel_size <= MAX_KERNEL_SIZE
        return self._execute(
            Opcode.CAUSAL_CONV,
            (x,),
            torch.empty(x.shape, dtype=x.dtype),
            target=_state_operation(state, weight, bias),
            keep_alive=(state, weight, bias),
            sizes=(GATES[activation],),
            batch=batch,
        )

    def gated_delta_rule(
        self,
        qkv: Tensor,
        alpha: Tensor,
        beta: Tensor,
        rates: Tensor,
        offsets: Tensor,
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        shape, rows = state.shape, qkv.shape[0]
        heads = shape.value_heads
        assert qkv.dtype == alpha.dtype == beta.dtype == state.keys.dtype == state.updates.dtype
        assert alpha.shape == beta.shape == (rows, heads) and rates.shape == offsets.shape == (heads,)
        _check_heads(shape, qkv)
        return self._execute(
            Opcode.DELTA_RULE,
            (qkv, alpha, beta),
            torch.empty(rows, heads, shape.value_dim, dtype=qkv.dtype),
            target=_state_operation(state, rates, offsets),
            keep_alive=(state, rates, offsets),
            batch=batch,
        )

    def ssm_scan(
        self,
        cbx: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        offsets: Tensor,
        skips: Tensor,
        limits: tuple[float, float],
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        shape, rows = state.shape, cbx.shape[0]
        vectors = rates, offsets, skips
        assert cbx.dtype == time_steps.dtype == state.keys.dtype == state.updates.dtype
        assert time_steps.shape == (rows, shape.value_heads)
        assert all(vector.shape == (shape.value_heads,) for vector in vectors)
        _check_heads(shape, cbx)
        return self._execute(
            Opcode.SSM_SCAN,
            (cbx, time_steps),
            torch.empty(rows, shape.value_heads, shape.value_dim, dtype=cbx.dtype),
            target=_state_operation(state, *vectors),
            keep_alive=(state, vectors),
            scalars=limits,
            batch=batch,
        )


def _check_heads(shape: StateShape, inputs: Tensor) -> None:
    assert inputs.shape[1] == 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    assert shape.key_dim % HEAD_DIM_MULTIPLE == shape.value_dim % HEAD_DIM_MULTIPLE == 0
    assert shape.value_heads % shape.key_heads == 0


def _state_operation(
    state: StateLayer, weight: Tensor, bias: Tensor | None, skips: Tensor | None = None
) -> StateOperation:
    shape, tensors = state.shape, (state.inputs, state.tails, state.keys, state.updates)
    optional = (weight, bias, skips, state.decays, state.matrices)
    vectors = [vector for vector in optional if vector is not None]
    assert all(tensor.is_contiguous() for tensor in (*tensors, *vectors))
    assert all(vector.dtype == torch.float32 for vector in vectors)
    assert state.inputs.shape[1] == state.keys.shape[1] == state.updates.shape[1] == state.decays.shape[1]
    return StateOperation(
        DTYPE_IDS[state.inputs.dtype],
        0,
        shape.channels,
        shape.kernel_size,
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        state.inputs.shape[1],
        state.inputs.shape[0],
        state.tails.shape[0],
        *(tensor.data_ptr() for tensor in tensors),
        state.decays.data_ptr(),
        state.matrices.data_ptr(),
        *(None if vector is None else vector.data_ptr() for vector in (weight, bias, skips)),
    )
