"""Compiled sampling kernels: rounding as in the reference, no spilled registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from foreword.kernels.triton import topk
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, argument_types, compile_all

PACKAGE = "foreword.kernels.triton."
BLOCK, NUM_BLOCKS = 2048, 128  # of 151,936 ids and of 256,000
ROWS = "logits:*fp32 stride:i32 V:i32"
PREFIX = "block_maxes,block_expsums,block_entropies,sums,prefixes,last_sums:*i64"
XTC = f"{ROWS} seeds,positions:*i64 probabilities,thresholds:*fp64 block_maxes,block_expsums,last:*i64"
BLOCK_SHAPE: Mapping[str, Any] = {"WIDTH": NUM_BLOCKS, "BLOCK": BLOCK}
FILTERS = {"i64": topk.TOP_K.value, "fp64": topk.TYPICAL_P.value}
# Kernels that could spill: compiled for the older GPU too.
SPILL_PRONE = ("_block_expsum_kernel", "_block_best_kernel", "_digit_histogram_kernel", "_mask_rest_kernel")
PER_ROW = {"bounds", "p", "n", "temperatures", "seeds", "positions", "greedy", "probabilities", "thresholds"}
SPECIALIZED = """
import importlib, json, sys
specialized = []
for kernel in sys.argv[1:]:
    module, name = kernel.split(":")
    for param in getattr(importlib.import_module("foreword.kernels.triton." + module), name).params:
        specialized += [[param.name, "value"]] * (not param.do_not_specialize)
        specialized += [[param.name, "place"]] * (not param.do_not_specialize_on_alignment)
print(json.dumps(specialized))
"""


def kernels() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """(module:kernel, arguments, constants, warps)"""
    yield (
        "topk:_block_max_kernel",
        f"{ROWS} bounds:*fp64 block_maxes:*i64 sums:*i64",
        {"FILTER": topk.TOP_P.value, "BLOCK": BLOCK},
        8,
    )
    any_row = {"FILTER": topk.NO_FILTER.value, **BLOCK_SHAPE}
    yield "topk:_block_expsum_kernel", f"{ROWS} bounds:*fp32 block_maxes:*i64 block_expsums:*i64", any_row, 8
    keys = "seeds:*i64 positions:*i64 greedy:*u8"
    yield (
        "sampling:_block_best_kernel",
        f"{ROWS} {keys} block_maxes:*i64 best_ids:*i32 rivals:*fp32",
        {"BLOCK": BLOCK},
        8,
    )
    yield (
        "sampling:_row_argmax_kernel",
        f"{ROWS} {keys} block_maxes:*i64 best_ids:*i32 rivals:*fp32 out:*i64 count:i32",
        {"IDS": 256, **BLOCK_SHAPE},
        4,
    )
    yield (
        "topk:_log_sum_exp_kernel",
        "block_maxes:*i64 block_expsums:*i64 out:*fp32 count:i32",
        {"WIDTH": NUM_BLOCKS},
        1,
    )
    yield "topk:_block_top_ids_kernel", f"{ROWS} block_keys:*i64 K:i32", {"BLOCK": BLOCK}, 8
    yield (
        "topk:_row_top_ids_kernel",
        "block_keys:*i64 out:*i64 count:i32 K:i32",
        {"WIDTH": 64 * NUM_BLOCKS},
        8,
    )
    yield (
        "sampling:_apply_mask_kernel",
        f"{ROWS} masks:*i32 mask_stride:i32 num_words:i32",
        {"BLOCK": BLOCK},
        8,
    )
    yield "sampling:_add_bias_kernel", f"{ROWS} starts:*i64 ids:*i64 biases:*fp32", {"IDS": 256}, 4
    yield (
        "sampling:_repetition_penalty_kernel",
        f"{ROWS} starts:*i64 ids:*i64 penalties:*fp32",
        {"IDS": 256},
        4,
    )
    yield "sampling:_temperature_kernel", f"{ROWS} temperatures:*fp32", {"BLOCK": BLOCK}, 8
    yield "sampling:_min_p_kernel", f"{ROWS} p:*fp64 block_maxes:*i64", dict(BLOCK_SHAPE), 8
    moments = "block_maxes:*i64 counts:*i64 sums:*i64 squares:*i64"
    yield "sampling:_moments_kernel", f"{ROWS} {moments}", dict(BLOCK_SHAPE), 8
    yield "sampling:_top_n_sigma_kernel", f"{ROWS} n:*fp64 {moments}", dict(BLOCK_SHAPE), 8
    yield "sampling:_xtc_last_kernel", XTC, dict(BLOCK_SHAPE), 8
    yield "sampling:_xtc_kernel", XTC, dict(BLOCK_SHAPE), 8
    yield (
        "topk:_entropy_kernel",
        f"{ROWS} p:*fp64 block_maxes:*i64 block_entropies:*i64",
        dict(BLOCK_SHAPE),
        8,
    )
    for bound, kind in FILTERS.items():
        constants = {"FILTER": kind, **BLOCK_SHAPE}
        yield "topk:_digit_histogram_kernel", f"{ROWS} bounds:*{bound} {PREFIX} index:i32", constants, 8
        yield "topk:_mask_rest_kernel", f"{ROWS} bounds:*{bound} {PREFIX}", constants, 8


def compile_kernels(capability: int) -> list[tuple[str, KernelBinary]]:
    """With dependent launch on Hopper."""
    sources = []
    for kernel, arguments, constants, warps in kernels():
        if capability != 90 and not kernel.endswith(SPILL_PRONE):
            continue
        types = argument_types(arguments)
        divisible = [name for name, kind in types.items() if kind[0] == "*" or name in ("stride", "V")]
        sources.append(
            KernelSource(
                PACKAGE + kernel,
                types,
                {**constants, "PDL": capability == 90},
                capability,
                warps,
                enable_fp_fusion=False,
                divisible=divisible,
            )
        )
    made = compile_all(sources)
    assert all(each.shared <= MAX_SHARED[capability] for each in made)
    return [(source.kernel, each) for source, each in zip(sources, made, strict=True)]


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request: pytest.FixtureRequest) -> list[tuple[str, KernelBinary]]:
    return compile_kernels(request.param)


def test_operations_round_to_nearest_unfused(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        assert not made.count(r"\bfma\b"), kernel
        assert not made.count(r"\.ftz\b|\.approx\b|div\.full"), kernel
        assert made.count(r"\b(?:div|sqrt)\.") == made.count(r"\b(?:div|sqrt)\.rn\.f(?:32|64)\b"), kernel
        assert not made.count(r"\b(?:add|sub|mul)\.f(?:32|64)\b"), (
            f"{kernel}: the assembler may fuse operations without explicit rounding"
        )


def test_no_register_is_spilled(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        assert made.stack == made.spills == 0, kernel


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_dependent_kernels_wait_before_they_read_or_write(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        before, after = made.ptx.split("griddepcontrol.wait")
        assert not re.search(r"\b(?:ld|st|atom)\.global", before), kernel
        assert "griddepcontrol.launch_dependents" in after, kernel


def test_rows_are_read_in_vectors(compiled: list[tuple[str, KernelBinary]]) -> None:
    for kernel, made in compiled:
        if kernel.endswith(
            (
                "_block_max_kernel",
                "_block_expsum_kernel",
                "_temperature_kernel",
                "_digit_histogram_kernel",
                "_block_best_kernel",
            )
        ):
            assert made.count(r"ld\.global\.v[24]\."), kernel


def test_request_parameters_do_not_recompile_kernels() -> None:
    """Nor does the alignment of a line in a table of requests."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", SPECIALIZED, *(name for name, *_ in kernels())]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    specialized = {(name, how) for name, how in json.loads(run.stdout)}
    assert ("logits", "place") in specialized and ("V", "value") in specialized
    assert not {(name, "place") for name in PER_ROW} & specialized
    assert not {("K", "value"), ("index", "value"), ("index", "place")} & specialized
