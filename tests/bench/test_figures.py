"""Figures of `foreword bench speculate` from its rounds."""

import pytest

from foreword.bench.engine import drafting_since
from foreword.bench.figures import best_fixed, mode_figures
from foreword.bench.measurement import BenchRepetition, PairedRun, RequestResult
from foreword.core.outputs import DraftingStats
from foreword.metrics.request_stats import SpecDecodeStats


def repetition_of(
    seconds: float, *results: RequestResult, stats: dict[str, SpecDecodeStats] | None = None
) -> BenchRepetition:
    return BenchRepetition(results, seconds, {"forward": seconds / 2, "draft": seconds / 10}, stats or {})


def result_of(
    number: int,
    first: float,
    total: float,
    gaps: list[tuple[float, int]],
    output: tuple[int, ...] = (1, 2, 3, 4),
) -> RequestResult:
    return RequestResult(
        number, 0, output=output, num_tokens=len(output), ttft_s=first, total_s=total, gaps=gaps
    )


def stats_of(*drafts: tuple[int, int]) -> SpecDecodeStats:
    stats = SpecDecodeStats()
    for drafted, accepted in drafts:
        stats.add(drafted, accepted, accepted + 1)
    return stats


def test_mode_figures_are_ratios_to_plain_decoding() -> None:
    plain = repetition_of(4.0, result_of(0, 0.2, 2.0, [(0.6, 1)] * 3), result_of(1, 0.4, 4.0, [(1.2, 1)] * 3))
    other = repetition_of(
        2.0,
        result_of(0, 0.2, 1.0, [(0.8, 3)]),
        result_of(1, 0.1, 4.0, [(1.2, 3)]),
        stats={"suffix": stats_of((4, 2), (2, 2))},
    )
    figures = mode_figures([PairedRun(plain, other)])
    assert figures["throughput"] == {"ratio": pytest.approx(2.0)}
    assert figures["first_token"]["ratio"] == pytest.approx(2.0), "the geometric mean of 1 and 4"
    assert figures["slowest_request"]["ratio"] == pytest.approx(1.0), "the second gained nothing"
    assert figures["token_p99"]["ratio"] == pytest.approx(3.0), "a burst of three tokens is three thirds"
    assert figures["burst_p99"]["ratio"] == pytest.approx(1.0)
    assert figures["tokens_per_step"] == 2.0
    assert figures["acceptance"] == pytest.approx(4 / 6)
    assert figures["acceptance_by_position"] == [1.0, 1.0, 0.0, 0.0]
    assert figures["mean_draft_length"] == 3.0
    assert figures["system_efficiency"] == pytest.approx(6 / 8)
    assert figures["stage_us_per_token"]["forward"] == pytest.approx(1.0 / 8 * 1e6)
    assert figures["equal"] is True


def test_best_fixed_length_is_chosen_by_case() -> None:
    def pairs(seconds: float) -> list[PairedRun]:
        return [
            PairedRun(
                repetition_of(4.0, result_of(0, 0.1, 1.0, [])),
                repetition_of(seconds, result_of(0, 0.1, 1.0, [])),
            )
        ] * 2

    modes = {"auto": pairs(2.0), "fixed 1": pairs(3.0), "fixed 4": pairs(1.0)}
    best = best_fixed(modes, "auto", ("fixed 1", "fixed 4"))
    assert best is not None and best["best"] == "fixed 4"
    assert best["ratio"] == pytest.approx(0.5)
    lost = best_fixed({"auto": pairs(5.0), "fixed 1": pairs(8.0)}, "auto", ("fixed 1",))
    assert lost is not None and lost["best"] == "off"
    assert lost["ratio"] == pytest.approx(0.8)
    assert best_fixed(modes, "auto", ()) is None


def test_luck_of_one_round_is_no_best_length() -> None:
    """Each round compares with the length that won the other rounds."""

    def pairs(*seconds: float) -> list[PairedRun]:
        plain = repetition_of(4.0, result_of(0, 0.1, 1.0, []))
        return [PairedRun(plain, repetition_of(each, result_of(0, 0.1, 1.0, []))) for each in seconds]

    modes = {"auto": pairs(2.0, 2.0), "fixed 1": pairs(1.0, 4.0), "fixed 4": pairs(4.0, 1.0)}
    best = best_fixed(modes, "auto", ("fixed 1", "fixed 4"))
    assert best is not None and best["ratio"] == pytest.approx(2.0), "what won one round lost the other"


def test_drafting_since_subtracts_earlier_rounds() -> None:
    before = DraftingStats({"suffix": {4: 2}}, {"backoff": 5}, 1.0, 1.0, 0.1)
    after = DraftingStats({"suffix": {4: 2, 8: 3}, "draft": {1: 1}}, {"backoff": 7}, 2.0, 3.0, 0.1)
    since = drafting_since(before, after)
    assert since.draft_length_counts == {"suffix": {8: 3}, "draft": {1: 1}}
    assert since.no_draft_counts == {"backoff": 2}
    assert (since.predicted_seconds, since.realised_seconds, since.exploring_seconds) == (1.0, 2.0, 0.0)
