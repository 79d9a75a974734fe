"""`foreword bench kernels` end to end on tiny shapes: every case is there, no figure that cannot be. No times are asserted."""

import json
from typing import Any

import pytest
import torch

from foreword.bench import kernels as bench_kernels
from foreword.bench.cases import KernelCase, KernelCases
from foreword.bench.common import MATMUL_MAKERS, MemoryReader, matmul_rate
from foreword.bench.kernels import CaseTimings, KernelBenchSizes
from foreword.bench.shapes import SHAPES, WEIGHT_FORMATS, ModelShape, WeightMatrix, read_shape
from foreword.cli.main import main
from foreword.errors import ConfigError
from foreword.kernels.registry import select_backend

TINY = ModelShape(
    "tiny", (WeightMatrix("down", 48, 256, 2), WeightMatrix("head", 100, 32, 1)), 2, 32, 64, 4, 2, 8, 100
)
SIZES = KernelBenchSizes(
    1 << 20, 32, contexts=(40,), prompts=(20,), attention_rows=(1, 3), row_counts=(1, 2), sampler_rows=(1, 2)
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes, and torch's threads as they are."""
    monkeypatch.setattr(bench_kernels, "KernelBenchSizes", lambda: SIZES)
    monkeypatch.setattr(
        bench_kernels, "read_shape", lambda text, working_set: TINY if text == "tiny" else read_shape(text, 1)
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "kernels", "--rounds", "2", "--threads", "1", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    result: dict[str, Any] = json.loads(lines[-1], parse_constant=pytest.fail)
    return result


@pytest.mark.parametrize("isa", ["auto", "reference"])
def test_every_part(isa: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "--shape", "tiny", "--isa", isa, "--kinds", "bfloat16,int8,q4_k", "--rows", "1,3")
    cases = {(case["op"], case["of"], case["rows"]): case for case in result["cases"]}
    assert {of for op, of, _ in cases if op == "linear down"} == {"bfloat16", "int8", "q4_k"}
    assert {of for op, of, _ in cases if op == "linear head"} == {
        "bfloat16",
        "int8",
    }  # 32 values are no block of q4_k
    assert {op for op, _, _ in cases if op.startswith(("decode", "prompt"))} == {"decode at 40", "prompt"}
    assert {"norm", "rope", "gated silu", "greedy", "top-p 0.95"} <= {op for op, _, _ in cases}
    assert all(case["us"] > 0 for case in cases.values())
    assert cases["linear down", "int8", 1]["ratio"] == 1.0
    assert cases["linear down", "int8", 3]["of_peak"] <= 1.0
    assert "of_read" not in cases["norm", "bfloat16 rows", 1]


def test_one_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "--shape", "33x64", "--kinds", "float32", "--rows", "1")
    (case,) = result["cases"]
    assert (case["op"], case["of"]) == ("linear 33x64", "float32")
    assert result["read_gb_s"]["best"] >= result["read_gb_s"]["median"]


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
def test_what_cannot_be_read_names_its_flag(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_a_working_set_is_filled_with_copies() -> None:
    assert read_shape("100x50", 25_000).matrices[0].copies == 3
    with pytest.raises(ConfigError, match="--shape"):
        read_shape("qwen", 1)


def test_shapes_are_those_of_the_models() -> None:
    """Parameters, the head counted once: in the smaller ones it is tied to the embedding."""
    sizes = {name: sum(m.n * m.k * m.copies for m in shape.matrices) for name, shape in SHAPES.items()}
    assert sizes == {
        "qwen2.5-0.5b": 493_961_216,
        "llama-3.2-1b": 1_235_746_816,
        "llama-3.1-8b": 7_504_658_432,
    }


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_weights_of_every_kind_are_finite(name: str) -> None:
    """A random float16 scale would be inf or NaN once in 32 blocks."""
    shape = ModelShape("one", (WeightMatrix("w", 64, 512, 1),))
    (case,) = KernelCases(select_backend("cpu", False, 1, "reference"), shape).linear(name, [2])
    assert torch.isfinite(case.call(None)).all()


def test_shares_are_of_what_was_measured_beside() -> None:
    case = KernelCase("linear", "int8", 2, lambda _: None, 1, num_bytes=100.0, num_ops=10.0)
    done = CaseTimings(case, seconds=[1.0, 2.0, 4.0], bandwidths=[200.0, 200.0, 50.0])
    assert done.bandwidth_share == 0.5
    assert done.ops_per_s == 5.0
    assert done.ratio(CaseTimings(case, seconds=[1.0, 1.0, 1.0])) == 2.0


def test_a_case_prepares_outside_the_time_and_counts_one_operation() -> None:
    seen: list[torch.Tensor | None] = []
    case = KernelCase("x", "y", 1, seen.append, repeats=4, prepare=lambda: torch.ones(1))
    assert case.time_op() >= 0
    assert seen == [torch.ones(1)]


def test_what_the_machine_allows() -> None:
    assert MemoryReader(1 << 16).read_bandwidth() > 0
    assert all(matmul_rate(kind, 32, 1) > 0 for kind in MATMUL_MAKERS)
