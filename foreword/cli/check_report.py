"""Lines of the report of `foreword check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.planning.memory import format_bytes
from foreword.planning.memory_plan import MemoryPart

INDENT = " " * 7


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
