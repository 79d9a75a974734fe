"""Results of `foreword bench speculate` as one plot: ratios by load, acceptance by position, time by
stage.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullLocator

from foreword.bench.measurement import AUTO, OFF
from foreword.bench.session import describe_machine

Cells = Sequence[Mapping[str, Any]]
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)
INK, GRID = "#222222", "#dddddd"
# Okabe and Ito's colours, which colour-blind readers tell apart; markers repeat what the colours say.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
MARKERS = "osD^vP*X"
STAGES = {
    "forward": "#0072b2",
    "sample": "#56b4e9",
    "draft": "#d55e00",
    "schedule": "#e69f00",
    "assemble": "#cc79a7",
    "commit": "#999999",
}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write a PNG. Raises OSError."""
    cells: Cells = [cell for cell in result["cells"] if cell["modes"]]
    loads = sorted({(cell["cache_full"], cell["concurrency"]) for cell in cells})
    categories = list(dict.fromkeys(cell["category"] for cell in cells))
    height = 1.6 + 0.42 * len(categories)
    figure = Figure(figsize=(3.0 + 2.9 * max(len(loads), 2), 2 * height + 1.6), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    for axes, load in zip(_subplots(above, len(loads), share=True), loads, strict=True):
        of_load = [cell for cell in cells if (cell["cache_full"], cell["concurrency"]) == load]
        _ratios(axes, of_load, categories, result["modes"], result["rounds"])
    left, right = _subplots(below, 2)
    _acceptance(left, cells, categories)
    _stages(right, cells, loads)
    below.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=len(STAGES), frameon=False
    )
    state = "" if result["complete"] else ", INCOMPLETE"
    title = f"speed with speculation over off: {result['model']}, {result['rounds']} rounds{state}"
    figure.suptitle(f"{title}\n{describe_machine(result)}", color=INK, fontsize=12)
    handles, labels = above.axes[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), frameon=False)
    figure.savefig(file, dpi=130, format="png")


def _subplots(part: Any, count: int, share: bool = False) -> list[Axes]:
    return list(part.subplots(1, count, sharey=share, squeeze=False)[0])


def _ratios(axes: Axes, cells: Cells, categories: Sequence[str], modes: Sequence[str], rounds: int) -> None:
    """A marker for every category and mode, `auto` large; n counts the answers of a mode."""
    shown = [mode for mode in modes if mode != OFF.name]
    for index, mode in enumerate(shown):
        measured = [cell for cell in cells if "throughput" in cell["modes"].get(mode, {})]
        ratios = [cell["modes"][mode]["throughput"] for cell in measured]
        offset = 0.6 * (index + 0.5) / len(shown) - 0.3
        heights = [categories.index(cell["category"]) + offset for cell in measured]
        values = [ratio["ratio"] for ratio in ratios]
        lower = [ratio["ratio"] - ratio.get("low", ratio["ratio"]) for ratio in ratios]
        upper = [ratio.get("high", ratio["ratio"]) - ratio["ratio"] for ratio in ratios]
        size, color = (7, INK) if mode == AUTO.name else (4, COLORS[index % len(COLORS)])
        style: dict[str, Any] = {
            "fmt": MARKERS[index % len(MARKERS)],
            "color": color,
            "markersize": size,
            "linewidth": 1.2,
        }
        axes.errorbar(values, heights, xerr=[lower, upper], label=mode, **style)
        _mark_cut_intervals(axes, cells, ratios, heights, color)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(*_span(cells))
    axes.set_xticks([tick for tick in TICKS if _span(cells)[0] <= tick <= _span(cells)[1]])
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(categories)), categories)
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("times the tokens/s of off (95 % interval; n answers)")
    for cell in cells:
        place = (0.99, categories.index(cell["category"]) - 0.42)
        style = {"ha": "right", "va": "center", "fontsize": 8, "color": "#666666"}
        axes.text(*place, f"n = {cell['requests'] * rounds}", transform=axes.get_yaxis_transform(), **style)
    suffix = ", cache full" if cells[0]["cache_full"] else ""
    axes.set_title(f"{cells[0]['concurrency']} at once{suffix}", fontsize=11)


def _mark_cut_intervals(
    axes: Axes, cells: Cells, ratios: Sequence[Mapping[str, float]], heights: Sequence[float], color: str
) -> None:
    """An arrow at the edge where an interval goes on."""
    low, high = _span(cells)
    cuts = [(low, "<", y) for ratio, y in zip(ratios, heights, strict=True) if ratio.get("low", low) < low]
    cuts += [
        (high, ">", y) for ratio, y in zip(ratios, heights, strict=True) if ratio.get("high", high) > high
    ]
    for edge, marker, height in cuts:
        axes.plot(edge, height, marker, color=color, markersize=5, clip_on=False, zorder=5)


def _span(cells: Cells) -> tuple[float, float]:
    """Limits by the values, not by their intervals: one noisy case must not squeeze all others."""
    figures = [mode for cell in cells for mode in cell["modes"].values() if "throughput" in mode]
    ratios = [mode["throughput"]["ratio"] for mode in figures]
    return min(0.75, *ratios) / 1.1, max(1.6, *ratios) * 1.15


def _acceptance(axes: Axes, cells: Cells, categories: Sequence[str]) -> None:
    """Acceptance of `auto` by position, at the lowest concurrency."""
    least = min(cell["concurrency"] for cell in cells)
    shown = [cell for cell in cells if cell["concurrency"] == least and not cell["cache_full"]]
    shares = {
        cell["category"]: cell["modes"].get(AUTO.name, {}).get("acceptance_by_position", []) for cell in shown
    }
    width = max(map(len, shares.values()), default=0) or 1
    rows = [[*shares.get(name, []), *[float("nan")] * width][:width] for name in categories]
    image = axes.imshow(rows, aspect="auto", vmin=0, vmax=1, cmap="YlGnBu", interpolation="nearest")
    axes.set_yticks(range(len(categories)), categories)
    ticks = range(0, width, max(width // 8, 1))
    axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
    axes.set_xlabel("position in the draft (white: no draft was so long)")
    axes.set_title(f"draft tokens of auto that were accepted, {least} at once", fontsize=11)
    axes.figure.colorbar(image, ax=axes, shrink=0.9, label="share accepted")


def _stages(axes: Axes, cells: Cells, loads: Sequence[tuple[bool, int]]) -> None:
    """Time of a delivered token, mean over categories, each relative to its time without speculation."""
    bars = [(load, mode) for load in loads for mode in (OFF.name, AUTO.name)]
    left = [0.0] * len(bars)
    for stage, color in STAGES.items():
        widths = [_share(cells, load, mode, stage) for load, mode in bars]
        axes.barh(range(len(bars)), widths, left=left, color=color, label=stage, height=0.75)
        left = [total + width for total, width in zip(left, widths, strict=True)]
    axes.axvline(1, color=INK, linewidth=0.8)
    labels = [f"{count} at once, {'cache full, ' if full else ''}{mode}" for (full, count), mode in bars]
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("time of a token (off = 1)")
    axes.set_title("where the time of a token goes", fontsize=11)


def _share(cells: Cells, load: tuple[bool, int], mode: str, stage: str) -> float:
    of_load = [cell["modes"] for cell in cells if (cell["cache_full"], cell["concurrency"]) == load]
    shares = [
        modes[mode]["stage_us_per_token"].get(stage, 0.0)
        / sum(modes[OFF.name]["stage_us_per_token"].values())
        for modes in of_load
        if mode in modes
    ]
    return statistics.fmean(shares) if shares else 0.0
