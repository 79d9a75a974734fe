"""Loads the experts of a mixture, one by one, from the layouts of tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.kernels.ops import ExpertsConfig, Matrix, Ops, PackedExperts, QuantizedBlocks
from foreword.layers.weights import Weights

FUSED = ("experts.gate_up_proj", "experts.down_proj")  # tensors of all experts: gate and up, down
SEPARATE = (
    "experts.gate_proj",
    "experts.up_proj",
    "experts.down_proj",
)  # tensors of all experts in GGUF files


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's tensors in Hugging Face's format."""

    module: str = "mlp"  # in the layer; "": the layer itself
    router: str = "gate"  # in the module, like those of experts
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # names within one expert
    fused: tuple[str, str] = FUSED
    shared: str = "mlp.shared_expert"  # in the layer
    shared_gate: str | None = None
    shared_fused: tuple[str, str] | None = None  # names in the shared expert: gate and up, down


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Mixtures of experts in the layers of a decoder."""

    experts: ExpertsConfig
    intermediate_size: int  # I: of one expert
    has_experts: tuple[bool, ...]  # one per layer; the others have an MLP
    names: ExpertNames = ExpertNames()
    shared_intermediate_size: int = 0  # 0: no shared expert
    bias: bool = False  # router and experts have biases
    is_gpt_oss: bool = False  # see _GptOssExperts
    score_bias: str | None = None  # name in the module of what is added to scores
    score_bias_is_row: bool = False  # [1, E]
    expert_scales: str | None = None  # name in the module of factors of the experts' weights


def load_experts(
    ops: Ops, weights: Weights, weight_format: str, config: MoEConfig, hidden_size: int
) -> PackedExperts:
    """Pack all experts of a mixture; only one of them is in memory unpacked. weights: of its module."""
    tensors = _find_tensors(weights, config, hidden_size)
    gate_up, down = [], []
    for expert in range(config.experts.num_experts):
        gate_up_bias, down_bias = tensors.biases(expert) if config.bias else (None, None)
        with tensors.gate_up(expert) as parts:
            gate_up.append(ops.pack_linear(parts, weight_format, gate_up_bias))
        with tensors.down(expert) as parts:
            down.append(ops.pack_linear(parts, weight_format, down_bias))
    count, row = config.experts.num_experts, (1,) * config.score_bias_is_row
    bias = None if config.score_bias is None else weights.tensor(config.score_bias, *row, count).view(count)
    scales = None if config.expert_scales is None else weights.tensor(config.expert_scales, count)
    return ops.pack_experts(gate_up, down, bias, scales)


def _find_tensors(weights: Weights, config: MoEConfig, hidden_size: int) -> _ExpertTensors:
    """The layout in the files: a tensor for each expert, unless there are tensors for all."""
    if config.is_gpt_oss and (weights.has(FUSED[0]) or weights.has(f"{FUSED[0]}_blocks")):
        return _GptOssExperts(weights, config, hidden_size)
    layouts = (config.names.fused, FUSED, SEPARATE) if config.experts.gated else (SEPARATE[1:],)
    for *gate_up, down in layouts:
        if weights.has(gate_up[0]):
            return _StackedExperts(weights, config, hidden_size, gate_up, down)
    return _ExpertTensors(weights, config, hidden_size)


class _ExpertTensors:
    """Matrices and biases of one expert after the other, from a tensor for each."""

    def __init__(self, weights: Weights, config: MoEConfig, hidden_size: int) -> None:
        self._weights = weights
        self._names = config.names
        self._num_experts = config.experts.num_experts
        self._inner = config.intermediate_size
        self._gate_up_rows = (1 + config.experts.gated) * config.intermediate_size
        self._hidden = hidden_size

    def gate_up(self, expert: int) -> AbstractContextManager[Sequence[Matrix]]:
        """Parts of [2I, H], or [I, H] without gates"""
        sizes = {f"{name}.weight": self._inner for name in self._projections(expert)[:-1]}
        return self._weights.weights(sizes, self._hidden)

    def down(self, expert: int) -> AbstractContextManager[Sequence[Matrix]]:
        """Parts of [H, I]"""
        return self._weights.weights({f"{self._projections(expert)[-1]}.weight": self._hidden}, self._inner)

    def biases(self, expert: int) -> tuple[Tensor, Tensor]:
        """[2I] and [H]"""
        sizes = self._inner, self._inner, self._hidden
        gate, up, down = (
            self._weights.tensor(f"{name}.bias", size)
            for name, size in zip(self._projections(expert), sizes, strict=True)
        )
        return torch.cat((gate, up)), down

    def _projections(self, expert: int) -> list[str]:
        return [f"experts.{expert}.{name}" for name in self._names.projections]


class _StackedExperts(_ExpertTensors):
    """One tensor of each kind for all experts: gate and up, or both in one, and down."""

    def __init__(
        self, weights: Weights, config: MoEConfig, hidden_size: int, gate_up: Sequence[str], down: str
    ) -> None:
        super().__init__(weights, config, hidden_size)
        self._gate_up_names = gate_up
        self._down_name = down
        if config.bias:
            inner = self._num_experts, self._inner
            gate_up_biases = [weights.tensor(f"{name}_bias", *inner) for name in SEPARATE[:2]]
            self._gate_up_bias = torch.cat(gate_up_biases, 1)
            self._down_bias = weights.tensor(f"{SEPARATE[2]}_bias", self._num_experts, hidden_size)

    @contextmanager
    def gate_up(self, expert: int) -> Iterator[Sequence[Matrix]]:
        shape = self._num_experts, self._gate_up_rows // len(self._gate_up_names), self._hidden
        with ExitStack() as stack:
            yield [
                stack.enter_context(self._weights.stacked(name, expert, *shape))
                for name in self._gate_up_names
            ]

    @contextmanager
    def down(self, expert: int) -> Iterator[Sequence[Matrix]]:
        shape = self._num_experts, self._hidden, self._inner
        with self._weights.stacked(self._down_name, expert, *shape) as matrix:
            yield [matrix]

    def biases(self, expert: int) -> tuple[Tensor, Tensor]:
        return self._gate_up_bias[expert], self._down_bias[expert]


class _GptOssExperts(_ExpertTensors):
    """Rows of gate and up alternate. Floats are [E, in, out]; blocks of MXFP4 are [E, out, in]."""

    def __init__(self, weights: Weights, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(weights, config, hidden_size)
        gate_up, down = (f"{name}_bias" for name in self._names.fused)
        self._gate_up_bias = weights.tensor(gate_up, self._num_experts, 2 * self._inner)
        self._down_bias = weights.tensor(down, self._num_experts, hidden_size)

    @contextmanager
    def gate_up(self, expert: int) -> Iterator[Sequence[Matrix]]:
        with self._stacked(self._names.fused[0], expert, 2 * self._inner, self._hidden) as matrix:
            yield [_take_rows(matrix, slice(first, None, 2)) for first in range(2)]

    @contextmanager
    def down(self, expert: int) -> Iterator[Sequence[Matrix]]:
        with self._stacked(self._names.fused[1], expert, self._hidden, self._inner) as matrix:
            yield [_take_rows(matrix, slice(None))]

    def biases(self, expert: int) -> tuple[Tensor, Tensor]:
        gate_up = self._gate_up_bias[expert]
        return torch.cat((gate_up[::2], gate_up[1::2])), self._down_bias[expert]

    @contextmanager
    def _stacked(self, name: str, expert: int, rows: int, columns: int) -> Iterator[Matrix]:
        """[rows, columns]"""
        is_float = self._weights.has(name)
        shape = (columns, rows) if is_float else (rows, columns)
        with self._weights.stacked(name, expert, self._num_experts, *shape) as matrix:
            yield matrix.t() if isinstance(matrix, Tensor) else matrix


def _take_rows(matrix: Matrix, rows: slice) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[rows].contiguous()
    assert isinstance(matrix, QuantizedBlocks)
    return replace(matrix, data=matrix.data[rows].contiguous())
