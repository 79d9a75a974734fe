"""Results of `foreword bench speculate` as tables and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.bench.figures import best_fixed, mode_figures, repetition_figures
from foreword.bench.measurement import AUTO, FIXED, OFF, PLAIN, BenchCase, Mode, Pairs, request_errors
from foreword.bench.statistics import verdict
from foreword.bench.tables import (
    NO_DRAFTS,
    equal_text,
    print_table,
    ratio_legend,
    ratio_number,
    ratio_text,
    share_text,
)

RATIOS = {
    "throughput": "tokens/s",
    "first_token": "first token",
    "token_p99": "p99 a token",
    "slowest_request": "slowest request",
    "best_fixed": "against the best fixed length",
}
COLUMNS = ("category", "mode", "speed [95 %]", "result", "accepted", "tok/step")
MORE_COLUMNS = ("TTFT", "slowest", "p99", "drafted", "efficiency")  # where the terminal is wide enough
LEGEND = (
    "accepted: share of draft tokens that were right.",
    "tok/step: tokens that a step delivers to a request; plain decoding has 1.",
    "TTFT: the same ratio for the time to the first token.",
    "slowest: the same ratio for the request that gained least.",
    "p99: the same ratio for the 99th percentile of the time of a token.",
    "drafted: tokens of a draft.",
    "efficiency: share of rows that delivered a token, in steps with drafts.",
)
STAGE_LEGEND = (
    "forward: the model; sample: choosing and checking tokens; the rest: the engine.",
    "draft: proposing tokens, and recording the time of each step, drafts or not: what a draft may cost.",
)


def case_result(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    """All figures of one case. A pair with an unanswered request has errors and no figures."""
    complete = {name: [pair for pair in of_mode if not pair.errors] for name, of_mode in pairs.items()}
    result: dict[str, Any] = {
        "category": case.category,
        "concurrency": case.concurrency,
        "cache_full": case.full,
        "errors": request_errors(pairs),
    }
    if not all(complete.values()):
        return {**result, "modes": {}}
    first = complete[modes[0].name]
    result["requests"] = len(first[0].plain.results)
    result["modes"] = {OFF.name: repetition_figures([pair.plain for pair in first])}
    result["modes"] |= {name: mode_figures(of_mode) for name, of_mode in complete.items()}
    fixed = [mode.name for mode in modes if mode.engine == FIXED]
    best = best_fixed(complete, AUTO.name, fixed) if AUTO.name in complete else None
    return result | ({"auto_to_best_fixed": best} if best else {})


def worst_cases(cells: Sequence[Mapping[str, Any]], mode: str) -> dict[str, dict[str, Any]]:
    """The case with the lowest value of each ratio."""
    worst: dict[str, dict[str, Any]] = {}
    for name in RATIOS:
        ratios = [(cell["modes"][mode][name], cell) for cell in cells if name in cell["modes"].get(mode, {})]
        if ratios:
            ratio, cell = min(ratios, key=lambda pair: float(pair[0]["ratio"]))
            worst[name] = {"cell": case_name(cell), **ratio}
    with_fixed = [cell for cell in cells if "auto_to_best_fixed" in cell]
    if with_fixed and mode == AUTO.name:
        cell = min(with_fixed, key=lambda cell: float(cell["auto_to_best_fixed"]["ratio"]))
        worst["best_fixed"] = {"cell": case_name(cell), **cell["auto_to_best_fixed"]}
    return worst


def case_name(case: Mapping[str, Any]) -> str:
    return f"{case['category']} x{case['concurrency']}" + (", cache full" if case["cache_full"] else "")


def print_result(result: Mapping[str, Any]) -> None:
    """Print a table by concurrency, time by stage, the worst cases, and a summary."""
    cells = [cell for cell in result["cells"] if cell["modes"]]
    with_fixed = any("auto_to_best_fixed" in cell for cell in cells)
    columns = (*COLUMNS[:4], *(("of best fixed",) if with_fixed else ()), *COLUMNS[4:], *MORE_COLUMNS)
    legend = (*ratio_legend(result["rounds"]), *LEGEND)
    loads = sorted({_load(cell) for cell in cells})
    for full, count in loads:
        rows = [
            row
            for cell in cells
            if _load(cell) == (full, count)
            for row in _rows(cell, with_fixed, result["speculate"])
        ]
        cache = ", in a cache too small for them" if full else ""
        lines = legend if (full, count) == loads[-1] else ()
        print_table(f"{count} at once{cache}: ratios to off", columns, rows, lines)
    _show_stages(cells, result["speculate"])
    for mode, ratios in result["worst"].items():
        rows = [[RATIOS[name], of["cell"], ratio_text(of)] for name, of in ratios.items()]
        if rows:
            print_table(
                f"where {result['speculate'] if mode == AUTO.name else mode} does worst",
                ("ratio of", "cell", "value [95 %]"),
                rows,
            )
    for cell in result["cells"]:
        for error in cell["errors"]:
            print(f"{case_name(cell)}: {error}")
    print(f"\n{_summary(result, cells)}")


def _summary(result: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for mode in result["modes"]:
        measured = [cell["modes"][mode] for cell in cells if mode in cell["modes"] and mode != OFF.name]
        counts = Counter(_verdict(mode, figures) for figures in measured)
        names = ("faster", "slower", "unclear", *((NO_DRAFTS,) if counts[NO_DRAFTS] else ()))
        verdicts = ", ".join(f"{name} in {counts[name]}" for name in names)
        name = result["speculate"] if mode == AUTO.name else mode
        lines += [f"{name} against off: {verdicts} of {len(measured)} cells."] if measured else []
    return "\n".join([*lines, f"Answers {equal_text(result['equal'])} in all modes."])


def _verdict(mode: str, figures: Mapping[str, Any]) -> str:
    """The ratio of a mode that verified no draft says nothing about drafts."""
    if not figures.get("drafted") and mode != PLAIN:
        return NO_DRAFTS
    return verdict(figures.get("throughput", {}))


def _load(case: Mapping[str, Any]) -> tuple[bool, int]:
    return case["cache_full"], case["concurrency"]


def _rows(case: Mapping[str, Any], with_fixed: bool, all_drafters: str) -> list[list[str]]:
    """A row by mode, `auto` as `all_drafters`; the first has the category."""
    rows: list[list[str]] = []
    for mode, figures in case["modes"].items():
        if mode == OFF.name:
            continue
        best = case.get("auto_to_best_fixed") if mode == AUTO.name else None
        fixed = f"{best['ratio']:.2f} of {best['best']}" if best else ""
        rows.append(
            [
                "" if rows else case["category"],
                (all_drafters if mode == AUTO.name else mode) + ("" if figures["equal"] else " NOT EQUAL"),
                ratio_text(figures.get("throughput")),
                _verdict(mode, figures),
                *((fixed,) if with_fixed else ()),
                share_text(figures.get("acceptance")),
                f"{figures['tokens_per_step']:.2f}",
                _value(figures.get("first_token")),
                _value(figures.get("slowest_request")),
                _value(figures.get("token_p99")),
                f"{figures['mean_draft_length']:.1f}" if "mean_draft_length" in figures else "",
                share_text(figures.get("system_efficiency")),
            ]
        )
    return rows


def _show_stages(cells: Sequence[Mapping[str, Any]], all_drafters: str) -> None:
    """Time by stage of `off` and `auto`, side by side."""
    measured = [
        (case_name(cell), mode, cell["modes"][mode]["stage_us_per_token"])
        for cell in cells
        for mode in (OFF.name, AUTO.name)
        if mode in cell["modes"]
    ]
    stages = list(dict.fromkeys(stage for _, _, times in measured for stage in times))
    rows = [
        [
            name,
            all_drafters if mode == AUTO.name else mode,
            *(f"{times.get(stage, 0.0):.0f}" for stage in stages),
        ]
        for name, mode, times in measured
    ]
    title = "microseconds a delivered token, by stage"
    print_table(title, ("cell", "mode", *stages), rows, STAGE_LEGEND)


def _value(figures: Mapping[str, Any] | None) -> str:
    return "" if figures is None else ratio_number(figures["ratio"])
