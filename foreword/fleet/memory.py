"""Memory of several models: planned before they are loaded, measured afterwards. Imports no torch.

The plan of a model never depends on what is free when it is loaded, so that a model that is loaded again
has the same context and the same fingerprint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from foreword.checkpoint import model_names, resolve_paths
from foreword.config.models_file import ModelEntry, ModelsConfig, models_config, read_models
from foreword.config.options import Config
from foreword.config.units import parse_bytes, parse_duration, parse_tokens
from foreword.engine_client.engine_process import EngineProcess
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import read_proc_stat
from foreword.engine_client.messages import DescribeModels, ModelDescriptions
from foreword.errors import ConfigError, ForewordError
from foreword.fleet.cpu_affinity import assign_gpus
from foreword.planning.memory import (
    CUDA_CONTEXT_BYTES,
    GIB,
    batch_limits,
    cpu_reserve,
    cuda_graph_reserve,
    memory_sizes,
    min_context,
)
from foreword.planning.memory_plan import MemoryPart, ModelDescription, plan_memory
from foreword.planning.replica_resources import read_machine
from foreword.planning.resolve import MAX_CPU_KV_BYTES, ResolvedConfig, resolve
from foreword.utils.threads import run_in_own_thread
from foreword.weights.hub import resolve_path

PROCESS_BYTES: Final = 256 << 20  # interpreter, libraries and heap of an engine
MAX_KV_SHARES: Final = 4  # models among which the memory of KV caches is divided at most
KV_CACHE: Final = "KV cache"
ELSEWHERE: Final = "other machines"  # device of a model whose engines all run there
UNPLANNED: Final = "unplanned"  # device of a model whose engine takes what is free when it starts
UNLIMITED: Final = sys.maxsize  # bytes of those
PROC: Final = Path("/proc")
PROCESS_GROUP: Final = 2  # index in read_proc_stat()


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Memory of a model and its replicas on their device."""

    entry: ModelEntry  # its config has local paths, and the size of the KV cache
    device: str  # "cpu", "gpu0", ELSEWHERE or UNPLANNED
    parts: tuple[MemoryPart, ...]
    resolved: ResolvedConfig | None  # None: its engines make their choices

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if not part.is_subset)

    def __str__(self) -> str:
        return _describe_need(self.entry.name, self.parts)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The plans of all models, in their order."""

    models: ModelsConfig  # entries as planned
    plans: tuple[ModelPlan, ...]
    memory_limits: Mapping[str, int]  # bytes, by device


async def plan_server(config: Config, fork_server: ForkServer) -> FleetPlan:
    """The models of a server with their plans. Raises ConfigError, CheckpointError.

    A pinned model that is alone, without a limit, is not planned: its engine takes what is free.
    """
    models = await run_in_own_thread(only_model if config.models is None else read_models, config)
    (first, *others) = models.entries
    if others or not first.pinned or models.memory_limit is not None:
        return await plan_fleet(models, fork_server)
    return FleetPlan(models, (ModelPlan(first, UNPLANNED, (), None),), {UNPLANNED: UNLIMITED})


def only_model(config: Config) -> ModelsConfig:
    """The model of a server without `--models`: pinned, unless keep_alive unloads it.

    Raises ConfigError, CheckpointError.
    """
    config = resolve_paths(config)
    name, *_ = model_names(config, Path(str(config.model)))
    keep_alive_s = None if config.keep_alive is None else parse_duration("keep_alive", config.keep_alive)
    entry = ModelEntry(name, config, keep_alive_s, pinned=keep_alive_s is None, preload=True)
    return models_config(config, [entry])


async def plan_fleet(models: ModelsConfig, fork_server: ForkServer) -> FleetPlan:
    """Place, describe and plan all models. Raises ConfigError, also for a model that can never be loaded."""
    models = assign_gpus(models, read_machine())
    configs = [await run_in_own_thread(resolve_paths, each.config) for each in models.entries]
    entries = tuple(replace(each, config=own) for each, own in zip(models.entries, configs, strict=True))
    models = replace(models, entries=entries)
    return make_fleet_plan(models, await describe_models([each.config for each in entries], fork_server))


async def describe_models(
    configs: Sequence[Config], fork_server: ForkServer
) -> list[ModelDescription | ForewordError | None]:
    """Describe models in processes of the fork server that exit at once: one for each choice of GPUs.

    None: all engines of the model run on other machines.
    """
    results: dict[int, ModelDescription | ForewordError] = {}
    local = {number: config for number, config in enumerate(configs) if config.replicas}
    for gpus in dict.fromkeys(config.gpus for config in local.values()):
        numbers = [number for number, config in local.items() if config.gpus == gpus]
        described = await _describe_in_process([configs[number] for number in numbers], fork_server)
        results.update(zip(numbers, described, strict=True))
    return [results.get(number) for number in range(len(configs))]


async def _describe_in_process(
    configs: Sequence[Config], fork_server: ForkServer
) -> tuple[ModelDescription | ForewordError, ...]:
    reply: asyncio.Future[ModelDescriptions] = asyncio.get_running_loop().create_future()

    def on_message(process: EngineProcess, message: object) -> None:
        if isinstance(message, ModelDescriptions) and not reply.done():
            reply.set_result(message)

    process = await EngineProcess.launch(fork_server, on_message)
    process.send(DescribeModels(tuple(configs)))
    await process.exited.wait()
    reason = await process.reap(fork_server)
    if not reply.done():
        raise ConfigError(f"the process that reads the models ended: {reason}", "models")
    return reply.result().results


def make_fleet_plan(
    models: ModelsConfig, descriptions: Sequence[ModelDescription | ForewordError | None]
) -> FleetPlan:
    """Divide the memory. Raises ConfigError for a model that can never be loaded beside the pinned ones."""
    described = zip(models.entries, descriptions, strict=True)
    sizings = [_Sizing(entry, each) for entry, each in described if each is not None]
    limits = {sizing.device: _limit(models, sizing) for sizing in sizings}
    for device, limit in limits.items():
        _divide([sizing for sizing in sizings if sizing.device == device], models, limit)
    pinned = [entry.name for entry in models.entries if entry.pinned]
    if (
        models.max_loaded is not None
        and len(pinned) + (len(pinned) < len(models.entries)) > models.max_loaded
    ):
        problem = f"max_loaded_models {models.max_loaded} leaves no room beside the pinned models"
        raise ConfigError(f"{problem} {', '.join(pinned)}", "max_loaded_models")
    local = {sizing.entry.name: sizing.plan() for sizing in sizings}
    plans = tuple(local.get(each.name) or ModelPlan(each, ELSEWHERE, (), None) for each in models.entries)
    if len(local) < len(plans):
        limits[ELSEWHERE] = UNLIMITED
    return FleetPlan(replace(models, entries=tuple(plan.entry for plan in plans)), plans, limits)


class _Sizing:
    """A model whose KV cache has no size yet. Raises ConfigError if it cannot be described."""

    def __init__(self, entry: ModelEntry, description: ModelDescription | ForewordError) -> None:
        if isinstance(description, ForewordError):
            raise ConfigError(f"model {entry.name}: {description}", "models")
        self.entry, config = entry, entry.config
        self.hardware, self._description = description.hardware, description
        gpu = (config.gpus or "0").partition(",")[0]
        self.device = "cpu" if self.hardware.device == "cpu" else f"gpu{gpu}"
        infos = [description.model, *filter(None, [description.drafter])]
        self._block_bytes = config.replicas * memory_sizes(config, self.hardware, infos).block
        context = config.max_model_len or description.model.context_len
        num_seqs, _ = batch_limits(config, self.hardware, description.model)
        self._min_blocks = self._blocks_for(min_context(config, description.model))
        self._max_blocks = num_seqs * self._blocks_for(context)
        if config.kv_cache_memory is not None:
            self._min_blocks = self._max_blocks = self._configured_blocks(config.kv_cache_memory)
        self._num_blocks = self._min_blocks
        self._fixed = tuple(part for part in self._parts(None) if part.name != KV_CACHE)

    @property
    def num_bytes(self) -> int:
        fixed = sum(part.num_bytes for part in self._fixed if not part.is_subset)
        return fixed + self._num_blocks * self._block_bytes

    def set_kv_cache(self, num_bytes: int) -> None:
        """The nearest size that holds the context, and that can ever be used."""
        self._num_blocks = max(min(num_bytes // self._block_bytes, self._max_blocks), self._min_blocks)

    @property
    def kv_bytes(self) -> int:
        return self._num_blocks * self._block_bytes

    def plan(self) -> ModelPlan:
        tokens = self._num_blocks * self.entry.config.block_size
        entry = replace(self.entry, config=replace(self.entry.config, kv_cache_memory=f"{tokens}tokens"))
        hardware = replace(self.hardware, free_bytes=max(self.hardware.free_bytes, self.num_bytes))
        try:
            resolved = resolve(entry.config, hardware, self._description.model, self._description.drafter)
        except ConfigError as error:
            raise ConfigError(f"model {entry.name}: {error.message}", error.param) from None
        return ModelPlan(entry, self.device, self._parts(resolved), resolved)

    def need(self) -> str:
        """The arithmetic."""
        kv_cache = MemoryPart(KV_CACHE, self.kv_bytes)
        return _describe_need(self.entry.name, (*self._fixed, kv_cache))

    def _parts(self, resolved: ResolvedConfig | None) -> tuple[MemoryPart, ...]:
        config, description = self.entry.config, self._description
        *parts, _ = plan_memory(config, self.hardware, description.model, description.drafter, resolved)
        if self.hardware.device == "cuda":
            graphs = 0 if config.enforce_eager else cuda_graph_reserve(self.hardware.total_bytes)
            parts += [MemoryPart("CUDA graphs", graphs), MemoryPart("CUDA", CUDA_CONTEXT_BYTES)]
        else:
            suffixes = parse_bytes("suffix_corpus_memory", config.suffix_corpus_memory)
            parts.append(MemoryPart("process", PROCESS_BYTES, "interpreter, libraries, heap"))
            if "suffix" in config.drafter_names():
                parts.append(MemoryPart("suffix corpus", suffixes))
        parts = [replace(part, num_bytes=config.replicas * part.num_bytes) for part in parts]
        if config.embedding_model is not None:  # one process for all replicas
            parts.append(MemoryPart("encoder", _encoder_bytes(config.embedding_model)))
        return tuple(part for part in parts if part.num_bytes)

    def _configured_blocks(self, text: str) -> int:
        tokens = parse_tokens("kv_cache_memory", text)
        if tokens is not None:
            return self._blocks_for(tokens)
        num_bytes = parse_bytes("kv_cache_memory", text) * self.entry.config.replicas
        return max(num_bytes // self._block_bytes, 1)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.entry.config.block_size)


def _limit(models: ModelsConfig, sizing: _Sizing) -> int:
    """Bytes that models may use of a device: `memory_limit`, at most what is free."""
    free, total = sizing.hardware.free_bytes, sizing.hardware.total_bytes
    if sizing.hardware.device == "cpu":
        default = free - cpu_reserve(free)
    else:
        default = free - int(total * (1 - sizing.entry.config.gpu_memory_utilization))
    return default if models.memory_limit is None else min(models.memory_limit, free)


def _divide(sizings: Sequence[_Sizing], models: ModelsConfig, limit: int) -> None:
    """Size the KV caches of the models of one device. Raises ConfigError for a model that never fits.

    A KV cache gets half of the memory, divided by the number of models that may be loaded together (four
    count as many), and at most 4 GiB on a CPU; less where weights leave less, down to the least context.
    """
    pinned = [sizing for sizing in sizings if sizing.entry.pinned]
    others = [sizing for sizing in sizings if not sizing.entry.pinned]
    least = sum(sizing.num_bytes for sizing in pinned)
    if least > limit:
        raise _never_fits(pinned[0], pinned[1:], limit)
    errors = [_never_fits(each, pinned, limit) for each in others if each.num_bytes + least > limit]
    if errors:
        raise ConfigError("\n".join(error.message for error in errors), "models")
    hardware = sizings[0].hardware
    total = models.memory_limit or hardware.total_bytes
    share = total // (2 * min(len(sizings), models.max_loaded or len(sizings), MAX_KV_SHARES))
    if hardware.device == "cpu":
        share = min(share, MAX_CPU_KV_BYTES)
    reserve = max((sizing.num_bytes for sizing in others), default=0)
    for sizing in pinned:
        taken = sum(each.num_bytes for each in pinned) - sizing.kv_bytes
        sizing.set_kv_cache(min(share, limit - reserve - taken))
    taken = sum(sizing.num_bytes for sizing in pinned)
    for sizing in others:
        sizing.set_kv_cache(min(share, limit - taken - sizing.num_bytes + sizing.kv_bytes))


def _never_fits(sizing: _Sizing, pinned: Sequence[_Sizing], limit: int) -> ConfigError:
    needs = "; ".join(each.need() for each in (sizing, *pinned))
    total = sum(each.num_bytes for each in (sizing, *pinned))
    beside = f" beside the pinned {', '.join(each.entry.name for each in pinned)}" if pinned else ""
    helps = "What would help: a higher memory_limit, less kv_cache_memory or max_model_len, quantization"
    return ConfigError(
        f"model {sizing.entry.name} can never be loaded{beside}: {total / GIB:.2f} GiB are needed, "
        f"models may use {limit / GIB:.2f} GiB. {needs}. {helps}",
        "models",
    )


def _describe_need(name: str, parts: Iterable[MemoryPart]) -> str:
    """ "qwen needs 9.10 GiB (weights 8.05, ...)"."""
    parts = [part for part in parts if not part.is_subset]
    listed = ", ".join(f"{part.name} {part.num_bytes / GIB:.2f}" for part in parts)
    return f"{name} needs {sum(part.num_bytes for part in parts) / GIB:.2f} GiB ({listed})"


def _encoder_bytes(name: str) -> int:
    """Memory of an encoder's process: its weights are float32, and at least 16 bits wide in the files."""
    files = resolve_path(name).glob("*.safetensors")
    return PROCESS_BYTES + 2 * sum(file.stat().st_size for file in files)


def resident_bytes(process_groups: Iterable[int]) -> int:
    """Memory of processes: shared pages count in parts (PSS), mapped files too.

    process_groups  their ids; an engine's is its pid
    A process whose shares cannot be read counts with all its pages (RSS).
    """
    groups = set(process_groups)
    total = 0
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if int(read_proc_stat(int(entry))[PROCESS_GROUP]) in groups:
                    total += _process_bytes(PROC / entry)
    return total


def _process_bytes(folder: Path) -> int:
    try:
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
