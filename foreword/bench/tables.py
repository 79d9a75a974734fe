"""Tables of all benchmarks, and their cells. rich is imported with the first table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.bench.statistics import verdict

NO_DRAFTS = "no drafts"  # the verdict where none was verified: the ratio is chance
MODE_LEGEND = "off: no speculation; auto: all drafters, chosen step by step; other names: one drafter alone."
TABLE_WIDTH = 100  # columns of a table that is not printed to a terminal
MAX_CELL_WIDTH = 40  # a longer cell takes several lines where the table would be too wide


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], legend: Sequence[str] = ()
) -> None:
    """A table as wide as the terminal at most, and lines that explain it.

    Where it does not fit, columns are left out from the right and named; a line that begins with the name
    of one ("name: ...") is left out too.
    """
    console = importlib.import_module("rich.console").Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    cells = [columns, *rows]
    widths = [max(len(row[index]) for row in cells if index < len(row)) for index in range(len(columns))]
    shown = len(columns)
    while shown > 2 and sum(min(width, MAX_CELL_WIDTH) + 3 for width in widths[:shown]) + 1 > console.width:
        shown -= 1
    table = importlib.import_module("rich.table").Table()
    for index, column in enumerate(columns[:shown]):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row[:shown])
    console.print(f"\n{title}", style="bold")
    console.print(table)
    if shown < len(columns):
        console.print(f"left out for width (the JSON has them): {', '.join(columns[shown:])}")
    left_out = {column.partition(" [")[0] for column in columns[shown:]}
    for line in legend:
        if line.partition(":")[0] not in left_out:
            console.print(line)


def rounds_text(count: int) -> str:
    """ "1 round", "5 rounds"."""
    return f"{count} round" + ("s" if count != 1 else "")


def ratio_text(figures: Mapping[str, Any] | None) -> str:
    """ "1.08 [1.02, 1.15]"."""
    if figures is None:
        return ""
    bounds = f" [{ratio_number(figures['low'])}, {ratio_number(figures['high'])}]" if "low" in figures else ""
    return f"{ratio_number(figures['ratio'])}{bounds}"


def ratio_number(value: float) -> str:
    """Two rounds may leave a huge interval, whose digits would widen the column."""
    return f"{value:.2f}" if value < 99 else ">99"


def speed_cells(ratio: Mapping[str, Any], has_drafts: bool) -> tuple[str, str]:
    """Cells of the columns that `ratio_legend` explains."""
    return ratio_text(ratio), verdict(ratio) if has_drafts else NO_DRAFTS


def share_text(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def equal_text(is_equal: bool) -> str:
    return "equal" if is_equal else "NOT EQUAL"


def ratio_legend(rounds: int) -> tuple[str, ...]:
    """Lines for the columns of speed and its verdict."""
    return (
        f"speed: tokens/s over off in the same round, with the 95 % interval of {rounds_text(rounds)}; "
        "above 1 is faster.",
        "result: faster or slower where the interval excludes 1, else unclear; more --rounds narrow it.",
        f"{NO_DRAFTS}: none was verified, so that the ratio is chance.",
    )
