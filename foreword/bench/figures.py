"""From rounds to figures: ratios to plain decoding with 95 % intervals, acceptance, time by stage.

Above 1 a ratio is better than plain decoding. It is taken within each pair of neighbouring rounds; the
figure is the geometric mean over the pairs, with the interval of Student's t over their logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from foreword.bench.measurement import BenchRepetition, PairedRun, RequestResult
from foreword.bench.statistics import Ratio, geometric_mean, geometric_mean_ratio, percentile
from foreword.core.outputs import DraftingStats
from foreword.metrics.request_stats import SpecDecodeStats

TAIL = 99  # percent


def mode_figures(pairs: Sequence[PairedRun]) -> dict[str, Any]:
    """Figures of one mode in one case; a ratio without samples is absent."""
    tokens = [value for pair in pairs if (value := _tail_latencies(pair, _per_token))]
    bursts = [value for pair in pairs if (value := _tail_latencies(pair, _per_burst))]
    ratios = {
        "throughput": geometric_mean_ratio([_rate(pair.other) / _rate(pair.plain) for pair in pairs]),
        "first_token": geometric_mean_ratio([_first_token(pair) for pair in pairs]),
        "token_p99": geometric_mean_ratio(tokens),
        "burst_p99": geometric_mean_ratio(bursts),
        "slowest_request": _slowest_request(pairs),
    }
    shown = {name: ratio.as_dict() for name, ratio in ratios.items() if ratio is not None}
    return {
        **shown,
        **repetition_figures([pair.other for pair in pairs]),
        "equal": all(pair.has_equal_outputs for pair in pairs),
    }


def repetition_figures(repetitions: Sequence[BenchRepetition]) -> dict[str, Any]:
    """Figures without a comparison: rates, acceptance, stages."""
    stats = merge_draft_stats(one.draft_stats for one in repetitions)
    tokens = sum(one.num_tokens for one in repetitions)
    figures: dict[str, Any] = {
        "tokens_per_second": statistics.median(_rate(one) for one in repetitions),
        "tokens_per_step": tokens / sum(one.bursts for one in repetitions),
        "preemptions": sum(one.preemptions for one in repetitions),
        "stage_us_per_token": _stages(repetitions, tokens),
        "drafters": {name: _draft_figures(of_drafter) for name, of_drafter in stats.items()},
    }
    if stats:
        figures |= _draft_figures(_merge_stats(stats.values()))
    decided = [one.drafting for one in repetitions if one.drafting is not None]
    return figures | (_decisions(decided, sum(one.seconds for one in repetitions)) if decided else {})


def best_fixed(
    pairs: Mapping[str, Sequence[PairedRun]], auto: str, fixed: Sequence[str]
) -> dict[str, Any] | None:
    """`auto` over the best fixed length of this case, by round; `off` is length 0.

    Each round compares with the length that was best in the other rounds: the fastest of many noisy figures
    of one round is mostly lucky.
    """
    if not fixed:
        return None
    rates = {name: [_rate(pair.other) for pair in pairs[name]] for name in (auto, *fixed)}
    auto_rates = rates.pop(auto)
    rates = {"off": [_rate(pair.plain) for pair in pairs[auto]], **rates}
    logs = {name: [math.log(rate) for rate in values] for name, values in rates.items()}

    def best_without(number: int | None) -> str:
        return max(logs, key=lambda name: sum(logs[name]) - (0.0 if number is None else logs[name][number]))

    others = [best_without(number if len(auto_rates) > 1 else None) for number in range(len(auto_rates))]
    ratio = geometric_mean_ratio(
        [rate / rates[name][n] for n, (rate, name) in enumerate(zip(auto_rates, others, strict=True))]
    )
    assert ratio is not None, "a case without rounds"
    return {"best": best_without(None), **ratio.as_dict()}


def merge_draft_stats(repetitions: Iterable[Mapping[str, SpecDecodeStats]]) -> dict[str, SpecDecodeStats]:
    """Draft statistics of all rounds, by drafter."""
    by_name: dict[str, list[SpecDecodeStats]] = {}
    for repetition in repetitions:
        for name, stats in repetition.items():
            by_name.setdefault(name, []).append(stats)
    return {name: _merge_stats(stats) for name, stats in by_name.items()}


def _merge_stats(stats: Iterable[SpecDecodeStats]) -> SpecDecodeStats:
    total = SpecDecodeStats()
    for part in stats:
        total.merge(part)
    return total


def _draft_figures(stats: SpecDecodeStats) -> dict[str, Any]:
    """Acceptance by position is the share accepted of the drafts that reached it."""
    return {
        "acceptance": stats.acceptance_rate,
        "acceptance_by_position": list(stats.acceptance_per_position),
        "mean_draft_length": stats.num_drafted / stats.num_verify_steps,
        "mean_acceptance_length": stats.mean_acceptance_len,
        "system_efficiency": stats.system_efficiency,
        "drafted": stats.num_drafted,
        "verify_steps": stats.num_verify_steps,
    }


def _decisions(decided: Sequence[DraftingStats], seconds: float) -> dict[str, Any]:
    """Reasons for no draft, predicted over real step time, and the share of time spent exploring."""
    reasons: Counter[str] = Counter()
    for one in decided:
        reasons.update(one.no_draft_counts)
    realised = sum(one.realised_seconds for one in decided)
    figures: dict[str, Any] = {"exploring_share": sum(one.exploring_seconds for one in decided) / seconds}
    if realised:
        figures["predicted_to_realised"] = sum(one.predicted_seconds for one in decided) / realised
    return figures | ({"no_draft": dict(reasons)} if reasons else {})


def _rate(one: BenchRepetition) -> float:
    return one.num_tokens / one.seconds


def matched_results(pair: PairedRun) -> Iterator[tuple[RequestResult, RequestResult]]:
    """The same request in both rounds; a later turn may lack where answers differ."""
    others = {result.key: result for result in pair.other.results}
    return ((result, others[result.key]) for result in pair.plain.results if result.key in others)


def _first_token(pair: PairedRun) -> float:
    """Geometric mean over requests, so that a short prompt counts as much as a long one."""
    times = [(plain.ttft_s, other.ttft_s) for plain, other in matched_results(pair)]
    ratios = [plain / other for plain, other in times if plain and other]
    return geometric_mean(ratios) if ratios else 1.0


def _per_token(results: Iterable[RequestResult]) -> list[float]:
    """Seconds of each token after the first burst: m tokens after t seconds count m times t / m, as in
    /metrics.
    """
    return [gap_s / count for result in results for gap_s, count in result.gaps for _ in range(count)]


def _per_burst(results: Iterable[RequestResult]) -> list[float]:
    """Seconds that a reader waits for the next burst."""
    return [gap_s for result in results for gap_s, _ in result.gaps]


def _tail_latencies(
    pair: PairedRun, seconds: Callable[[Iterable[RequestResult]], list[float]]
) -> float | None:
    plain, other = (percentile(seconds(one.results), TAIL) for one in (pair.plain, pair.other))
    return plain / other if plain and other else None


def _slowest_request(pairs: Sequence[PairedRun]) -> Ratio | None:
    """The ratio of the request that gained least, over its whole time."""
    by_request: dict[tuple[int, int], list[float]] = {}
    for pair in pairs:
        for plain, other in matched_results(pair):
            by_request.setdefault(plain.key, []).append(plain.total_s / other.total_s)
    ratios = [ratio for of_request in by_request.values() if (ratio := geometric_mean_ratio(of_request))]
    return min(ratios, key=lambda ratio: ratio.value, default=None)


def _stages(repetitions: Sequence[BenchRepetition], tokens: int) -> dict[str, float]:
    """Microseconds per delivered token, by stage."""
    total: Counter[str] = Counter()
    for one in repetitions:
        total.update(one.stages)
    return {stage: seconds / tokens * 1e6 for stage, seconds in total.items()}
