"""Memory of a model, part by part, before it is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foreword.config.options import Config
from foreword.config.units import parse_bytes
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import (
    DTYPE_BYTES,
    ModelInfo,
    batch_limits,
    cpu_reserve,
    format_bytes,
    host_tier_bytes,
    kv_bytes_per_token,
    lora_bytes,
    min_context,
    plan_states,
    resolve_dtypes,
    scratch_bytes,
    weight_bytes_by_format,
)
from foreword.planning.resolve import ResolvedConfig

VISION_ENCODER = "vision encoder"
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the plan."""

    name: str
    num_bytes: int
    detail: str = ""
    is_subset: bool = False  # a part of the line before


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Properties of the checkpoints and the machine that the plan of a model needs."""

    hardware: HardwareInfo
    model: ModelInfo
    drafter: ModelInfo | None = None


def plan_memory(
    config: Config,
    hardware: HardwareInfo,
    model: ModelInfo,
    drafter: ModelInfo | None = None,
    resolved: ResolvedConfig | None = None,
) -> list[MemoryPart]:
    """The parts that --kv-cache-memory and --gpu-memory-utilization divide, and their sum at the end.

    resolved  None if the model does not fit: the KV cache is then the least one
    """
    plan = _Plan(config, hardware, model, drafter)
    parts = [*plan.weights(), *plan.kv_cache(resolved), *plan.others(resolved)]
    total = sum(part.num_bytes for part in parts if not part.is_subset)
    free = format_bytes(hardware.free_bytes)
    if hardware.device == "cuda":
        usable = format_bytes(int(hardware.total_bytes * config.gpu_memory_utilization))
        detail = f"of {usable} that may be used on {hardware.gpu}; {free} are free"
        return [*parts, MemoryPart("sum", total, detail)]
    reserve = ""
    if config.kv_cache_memory is None:
        reserve = f", of which {format_bytes(cpu_reserve(hardware.free_bytes))} stay in reserve"
    return [*parts, MemoryPart("sum", total, f"of {free} free{reserve}")]


class _Plan:
    def __init__(
        self, config: Config, hardware: HardwareInfo, model: ModelInfo, drafter: ModelInfo | None
    ) -> None:
        self._config = config
        self._hardware = hardware
        self._model = model
        self._drafter = drafter
        self._dtype, self._weight_dtype = resolve_dtypes(config, hardware, model)

    def weights(self) -> Iterator[MemoryPart]:
        formats = self._formats(self._model)
        vision = int(formats.pop(VISION_ENCODER, 0))
        total = int(sum(formats.values()))
        yield MemoryPart("weights", total, _list_formats(formats))
        if self._model.num_experts:
            yield self._experts(formats)
        if vision:
            yield MemoryPart(VISION_ENCODER, vision)
        if self._drafter is not None:
            formats = self._formats(self._drafter)
            name = "trained head" if self._drafter.is_head else "draft model"
            yield MemoryPart(name, int(sum(formats.values())), _list_formats(formats))
        models = [self._model, *filter(None, [self._drafter])]
        if scratch := scratch_bytes(self._config, self._hardware, models, self._dtype):
            yield MemoryPart("draft tokens", scratch, "room of the trained head")
        slots, rank = self._config.num_lora_slots, self._config.max_lora_rank
        if slots:
            size = lora_bytes(self._model, self._dtype, slots, rank)
            yield MemoryPart("adapters", size, f"room for {slots} of rank {rank}")

    def kv_cache(self, resolved: ResolvedConfig | None) -> Iterator[MemoryPart]:
        config, models = self._config, [self._model, *filter(None, [self._drafter])]
        dtype = self._dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        per_token = sum(kv_bytes_per_token(info, dtype, self._dtype) for info in models)
        tokens = min_context(config, self._model)
        if resolved is not None:
            tokens = resolved.num_blocks * config.block_size
        detail = f"{tokens} tokens in {dtype}, {format_bytes(per_token)} a token"
        states = plan_states(config, self._hardware, self._model)
        if states is None:
            yield MemoryPart("KV cache", tokens * per_token, detail)
            return
        share = tokens // config.block_size * states.block_share(config.block_size)
        detail += f", and a state of {format_bytes(states.anchor_bytes)} every {states.interval} tokens"
        yield MemoryPart("KV cache", tokens * per_token + share, detail)
        requests = f"{states.num_seqs} requests of {format_bytes(states.request_bytes)}"
        yield MemoryPart("states", states.fixed_bytes, requests)

    def others(self, resolved: ResolvedConfig | None) -> Iterator[MemoryPart]:
        config, model = self._config, self._model
        if self._hardware.device == "cpu" and (num_bytes := host_tier_bytes(config)):
            yield MemoryPart("host memory", num_bytes, "KV blocks that the KV cache has no room for")
        if model.image_token_id is not None:
            yield MemoryPart("image cache", parse_bytes("image_cache_memory", config.image_cache_memory))
        memory = None if resolved is None else resolved.memory
        if memory is not None:
            yield from (
                MemoryPart(name, size)
                for name, size in memory.parts
                if size and name not in ("weights", "image cache")
            )
            return
        num_seqs, num_rows = batch_limits(config, self._hardware, model)
        row = max(info.activation_values_per_row for info in (model, self._drafter or model))
        logits = num_seqs * model.vocab_size * LOGIT_BYTES
        size = int(num_rows * row * DTYPE_BYTES[self._dtype]) + logits
        yield MemoryPart("activations", size, f"a step of {num_rows} rows, logits of {num_seqs}")

    def _experts(self, formats: Mapping[str, float]) -> MemoryPart:
        """Memory of all experts but shared ones; the detail says how much a token reads."""
        model = self._model
        count, used = model.num_experts, model.experts_per_token
        experts = float(sum(packed.expert_bytes for packed in model.packed_formats))
        if not experts or self._hardware.kernel_backend != "native":
            outer = model.embedding_parameters
            layers = model.parameters - model.vision_parameters - outer
            of_layers = sum(formats.values()) - outer * DTYPE_BYTES[self._weight_dtype]
            experts = model.expert_parameters / max(layers, 1) * of_layers
        read = sum(formats.values()) - experts * (count - used) / count
        return MemoryPart(
            "experts",
            int(experts),
            f"{count} in a layer, {used} a token, which reads {format_bytes(read)} of the weights: "
            f"{model.active_parameters / 1e9:.1f} of {model.parameters / 1e9:.1f} G parameters",
            is_subset=True,
        )

    def _formats(self, info: ModelInfo) -> dict[str, float]:
        options = (self._dtype, self._weight_dtype, self._config.quantization, self._hardware.kernel_backend)
        return weight_bytes_by_format(info, *options)


def _list_formats(formats: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in formats.items())
