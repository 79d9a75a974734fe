"""What a step costs on this machine, timed on the loaded engine before the first request.

The steps are real ones, from assembling to matching, over requests that nobody sent. Their KV lies in the scratch
block, which belongs to no request. Only ratios matter later, so every size has its turn in each round: a machine
that slows down for a while slows all of them.

The largest steps that there can be: run once before the KV cache is made, to see what memory they take.

They are real ones, from assembling to matching, over requests that nobody sent. All their KV lies in the scratch block.

What is left for the KV cache of a GPU, measured on the loaded models before the cache is made.

The largest steps are run for real: as many rows as a step may have, a picture as large as it can be, every row sampled with
all filters and scored. What the allocator holds then is what it will hold while it serves, whether it is in use or lies between
what is. What neither it nor anybody else holds is left, and of that the cache takes --gpu-memory-utilization's share.

Graphs are captured when the cache stands, because they know its addresses. So their memory is set aside before: what a pass of
as many rows as the largest of them needs, since they share one pool, and an allowance for what CUDA itself keeps of each.
`told()` says it when that was too little: then part of what --gpu-memory-utilization leaves free has been used.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from foreword.config.memory import GIB, DeviceMemory
from foreword.config.resolve import ResolvedConfig
from foreword.core.batch import NULL_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.model_runner import ModelRunner
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput
from foreword.models.base import VisionEncoder
from foreword.speculation.base import ModelBasedDrafter
from foreword.speculation.control.cost_model import Calibration

__all__ = [
    "CudaMemoryMeter",
    "MemoryMeter",
    "ProfileRun",
    "ProfileSteps",
    "StepCostProfiler",
    "log_memory",
    "max_graph_rows",
    "oom_message",
    "profile_memory",
    "time_passes",
]

logger = logging.getLogger(__name__)

# What tells most comes first: a large model is not timed for long, and between two sizes the cost is a line
SAMPLED_ROWS = (1, 16, 4, 64, 8, 2, 32, 128, 3, 6, 12, 24, 48, 96)
PROMPT_ROWS = (1, 16, 64, 128)  # rows of a prompt, of which the last is sampled
CONTEXT_TOKENS, CONTEXT_ROWS = 1024, 8  # tokens of a long text, and rows of one request that read it
REPETITIONS = 5
FIRST_REPETITION_S, ALL_REPETITIONS_S = (
    1.5,
    0.2,
)  # for each table: a large model is timed once, and no further than the first of these,
MIN_SIZES = 2  # but for so many sizes: one says nothing about what further rows cost

TimeRows = Callable[[int], float]


class StepCostProfiler:
    """Times steps of one engine.

    max_rows, max_len  of a step, and of a request
    clock              seconds
    """

    def __init__(
        self,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        max_rows: int,
        max_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_builder = batch_builder
        self._model_runner = model_runner
        self._max_rows = max_rows
        self._max_len = max_len
        self._clock = clock

    def measure(self) -> Calibration:
        most = min(self._max_rows, self._max_len - 2)
        first, further = self._context_costs()
        return Calibration(
            all_rows_sampled=time_sizes(
                lambda rows: self.time_step(rows, rows), _sizes_up_to(most, SAMPLED_ROWS), self._clock
            ),
            one_row_sampled=time_sizes(
                lambda rows: self.time_step(rows, 1), _sizes_up_to(most, PROMPT_ROWS), self._clock
            ),
            context_cost_first_row=first,
            context_cost_extra_row=further,
        )

    def time_step(self, num_rows: int, num_sampled: int, context: int = 0) -> float:
        """Seconds of a step of one request behind `context` tokens: all sampled rows but the first are drafted."""
        num_known = num_rows - num_sampled + 1
        state = self._dummy_state(context + num_known, num_sampled - 1)
        plan = ScheduleOutput(
            (ScheduledRequest(state, context, num_known, is_sampled=True, num_draft_tokens=num_sampled - 1),)
        )
        started = self._clock()
        self._model_runner.run(self._batch_builder.build(plan))
        return self._clock() - started

    def _context_costs(self) -> tuple[float, float]:
        """Seconds for each token of context that the first row of a request reads, and each further row."""
        rows = min(CONTEXT_ROWS, self._max_rows)
        context = min(CONTEXT_TOKENS, self._max_len - rows - 2)
        if context < 1 or rows < 2:
            return 0.0, 0.0
        near = time_sizes(lambda n: self.time_step(n, n), (1, rows), self._clock)
        far = time_sizes(lambda n: self.time_step(n, n, context), (1, rows), self._clock)
        first = max(far.get(1, 0.0) - near[1], 0.0) / context
        all_rows = max(far.get(rows, 0.0) - near.get(rows, 0.0), 0.0) / context
        return first, max(all_rows - first, 0.0) / (rows - 1)

    def _dummy_state(self, num_tokens: int, num_draft: int) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request("calibration", (0,) * num_tokens, SamplingParams(temperature=0.0), seed=0)
        state = RequestState(request, 0, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "calibration")
        state.blocks = [NULL_BLOCK] * -(-(num_tokens + num_draft) // self._batch_builder.block_size)
        return state


def time_passes(
    drafter: ModelBasedDrafter, max_rows: int, clock: Callable[[], float] = time.perf_counter
) -> Mapping[int, float]:
    """Seconds of one pass of a drafter's model, by rows."""
    return time_sizes(
        lambda rows: drafter.pass_seconds(rows, rows), _sizes_up_to(max_rows, SAMPLED_ROWS), clock
    )


def time_sizes(time_rows: TimeRows, sizes: Sequence[int], clock: Callable[[], float]) -> Mapping[int, float]:
    """Least seconds by size: whoever else uses the machine only adds to them. What a first call does once is not counted."""
    time_rows(sizes[0])
    seconds: dict[int, list[float]] = {}
    started = clock()
    for round_ in range(REPETITIONS):
        for size in sizes if round_ == 0 else tuple(seconds):
            if clock() - started > (ALL_REPETITIONS_S if round_ else FIRST_REPETITION_S) and (
                round_ or len(seconds) >= MIN_SIZES
            ):
                break
            seconds.setdefault(size, []).append(time_rows(size))
    return {rows: min(of) for rows, of in seconds.items()}


def _sizes_up_to(max_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= max_size) or (1,)


DEFAULT_GRAPH_ROWS = 256  # rows of the largest graph, unless more requests may run at once
MAX_IMAGE_TOKENS = 16_384  # tokens: processors of the models here make none that has more
NUM_LOGPROBS = 20
ALL_PARAMS = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    top_n_sigma=3.0,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    xtc_probability=0.5,
    logprobs=NUM_LOGPROBS,
    max_tokens=64,
    ignore_eos=True,
)
PROMPT_LOGPROBS = SamplingParams(temperature=1.0, prompt_logprobs=NUM_LOGPROBS, max_tokens=1, ignore_eos=True)


def max_graph_rows(resolved: ResolvedConfig) -> int:
    """Rows of the largest graph."""
    return min(max(resolved.max_num_seqs, DEFAULT_GRAPH_ROWS), resolved.max_num_batched_tokens)


class ProfileRun:
    """See engine.memory.Passes.

    drafters  those that run models of their own
    towers    of all models that see
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        drafters: Sequence[ModelBasedDrafter] = (),
        vision_encoders: Sequence[VisionEncoder] = (),
    ) -> None:
        self._resolved = resolved
        self._batch_builder = batch_builder
        self._model_runner = model_runner
        self._drafters = drafters
        self._vision_encoders = vision_encoders

    def run_max(self) -> None:
        """A prompt at the end of the longest context, one that is scored, every row sampled with everything, and what draft
        models and towers do."""
        resolved = self._resolved
        rows = min(resolved.max_num_batched_tokens, resolved.max_model_len - 1)
        self._run(
            [self._prompt_request(rows, resolved.max_model_len - 1 - rows, SamplingParams(temperature=0.0))]
        )
        self._run([self._prompt_request(rows, 0, PROMPT_LOGPROBS)])
        self._run(self._max_batch(resolved.max_num_batched_tokens, ALL_PARAMS))
        for drafter in self._drafters:
            drafter.pass_seconds(
                resolved.max_num_batched_tokens, min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
            )
        for tower in self._vision_encoders:
            self._encode(tower)

    def run_graphs(self) -> None:
        """One row of each of so many requests."""
        rows = max_graph_rows(self._resolved)
        self._run(
            self._max_batch(rows, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True))
        )
        for drafter in self._drafters:
            drafter.pass_seconds(rows, rows)

    def _run(self, requests: Sequence[ScheduledRequest]) -> None:
        self._model_runner.run(self._batch_builder.build(ScheduleOutput(tuple(requests))))

    def _prompt_request(self, num_rows: int, start: int, params: SamplingParams) -> ScheduledRequest:
        return ScheduledRequest(
            self._dummy_state(0, start + num_rows, 0, params), start, num_rows, is_sampled=True
        )

    def _max_batch(self, num_rows: int, params: SamplingParams) -> list[ScheduledRequest]:
        """As many requests as may run; each samples behind its last token and behind each token of a draft, `rows` in all."""
        resolved = self._resolved
        count = min(resolved.max_num_seqs, num_rows)
        most = min(
            resolved.num_speculative_tokens if resolved.drafters else 0,
            resolved.max_model_len - 3,
            num_rows // count - 1,
        )
        works = []
        for number in range(count):
            state = self._dummy_state(number, 1, max(most, 0), params)
            works.append(ScheduledRequest(state, 0, 1, is_sampled=True, num_draft_tokens=len(state.draft)))
        return works

    def _dummy_state(
        self, number: int, num_tokens: int, num_draft: int, params: SamplingParams
    ) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request(f"largest-{number}", (0,) * num_tokens, params, seed=number)
        state = RequestState(request, number, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "largest")
        state.blocks = [NULL_BLOCK] * -(-(num_tokens + num_draft) // self._batch_builder.block_size)
        return state

    def _encode(self, vision_encoder: VisionEncoder) -> None:
        with torch.inference_mode():
            for _ in vision_encoder.encode(
                vision_encoder.make_max_image(min(MAX_IMAGE_TOKENS, self._resolved.max_model_len))
            ):
                pass


class MemoryMeter(Protocol):
    """What a device says of its memory, in bytes."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """Held by nobody."""

    def reserved(self) -> int:
        """Held by this process's allocator, in use or not."""

    def peak(self) -> int:
        """The most that it has held since reset()."""

    def reset(self) -> None:
        """Give back what is not in use, and measure the peak from now on."""


class CudaMemoryMeter:
    """The GPU in use."""

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def reset(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class ProfileSteps(Protocol):
    """What is run to be measured."""

    def run_max(self) -> None:
        """Every kind of step, each as large as it can be."""

    def run_graphs(self) -> None:
        """A pass of each model of as many rows as its largest graph."""


def profile_memory(meter: MemoryMeter, estimate: DeviceMemory, steps: ProfileSteps) -> DeviceMemory:
    """The estimate with the figures of this machine; models are loaded, and no KV cache is there but for a block or two."""
    meter.reset()
    weights = meter.reserved()
    steps.run_max()
    activations = meter.peak() - weights
    others = meter.total() - meter.free() - meter.reserved()
    graphs = 0
    if estimate.cuda_graphs:
        meter.reset()
        steps.run_graphs()
        graphs = estimate.cuda_graphs + meter.peak() - weights
    meter.reset()
    return replace(
        estimate,
        other_processes=max(others, 0),
        weights=weights,
        activations=max(activations, 0),
        cuda_graphs=max(graphs, 0),
        is_measured=True,
    )


def log_memory(memory: DeviceMemory, graph_bytes: int) -> None:
    """Log how the memory is divided, and whether graphs have taken more than was set aside."""
    logger.info("memory of the GPU: %s; %.2f GiB are left for the KV cache", memory, memory.kv_cache / GIB)
    if graph_bytes > memory.cuda_graphs:
        logger.warning(
            "CUDA graphs took %.2f GiB, %.2f were set aside: a lower --gpu-memory-utilization leaves room for them",
            graph_bytes / GIB,
            memory.cuda_graphs / GIB,
        )


def oom_message(resolved: ResolvedConfig, error: BaseException) -> str:
    """What an operator is told when memory ran out while loading."""
    needs = f"weights need about {resolved.weight_bytes / GIB:.2f} GiB and the KV cache {resolved.kv_bytes / GIB:.2f} GiB"
    helps = "a smaller model, --quantization or --kv-cache-memory would need less"
    if resolved.device == "cuda":
        if resolved.memory is not None:
            needs = f"{resolved.memory}, the KV cache {resolved.kv_bytes / GIB:.2f}"
        fewer = f"fewer --max-num-batched-tokens than {resolved.max_num_batched_tokens}"
        helps = (
            f"{fewer}, a lower --gpu-memory-utilization, --quantization or a smaller model would need less"
        )
    said = f" ({' '.join(str(error).split())})" if str(error) else ""
    return f"out of memory while loading: {needs}; {helps}{said}"
