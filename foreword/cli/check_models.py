"""`foreword check --models FILE`: the plan of several models, and which of them fit into memory together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from foreword.config.models_file import ModelEntry, ModelsConfig
from foreword.config.units import format_cpus, parse_cpus
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ForewordError
from foreword.fleet.memory import ELSEWHERE, FleetPlan, ModelPlan, plan_fleet
from foreword.planning.memory import format_bytes
from foreword.planning.memory_plan import MemoryPart
from foreword.planning.replica_resources import read_machine

INDENT = " " * 7  # of lines below the first of a result
MAX_LISTED_SETS = 8
MAX_COMBINED = 12  # unpinned models of which all sets are tried


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
    try:
        plan = asyncio.run(_plan(models))
    except ForewordError as error:
        yield CheckResult(False, f"memory: {error}")
        return
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
