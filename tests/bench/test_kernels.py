"""`foreword bench kernels` on tiny shapes: every case is present and no share is impossible."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from foreword.bench import kernels
from foreword.bench.kernels import CaseTimings, KernelBenchSizes, KernelCase, KernelCases
from foreword.bench.roofline import PEAK_TYPES, MemoryReader, product_rate
from foreword.bench.shapes import WEIGHT_FORMATS, ExpertsShape, ModelShape, WeightMatrix, read_shape
from foreword.cli.main import main
from foreword.errors import ConfigError
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.registry import select_backend

MATRICES = (WeightMatrix("down", 48, 256, 2), WeightMatrix("head", 100, 32, 1))
TINY = ModelShape("tiny", MATRICES, 2, 32, 64, 4, 2, 8, 100)
SIZES = KernelBenchSizes(
    1 << 20,
    1 << 16,
    contexts=(40,),
    prompts=(20,),
    attention_rows=(1, 3),
    row_counts=(1, 2),
    sampler_rows=(1, 2),
    experts=ExpertsShape(num_experts=6, top_k=2, hidden=256, inner=256),
    expert_rows=(1, 3),
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sizes; torch keeps its threads."""
    monkeypatch.setattr(kernels, "KernelBenchSizes", lambda: SIZES)
    monkeypatch.setattr(kernels, "shared_cache_bytes", lambda: 1 << 24)
    read = lambda text, working_set: TINY if text == "tiny" else read_shape(text, 1)  # noqa: E731
    monkeypatch.setattr(kernels, "read_shape", read)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "kernels", "--rounds", "2", "--threads", "1", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    return result


@pytest.mark.full
@pytest.mark.parametrize("isa", ["auto", "reference"])
def test_bench_kernels_measures_every_part(isa: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "--shape", "tiny", "--isa", isa, "--kinds", "bfloat16,int8,q4_k", "--rows", "1,3")
    cases = {(case["op"], case["of"], case["rows"]): case for case in result["cases"]}
    assert {of for op, of, _ in cases if op == "linear down"} == {"bfloat16", "int8", "q4_k"}
    head = {of for op, of, _ in cases if op == "linear head"}
    assert head == {"bfloat16", "int8"}, "32 values are no block of q4_k"
    experts = {(of, rows) for op, of, rows in cases if op == "experts 2 of 6"}
    assert experts == {(of, rows) for of in ("bfloat16", "int8", "q4_k") for rows in (1, 3)}
    matrix_bytes = 3 * 256 * 256 * 2 * 144 / 256  # of two experts
    one = cases["experts 2 of 6", "q4_k", 1]
    assert one["gb_s"] * one["us"] * 1e3 == pytest.approx(matrix_bytes + 4 * 6 * 256)
    assert {op for op, _, _ in cases if op.startswith(("decode", "prompt"))} == {"decode at 40", "prompt"}
    assert {"norm", "rope", "gated silu", "greedy", "top-p 0.95"} <= {op for op, _, _ in cases}
    assert all(case["us"] > 0 for case in cases.values())
    assert cases["linear down", "int8", 1]["ratio"] == 1.0
    assert 0 < cases["linear down", "int8", 3]["of_peak"] <= 1.05
    decode = cases["decode at 40", "attention, int8 KV", 3]
    assert decode["gb_s"] * decode["us"] * 1e3 == pytest.approx(2 * 40 * 2 * (8 + 4)), "values and scales"
    assert decode["gop_s"] * decode["us"] * 1e3 == pytest.approx(3 * 4 * 4 * 8 * 40), "rows share the reading"
    assert 0 < decode["of_limit"] <= 1.05
    assert not any("of_read" in case for case in cases.values()), "all of it fits into a cache"


def test_bench_kernels_measures_one_matrix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "shared_cache_bytes", lambda: 0)
    monkeypatch.setattr(MemoryReader, "read_bandwidth", lambda self: 1e18)
    result = bench(capsys, "--shape", "33x64", "--kinds", "float32", "--rows", "1")
    (case,) = result["cases"]
    assert (case["op"], case["of"]) == ("linear 33x64", "float32")
    assert 0 < case["of_read"] < 1e-3
    assert result["read_gb_s"]["best"] == result["read_gb_s"]["median"] == 1e9


def test_limit_is_the_longer_of_reading_and_products() -> None:
    case = KernelCase("decode", "", 4, lambda _: None, 1, num_bytes=600.0, num_ops=200.0)
    timings = CaseTimings(case, [8.0, 10.0, 12.0], [100.0, 200.0, 300.0])
    assert timings.limit_share(100.0) == pytest.approx(0.3), "6, 3 and 2 s of 8, 10 and 12"
    assert timings.limit_share(25.0) == pytest.approx(0.8), "products take 8 s"
    assert CaseTimings(case, [4.0]).limit_share(100.0) == 0.5, "the data fits into a cache"


def test_fastest_call_is_the_ceiling_where_no_loop_is() -> None:
    """Rounds of 1 and 3 s are 2/3 of the median's time on average, so the median's rate would be exceeded."""
    timings = CaseTimings(KernelCase("decode", "", 1, lambda _: None, 1, 0.0, 12.0, "bfloat16"), [1.0, 3.0])
    peak = kernels._largest_rate([timings], "bfloat16")
    assert peak == 12.0
    assert timings.limit_share(peak) == pytest.approx(2 / 3)
    assert kernels._largest_rate([timings], "int8") == 0.0


@pytest.mark.parametrize(("loops", "code"), [((1e3, 1e3), 1), ((1e15, 1e3), 0)])
def test_wrong_ceiling_voids_the_share(
    loops: tuple[float, float], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ceilings are read before and after the cases; the larger counts."""
    rates = iter(rate for rate in loops for _ in range(2))
    monkeypatch.setattr(kernels, "product_rate", lambda *_: next(rates))
    words = ["--shape", "33x64", "--kinds", "float32", "--rows", "1", "--rounds", "1", "--threads", "1"]
    assert main(["bench", "kernels", *words]) == code
    shown = capsys.readouterr()
    (case,) = json.loads(shown.out.splitlines()[-1])["cases"]
    assert (case["of_peak"] is None) == bool(code)
    assert ("the ceiling is wrong" in shown.err) == ("not measured" in shown.out) == bool(code)


def test_row_with_other_bits_among_others_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pick = ReferenceOps.index_rows
    monkeypatch.setattr(ReferenceOps, "index_rows", lambda self, x, rows: pick(self, x, rows * 0))
    words = ["--shape", "33x64", "--kinds", "float32", "--rows", "1,3", "--rounds", "1", "--threads", "1"]
    assert main(["bench", "kernels", *words, "--isa", "reference"]) == 1
    assert "row 3 has the same bits among 3 rows as alone" in capsys.readouterr().err


@pytest.mark.parametrize("isa", supported_isas())
def test_loop_on_registers_is_the_ceiling(isa: str) -> None:
    rates = [product_rate(isa, dtype, 1, 1) for dtype in PEAK_TYPES]
    assert all(rates) or (isa in ("portable", "neon", "avx2-vnni") and not any(rates))
    assert product_rate("reference", "int8", 1, 1) is None


@pytest.mark.parametrize(
    "words",
    [
        ("--kinds", "int8,int9"),
        ("--parts", "all"),
        ("--rows", "1,x"),
        ("--rows", "0"),
        ("--shape", "12"),
        ("--shape", "0x4"),
    ],
)
def test_invalid_flag_is_named(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_read_shape_fills_the_working_set_with_copies() -> None:
    assert read_shape("100x50", 25_000).matrices[0].copies == 3
    with pytest.raises(ConfigError, match="--shape"):
        read_shape("qwen", 1)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_random_weights_give_finite_outputs(name: str) -> None:
    shape = ModelShape("one", (WeightMatrix("w", 64, 512, 1),))
    (case,) = KernelCases(select_backend("cpu", False, 1, "reference"), shape).linear(name, [2])
    assert torch.isfinite(case.call(None)).all()


def test_case_timings_are_medians_over_rounds() -> None:
    case = KernelCase("linear", "int8", 2, lambda _: None, 1, num_bytes=100.0, num_ops=10.0)
    timings = CaseTimings(case, seconds=[1.0, 2.0, 4.0], bandwidths=[200.0, 200.0, 50.0])
    assert timings.bandwidth_share == 0.5
    assert timings.ops_per_s == 5.0
    assert timings.ratio(CaseTimings(case, seconds=[1.0, 1.0, 1.0])) == 2.0


@pytest.mark.full
def test_command_of_the_shell_imports_all_of_torch() -> None:
    """An import of torch without its kernels for the meta device once broke its generators."""
    words = "bench kernels --shape 33x64 --kinds float32 --rows 1 --rounds 1 --threads 1 --isa reference"
    result = subprocess.run(
        [sys.executable, "-m", "foreword", *words.split()], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
