"""Memory of the loaded engine's largest steps, measured before its first request."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from foreword.core.params import SamplingParams
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.cost_profiler import make_dummy_request
from foreword.engine.model_runner import ModelRunner
from foreword.engine.scheduler import ScheduledRequest
from foreword.models.interfaces import VisionEncoder
from foreword.planning.memory import GIB, DeviceMemory
from foreword.planning.resolve import ResolvedConfig
from foreword.speculation.engine_drafter import ModelBasedDrafter

logger = logging.getLogger(__name__)

MIN_GRAPH_ROWS, MAX_VERIFY_GRAPH_ROWS = 256, 512  # bounds of the largest graph, unless max_num_seqs is larger
MAX_IMAGE_TOKENS = 16_384  # upper bound of image processors
NUM_LOGPROBS = 20

ALL_PARAMS = SamplingParams(  # every kind of sampling
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
    logit_bias={0: 1.0},
    allowed_token_ids=(0, 1),
    logprobs=NUM_LOGPROBS,
    max_tokens=64,
    ignore_eos=True,
)
PROMPT_LOGPROBS = SamplingParams(temperature=1.0, prompt_logprobs=NUM_LOGPROBS, max_tokens=1, ignore_eos=True)
GRAPH_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)


def max_graph_rows(resolved: ResolvedConfig) -> int:
    """Rows of the largest CUDA graph: all running requests with their drafts, or short prompts."""
    num_draft = resolved.num_speculative_tokens if resolved.drafters else 0
    verified = min(resolved.max_num_seqs * (1 + num_draft), MAX_VERIFY_GRAPH_ROWS)
    return min(max(resolved.max_num_seqs, verified, MIN_GRAPH_ROWS), resolved.max_num_batched_tokens)


class ProfileRun:
    """The largest steps of an engine, run for real to measure their memory."""

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
        """Every kind of step at its largest: a prompt at the end of the longest context, prompt logprobs,
        all sampling parameters in every row, draft models, and the largest image."""
        resolved, block_size = self._resolved, self._batch_builder.block_size
        max_rows = resolved.max_num_batched_tokens
        rows = min(max_rows, resolved.max_model_len - 1)
        greedy, context = SamplingParams(temperature=0.0), resolved.max_model_len - 1 - rows
        self._run([make_dummy_request(0, rows, 0, greedy, block_size, context)])
        self._run([make_dummy_request(0, rows, 0, PROMPT_LOGPROBS, block_size)])
        self._run(self._max_batch(max_rows, ALL_PARAMS))
        for drafter in self._drafters:
            drafter.pass_seconds(max_rows, min(resolved.max_num_seqs, max_rows))
        for vision_encoder in self._vision_encoders:
            image = vision_encoder.make_max_image(min(MAX_IMAGE_TOKENS, resolved.max_model_len))
            with torch.inference_mode():
                for _ in vision_encoder.encode(image):
                    pass

    def run_graphs(self) -> None:
        """A pass of each model with the rows of its largest graph, one per request."""
        rows, block_size = max_graph_rows(self._resolved), self._batch_builder.block_size
        self._run([make_dummy_request(index, 1, 0, GRAPH_PARAMS, block_size) for index in range(rows)])
        for drafter in self._drafters:
            drafter.pass_seconds(rows, rows)

    def _run(self, requests: Sequence[ScheduledRequest]) -> None:
        self._model_runner.run(self._batch_builder.build(requests))

    def _max_batch(self, num_rows: int, params: SamplingParams) -> list[ScheduledRequest]:
        """As many requests as can run, each with a draft, `num_rows` sampled rows in all."""
        resolved = self._resolved
        count = min(resolved.max_num_seqs, num_rows)
        num_draft = min(
            resolved.num_speculative_tokens if resolved.drafters else 0,
            resolved.max_model_len - 3,
            num_rows // count - 1,
        )
        block_size = self._batch_builder.block_size
        return [make_dummy_request(index, 1, max(num_draft, 0), params, block_size) for index in range(count)]


class CudaMemoryMeter:
    """Memory of the current GPU in bytes."""

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free(self) -> int:
        """Unused by all processes."""
        return torch.cuda.mem_get_info()[0]

    def reserved(self) -> int:
        """Held by this process's allocator, in use or cached."""
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        """Maximum of reserved() since reset()."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def reset(self) -> None:
        """Free cached memory and restart the peak."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def profile_memory(meter: CudaMemoryMeter, estimate: DeviceMemory, steps: ProfileRun) -> DeviceMemory:
    """The estimate with measured figures. The models are loaded, the KV cache has a block or two.

    After the largest steps the allocator holds all that it will hold while it serves. The KV cache gets the
    share of --gpu-memory-utilization of the rest. Graphs know the cache's addresses and are captured later,
    so their memory is set aside: a pass of the largest graph, whose pool all graphs share, and an allowance
    for CUDA's own memory per graph.
    """
    meter.reset()
    weights = meter.reserved()
    steps.run_max()
    activations = meter.peak() - weights
    other_processes = meter.total() - meter.free() - meter.reserved()
    graphs = 0
    if estimate.cuda_graphs:
        meter.reset()
        steps.run_graphs()
        graphs = estimate.cuda_graphs + meter.peak() - weights
    meter.reset()
    return replace(
        estimate,
        other_processes=max(other_processes, 0),
        weights=weights,
        activations=max(activations, 0),
        cuda_graphs=max(graphs, 0),
        is_measured=True,
    )


def log_memory(memory: DeviceMemory, graph_bytes: int) -> None:
    """Log the division of GPU memory, and a warning if graphs exceed their allowance."""
    logger.info("GPU memory: %s; %.2f GiB are left for the KV cache", memory, memory.kv_cache / GIB)
    if graph_bytes > memory.cuda_graphs:
        logger.warning(
            "CUDA graphs took %.2f GiB, %.2f were set aside: lower --gpu-memory-utilization to make room",
            graph_bytes / GIB,
            memory.cuda_graphs / GIB,
        )


def oom_message(resolved: ResolvedConfig, error: BaseException) -> str:
    """Memory needed by each part, and the flags that lower it."""
    weights, kv_cache = f"{resolved.weight_bytes / GIB:.2f}", f"{resolved.kv_bytes / GIB:.2f}"
    needs = f"weights need about {weights} GiB and the KV cache {kv_cache} GiB"
    helps = "a smaller model, --quantization or --kv-cache-memory would need less"
    if resolved.device == "cuda":
        if resolved.memory is not None:
            needs = f"{resolved.memory}, the KV cache {kv_cache}"
        helps = (
            f"fewer --max-num-batched-tokens than {resolved.max_num_batched_tokens}, a lower "
            "--gpu-memory-utilization, --quantization or a smaller model would need less"
        )
    cause = f" ({' '.join(str(error).split())})" if str(error) else ""
    return f"out of memory while loading: {needs}; {helps}{cause}"
