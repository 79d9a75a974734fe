"""What `foreword bench speculate` found, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.bench.common import print_table
from foreword.bench.speculate.statistics import best_fixed, mode_figures, repetition_figures
from foreword.bench.speculate.types import AUTO, FIXED, OFF, Mode, PairedRun, SpecCase

__all__ = ["case_result", "print_result", "worst_cases"]

RATIOS = {
    "throughput": "tokens/s",
    "first_token": "first token",
    "token_p99": "p99 a token",
    "slowest_request": "slowest request",
}


def case_result(
    case: SpecCase, modes: Sequence[Mode], pairs: Mapping[str, Sequence[PairedRun]]
) -> dict[str, Any]:
    """All figures of one cell. A pair that was not answered in full has no figures, only its errors."""
    sound = {name: [pair for pair in of if not _errors(pair)] for name, of in pairs.items()}
    errors = sorted({error for of in pairs.values() for pair in of for error in _errors(pair)})
    result: dict[str, Any] = {
        "category": case.category,
        "concurrency": case.concurrency,
        "cache_full": case.full,
        "errors": errors,
    }
    if not all(sound.values()):
        return {**result, "modes": {}}
    first = sound[modes[0].name]
    result["requests"] = len(first[0].plain.results)
    result["modes"] = {OFF.name: repetition_figures([pair.plain for pair in first])}
    result["modes"] |= {name: mode_figures(of) for name, of in sound.items()}
    fixed = [mode.name for mode in modes if mode.engine == FIXED]
    against = best_fixed(sound, AUTO.name, fixed) if AUTO.name in sound else None
    return result | ({"auto_to_best_fixed": against} if against else {})


def _errors(pair: PairedRun) -> list[str]:
    return [call.error for one in (pair.plain, pair.other) for call in one.results if call.error is not None]


def worst_cases(cells: Sequence[Mapping[str, Any]], mode: str) -> dict[str, dict[str, Any]]:
    """For each kind of ratio the cell where `mode` does worst."""
    found: dict[str, dict[str, Any]] = {}
    for name in RATIOS:
        have = [(cell["modes"][mode][name], cell) for cell in cells if name in cell["modes"].get(mode, {})]
        if have:
            ratio, cell = min(have, key=lambda one: float(one[0]["ratio"]))
            found[name] = {"cell": case_name(cell), **ratio}
    against = [cell for cell in cells if "auto_to_best_fixed" in cell]
    if against and mode == AUTO.name:
        cell = min(against, key=lambda cell: float(cell["auto_to_best_fixed"]["ratio"]))
        found["best_fixed"] = {"cell": case_name(cell), **cell["auto_to_best_fixed"]}
    return found


def case_name(case: Mapping[str, Any]) -> str:
    return f"{case['category']} x{case['concurrency']}" + (", cache full" if case["cache_full"] else "")


def print_result(result: Mapping[str, Any]) -> None:
    """Tables: one for each number of requests at once, the time by stage, the worst cells."""
    cells = result["cells"]
    for full, count in sorted({(cell["cache_full"], cell["concurrency"]) for cell in cells}):
        _show_cells(
            [cell for cell in cells if (cell["cache_full"], cell["concurrency"]) == (full, count)],
            full,
            count,
        )
    _show_stages(cells)
    for mode, ratios in result["worst"].items():
        rows = [[name, of["cell"], _ratio(of)] for name, of in ratios.items()]
        print_table(f"where {mode} does worst", ("ratio", "cell", "value"), rows)


def _show_cells(cells: Sequence[Mapping[str, Any]], full: bool, count: int) -> None:
    columns = (
        "category",
        "mode",
        *RATIOS.values(),
        "accepted",
        "tokens a step",
        "drafted",
        "efficiency",
        "of best fixed",
    )
    rows = [row for cell in cells for row in _rows(cell)]
    cache = ", in a cache too small for them" if full else ""
    print_table(f"{count} at once{cache}: ratios to off with 95 % intervals", columns, rows)


def _rows(case: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for mode, figures in case["modes"].items():
        if mode == OFF.name:
            continue
        best = case.get("auto_to_best_fixed") if mode == AUTO.name else None
        rows.append(
            [
                case["category"],
                mode + ("" if figures["equal"] else " NOT EQUAL"),
                *(_ratio(figures.get(name)) for name in RATIOS),
                _share(figures.get("acceptance")),
                f"{figures['tokens_per_step']:.2f}",
                f"{figures['mean_draft_length']:.1f}" if "mean_draft_length" in figures else "",
                _share(figures.get("system_efficiency")),
                f"{best['ratio']:.2f} of {best['best']}" if best else "",
            ]
        )
    return rows or [[case["category"], "; ".join(case["errors"])[:60]]]


def _show_stages(cells: Sequence[Mapping[str, Any]]) -> None:
    """Without speculation and with all of it, side by side."""
    measured = [(cell, mode) for cell in cells for mode in (OFF.name, AUTO.name) if mode in cell["modes"]]
    stages = list(
        dict.fromkeys(stage for cell, mode in measured for stage in cell["modes"][mode]["stage_us_per_token"])
    )
    rows = [
        [
            case_name(cell),
            mode,
            *(f"{cell['modes'][mode]['stage_us_per_token'].get(stage, 0.0):.0f}" for stage in stages),
        ]
        for cell, mode in measured
    ]
    print_table("microseconds a delivered token, by stage", ("cell", "mode", *stages), rows)


def _ratio(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    bounds = f" [{_number(figures['low'])}, {_number(figures['high'])}]" if "low" in figures else ""
    return f"{_number(figures['ratio'])}{bounds}"


def _number(value: float) -> str:
    """Two rounds may leave an interval without end; its digits would take the room of others."""
    return f"{value:.2f}" if value < 99 else ">99"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
