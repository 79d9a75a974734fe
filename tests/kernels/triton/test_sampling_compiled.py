"""What sampling's kernels become on cards that need not be here: rounding as the reference has it, and no spilled registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from foreword.kernels.triton import ranks, selection
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, compile_all

PACKAGE = "foreword.kernels.triton."
BLOCK, PARTS = 2048, 128  # of 151,936 ids and of 256,000
ROWS = "logits:*fp32 stride:i32 V:i32"
RUN = "peaks:*i64 masses:*i64 shares:*i64 sums:*i64 last_sums:*i64"
COIN = f"{ROWS} seeds:*i64 positions:*i64 chances:*fp64 thresholds:*fp64 peaks:*i64 masses:*i64 last:*i64"
SHARED_BY_PARTS: Mapping[str, Any] = {"WIDTH": PARTS, "BLOCK": BLOCK}
FILTERS = {"i64": ranks.TOP_K.value, "fp64": ranks.TYPICAL_P.value}
HEAVY = (
    "_masses",
    "_best_of_parts",
    "_add_by_digit",
    "_keep_run",
)  # what could spill: compiled for the older card as well
OF_ROWS = {"bounds", "p", "n", "by", "seeds", "positions", "greedy", "chances", "thresholds"}
SPECIALIZED = """
import importlib, json, sys
found = []
for kernel in sys.argv[1:]:
    module, name = kernel.split(":")
    for one in getattr(importlib.import_module("foreword.kernels.triton." + module), name).params:
        found += [[one.name, "value"]] * (not one.do_not_specialize)
        found += [[one.name, "place"]] * (not one.do_not_specialize_on_alignment)
print(json.dumps(found))
"""


def kernels() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """(module:kernel, arguments, constants, warps)"""
    yield "ranks:_peaks", f"{ROWS} bounds:*fp64 peaks:*i64", {"FILTER": ranks.TOP_P.value, "BLOCK": BLOCK}, 8
    any_row = {"FILTER": ranks.NO_FILTER.value, **SHARED_BY_PARTS}
    yield "ranks:_masses", f"{ROWS} bounds:*fp32 peaks:*i64 masses:*i64", any_row, 8
    keys = "seeds:*i64 positions:*i64 greedy:*u8"
    yield "sample:_best_of_parts", f"{ROWS} {keys} peaks:*i64 best:*i64", {"BLOCK": BLOCK}, 8
    yield "sample:_best_of_rows", "peaks:*i64 best:*i64 out:*i64", {"count": 1, "WIDTH": 1}, 1
    yield "reduce:_log_sum", "peaks:*i64 masses:*i64 out:*fp32 count:i32", {"WIDTH": PARTS}, 1
    yield "reduce:_first_of_parts", f"{ROWS} found:*i64 K:i32", {"BLOCK": BLOCK}, 8
    yield "reduce:_first_of_rows", "found:*i64 out:*i64 count:i32 K:i32", {"WIDTH": 64 * PARTS}, 8
    yield "masks:_keep_allowed", f"{ROWS} masks:*i32 mask_stride:i32 num_words:i32", {"BLOCK": BLOCK}, 8
    yield "penalties:_add_at", f"{ROWS} starts:*i64 ids:*i64 amounts:*fp32", {"IDS": 256}, 4
    yield "penalties:_penalize", f"{ROWS} starts:*i64 ids:*i64 penalties:*fp32", {"IDS": 256}, 4
    yield "penalties:_divide", f"{ROWS} by:*fp32", {"BLOCK": BLOCK}, 8
    yield "filters:_keep_min_p", f"{ROWS} p:*fp64 peaks:*i64", dict(SHARED_BY_PARTS), 8
    moments = "peaks:*i64 counts:*i64 sums:*i64 squares:*i64"
    yield "filters:_moments", f"{ROWS} {moments}", dict(SHARED_BY_PARTS), 8
    yield "filters:_keep_top_n_sigma", f"{ROWS} n:*fp64 {moments}", dict(SHARED_BY_PARTS), 8
    yield "filters:_last_reaching", COIN, dict(SHARED_BY_PARTS), 8
    yield "filters:_exclude_top", COIN, dict(SHARED_BY_PARTS), 8
    yield "selection:_add_shares", f"{ROWS} p:*fp64 peaks:*i64 shares:*i64", dict(SHARED_BY_PARTS), 8
    for bound, kind in FILTERS.items():
        last = {"PLACE": selection.NUM_DIGITS.value - 1, "FILTER": kind, **SHARED_BY_PARTS}
        yield "selection:_add_by_digit", f"{ROWS} bounds:*{bound} {RUN}", last, 8
        yield "selection:_keep_run", f"{ROWS} bounds:*{bound} {RUN}", {"FILTER": kind, **SHARED_BY_PARTS}, 8
    strides = "sampled:*i64 sampled_stride:i32 drafts:*i64 drafts_stride:i32 num_draft:*i64 out:*i64"
    yield "match:_match", strides, {"WIDTH": 8}, 1


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request: pytest.FixtureRequest) -> list[tuple[str, KernelBinary]]:
    sources = []
    for kernel, arguments, constants, warps in kernels():
        if request.param != 90 and not kernel.endswith(HEAVY):
            continue
        types = dict(argument.split(":") for argument in arguments.split())
        divisible = [name for name, kind in types.items() if kind[0] == "*" or name in ("stride", "V")]
        sources.append(
            KernelSource(
                PACKAGE + kernel,
                types,
                constants,
                request.param,
                warps,
                enable_fp_fusion=False,
                divisible=divisible,
            )
        )
    made = compile_all(sources)
    assert all(each.shared <= MAX_SHARED[request.param] for each in made)
    return [(source.kernel, each) for source, each in zip(sources, made, strict=True)]


def test_every_operation_rounds_to_nearest_and_none_is_fused(
    compiled: list[tuple[str, KernelBinary]],
) -> None:
    for kernel, made in compiled:
        assert not made.count(r"\bfma\b"), kernel
        assert not made.count(r"\.ftz\b|\.approx\b|div\.full"), kernel
        assert made.count(r"\b(?:div|sqrt)\.") == made.count(r"\b(?:div|sqrt)\.rn\.f(?:32|64)\b"), kernel
        assert not made.count(r"\b(?:add|sub|mul)\.f(?:32|64)\b"), (
            f"{kernel}: the assembler may fuse what has no rounding of its own"
        )


def test_no_register_is_spilled(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        assert made.stack == made.spills == 0, kernel


def test_rows_are_read_in_vectors(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        if kernel.endswith(("_peaks", "_masses", "_divide", "_add_by_digit", "_best_of_parts")):
            assert made.count(r"ld\.global\.v[24]\."), kernel


def test_nobody_waits_for_a_compiler_because_of_what_requests_ask_for() -> None:
    """Nor because a line of a table begins where Triton would compile the kernel once more: with one request every line does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", SPECIALIZED, *(name for name, *_ in kernels())]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {(name, how) for name, how in json.loads(told.stdout)}
    assert ("logits", "place") in found and ("V", "value") in found
    assert not {(name, "place") for name in OF_ROWS} & found
    assert ("K", "value") not in found
