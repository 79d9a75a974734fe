"""Sections "checks" and "kernels" of `foreword bench gpu`: bits of products and attention, kernel speed.

Every mismatch is listed: where, how far apart, and how the kernel was launched. Errors and the other kernels'
bits are tests (tests/kernels/triton): run pytest on the machine with the GPU.
Timed cases are CUDA graphs over more weights or KV caches than the caches of the device hold.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.device import roofline
from foreword.bench.gpu.report import Report
from foreword.bench.inputs import BLOCK_SIZE, RandomInputs, sampling_ops
from foreword.bench.shapes import WEIGHT_FORMATS, ExpertsShape, ModelShape, WeightMatrix
from foreword.core.batch import NULL_BLOCK, Batch
from foreword.kernels.gpu import ComputeTypes, trial_mismatches
from foreword.kernels.ops import ExpertsConfig, Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.reference.sampling import gumbel, hash_logits
from foreword.kernels.registry import select_backend

Rows = Callable[[Tensor], Tensor]
Part = tuple[str, Callable[[], Mapping[str, Any]]]

CHECKED_FORMATS = ("int8", "int4", "fp8", "q8_0", "q4_k", "q6_k", "grouped4", "grouped8", "fp8_blocks")
TRIAL_FORMATS = ("int8", "fp8", "int4")
TIMED_FORMATS = (*TRIAL_FORMATS, "grouped4", "fp8_blocks")
EXPERT_FORMATS = ("int4", "grouped4", "fp8_blocks")
KV_KINDS = ("auto", "int8", "fp8")
BYTES_PER_VALUE = {"fp8": 1.0, "fp8_blocks": 1.0, "grouped4": 0.5}  # without scales
EXPERT_ROUTERS = 8  # so that copies read other experts
MAX_CHECKED_VALUES = 1 << 28  # of one result
MAX_TIMED_VALUES = 1 << 30
NUM_DRAFTED = 4
WINDOW = 100  # tokens, in the check of sliding-window attention
MANY_ROWS = 256  # from here on the product takes longer than its weights: few copies are enough
MAX_COPIES, FEW_COPIES = 256, 2
NUM_CACHES = 4
CHECKED_SAMPLES = 4  # rows of logits
BATCH_SIZE, BATCH_CONTEXT = 64, 1024  # of timed batched decoding


def kernel_ops(device: str) -> Ops:
    """Triton's kernels where Triton is installed, even if loading would decline them, else the backend."""
    if importlib.util.find_spec("triton") is None:
        return select_backend(device)
    ops: Ops = importlib.import_module("foreword.kernels.triton.backend").TritonOps(eager=True)
    return ops


def check_linear(config: BenchConfig, report: Report) -> None:
    """Row for row the same bits in every batch, formats and shapes in turn."""
    check = OpChecks(config)
    with torch.inference_mode():
        for role in reversed(config.kernel_roles):
            for matrix in config.shape(role).matrices:
                report.measure(f"linear {role} {matrix.name}", partial(check.linear, config.dtype, matrix))
        shape = config.shape(config.kernel_roles[0])
        down = next(matrix for matrix in shape.matrices if matrix.name == "down")
        report.measure("linear repeated", partial(check.repeated_linear, down))
        for name in CHECKED_FORMATS:
            if name not in WEIGHT_FORMATS or WEIGHT_FORMATS[name].fits(down):
                report.measure(f"linear {name}", partial(check.linear, name, down))
        for role in config.kernel_roles:
            report.measure(f"gated {role}", partial(check.gated, config.shape(role)))
        report.measure("linear, negative control", partial(check.torch_linear, down))


def check_experts(config: BenchConfig, report: Report) -> None:
    """Rows that choose experts or have adapters, in batches and alone."""
    check = OpChecks(config)
    with torch.inference_mode():
        for name in (config.dtype, *EXPERT_FORMATS):
            report.measure(f"experts {name}", partial(check.experts, name))
        matrices = config.shape(config.kernel_roles[0]).matrices
        down = next(matrix for matrix in matrices if matrix.name == "down")
        report.measure("adapters", partial(check.adapters, down))


def check_attention(config: BenchConfig, report: Report) -> None:
    check = OpChecks(config)
    with torch.inference_mode():
        for role in config.kernel_roles:
            shape = config.shape(role)
            for kind in KV_KINDS:
                report.measure(f"attention {role}, {kind} KV", partial(check.attention, shape, kind, None))
            report.measure(f"attention {role}, window", partial(check.attention, shape, "auto", WINDOW))
            sinks = partial(check.attention, shape, "auto", WINDOW, with_sinks=True)
            report.measure(f"attention {role}, window and sinks", sinks)
        report.measure("attention repeated", partial(check.repeated_attention, shape))


def check_sampling(config: BenchConfig, report: Report) -> None:
    """Bits of the specification on the CPU, also where all scores nearly tie."""
    with torch.inference_mode():
        report.measure("sampling", OpChecks(config).sampling)


def check_load(config: BenchConfig, report: Report) -> None:
    """What the start of a server would refuse, in the types of common models."""
    if config.is_dry_run:  # too large for Triton's interpreter
        return
    for types in (
        ComputeTypes(config.dtype, config.dtype, config.dtype),
        ComputeTypes("float16", "float16", "float16"),
        *(ComputeTypes(config.dtype, name, config.dtype) for name in TRIAL_FORMATS),
    ):
        report.measure(f"trial {types.dtype} {types.linear_format}", partial(_list_trial, types))


def _list_trial(types: ComputeTypes) -> Mapping[str, Any]:
    differ = list(trial_mismatches(types))
    return {"ok": not differ, "differ": differ}


@contextmanager
def record_launches() -> Iterator[list[str]]:
    """Names, grids and named arguments of the kernels that are launched in this block."""
    interface = importlib.import_module("triton.runtime.jit").KernelInterface
    launches: list[str] = []
    original = interface.__getitem__

    def get(kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)

        def run(*args: Any, **options: Any) -> Any:
            shown = " ".join(f"{name}={value}" for name, value in options.items() if _is_plain(value))
            launches.append(f"{kernel.fn.__name__}{tuple(grid)} {shown}")
            return launch(*args, **options)

        return run

    interface.__getitem__ = get
    try:
        yield launches
    finally:
        interface.__getitem__ = original


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str)


def describe_difference(values: Tensor, expected: Tensor) -> str:
    """Number of values with other bits, the first one, and the largest distance in ulps."""
    bits, expected_bits = _as_integers(values), _as_integers(expected)
    places = (bits != expected_bits).nonzero()
    first = tuple(places[0].tolist())
    distance = int((_order(bits) - _order(expected_bits)).abs().max())
    pair = f"{float(values[first]):.9g}, not {float(expected[first]):.9g}"
    return f"{len(places)} of {values.numel()} values, first {list(first)}: {pair}; at most {distance} ulp"


def _as_integers(values: Tensor) -> Tensor:
    """The bits of floats: unlike in torch.equal, 0.0 and -0.0 differ and a NaN equals itself."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(ints)


def _order(bits: Tensor) -> Tensor:
    """Integers in the order of the floats, so that differences are units in the last place."""
    wide, lowest = bits.to(torch.int64), torch.iinfo(bits.dtype).min
    return torch.where(wide < 0, lowest - wide, wide)


class OpChecks:
    """Checks of bits; each returns `ok` and the list of mismatches."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.ops = kernel_ops(config.device)
        self.inputs = RandomInputs(config.device, config.dtype)

    def linear(self, kind: str, matrix: WeightMatrix) -> dict[str, Any]:
        weight = self.inputs.weight(kind, matrix.n, matrix.k)
        stored = kind if isinstance(weight, Tensor) else self.config.dtype
        packed = self.ops.pack_linear([weight], stored)
        x = self._input(matrix)
        if matrix.name == "head":
            return self._compare(x, lambda rows: self.ops.linear(rows, packed, torch.float32))
        residual = self.inputs.normal(len(x), matrix.n)
        plain = self._compare(x, lambda rows: self.ops.linear(rows, packed, None))
        added = self._compare(
            x, lambda rows: self.ops.linear(rows, packed, None, residual[: len(rows)]), False
        )
        return {**plain, "ok": plain["ok"] and added["ok"], "differ_added": added["differ"]}

    def torch_linear(self, matrix: WeightMatrix) -> dict[str, Any]:
        """Torch's own product must be caught, or these checks see nothing."""
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        return {"caught": not self._compare(self._input(matrix), lambda rows: rows @ weight.T)["ok"]}

    def repeated_linear(self, matrix: WeightMatrix) -> dict[str, Any]:
        """One product again and again, with another kernel in between: a race would change its bits."""
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = self.ops.pack_linear([weight], self.config.dtype)
        norm = torch.ones(matrix.k, device=self.config.device)
        differ = []
        for rows in (1, max(count for count in self.config.row_counts if count <= MANY_ROWS)):
            x = self.inputs.normal(rows, matrix.k)
            between = partial(self.ops.rms_norm, x, norm, 1e-6)
            calls = self._repeat(partial(self.ops.linear, x, packed, None), between)
            differ += [f"{rows} rows, {call}" for call in calls]
        return {"ok": not differ, "calls": 2 * self.config.repeats, "differ": differ}

    def repeated_attention(self, shape: ModelShape) -> dict[str, Any]:
        """Decoding in splits, whose last program adds them."""
        inputs, tokens = self.inputs, self.config.check_context
        blocks = inputs.block_table(tokens)
        cache = inputs.kv_cache(shape, (1 + len(blocks)) * BLOCK_SIZE)
        batch = inputs.batch(self.ops, [(tokens - 1, 1, blocks)])
        q = inputs.normal(len(batch.positions), shape.heads, shape.head_dim)
        attend = partial(self.ops.attention, q, cache, batch, shape.head_dim**-0.5)
        differ = self._repeat(attend, partial(self.ops.softcap, q, 30.0))
        return {"ok": not differ, "calls": self.config.repeats, "differ": differ}

    def _repeat(self, run: Callable[[], Tensor], between: Callable[[], object]) -> list[str]:
        """Calls with other bits than the first; the host waits once."""
        expected, are_equal = run(), []
        for _ in range(self.config.repeats):
            between()
            are_equal.append((_as_integers(run()) == _as_integers(expected)).all())
        return [f"call {number}" for number, equal in enumerate(torch.stack(are_equal).tolist()) if not equal]

    def gated(self, shape: ModelShape) -> dict[str, Any]:
        matrix = WeightMatrix("gate_up", 2 * shape.intermediate, shape.hidden, 1)
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = self.ops.pack_linear([weight], self.config.dtype)
        return self._compare(self._input(matrix), lambda x: self.ops.linear_gated_act(x, packed, "silu"))

    def experts(self, kind: str) -> dict[str, Any]:
        """A layer of experts with its router."""
        shape, dtype = self.config.experts, self.config.dtype
        run = ExpertLayer(self.ops, self.inputs, shape, kind, dtype)
        residual = self.inputs.normal(max(self.config.row_counts), shape.hidden)
        x = self._input(shape.matrices[0])
        return self._compare(x, lambda rows: run(rows, 0, residual[: len(rows)]), False)

    def adapters(self, matrix: WeightMatrix) -> dict[str, Any]:
        """Rows of mixed adapters, some without, in batches and alone."""
        config, x = self.config, self._input(matrix)
        table = self.inputs.lora_table(config.adapters, config.adapter_rank, matrix)
        y = self.inputs.normal(len(x), matrix.n)
        slots = self.inputs.integers(-1, config.adapters, len(x), dtype=torch.int64)
        batch = self.inputs.batch(self.ops, [(0, 1, self.inputs.block_table(1))])

        def add(number: Tensor) -> Tensor:
            part = replace(batch, lora_slots=slots[number])
            return self.ops.add_lora(y[number], x[number], table, part)

        return self._compare(torch.arange(len(x), device=config.device), add)

    def attention(
        self, shape: ModelShape, kind: str, window: int | None, with_sinks: bool = False
    ) -> dict[str, Any]:
        """One context as a whole prompt, in chunks, row by row, verified, and beside other requests."""
        tokens, ops, inputs = self.config.check_context, self.ops, self.inputs
        blocks = inputs.block_table(tokens)
        other = inputs.block_table(tokens, 1 + len(blocks))
        cache = inputs.kv_cache(shape, (1 + len(blocks) + len(other)) * BLOCK_SIZE, kind)
        q = inputs.normal(tokens, shape.heads, shape.head_dim)
        sinks = inputs.normal(shape.heads, dtype=torch.float32) if with_sinks else None

        def attend(*chunks: tuple[int, int, Sequence[int]]) -> Tensor:
            """Outputs of the first chunk."""
            batch = inputs.batch(ops, chunks)
            queries = torch.cat([q[start : start + count] for start, count, _ in chunks])
            padding = q.new_zeros(len(batch.positions) - len(queries), *q.shape[1:])
            q_rows, scale = torch.cat([queries, padding]), shape.head_dim**-0.5
            y = ops.attention(q_rows, cache, batch, scale, window, sinks=sinks)
            return y[: chunks[0][1]]

        whole = attend((0, tokens, blocks))
        middle, last = tokens // 3 + 1, tokens - NUM_DRAFTED - 2
        cases: list[tuple[str, int, int, list[tuple[int, int, list[int]]]]] = [
            ("chunk", 0, middle, []),
            ("chunk", middle, tokens - middle, []),
        ]
        decodes = [(tokens - 1 - number % 3, 1, other) for number in range(7)]
        for row in (last,) if self.config.is_dry_run else (0, middle, last, tokens - 1):
            count = min(1 + NUM_DRAFTED, tokens - row)
            cases += [
                ("alone", row, 1, []),
                ("with decodes", row, 1, decodes),
                ("with a prompt", row, 1, [(0, tokens // 2, other)]),
                ("verified", row, count, []),
                ("verified with others", row, count, [(tokens - count, count, other)] * 3),
            ]
        differ = [
            f"{name}, {count} rows at {start}: {difference}"
            for name, start, count, neighbours in cases
            for difference in _differences(
                partial(attend, (start, count, blocks), *neighbours), whole[start : start + count]
            )
        ]
        return {"ok": not differ, "cases": len(cases), "differ": differ}

    def sampling(self) -> dict[str, Any]:
        rows, vocab = CHECKED_SAMPLES, self.config.small.vocab
        numbers = torch.arange(rows)
        logits = self.inputs.normal(rows, vocab, scale=4.0, dtype=torch.float32).cpu()
        cases = [
            (name, logits, ours, theirs)
            for (name, ours), theirs in zip(
                sampling_ops(self.ops, rows, self.config.device).items(),
                sampling_ops(ReferenceOps(), rows, "cpu").values(),
                strict=True,
            )
        ]
        cases += [("near ties", 1.0 - gumbel(numbers, numbers, vocab), *cases[1][2:])]
        differ = []
        for name, values, ours, theirs in cases:
            on_device, on_host = values.to(self.config.device, copy=True), values.clone()
            for mine, expected in zip(_outputs(ours, on_device), _outputs(theirs, on_host), strict=True):
                if not torch.equal(_as_integers(mine.cpu()), _as_integers(expected)):
                    differ.append(f"{name}: {describe_difference(mine.cpu(), expected)}")
        return {"ok": not differ, "rows": rows, "differ": differ}

    def _input(self, matrix: WeightMatrix) -> Tensor:
        rows = max(count for count in self.config.row_counts if count * matrix.n <= MAX_CHECKED_VALUES)
        return self.inputs.normal(rows, matrix.k)

    def _compare(self, x: Tensor, run: Rows, with_offset: bool = True) -> dict[str, Any]:
        """`run` on the first rows, and on rows from the middle, against `run` on all rows of x."""
        whole, differ = run(x), []
        for count in (count for count in self.config.row_counts if count < len(x)):
            for start in (0, min(3 + count // 2, len(x) - count))[: 1 + with_offset]:
                rows = slice(start, start + count)
                compared = _differences(partial(run, x[rows].contiguous()), whole[rows])
                differ += [f"{count} rows from {start}: {difference}" for difference in compared]
        return {"ok": not differ, "rows": len(x), "differ": differ}


class ExpertLayer:
    """A mixture of experts with EXPERT_ROUTERS routers."""

    def __init__(self, ops: Ops, inputs: RandomInputs, shape: ExpertsShape, kind: str, dtype: str) -> None:
        matrices = []
        for matrix in shape.matrices:
            source = inputs.weight(kind, matrix.n, matrix.k)
            stored = kind if isinstance(source, Tensor) else dtype
            matrices.append([ops.pack_linear([source], stored) for _ in range(matrix.copies)])
        self._ops = ops
        gate_up, down = matrices
        self._weights = ops.pack_experts(gate_up, down)
        self._config = ExpertsConfig(shape.num_experts, shape.top_k, True, "silu")
        routers = [
            inputs.normal(shape.num_experts, shape.hidden, scale=shape.hidden**-0.5, dtype=torch.float32)
            for _ in range(EXPERT_ROUTERS)
        ]
        self._routers = [ops.pack_linear([router], "float32") for router in routers]

    def __call__(self, x: Tensor, router: int, add_to: Tensor | None = None) -> Tensor:
        return self._ops.experts(x, self.logits(x, router), self._weights, self._config, add_to)

    def run_all(self, x: Tensor) -> list[Tensor]:
        return [self(x, router) for router in range(EXPERT_ROUTERS)]

    def logits(self, x: Tensor, router: int) -> Tensor:
        return self._ops.linear(x.to(torch.float32), self._routers[router])


def _outputs(op: Callable[[Tensor], object], logits: Tensor) -> list[Tensor]:
    """Results of an operation on logits, which it may change, and the logits."""
    result = op(logits)
    results = result if isinstance(result, tuple) else (result,)
    return [*(value for value in results if isinstance(value, Tensor)), logits]


def _differences(run: Callable[[], Tensor], expected: Tensor) -> list[str]:
    """[] if run() has the bits of `expected`, else how it differs and what it launches."""
    values = run()
    if torch.equal(_as_integers(values), _as_integers(expected)):
        return []
    if importlib.util.find_spec("triton") is None:
        return [describe_difference(values, expected)]
    with record_launches() as launches:
        run()
    return [f"{describe_difference(values, expected)}; {'; '.join(launches)}"]


def time_linear(config: BenchConfig, report: Report) -> None:
    """Microseconds and shares of the ceilings."""
    timings = KernelTimings(config)
    timings.measure(report, timings.linear_parts())


def time_experts(config: BenchConfig, report: Report) -> None:
    timings = KernelTimings(config)
    timings.measure(report, timings.expert_parts())


def time_attention(config: BenchConfig, report: Report) -> None:
    timings = KernelTimings(config)
    timings.measure(report, timings.attention_parts())


def time_rows(config: BenchConfig, report: Report) -> None:
    """Sampling, and the kernels between products."""
    timings = KernelTimings(config)
    timings.measure(report, timings.row_parts())


@dataclass(frozen=True, slots=True)
class Case:
    """`run` does the operation `repeats` times."""

    run: Callable[[], object]
    repeats: int = 1
    num_bytes: float = 0.0  # moved by one operation; 0: memory does not bound it
    num_ops: float = 0.0  # of one operation; 0: the product rate does not bound it


class KernelTimings:
    """Timed cases by part, with hashes of their results if `with_bits`.

    With `only_launch`, each is launched once and nothing is timed.
    """

    def __init__(self, config: BenchConfig, only_launch: bool = False, with_bits: bool = False) -> None:
        self.config = config
        self.only_launch, self.with_bits = only_launch, with_bits
        self.limits = roofline(config)
        self.device = self.limits.device
        self.ops = kernel_ops(config.device)
        self.inputs = RandomInputs(config.device, config.dtype)

    def measure(self, report: Report, parts: Iterator[Part]) -> None:
        with torch.inference_mode():
            for name, run in parts:
                report.measure(name, run)
                self.device.free()

    def launch_all(self) -> None:
        """Every kernel of the section, for a compiler in threads."""
        for parts in (self.linear_parts(), self.expert_parts(), self.attention_parts(), self.row_parts()):
            for _, run in parts:
                run()

    def linear_parts(self) -> Iterator[Part]:
        config = self.config
        for role in config.kernel_roles:
            for matrix in config.shape(role).matrices:
                run = partial(self.linear, matrix, config.dtype, config.kernel_rows)
                yield f"linear {role} {matrix.name}", run
        matrices = config.shape(config.kernel_roles[0]).matrices
        gate_up = next(matrix for matrix in matrices if matrix.name == "gate_up")
        for fmt in TIMED_FORMATS:
            yield f"linear {fmt}", partial(self.linear, gate_up, fmt, config.kernel_rows)

    def expert_parts(self) -> Iterator[Part]:
        for fmt in (self.config.dtype, *EXPERT_FORMATS):
            yield f"experts {fmt}", partial(self.experts, fmt)
        for role in self.config.kernel_roles:
            for matrix in self.config.shape(role).matrices[:-1]:
                yield f"adapters {role} {matrix.name}", partial(self.adapters, matrix)

    def attention_parts(self) -> Iterator[Part]:
        for role in self.config.kernel_roles:
            yield f"attention {role}", partial(self.attention, self.config.shape(role))
        yield "attention planned", partial(self.planned_attention, self.config.large)

    def row_parts(self) -> Iterator[Part]:
        yield "sampler", partial(self.sampler, self.config.small.vocab)
        for role in self.config.kernel_roles:
            yield f"rows {role}", partial(self.elementwise, self.config.shape(role))

    def linear(self, matrix: WeightMatrix, fmt: str, row_counts: Sequence[int]) -> Mapping[str, Any]:
        """Copies of one weight in turn; gate_up with its activation, as models call it."""
        size = _num_bytes(fmt, matrix)
        copies = max(FEW_COPIES, min(MAX_COPIES, int(self.config.working_set / size) + 1))
        source = self.inputs.weight(fmt, matrix.n, matrix.k)
        stored = fmt if isinstance(source, Tensor) else self.config.dtype
        packed = [self.ops.pack_linear([source], stored) for _ in range(copies)]
        cases = {}
        for rows in row_counts:
            if rows * matrix.n <= MAX_TIMED_VALUES:
                x = self.inputs.normal(rows, matrix.k)
                weights = packed if rows < MANY_ROWS else packed[:FEW_COPIES]
                moved = size + rows * (matrix.n + matrix.k) * self.inputs.dtype.itemsize
                num_ops = 2.0 * rows * matrix.n * matrix.k
                run = partial(self._multiply, matrix, x, weights)
                cases[str(rows)] = Case(run, len(weights), moved, num_ops)
        return self._time(cases)

    def experts(self, fmt: str) -> Mapping[str, Any]:
        """A router and its experts; bytes are those of the chosen ones."""
        shape = self.config.experts
        layer = ExpertLayer(self.ops, self.inputs, shape, fmt, self.config.dtype)
        size = sum(_num_bytes(fmt, matrix) for matrix in shape.matrices)
        cases = {}
        for rows in self.config.kernel_rows:
            x = self.inputs.normal(rows, shape.hidden)
            ids = [self.ops.top_ids(layer.logits(x, router), shape.top_k) for router in range(EXPERT_ROUTERS)]
            chosen = sum(len(set(each.flatten().tolist())) for each in ids)
            num_ops = 2.0 * rows * shape.top_k * sum(matrix.n * matrix.k for matrix in shape.matrices)
            run = partial(layer.run_all, x)
            cases[str(rows)] = Case(run, EXPERT_ROUTERS, chosen / EXPERT_ROUTERS * size, num_ops)
        return self._time(cases)

    def adapters(self, matrix: WeightMatrix) -> Mapping[str, Any]:
        """The LoRA of a linear layer: to be compared with the layer's time. Prompts have one adapter."""
        config, cases = self.config, {}
        table = self.inputs.lora_table(config.adapters, config.adapter_rank, matrix)
        batch = self.inputs.batch(self.ops, [(0, 1, self.inputs.block_table(1))])
        for rows in config.kernel_rows:
            x, y = self.inputs.normal(rows, matrix.k), self.inputs.normal(rows, matrix.n)
            slots = torch.arange(rows, device=config.device) % config.adapters
            part = replace(batch, lora_slots=slots if rows <= MANY_ROWS else torch.zeros_like(slots))
            cases[str(rows)] = Case(partial(self.ops.add_lora, y, x, table, part))
        return self._time(cases)

    def _multiply(self, matrix: WeightMatrix, x: Tensor, weights: Sequence[Any]) -> list[Tensor]:
        dtype = torch.float32 if matrix.name == "head" else None
        if matrix.name == "gate_up":
            return [self.ops.linear_gated_act(x, weight, "silu") for weight in weights]
        return [self.ops.linear(x, weight, dtype) for weight in weights]

    def attention(self, shape: ModelShape) -> Mapping[str, Any]:
        """Decoding and verification at the end of a context, batched decoding, and a whole prompt."""
        longest = max(self.config.contexts)
        blocks = self.inputs.block_table(longest)
        context = min(BATCH_CONTEXT, longest)
        size = max(1, min(BATCH_SIZE, longest * NUM_CACHES // context))
        blocks_each = -(-context // BLOCK_SIZE)
        slots = (1 + max(len(blocks), size * blocks_each)) * BLOCK_SIZE
        caches = [self.inputs.kv_cache(shape, slots) for _ in range(NUM_CACHES)]
        token_bytes = 2.0 * shape.kv_heads * shape.head_dim * self.inputs.dtype.itemsize
        cases = {}
        for tokens in self.config.contexts:
            for name, rows in (("decode", 1), ("verify 5", 5)):
                run = self._attend(shape, caches, [(tokens - rows, rows, blocks)])
                cases[f"{name} at {tokens}"] = Case(run, NUM_CACHES, tokens * token_bytes)
        tables = [self.inputs.block_table(context, 1 + number * blocks_each) for number in range(size)]
        run = self._attend(shape, caches, [(context - 1, 1, table) for table in tables])
        cases[f"{size} decodes at {context}"] = Case(run, NUM_CACHES, size * context * token_bytes)
        prompt = min(self.config.long_prompt, longest)
        num_ops = 2.0 * shape.heads * shape.head_dim * prompt * (prompt + 1)
        run = self._attend(shape, caches, [(0, prompt, blocks)])
        cases[f"prompt {prompt}"] = Case(run, NUM_CACHES, num_ops=num_ops)
        return self._time(cases)

    def planned_attention(self, shape: ModelShape) -> Mapping[str, Any]:
        """Decoding in a graph that is planned for the longest context, of one layer."""
        cases = {}
        for count, tokens in self.config.long_contexts:
            blocks = -(-tokens // BLOCK_SIZE)
            cache = self.inputs.kv_cache(shape, (1 + count * blocks) * BLOCK_SIZE)
            chunks = [
                (tokens - 1, 1, self.inputs.block_table(tokens, 1 + number * blocks))
                for number in range(count)
            ]
            batch = self._plan_longest(self.inputs.batch(self.ops, chunks))
            q = self.inputs.normal(len(batch.positions), shape.heads, shape.head_dim)
            run = partial(self.ops.attention, q, cache, batch, shape.head_dim**-0.5)
            moved = 2.0 * count * tokens * shape.kv_heads * shape.head_dim * self.inputs.dtype.itemsize
            cases[f"{count} at {tokens}"] = Case(run, 1, moved)
        return self._time(cases)

    def _plan_longest(self, batch: Batch) -> Batch:
        """As in a CUDA graph: lengths are on the device alone, and block tables have room for max_context."""
        room = self.config.max_context // BLOCK_SIZE - batch.block_tables.shape[1]
        tables = torch.nn.functional.pad(batch.block_tables, (0, max(room, 0)), value=NULL_BLOCK)
        return replace(batch, block_tables=tables.contiguous(), seq_lens=())

    def _attend(
        self, shape: ModelShape, caches: Sequence[Any], chunks: Sequence[tuple[int, int, Sequence[int]]]
    ) -> Callable[[], object]:
        ops, batch, scale = self.ops, self.inputs.batch(self.ops, chunks), shape.head_dim**-0.5
        q = self.inputs.normal(len(batch.positions), shape.heads, shape.head_dim)
        metadata = ops.build_attention_metadata(batch)
        return lambda: [ops.attention(q, cache, batch, scale, metadata=metadata) for cache in caches]

    def sampler(self, vocab: int) -> Mapping[str, Any]:
        """With a copy of the logits in each, since filters change them in place; "copy" is that alone."""
        cases = {}
        for rows in self.config.sampled_rows:
            logits = self.inputs.normal(rows, vocab, scale=4.0, dtype=torch.float32)
            cases[f"{rows} rows, copy"] = Case(logits.clone)
            for name, op in sampling_ops(self.ops, rows, self.device.name).items():
                cases[f"{rows} rows, {name}"] = Case(partial(_run_on_copy, op, logits))
        return self._time(cases)

    def elementwise(self, shape: ModelShape) -> Mapping[str, Any]:
        """Kernels between the products of a layer."""
        ops, inputs, max_rows = self.ops, self.inputs, max(self.config.kernel_rows)
        weight = inputs.normal(shape.hidden, dtype=torch.float32)
        table = inputs.normal(max_rows, shape.head_dim, dtype=torch.float32)
        cache = inputs.kv_cache(shape, max_rows)
        cases = {}
        for rows in self.config.kernel_rows:
            x, gate_up = inputs.normal(rows, shape.hidden), inputs.normal(rows, 2 * shape.intermediate)
            q = inputs.normal(rows, shape.heads, shape.head_dim)
            k, v = (inputs.normal(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
            at = torch.arange(rows, device=self.device.name)
            cases[f"{rows} norm"] = Case(partial(ops.rms_norm, x, weight, 1e-6))
            cases[f"{rows} gated"] = Case(partial(ops.gated_act, gate_up, "silu"))
            rope = partial(ops.rope_and_cache, q, k, v, table, at, None, cache, at)
            cases[f"{rows} rope and cache"] = Case(rope)
        return self._time(cases)

    def _time(self, cases: Mapping[str, Case]) -> dict[str, Any]:
        """Microseconds by case, and shares of the ceilings that bound it."""
        figures: dict[str, Any] = {}
        if self.only_launch:
            for case in cases.values():
                case.run()
            return figures
        if self.with_bits:
            figures |= {f"{name} bits": _digest(case.run()) for name, case in cases.items()}
        graphs = {name: self.device.graph(case.run) for name, case in cases.items()}
        for name, seconds in self.device.medians(graphs, self.config.rounds).items():
            case, op_s = cases[name], seconds / cases[name].repeats
            figures[f"{name} us"] = op_s * 1e6
            if case.num_bytes:
                figures[f"{name} of bandwidth"] = case.num_bytes / op_s / self.limits.bandwidth
            if case.num_ops:
                figures[f"{name} of product"] = case.num_ops / op_s / self.limits.product
        return figures


def _num_bytes(fmt: str, matrix: WeightMatrix) -> float:
    known = WEIGHT_FORMATS.get(fmt)
    return known.num_bytes(matrix) if known else BYTES_PER_VALUE[fmt] * matrix.n * matrix.k


def _run_on_copy(op: Callable[[Tensor], object], logits: Tensor) -> list[object]:
    """The results of an operation, one of which may be the changed copy."""
    copy = logits.clone()
    return [op(copy), copy]


def _digest(results: object) -> str:
    """A hash of the bits of tensors in nested lists and tuples."""
    values: list[int] = []
    waiting = [results]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            values += hash_logits(value.reshape(len(value), -1).to(torch.float32)).tolist()
        elif isinstance(value, list | tuple):
            waiting += value
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
