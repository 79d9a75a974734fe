"""Memory of a model, before and after it is loaded, with the data types and limits of a config. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.config.options import Config
from foreword.config.units import parse_bytes, parse_tokens
from foreword.core.states import SEGMENT, StateShape, StateSizes
from foreword.planning.hardware import HardwareInfo

GIB = 1 << 30
# Bytes of a value by data type. int4 includes a scale of 16 bits per 32 values.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "int4": 18 / 32}
SCALE_BYTES = 4  # scale of an int8 or fp8 vector in the KV cache
BYTES_PER_LOGIT = 2 * 4  # float32, twice while they are filtered
CUDA_CONTEXT_BYTES = 512 << 20  # CUDA's own
WORKSPACE_DIVISOR, MAX_WORKSPACE_BYTES = 64, 1 << 30  # attention's, as in kernels/triton/attention.py
MARGIN_DIVISOR, MAX_MARGIN_BYTES = 64, 512 << 20  # share of the GPU's memory, and its limit
CUDA_GRAPH_DIVISOR, MAX_CUDA_GRAPH_BYTES = 64, 1 << 30
TILE_ROWS, TILE_ALIGNMENT = 16, 64  # packed weights on the CPU: csrc/common/packing.h
CPU_RESERVE_DIVISOR, MIN_CPU_RESERVE_BYTES = 10, GIB
MIN_CONTEXT = 512  # tokens that the default KV cache must hold; less with max_model_len
# Share of the free memory for states of running requests, and its limit
STATE_DIVISOR, MAX_STATE_BYTES = 4, 2 * GIB
LARGE_GPU_BYTES = 64 * GIB
LARGE_GPU_BATCHED_TOKENS, SMALL_GPU_BATCHED_TOKENS = 8192, 2048  # limited by the memory of their logits


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Matrices that stay quantized as they are in the files."""

    name: str
    num_bytes: int  # in the layout of the CPU kernels
    expert_bytes: int = 0  # those of experts


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a checkpoint that resolve() needs. Packed weights keep the file's quantized format."""

    architecture: str
    context_len: int  # positions the model was trained for
    dtype: str  # the weights' type in the file
    parameters: int  # tied weights once
    vocab_size: int
    kv_values_per_token: int  # K and V of all layers
    kv_vectors_per_token: int = 0  # one per head: int8 and fp8 have a scale for each
    embedding_parameters: int = 0  # embedding and head
    packed_bytes: int | None = None  # None: no packed weights
    packed_parameters: int = 0
    packed_embedding_parameters: int = 0  # packed ones of the embedding and the head
    vision_parameters: int = 0
    image_token_id: int | None = None  # placeholder of images; None: text only
    activation_values_per_row: int = 0  # peak values of one row of a forward pass, estimated
    gpu_packed_bytes: int = 0  # weights that a GPU keeps packed; others become the activations' type
    gpu_packed_parameters: int = 0
    packed_formats: tuple[PackedFormat, ...] = ()  # parts of packed_bytes
    num_experts: int = 0  # experts of a layer; 0: no mixture of experts
    experts_per_token: int = 0
    expert_parameters: int = 0  # all experts but shared ones
    lora_values_per_rank: int = 0  # values of a LoRA adapter for all projections
    state_shapes: tuple[StateShape, ...] = ()  # one for each layer with state
    unused_parts: tuple[str, ...] = ()  # parts of the checkpoint, in words
    hidden_size: int = 0
    is_head: bool = False  # a trained head, which reads hidden states of another model
    hidden_values_per_token: int = 0  # hidden states in the memory of a trained head
    draft_tokens_per_pass: int = 1  # tokens that a trained head drafts at once
    draft_extra_rows: int = 0  # rows of such a pass beyond one for each token
    markov_parameters: int = 0  # part of embedding_parameters: the tables of a DSpark head

    @property
    def active_parameters(self) -> int:
        """Parameters that one token reads, and the embedding."""
        if not self.num_experts:
            return self.parameters
        used = self.expert_parameters * self.experts_per_token // self.num_experts
        return self.parameters - self.expert_parameters + used


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Division of a GPU's memory, in bytes."""

    total: int
    utilization: float  # share of the total that may be used, by all processes
    other_processes: int  # and CUDA itself
    weights: int  # all models, and other permanent tensors
    activations: int  # peak of a step
    image_cache: int
    cuda_graphs: int
    is_measured: bool = False  # on the loaded models; else estimated

    @property
    def margin(self) -> int:
        """For fragmentation of the allocator."""
        return min(self.total // MARGIN_DIVISOR, MAX_MARGIN_BYTES)

    @property
    def usable(self) -> int:
        return int(self.total * self.utilization)

    @property
    def kv_cache(self) -> int:
        """Memory left for the KV cache; negative if the other parts do not fit."""
        return self.usable - sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """All parts but the KV cache, by name."""
        return (
            ("weights", self.weights),
            ("activations", self.activations),
            ("CUDA graphs", self.cuda_graphs),
            ("image cache", self.image_cache),
            ("CUDA and other processes", self.other_processes),
            ("margin", self.margin),
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts if size)
        source = "measured" if self.is_measured else "estimated"
        return f"{self.usable / GIB:.2f} of {self.total / GIB:.2f} GiB may be used; {source}: {parts}"


def cpu_reserve(free: int) -> int:
    """Bytes of a CPU's free memory that weights and KV cache leave to activations and other processes.

    A tenth, at least 1 GiB, but at most half, so that a small model runs in little memory.
    """
    return min(max(free // CPU_RESERVE_DIVISOR, MIN_CPU_RESERVE_BYTES), free // 2)


def min_free_bytes(used: int) -> int:
    """Free memory that holds `used` bytes and the reserve: the inverse of cpu_reserve()."""
    with_tenth = -(-used * CPU_RESERVE_DIVISOR // (CPU_RESERVE_DIVISOR - 1))
    return min(2 * used, max(used + MIN_CPU_RESERVE_BYTES, with_tenth))


def cuda_graph_reserve(total: int) -> int:
    """Bytes reserved for CUDA graphs, in addition to the activations of their passes."""
    return min(total // CUDA_GRAPH_DIVISOR, MAX_CUDA_GRAPH_BYTES)


def estimate_memory(
    total: int,
    free: int,
    utilization: float,
    weights: int,
    activations: int,
    image_cache: int,
    cuda_graphs: bool,
) -> DeviceMemory:
    """Estimate before loading; sizes as in DeviceMemory.

    The workspace of attention is part of the activations here; measured, it is one of the permanent tensors.
    """
    graphs = cuda_graph_reserve(total) if cuda_graphs else 0
    others = max(total - free, CUDA_CONTEXT_BYTES)
    activations += min(total // WORKSPACE_DIVISOR, MAX_WORKSPACE_BYTES)
    return DeviceMemory(total, utilization, others, weights, activations, image_cache, graphs)


def activation_bytes(model: ModelInfo, dtype: str, num_rows: int) -> int:
    """Peak memory of a forward pass over `num_rows` rows with logits of all."""
    logits = model.vocab_size * BYTES_PER_LOGIT
    return int(num_rows * (model.activation_values_per_row * DTYPE_BYTES[dtype] + logits))


def lora_bytes(model: ModelInfo, dtype: str, max_loras: int, max_rank: int) -> int:
    """Memory of that many adapters of the largest rank, for all projections."""
    return max_loras * max_rank * model.lora_values_per_rank * int(DTYPE_BYTES[dtype])


def kv_bytes_per_token(model: ModelInfo, kv_dtype: str, dtype: str) -> int:
    """Bytes of one token in the KV cache, with scales and a head's hidden state; dtype: of activations."""
    scales = model.kv_vectors_per_token * SCALE_BYTES if kv_dtype in ("int8", "fp8") else 0
    hidden = int(model.hidden_values_per_token * DTYPE_BYTES[dtype])
    return int(model.kv_values_per_token * DTYPE_BYTES[kv_dtype]) + scales + hidden


@dataclass(frozen=True, slots=True)
class TierBlock:
    """Images of --kv-cache-dir and --kv-cache-host-memory."""

    num_bytes: int  # size of a block
    bytes_per_token: float  # with the states that a long prompt leaves
    state_bytes: int  # size of one state; 0: no layer has any


def tier_block(
    config: Config, hardware: HardwareInfo, model: ModelInfo, drafter: ModelInfo | None, header_bytes: int
) -> TierBlock:
    """A block has what the model and a trained head keep of its tokens; a draft model's is in no tier."""
    dtype, _ = resolve_dtypes(config, hardware, model)
    kept = [model, *([drafter] if drafter is not None and drafter.is_head else [])]
    per_token = sum(kv_bytes_per_token(info, resolve_kv_dtype(config, dtype), dtype) for info in kept)
    num_bytes = header_bytes + config.block_size * per_token
    states = plan_states(config, hardware, model)
    state_bytes = 0 if states is None else header_bytes + states.anchor_bytes
    state_share = 0.0 if states is None else state_bytes / states.interval
    return TierBlock(num_bytes, num_bytes / config.block_size + state_share, state_bytes)


def scratch_bytes(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo], dtype: str) -> int:
    """Memory of a trained head for the draft tokens of all requests."""
    num_seqs, _ = batch_limits(config, hardware, models[0])
    kv_dtype, drafted = resolve_kv_dtype(config, dtype), num_drafted(config)
    return sum(
        num_seqs
        * blocks_for(drafted + info.draft_extra_rows, config.block_size)
        * config.block_size
        * kv_bytes_per_token(info, kv_dtype, dtype)
        for info in models
        if info.is_head
    )


def grouped_bytes(rows: int, columns: int, bits: int, num_groups: int) -> int:
    """Bytes of a packed matrix of 4 or 8 bits with a scale and a zero for each group of values of a row."""
    zeros = -(-num_groups * TILE_ROWS // TILE_ALIGNMENT) * TILE_ALIGNMENT
    values = -(-columns // 32) * 32 * TILE_ROWS * bits // 8
    return -(-rows // TILE_ROWS) * (zeros + num_groups * TILE_ROWS * 4 + values)


def float8_bytes(rows: int, columns: int, num_groups: int) -> int:
    """Bytes of a packed matrix of float8 with a scale for each group of values of a row."""
    scales = (1 + num_groups) * 4  # and the first sum
    return -(-rows // TILE_ROWS) * TILE_ROWS * (scales + -(-columns // 32) * 32)


def weight_bytes(
    model: ModelInfo, dtype: str, weight_dtype: str, quantization: str | None, kernel_backend: str
) -> int:
    """Bytes of a model's weights on the device."""
    parts = weight_bytes_by_format(model, dtype, weight_dtype, quantization, kernel_backend)
    return int(sum(parts.values()))


def weight_bytes_by_format(
    model: ModelInfo, dtype: str, weight_dtype: str, quantization: str | None, kernel_backend: str
) -> dict[str, float]:
    """Bytes of a model's weights on the device, by format; a vision encoder's are those of "vision encoder".

    Quantization leaves the embedding and the head in 8 bits, and a vision encoder in `dtype`, the type of
    activations. Backend "native" keeps packed weights; "triton" keeps some and converts others to `dtype`;
    "torch" holds quantized weights as float32; weights of another type than `dtype` have a copy in it.
    """
    parts: dict[str, float] = {}

    def add(name: str, num_bytes: float) -> None:
        if num_bytes:
            parts[name] = parts.get(name, 0.0) + num_bytes

    vision_dtype = dtype if quantization else weight_dtype
    text_parameters = model.parameters - model.vision_parameters
    if kernel_backend == "torch":
        num_quantized = text_parameters if quantization else model.packed_parameters
        for name in dict.fromkeys(("float32", dtype)):
            add(name, num_quantized * DTYPE_BYTES[name])
        for name in dict.fromkeys((vision_dtype, dtype)):
            add(name, (text_parameters - num_quantized) * DTYPE_BYTES[name])
            add("vision encoder", model.vision_parameters * DTYPE_BYTES[name])
        return parts
    if kernel_backend == "native":
        for packed in model.packed_formats or (PackedFormat("quantized", model.packed_bytes or 0),):
            add(packed.name, packed.num_bytes)
    else:
        add("quantized", model.gpu_packed_bytes)
        add(dtype, (model.packed_parameters - model.gpu_packed_parameters) * DTYPE_BYTES[dtype])
    outer = model.embedding_parameters - model.packed_embedding_parameters
    layers = text_parameters - model.packed_parameters - outer
    layer_format, outer_format = quantization or weight_dtype, "int8" if quantization else weight_dtype
    add(layer_format, layers * DTYPE_BYTES[layer_format])
    add(outer_format, outer * DTYPE_BYTES[outer_format])
    add("vision encoder", model.vision_parameters * DTYPE_BYTES[vision_dtype])
    return parts


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes of all models."""

    weights: int  # with room for adapters, and for draft tokens of a trained head
    block: int  # one block of the KV cache, with its share of the kept anchors
    states: int = 0  # states of the requests that may run
    host: int = 0  # --kv-cache-host-memory, where the device's memory is the host's

    @property
    def fixed(self) -> int:
        return self.weights + self.states + self.host

    def __str__(self) -> str:
        states = f", the states of requests {self.states / GIB:.2f} GiB" if self.states else ""
        host = f", kv_cache_host_memory {self.host / GIB:.2f} GiB" if self.host else ""
        return f"{self.weights / GIB:.2f} GiB{states}{host}"


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Memory of layers with state (core/states.py)."""

    num_seqs: int
    max_rows: int  # rejectable rows of a step
    slot_bytes: int  # ring of a running request
    anchor_bytes: int
    interval: int  # tokens between the anchors that are kept in a long prompt

    @property
    def request_bytes(self) -> int:
        """Bytes of a running request's states, which hold up to two anchors."""
        return self.slot_bytes + 2 * self.anchor_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the states of all running requests and of dummy rows."""
        return self.num_seqs * self.request_bytes + self.slot_bytes + self.anchor_bytes

    def block_share(self, block_size: int) -> int:
        """Bytes of kept anchors for each block of the KV cache."""
        return -(-self.anchor_bytes * block_size // self.interval)

    def sizes(self, num_tokens: int) -> StateSizes:
        """Beside a KV cache of this many tokens."""
        return StateSizes(
            self.num_seqs + 1, 2 * self.num_seqs + 1 + num_tokens // self.interval, self.max_rows
        )


def plan_states(config: Config, hardware: HardwareInfo, model: ModelInfo) -> StatePlan | None:
    """None for a model without such layers.

    Anchors are kept at the interval at which they take about as much memory as K and V of its tokens.
    """
    if not model.state_shapes:
        return None
    dtype, _ = resolve_dtypes(config, hardware, model)
    itemsize, max_rows = int(DTYPE_BYTES[dtype]), 1 + (bool(config.drafter_names()) and num_drafted(config))
    slot_bytes = sum(shape.slot_bytes(itemsize, max_rows) for shape in model.state_shapes)
    anchor_bytes = sum(shape.anchor_bytes(itemsize) for shape in model.state_shapes)
    per_token = kv_bytes_per_token(model, resolve_kv_dtype(config, dtype), dtype)
    tokens = max(-(-anchor_bytes // per_token), SEGMENT, config.block_size)
    interval = 1 << (tokens - 1).bit_length()
    num_seqs, _ = batch_limits(config, hardware, model)
    return StatePlan(num_seqs, max_rows, slot_bytes, anchor_bytes, interval)


def num_drafted(config: Config) -> int:
    """Draft tokens of a step, at most."""
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 32 if config.draft_length == "adaptive" else 4


def memory_sizes(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> MemorySizes:
    dtype, weight_dtype = resolve_dtypes(config, hardware, models[0])
    kv_dtype = resolve_kv_dtype(config, dtype)
    options = (dtype, weight_dtype, config.quantization, hardware.kernel_backend)
    lora = lora_bytes(models[0], dtype, config.num_lora_slots, config.max_lora_rank)
    scratch = scratch_bytes(config, hardware, models, dtype)
    states = plan_states(config, hardware, models[0])
    block = config.block_size * sum(kv_bytes_per_token(info, kv_dtype, dtype) for info in models)
    if states is not None:
        block += states.block_share(config.block_size)
    return MemorySizes(
        sum(weight_bytes(info, *options) for info in models) + lora + scratch,
        block,
        0 if states is None else states.fixed_bytes,
        host_tier_bytes(config) if hardware.device == "cpu" else 0,
    )


def host_tier_bytes(config: Config) -> int:
    """Host memory for KV blocks beside those of the device."""
    size = config.kv_cache_host_memory
    return 0 if size is None else parse_bytes("kv_cache_host_memory", size)


def estimate_gpu_memory(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> DeviceMemory:
    """The estimate before loading."""
    dtype, _ = resolve_dtypes(config, hardware, models[0])
    _, rows = batch_limits(config, hardware, models[0])
    has_images = models[0].image_token_id is not None
    return estimate_memory(
        hardware.total_bytes,
        hardware.free_bytes,
        config.gpu_memory_utilization,
        memory_sizes(config, hardware, models).fixed,
        activations=max(activation_bytes(info, dtype, rows) for info in models),
        image_cache=parse_bytes("image_cache_memory", config.image_cache_memory) if has_images else 0,
        cuda_graphs=hardware.kernel_backend == "triton" and not config.enforce_eager,
    )


def batch_limits(config: Config, hardware: HardwareInfo, model: ModelInfo | None = None) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens; if one is configured, it limits the other.

    By default the states of all requests of a model take a share of the free memory.
    """
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if hardware.device != "cuda":
        default_seqs, default_tokens = 64, 512
    elif hardware.total_bytes >= LARGE_GPU_BYTES:
        default_seqs, default_tokens = 256, LARGE_GPU_BATCHED_TOKENS
    else:
        default_seqs, default_tokens = 256, SMALL_GPU_BATCHED_TOKENS
    if num_seqs is None:
        num_seqs = min(default_seqs, num_tokens or 256)
        if model is not None and model.state_shapes:
            one = plan_states(replace(config, max_num_seqs=1), hardware, model)
            room = min(hardware.free_bytes // STATE_DIVISOR, MAX_STATE_BYTES)
            num_seqs = min(num_seqs, max(room // one.request_bytes, 1)) if one is not None else num_seqs
    return num_seqs, num_tokens or max(default_tokens, num_seqs)


def resolve_dtypes(config: Config, hardware: HardwareInfo, model: ModelInfo) -> tuple[str, str]:
    """Data types of activations and weights. A CPU computes float16 weights in float32, which is exact."""
    asked = {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype)
    dtype = model.dtype if asked == "auto" else asked
    if hardware.device == "cpu" and dtype == "float16":
        return "float32", "float16"
    if config.dtype == "auto" and dtype == "bfloat16" and not hardware.supports_bfloat16:
        dtype = "float32" if hardware.device == "cpu" else "float16"
    return dtype, dtype


def resolve_kv_dtype(config: Config, dtype: str) -> str:
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def min_context(config: Config, model: ModelInfo) -> int:
    """Tokens that the KV cache must hold."""
    return config.max_model_len or min(model.context_len, MIN_CONTEXT)


def parse_num_blocks(config: Config, bytes_per_block: int) -> int:
    """KV blocks of the configured kv_cache_memory. Raises ConfigError."""
    text = str(config.kv_cache_memory)
    num_tokens = parse_tokens("kv_cache_memory", text)
    if num_tokens is not None:
        return blocks_for(num_tokens, config.block_size)
    return parse_bytes("kv_cache_memory", text) // bytes_per_block


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
