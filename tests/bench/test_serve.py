"""Figures of `foreword bench serve` from its rounds."""

import pytest

from foreword.bench.measurement import AUTO, BenchCase, BenchRepetition, PairedRun, RequestResult
from foreword.bench.serve import summarize

CASE = BenchCase("requests", 2, lambda variant: ())


def run_of(*outputs: int, seconds: float = 1.0, error: str | None = None) -> BenchRepetition:
    results = (
        RequestResult(
            number, 0, output=(output,) * 10, num_tokens=10, ttft_s=0.1, gaps=[(0.01, 9)], total_s=0.5
        )
        for number, output in enumerate(outputs)
    )
    run = BenchRepetition(tuple(results), seconds, {}, {})
    run.results[0].error = error
    return run


def test_summary_compares_throughput_and_answers() -> None:
    plain, fast = run_of(1, 2, seconds=2.0), run_of(1, 2, seconds=1.0)
    result = summarize(CASE, (AUTO,), {"auto": [PairedRun(plain, fast)]})
    assert (result["answered_all"], result["equal"]) == (True, True)
    assert result["throughput"] == {"ratio": pytest.approx(2.0)}
    assert result["modes"]["auto"]["tokens_per_second"] == 20.0
    assert result["modes"]["off"]["ttft_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert not summarize(CASE, (AUTO,), {"auto": [PairedRun(plain, run_of(1, 3))]})["equal"]


def test_round_with_an_error_has_no_figures() -> None:
    failed = PairedRun(run_of(1, 2), run_of(1, 2, error="503"))
    result = summarize(CASE, (AUTO,), {"auto": [failed]})
    assert (result["answered_all"], result["request_errors"], result["modes"]) == (False, ["503"], {})
    assert summarize(CASE, (AUTO,), {"auto": [failed, PairedRun(run_of(1), run_of(1))]})["modes"]
