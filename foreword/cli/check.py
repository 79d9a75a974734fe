"""`foreword check MODEL [--draft-model D]`: whether a model can be served here, and fits its draft model.

With --models FILE: the plan of several models, and which of them fit into memory together.
It reads config.json or the GGUF header, and the tokenizers, but no weights. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from rich.console import Console

from foreword.checkpoint import apply_options, check_draft_model, read_tokenizer, resolve_paths
from foreword.cli.configuration import read_config
from foreword.cli.startup import startup_line
from foreword.cli.terminal import format_count
from foreword.config.models_file import ModelEntry, ModelsConfig, read_models
from foreword.config.options import Config
from foreword.config.units import format_cpus, parse_bytes, parse_cpus
from foreword.engine.fingerprint import types_in_use
from foreword.engine.loader import detect_hardware, make_plugins, read_drafter_info
from foreword.engine_client.base import EngineCallbacks
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.replica_set import describe_difference
from foreword.errors import ConfigError, ForewordError
from foreword.fleet.memory import ELSEWHERE, FleetPlan, ModelPlan, plan_fleet
from foreword.kernels.registry import native_unavailable_reason
from foreword.kv_cache.block_files import (
    HEADER,
    check_private,
    folder_name,
    namespace_folders,
    stored_bytes,
)
from foreword.models.model_loader import check_weights, read_model_info
from foreword.multimodal.processor_registry import read_processor
from foreword.planning.fit_hints import fitting_options
from foreword.planning.memory import ModelInfo, format_bytes, host_tier_bytes, num_drafted, tier_block
from foreword.planning.memory_plan import MemoryPart, plan_memory
from foreword.planning.replica_resources import read_machine
from foreword.planning.resolve import EngineInfo, ResolvedConfig, draft_size_warning, fits, resolve
from foreword.tokenizer.chat_processor import ChatInputProcessor
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.weights.gguf.header import is_gguf
from foreword.weights.trained_heads import head_method

REPLICA_ANSWER_S = 5.0  # timeout of a server of --replica-urls
IMAGE_SIZES = ((640, 480), (1920, 1080), (1080, 1920))  # example widths and heights, for their token counts

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
INDENT = " " * 7  # indent of a result's further lines
MAX_LISTED_SETS = 8
MAX_COMBINED = 12  # unpinned models of which all sets are tried


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    console = Console(highlight=False, soft_wrap=True)
    marks = {True: "[green]ok  [/green]", False: "[red]no  [/red]", None: "[yellow]note[/yellow]"}
    passed = True
    startup_line.end()
    results = (
        run_checks(resolve_paths(config)) if config.models is None else check_models(read_models(config))
    )
    for result in results:
        passed = passed and result.ok is not False
        console.print(marks[result.ok], end=" ")
        console.print(result.text, markup=False)
    return 0 if passed else 1


def check_models(models: ModelsConfig) -> Iterator[CheckResult]:
    """Problems of the files of each model, and the plan of all."""
    for entry in models.entries:
        try:
            results = tuple(run_checks(resolve_paths(entry.config), with_memory=False))
        except ForewordError as error:
            results = (CheckResult(False, str(error)),)
        for result in results:
            if result.ok is not True:
                yield CheckResult(result.ok, f"{entry.name}: {result.text}")
    yield from _guard("memory", check_plan(models))


def run_checks(config: Config, with_memory: bool = True) -> Iterator[CheckResult]:
    """All checks in order, until one fails on which the others depend."""
    target = yield from _check_model("model", Path(str(config.model)), config.gguf_dequantize)
    drafter = None
    if config.runs_draft_model:
        drafter = yield from _check_draft_model(config)
        if drafter is None and config.is_head_optional:
            config = config.without_optional_head()
    if target is None or (drafter is None and config.runs_draft_model):
        return
    has_draft_model = drafter is not None and not drafter.is_head
    yield from _check_weights(config, has_draft_model)
    yield from _guard("tokenizer", _check_tokenizers(config, has_draft_model))
    if target.image_token_id is not None:
        yield from _guard("images", _check_images(config, target))
    if drafter is not None:
        yield _check_drafter_size(config, target, drafter)
    if with_memory and config.replicas:
        yield from _guard("memory", _check_memory(config, target, drafter))
    if config.kv_cache_host_memory is not None and config.replicas:
        yield from _guard("host memory", _check_host_memory(config, target, drafter))
    if config.kv_cache_dir is not None and config.replicas:
        yield from _guard("disk", _check_disk(config, target, drafter))
    if config.kv_cache_shared_memory and config.replicas:
        yield _check_shared_memory()
    if config.remote_urls:
        yield from _check_replicas(config)


def _guard(label: str, results: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """The results of a check; an error ends it as a failure."""
    try:
        yield from results
    except ForewordError as error:
        yield CheckResult(False, f"{label}: {error}")


def _check_model(
    label: str, path: Path, gguf_dequantize: bool
) -> Generator[CheckResult, None, ModelInfo | None]:
    try:
        facts = read_model_info(path, gguf_dequantize)
    except ForewordError as error:
        yield CheckResult(False, f"{label}: {error}")
        return None
    size = format_count(facts.parameters)
    yield CheckResult(
        True,
        f"{label}: {facts.architecture}, {size} parameters in {facts.dtype}, "
        f"context {facts.context_len} tokens",
    )
    return facts


def _check_draft_model(config: Config) -> Generator[CheckResult, None, ModelInfo | None]:
    """The draft model, or the trained head and whether it fits the model."""
    path = Path(str(config.draft_model))
    if head_method(path, Path(str(config.model))) is None:
        return (yield from _check_model("draft model", path, config.gguf_dequantize))
    try:
        facts = read_drafter_info(config)
    except ForewordError as error:
        if config.is_head_optional:
            yield CheckResult(None, f"the MTP head, which drafts, is not used: {error}")
        else:
            yield CheckResult(False, f"trained head: {error}")
        return None
    assert facts is not None
    size = format_count(facts.parameters)
    yield CheckResult(True, f"trained head: {facts.architecture}, {size} parameters in {facts.dtype}, fits")
    return facts


def _check_weights(config: Config, has_draft_model: bool) -> Iterator[CheckResult]:
    """Whether the files of weights are whole and have the tensors that the model loads, by their headers.

    Without an engine here, the weights are those of other machines.
    """
    draft_model = config.draft_model if has_draft_model else None
    for label, name in (("weights", config.model), ("draft weights", draft_model)):
        path = Path(str(name))
        if name is None or config.load_format == "dummy" or not config.replicas:
            continue
        try:
            size = format_bytes(check_weights(path, config.gguf_dequantize))
        except ForewordError as error:
            yield CheckResult(False, f"{label}: {error}")
        else:
            yield CheckResult(True, f"{label}: {size} in {'GGUF' if is_gguf(path) else 'safetensors'} files")


def _check_tokenizers(config: Config, has_draft_model: bool) -> Iterator[CheckResult]:
    path = Path(str(config.model))
    tokenizer, rows = read_tokenizer(path)
    processor = read_processor(path)
    apply_options(config, tokenizer, processor)
    chat = ChatInputProcessor(tokenizer, processor, config.max_images, config.tool_format)
    unused = len(tokenizer.unassigned_ids(rows))
    yield CheckResult(
        tokenizer.vocab_size <= rows,
        f"tokenizer: {tokenizer.vocab_size} ids, {rows} rows in the model, {unused} without a token",
    )
    yield from _check_generation_config(tokenizer)
    if tokenizer.chat_template is None:
        yield CheckResult(None, "tokenizer: no chat template; chat needs --chat-template FILE")
    else:
        yield CheckResult(True if chat.detection.is_proven else None, f"tool calls: {chat.detection}")
    if has_draft_model:
        yield from _guard("draft model", _check_draft_tokenizer(tokenizer, config))


def _check_generation_config(tokenizer: Tokenizer) -> Iterator[CheckResult]:
    """Sampling defaults, and values of generation_config.json that are not used."""
    defaults = tokenizer.generation_config
    if defaults.as_dict():
        yield CheckResult(True, f"sampling defaults: {defaults}; --generation-config none turns them off")
    for warning in defaults.warnings:
        yield CheckResult(None, f"sampling defaults: {warning}")


def _check_draft_tokenizer(tokenizer: Tokenizer, config: Config) -> Iterator[CheckResult]:
    processor = read_processor(Path(str(config.model)))
    num_missing = check_draft_model(tokenizer, processor, Path(str(config.draft_model)))
    same = f"the same, but lacks {num_missing} added tokens" if num_missing else "the same, token by token"
    yield CheckResult(True, f"draft tokenizer: {same}")


def _check_images(config: Config, target: ModelInfo) -> Iterator[CheckResult]:
    processor = read_processor(Path(str(config.model)))
    assert processor is not None, "a vision model has an image processor"
    costs = (
        f"{width} x {height} is {processor.layout(height, width).num_tokens} tokens"
        for width, height in IMAGE_SIZES
    )
    yield CheckResult(
        True,
        f"images: {format_count(target.vision_parameters)} parameters in the vision encoder; "
        f"{', '.join(costs)}",
    )


def _check_drafter_size(config: Config, target: ModelInfo, drafter: ModelInfo) -> CheckResult:
    if drafter.is_head:
        num_read = drafter.active_parameters
        if drafter.embedding_parameters == drafter.markov_parameters:  # its output layer is the model's
            limit = config.mtp_vocab_size if drafter.architecture == "mtp" else 0
            num_rows = min(limit or target.vocab_size, target.vocab_size)
            num_read += num_rows * drafter.hidden_size
        count = min(drafter.draft_tokens_per_pass, num_drafted(config))
        num_read += (count - 1) * drafter.markov_parameters // 2  # for each token, one of the two tables
        share = num_read / target.active_parameters
        what = "a draft token" if count == 1 else f"a draft of up to {count} tokens"
        return CheckResult(True, f"{what} reads at most {share:.1%} of the model's parameters")
    warning = draft_size_warning(target.parameters, drafter.parameters)
    if warning is not None:
        return CheckResult(None, f"draft size: {warning}")
    return CheckResult(True, f"draft size: 1/{target.parameters / drafter.parameters:.1f} of the model")


def _check_memory(config: Config, target: ModelInfo, drafter: ModelInfo | None) -> Iterator[CheckResult]:
    hardware = detect_hardware(config, target)
    try:
        chosen = resolve(config, hardware, target, drafter)
    except ForewordError as error:
        yield CheckResult(False, f"memory: {error}")
        yield CheckResult(None, _describe_memory(plan_memory(config, hardware, target, drafter)))
        return
    missing = native_unavailable_reason(chosen.device, types_in_use(chosen))
    for note in (*chosen.notes, *filter(None, [missing])):
        yield CheckResult(None, note)
    yield CheckResult(True, _describe_memory(plan_memory(config, hardware, target, drafter, chosen)))
    if chosen.memory is not None and chosen.memory.kv_cache < chosen.kv_bytes:
        hints = fitting_options(config, hardware, [target, *filter(None, [drafter])], fits)
        helps = f"; what would help: {', '.join(hints)}" if hints else ""
        yield CheckResult(None, f"by this estimate it does not fit, and loading measures it{helps}")
    drafts = f"at most {chosen.num_speculative_tokens} tokens a request and step"
    yield CheckResult(
        True,
        f"speculation: {', '.join(chosen.drafters)}; {drafts}" if chosen.drafters else "speculation: off",
    )
    ok = True if chosen.max_model_len >= target.context_len else None
    yield CheckResult(ok, f"context: {chosen.max_model_len} of {target.context_len} tokens")
    if config.drafter_plugins():
        yield from _guard("own drafters", _check_plugins(config, chosen, target))


def _check_host_memory(config: Config, target: ModelInfo, drafter: ModelInfo | None) -> Iterator[CheckResult]:
    """Capacity of --kv-cache-host-memory."""
    block = tier_block(config, detect_hardware(config, target), target, drafter, 0)
    num_bytes = host_tier_bytes(config)
    if num_bytes < block.num_bytes + block.state_bytes:
        size = (
            f"a block of {config.block_size} tokens has {format_bytes(block.num_bytes + block.state_bytes)}"
        )
        raise ConfigError(f"kv_cache_host_memory {config.kv_cache_host_memory} holds no block: {size}")
    num_tokens = format_count(num_bytes / block.bytes_per_token)
    yield CheckResult(True, f"host memory: {format_bytes(num_bytes)} of each engine hold {num_tokens} tokens")


def _check_disk(config: Config, target: ModelInfo, drafter: ModelInfo | None) -> Iterator[CheckResult]:
    """Capacity of --kv-cache-dir, and whether an engine can use the directory."""
    root, limit = Path(str(config.kv_cache_dir)), parse_bytes("kv_cache_disk", config.kv_cache_disk)
    block = tier_block(config, detect_hardware(config, target), target, drafter, HEADER.size)
    if limit < block.num_bytes:
        size = f"a block of {config.block_size} tokens has {format_bytes(block.num_bytes)}"
        raise ConfigError(f"kv_cache_disk {config.kv_cache_disk} holds no block: {size}")
    try:
        _check_directory(root, folder_name(Path(str(config.model))))
    except OSError as error:
        reason = f"{error.filename or root}: {error.strerror or error}"
        raise ConfigError(f"kv_cache_dir cannot be used: {reason}") from None
    states = f", with a state of {format_bytes(block.state_bytes)} now and then" if block.state_bytes else ""
    yield CheckResult(
        True,
        f"disk: {format_bytes(block.bytes_per_token)} a token{states}; {format_bytes(limit)} in {root} hold "
        f"{format_count(limit / block.bytes_per_token)} tokens; private to this user",
    )
    stored = stored_bytes(root)
    free = shutil.disk_usage(_existing_parent(root)).free
    if free + stored < limit:
        yield CheckResult(
            None,
            f"disk: {root} has room for {format_bytes(free + stored)} of the {format_bytes(limit)} of "
            "--kv-cache-disk: a full disk costs hits",
        )


def _check_directory(root: Path, name: str) -> None:
    """Raises ConfigError or OSError for a directory that the engine could not use, without a change to it."""
    place = _existing_parent(root)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"kv_cache_dir cannot be used: {place} is no directory that this user may write to")
    if os.path.lexists(root):
        check_private(root.resolve())
    for folder in namespace_folders(root, name):
        for path in (folder, folder / "blocks", folder / "states"):
            if os.path.lexists(path):
                check_private(path)


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _check_shared_memory() -> CheckResult:
    """Whether shared memory may have huge pages."""
    try:
        chosen = re.search(r"\[(\w+)\]", SHMEM_HUGE_PAGES.read_text())
    except OSError:
        chosen = None
    if chosen is not None and chosen[1] in ("always", "within_size", "advise", "force"):
        return CheckResult(True, "shared memory: with huge pages")
    reason = f"{SHMEM_HUGE_PAGES} is {chosen[1] if chosen else 'missing'}"
    return CheckResult(
        None, f"shared memory: without huge pages ({reason}): attention over long contexts may be slower"
    )


def _describe_memory(parts: Sequence[MemoryPart]) -> str:
    return f"memory:\n{describe_parts(parts)}"


def _check_plugins(config: Config, chosen: ResolvedConfig, target: ModelInfo) -> Iterator[CheckResult]:
    names = ", ".join(make_plugins(config, chosen, target, never_sampled_ids=()))
    yield CheckResult(True, f"own drafters: {names}")


def _check_replicas(config: Config) -> Iterator[CheckResult]:
    """Compare each server with the first that answers."""
    first: EngineInfo | None = None
    for url, answer in zip(config.remote_urls, asyncio.run(_ask_all(config)), strict=True):
        if isinstance(answer, ForewordError):
            yield CheckResult(False, f"replica {url}: {answer.message}")
            continue
        first = first or answer
        problem = describe_difference(first, answer, config.max_model_len)
        facts = f"context {answer.resolved.max_model_len} tokens, fingerprint {answer.fingerprint}"
        yield CheckResult(not problem, f"replica {url}: {problem or facts}")


async def _ask_all(config: Config) -> Sequence[EngineInfo | ForewordError]:
    return await asyncio.gather(*(_ask(url, str(config.engine_key)) for url in config.remote_urls))


async def _ask(url: str, key: str) -> EngineInfo | ForewordError:
    client = RemoteClient(url, key)
    try:
        async with asyncio.timeout(REPLICA_ANSWER_S):
            return await client.start(EngineCallbacks())
    except ForewordError as error:
        return error
    except TimeoutError:
        return ConfigError(client.readiness.detail, "replica_urls")
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the report."""

    ok: bool | None  # None: a note
    text: str


def describe_parts(parts: Sequence[MemoryPart]) -> str:
    """One line for each part of the memory, aligned."""
    names = [f"  {part.name}" if part.is_subset else part.name for part in parts]
    sizes = [format_bytes(part.num_bytes) for part in parts]
    width, size_width = max(map(len, names)), max(map(len, sizes))
    return "\n".join(
        f"{INDENT}{name:{width}}  {size:>{size_width}}  {part.detail}".rstrip()
        for name, size, part in zip(names, sizes, parts, strict=True)
    )


def check_plan(models: ModelsConfig) -> Iterator[CheckResult]:
    """The plan of each model, and what fits together; an error if a model never does."""
    plan = asyncio.run(_plan(models))
    for each in plan.plans:
        yield CheckResult(True, _describe(each))
    for device in dict.fromkeys(each.device for each in plan.plans if each.device != ELSEWHERE):
        yield _check_together(plan, device, plan.memory_limits[device])


async def _plan(models: ModelsConfig) -> FleetPlan:
    fork_server = ForkServer()
    try:
        return await plan_fleet(models, fork_server)
    finally:
        await fork_server.close()


def _describe(plan: ModelPlan) -> str:
    entry, resolved = plan.entry, plan.resolved
    urls = entry.config.remote_urls
    elsewhere = [f"engines of {', '.join(urls)}"] if urls else []
    if resolved is None:
        return f"{entry.name}: {'; '.join((*elsewhere, _describe_stay(entry) + _list_names(entry)))}"
    replicas = f" for {entry.config.replicas} replicas" if entry.config.replicas > 1 else ""
    facts = [f"{format_bytes(plan.num_bytes)} on {plan.device}{replicas}", *elsewhere]
    facts.append(f"context {resolved.max_model_len} tokens")
    facts.append(f"drafters {', '.join(resolved.drafters)}" if resolved.drafters else "speculation off")
    cpus = read_machine().cpus if entry.config.cpus is None else parse_cpus(entry.config.cpus)
    threads = "1 thread" if resolved.threads == 1 else f"up to {resolved.threads} threads"
    facts.append(f"{threads} on cores {format_cpus(cpus)}")
    facts.append(_describe_stay(entry) + _list_names(entry))
    return f"{entry.name}: {'; '.join(facts)}\n{describe_parts(plan.parts)}"


def _describe_stay(entry: ModelEntry) -> str:
    """How long the model stays in memory."""
    if entry.pinned:
        return "pinned"
    start = "loaded at the start, " if entry.preload else ""
    if entry.keep_alive is None:
        return f"{start}stays until memory is needed"
    return f"{start}unloaded after {entry.keep_alive:g} s without an answer"


def _list_names(entry: ModelEntry) -> str:
    adapters = [module.name for module in entry.config.adapters]
    lists = {
        "also called": [name for name in entry.config.served_names() if name != entry.name],
        "adapters": adapters,
        "variants": [variant.name for variant in entry.variants],
    }
    return "".join(f"; {title} {', '.join(names)}" for title, names in lists.items() if names)


def _check_together(plan: FleetPlan, device: str, limit: int) -> CheckResult:
    """Which models of a device fit together."""
    plans = [each for each in plan.plans if each.device == device]
    total = sum(each.num_bytes for each in plans)
    max_loaded = plan.models.max_loaded
    title = f"memory of {device}: models may use {format_bytes(limit)}"
    if total <= limit and (max_loaded is None or len(plan.plans) <= max_loaded):
        return CheckResult(True, f"{title}; all fit together, in {format_bytes(total)}")
    counted = "" if max_loaded is None else f", at most {max_loaded} at a time"
    sets = sets_that_fit(plans, limit, max_loaded)
    lines = [f"{INDENT}{', '.join(names)}" for names in sets[:MAX_LISTED_SETS]]
    if len(sets) > MAX_LISTED_SETS:
        lines.append(f"{INDENT}and {len(sets) - MAX_LISTED_SETS} more sets")
    return CheckResult(True, "\n".join((f"{title}{counted}; these fit together:", *lines)))


def sets_that_fit(
    plans: Sequence[ModelPlan], limit: int, max_loaded: int | None = None
) -> list[tuple[str, ...]]:
    """The largest sets that fit, each with all pinned models; of many models only those of the smallest."""
    pinned = [plan for plan in plans if plan.entry.pinned]
    others = [plan for plan in plans if not plan.entry.pinned]
    if len(others) > MAX_COMBINED:
        others = sorted(others, key=lambda plan: plan.num_bytes)[:MAX_COMBINED]
    room = limit - sum(plan.num_bytes for plan in pinned)
    most = len(others) if max_loaded is None else max_loaded - len(pinned)
    found: list[frozenset[str]] = []
    for count in range(min(most, len(others)), 0, -1):
        for chosen in combinations(others, count):
            names = frozenset(plan.entry.name for plan in chosen)
            if sum(plan.num_bytes for plan in chosen) <= room and not any(names < larger for larger in found):
                found.append(names)
    kept = [{plan.entry.name for plan in pinned} | names for names in found or [frozenset()]]
    return [tuple(plan.entry.name for plan in plans if plan.entry.name in names) for names in kept]
