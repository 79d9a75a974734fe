"""MetricsRecorder: scripted events, exact values, no NaN."""

import logging
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.core.finish import Repetition
from foreword.core.outputs import DraftingStats, DraftResult, KVTierStats, StepStats, TokenEvent, truncate
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.errors import RequestFailed
from foreword.metrics.definitions import CATALOG, INFO_LABELS, PREFIX, VLLM_METRICS
from foreword.metrics.logging_stats import format_speculation
from foreword.metrics.recorder import MAX_FINISHED_STATS, MetricsRecorder
from foreword.metrics.request_stats import SpecDecodeStats


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(id_: str = "a", prompt: int = 10, seed: int = 7, **params: object) -> Request:
    return Request(id_, tuple(range(prompt)), SamplingParams(**params), seed, arrival_s=100.0)  # type: ignore[arg-type]


def tokens(
    index: int, count: int, use: DraftResult | None = None, reason: str | None = None, **more: object
) -> TokenEvent:
    return TokenEvent(
        "a", index, tuple(range(count)), draft=use, finish_reason=reason, scheduled_s=101.0, **more
    )  # type: ignore[arg-type]


def scrape(recorder: MetricsRecorder) -> dict[tuple[str, ...], float]:
    """Series by (name without prefix, *label values)."""
    families = text_string_to_metric_families(recorder.render().decode())
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.name.startswith(PREFIX) for sample in samples)
    return {(sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value for sample in samples}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> MetricsRecorder:
    return MetricsRecorder(("ngram",), clock=clock)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Log lines of the metrics."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    caplog.set_level(logging.INFO, logger="foreword.metrics")
    logging.getLogger("foreword.metrics").addHandler(handler)
    yield texts
    logging.getLogger("foreword.metrics").removeHandler(handler)


def record(recorder: MetricsRecorder, *events: TokenEvent, **params: object) -> Request:
    """A request whose events come 2 s after its arrival, and every second from then on."""
    submitted = request(**params)  # type: ignore[arg-type]
    recorder.on_submit(submitted)
    for number, event in enumerate(events):
        recorder.on_tokens(submitted, event, 102.0 + number)
    return submitted


def play(recorder: MetricsRecorder, clock: Clock) -> Request:
    """First token after 2 s, 5 tokens of 6 verified rows 1 s later, a draft cut by a stop string."""
    submitted = request()
    recorder.on_submit(submitted)
    recorder.on_tokens(submitted, tokens(0, 1, num_cached=4), 102.0)
    recorder.on_tokens(submitted, tokens(1, 4, DraftResult("ngram", 4, 3)), 103.0)
    run = tokens(5, 5, DraftResult("ngram", 4, 4))
    clock.now = 104.0
    recorder.on_tokens(submitted, truncate(run, 2, "stop"), 104.0)
    return submitted


def test_drafters_of_replicas_are_counted_that_were_unknown_at_the_start(clock: Clock) -> None:
    """Engines of other machines may be started with further drafters."""
    recorder = MetricsRecorder((), clock=clock, speculative=True)
    recorder.on_submit(request())
    recorder.on_tokens(request(), tokens(0, 3, DraftResult("suffix", 4, 2)), clock.now)
    recorder.on_step(StepStats(step=1, drafter_errors={"own": 1}))
    series = scrape(recorder)
    assert series["spec_draft_tokens_total", "suffix"] == 4
    assert series["spec_drafter_errors_total", "own"] == 1


def test_tokens_are_counted_after_stop_strings(clock: Clock, recorder: MetricsRecorder) -> None:
    play(recorder, clock)
    series = scrape(recorder)
    assert series["prompt_tokens_total",] == 10
    assert series["generation_tokens_total",] == 1 + 4 + 2
    assert series["spec_drafts_total", "ngram"] == 2
    assert series["spec_draft_tokens_total", "ngram"] == 8
    assert series["spec_accepted_tokens_total", "ngram"] == 3 + 2
    assert series["spec_emitted_tokens_total", "ngram"] == 4 + 2
    assert series["spec_system_efficiency_ratio", "ngram"] == 6 / 10
    assert series["spec_acceptance_ratio", "ngram"] == 5 / 8
    assert [series["spec_accepted_tokens_per_position_total", "ngram", str(p)] for p in range(3)] == [2, 2, 1]
    assert ("spec_accepted_tokens_per_position_total", "ngram", "3") not in series
    assert [series["spec_draft_tokens_per_position_total", "ngram", str(p)] for p in range(4)] == [2, 2, 2, 2]
    assert series["requests_finished_total", "stop"] == 1
    assert series["requests_finished_total", "length"] == 0


@pytest.mark.parametrize(
    ("event", "delivered", "accepted", "efficiency"),
    [
        (tokens(0, 3, DraftResult("draft", 4, 3), "stop", stop_id=2), 3, 3, 3 / 5),  # at EOS
        (tokens(0, 2, DraftResult("draft", 4, 4), "stop"), 2, 2, 2 / 5),
        (truncate(tokens(0, 3, DraftResult("draft", 4, 2)), 0, "length"), 0, 0, 0.0),
    ],
)
def test_accepted_is_at_most_delivered(
    clock: Clock, event: TokenEvent, delivered: int, accepted: int, efficiency: float
) -> None:
    recorder = MetricsRecorder(("draft",), clock=clock)
    metrics = recorder.answer_metrics(record(recorder, event).id)
    series = scrape(recorder)
    assert series["generation_tokens_total",] == delivered
    assert series["spec_draft_tokens_total", "draft"] == 4
    assert series["spec_accepted_tokens_total", "draft"] == accepted
    assert series["spec_system_efficiency_ratio", "draft"] == efficiency
    assert metrics is not None and metrics.draft_tokens_acceptance == accepted / 4


def test_latency_histograms(clock: Clock, recorder: MetricsRecorder) -> None:
    """A burst of m tokens after t counts m observations of t/m."""
    play(recorder, clock)
    series = scrape(recorder)
    assert series["inter_token_latency_seconds_count",] == 4 + 2
    assert series["inter_token_latency_seconds_sum",] == pytest.approx(2.0)
    assert series["inter_token_latency_seconds_bucket", "0.25"] == 4
    assert series["inter_token_latency_seconds_bucket", "0.5"] == 6
    for name, seconds in (("time_to_first_token", 2.0), ("request_queue", 1.0), ("e2e_request_latency", 4.0)):
        assert (series[f"{name}_seconds_count",], series[f"{name}_seconds_sum",]) == (1, seconds)


def test_metrics_of_one_choice(clock: Clock, recorder: MetricsRecorder) -> None:
    submitted = play(recorder, clock)
    metrics = recorder.answer_metrics(submitted.id)
    assert metrics is not None
    assert metrics.as_dict() == {
        "time_to_first_token_ms": 2000.0,
        "time_per_output_token_ms": pytest.approx(2000 / 6),
        "prompt_tokens_per_second": 6.0,
        "tokens_per_second": pytest.approx(3.0),
        "draft_tokens": 8,
        "draft_tokens_acceptance": 5 / 8,
        "mean_acceptance_length": 3.0,
        "verify_steps": 2,
        "cached_tokens": 4,
        "seed": 7,
    }


def test_rates_begin_after_the_first_burst(recorder: MetricsRecorder) -> None:
    """Three tokens at once, four more 2 s later: 0.5 s per token."""
    submitted = request()
    recorder.on_submit(submitted)
    recorder.on_tokens(submitted, tokens(0, 3, DraftResult("ngram", 2, 2)), 102.0)
    recorder.on_tokens(submitted, tokens(3, 4, DraftResult("ngram", 3, 3)), 104.0)
    metrics = recorder.answer_metrics("a")
    assert metrics is not None
    assert (metrics.time_per_output_token_ms, metrics.tokens_per_second) == (500.0, 2.0)


def test_undefined_metrics_are_absent(clock: Clock) -> None:
    off = MetricsRecorder((), clock=clock)
    submitted = request()
    off.on_submit(submitted)
    assert off.answer_metrics("a").as_dict() == {"seed": 7}  # type: ignore[union-attr]
    off.on_tokens(submitted, TokenEvent("a", 0, (1,), finish_reason="length"), 102.0)
    assert off.answer_metrics("a").as_dict() == {
        "time_to_first_token_ms": 2000.0,
        "cached_tokens": 0,
        "seed": 7,
    }  # type: ignore[union-attr]
    assert off.answer_metrics("unknown") is None


def test_request_without_drafts_has_no_draft_metrics(recorder: MetricsRecorder) -> None:
    metrics = recorder.answer_metrics(record(recorder, tokens(0, 3, reason="stop")).id)
    assert metrics is not None
    assert not [name for name in metrics.as_dict() if "draft" in name or "verify" in name or "accept" in name]


def test_metrics_of_several_choices(clock: Clock) -> None:
    """Two choices of one prompt and one of another: sums, earliest first token, joint rate."""
    recorder = MetricsRecorder(("ngram", "suffix"), clock=clock)
    a, b, c = request("x-0-0", seed=7), request("x-0-1", seed=8), request("x-1-0", seed=7)
    for submitted in (a, b, c):
        recorder.on_submit(submitted)
    recorder.on_tokens(a, tokens(0, 1, num_cached=4), 103.0)
    recorder.on_tokens(b, tokens(0, 2, DraftResult("ngram", 3, 1), num_cached=9), 102.0)
    recorder.on_tokens(a, tokens(1, 4, DraftResult("suffix", 5, 3), "stop"), 105.0)
    recorder.on_tokens(b, tokens(2, 4, DraftResult("ngram", 4, 4), "stop"), 104.0)
    recorder.on_tokens(c, tokens(0, 1, reason="length", num_cached=2), 102.5)
    metrics = recorder.answer_metrics("x-0-0", "x-0-1", "x-1-0")
    assert metrics is not None
    assert metrics.as_dict() == {
        "time_to_first_token_ms": 2000.0,
        "time_per_output_token_ms": (2 + 2) / (4 + 4) * 1000,
        "tokens_per_second": 8 / (105 - 102),
        "prompt_tokens_per_second": (10 - 4) / 2,
        "draft_tokens": 12,
        "draft_tokens_acceptance": 8 / 12,
        "mean_acceptance_length": (2 + 4 + 4) / 3,
        "verify_steps": 3,
        "cached_tokens": 4 + 2,
        "seed": 7,
    }
    alone = recorder.answer_metrics("x-0-1")
    assert alone is not None and (alone.draft_tokens, alone.seed, alone.tokens_per_second) == (7, 8, 2.0)


def test_finish_without_tokens(recorder: MetricsRecorder) -> None:
    record(recorder, tokens(0, 0, reason="stop"))
    series = scrape(recorder)
    assert series["requests_finished_total", "stop"] == 1
    assert series["generation_tokens_total",] == 0
    assert series["time_to_first_token_seconds_count",] == 0


def test_repetition_is_counted_and_logged(recorder: MetricsRecorder, lines: list[str]) -> None:
    submitted = request(on_runaway="warn")
    recorder.on_submit(submitted)
    recorder.on_tokens(submitted, tokens(0, 300), 102.0)
    assert scrape(recorder)["runaway_requests_total",] == 0
    recorder.on_tokens(submitted, tokens(300, 8, repetition=Repetition(3, 12)), 103.0)
    assert scrape(recorder)["runaway_requests_total",] == 1
    (line,) = lines
    assert line == (
        "request a: repetitive output, pattern length 12, after 303 tokens; continuing (on_runaway warn)"
    )
    recorder.on_tokens(submitted, tokens(308, 1, reason="length"), 104.0)
    metrics = recorder.answer_metrics("a")
    assert metrics is not None and metrics.as_dict()["repeating_tokens"] == 12


def test_choice_stopped_by_repetition_is_returned(recorder: MetricsRecorder, lines: list[str]) -> None:
    repeated = tokens(0, 260, reason="repetition", repetition=Repetition(260, 4))
    record(recorder, repeated, on_runaway="stop")
    series = scrape(recorder)
    assert series["requests_finished_total", "repetition"] == 1
    assert series["generation_tokens_total",] == 260
    assert "pattern length 4, after 260 tokens; finished: repetition (on_runaway stop)" in lines[0]
    assert "request a: repetition; n 1 requested, 1 returned" in lines[1]


def test_repetition_of_aborted_request_is_not_counted(recorder: MetricsRecorder, lines: list[str]) -> None:
    recorder.on_tokens(request(), tokens(0, 8, repetition=Repetition(3, 12)), 103.0)
    assert scrape(recorder)["runaway_requests_total",] == 0 and not lines


def test_finished_stats_are_bounded(recorder: MetricsRecorder) -> None:
    for number in range(MAX_FINISHED_STATS + 5):
        submitted = request(str(number))
        recorder.on_submit(submitted)
        recorder.on_abort([submitted])
    assert recorder.answer_metrics("4") is None
    assert recorder.answer_metrics("5") is not None


def test_failed_and_aborted_requests_finish_once(recorder: MetricsRecorder) -> None:
    first, second = request("a"), request("b")
    recorder.on_submit(first)
    recorder.on_submit(second)
    recorder.on_error([first], RequestFailed("broken"))
    recorder.on_abort([second])
    recorder.on_abort([second])
    recorder.on_tokens(second, tokens(0, 1), 102.0)
    series = scrape(recorder)
    assert series["requests_finished_total", "error"] == 1
    assert series["requests_finished_total", "abort"] == 1
    assert series["generation_tokens_total",] == 0


def test_steps_set_gauges_and_add_deltas(recorder: MetricsRecorder) -> None:
    first = StepStats(
        step=1, requests_running=3, requests_waiting=2, kv_cache_usage_ratio=0.5,
        prefix_cache_queries_total=10, prefix_cache_hits_total=4, preemptions_total=1,
        stage_seconds={"forward": 0.5}, drafter_errors={"ngram": 1},
    )  # fmt: skip
    recorder.on_step(first)
    recorder.on_step(first)
    recorder.on_step(
        StepStats(step=2, prefix_cache_queries_total=15, prefix_cache_hits_total=4, preemptions_total=1)
    )
    series = scrape(recorder)
    assert series["requests_running",] == 0
    assert series["prefix_cache_queries_total",] == 15
    assert series["prefix_cache_hits_total",] == 4
    assert series["preemptions_total",] == 1
    assert series["step_seconds_count", "forward"] == 1
    assert series["spec_drafter_errors_total", "ngram"] == 1


def test_tiers_are_counted_through_restarts(recorder: MetricsRecorder) -> None:
    recorder.on_step(
        StepStats(step=1, kv_tiers={"disk": KVTierStats(64, 2.0, 100, 0.5, 200, 0.25, 1, 2, {"size": 3})})
    )
    recorder.on_step(
        StepStats(step=2, kv_tiers={"disk": KVTierStats(64, 2.0, 100, 0.5, 300, 0.5, 1, 2, {"size": 3})})
    )
    tiers = {**recorder._stats[""].kv_tiers, "host": KVTierStats(32, 1.0, 50, 0.5, 60, 0.25)}
    recorder.on_step(StepStats(step=3, kv_tiers=tiers))
    recorder.on_restart("signal 9")
    recorder.on_step(
        StepStats(step=1, adopted_tokens=160, kv_tiers={"disk": KVTierStats(16, refused={"checksum": 1})})
    )
    series = scrape(recorder)
    assert series["kv_adopted_tokens_total",] == 160
    assert series["kv_disk_hit_tokens_total",] == 80 and series["kv_disk_avoided_seconds_total",] == 2.0
    assert series["kv_disk_bytes_total", "read"] == 100 and series["kv_disk_bytes_total", "write"] == 300
    assert series["kv_disk_seconds_total", "read"] == series["kv_disk_seconds_total", "write"] == 0.5
    assert series["kv_host_hit_tokens_total",] == 32 and series["kv_host_bytes_total", "write"] == 60
    assert series["kv_host_seconds_total", "read"] == 0.5 and series["kv_host_avoided_seconds_total",] == 1.0
    assert series["kv_disk_refused_files_total", "size"] == 3
    assert series["kv_disk_refused_files_total", "checksum"] == 1
    assert series["kv_disk_lost_writes_total", "error"] == 1
    assert series["kv_disk_lost_writes_total", "queue"] == 2


@pytest.mark.parametrize("again", [2, 9])
def test_restarted_engine_counts_from_zero(recorder: MetricsRecorder, again: int) -> None:
    recorder.on_step(StepStats(step=9, preemptions_total=5))
    recorder.on_step(StepStats(step=1, preemptions_total=again))
    assert scrape(recorder)["preemptions_total",] == 5 + again


DECIDED = DraftingStats(
    draft_length_counts={"ngram": {1: 2, 7: 1}},
    no_draft_counts={"not_worth_it": 3},
    predicted_seconds=0.5,
    realised_seconds=0.75,
    exploring_seconds=0.25,
)
DECIDED_MORE = DraftingStats(
    draft_length_counts={"ngram": {1: 2, 7: 2}, "draft": {32: 1}},
    no_draft_counts={"not_worth_it": 4, "backoff": 1},
    predicted_seconds=1.0,
    realised_seconds=1.0,
    exploring_seconds=0.25,
)


def test_draft_decisions_are_counted(clock: Clock) -> None:
    recorder = MetricsRecorder(("ngram", "draft"), clock=clock)
    recorder.on_step(StepStats(step=1, drafting=DECIDED))
    recorder.on_step(StepStats(step=2, drafting=DECIDED_MORE))
    series = scrape(recorder)
    assert (series["spec_draft_length_count", "ngram"], series["spec_draft_length_sum", "ngram"]) == (4, 16)
    assert [series["spec_draft_length_bucket", "ngram", bound] for bound in ("1.0", "6.0", "8.0")] == [
        2,
        2,
        4,
    ]
    assert series["spec_draft_length_bucket", "draft", "24.0"] == 0
    assert series["spec_draft_length_bucket", "draft", "32.0"] == 1
    assert series["spec_no_draft_total", "not_worth_it"] == 4
    assert series["spec_no_draft_total", "backoff"] == 1
    assert series["spec_predicted_step_seconds_total",] == 1.0
    assert series["spec_realised_step_seconds_total",] == 1.0
    assert series["spec_exploration_seconds_total",] == 0.25


@pytest.mark.parametrize(
    ("reason", "step", "restarts"), [("it was killed", 4, 1), (None, 1, 0)], ids=["crash", "planned reload"]
)
def test_restart_is_counted_and_resets_stats(
    recorder: MetricsRecorder, reason: str | None, step: int, restarts: int
) -> None:
    recorder.on_step(StepStats(step=3, preemptions_total=5, requests_running=7))
    recorder.on_restart(reason)
    assert scrape(recorder)["requests_running",] == 0
    recorder.on_step(StepStats(step=step, preemptions_total=6))
    series = scrape(recorder)
    assert (series["engine_restarts_total",], series["preemptions_total",]) == (restarts, 5 + 6)


def test_gauges_use_get_stats(recorder: MetricsRecorder) -> None:
    recorder.on_step(StepStats(step=3, requests_running=7))
    recorder.get_stats = lambda: StepStats(requests_waiting=2, oldest_running_seconds=60.0)
    series = scrape(recorder)
    gauges = [series[name,] for name in ("requests_running", "requests_waiting", "oldest_running_seconds")]
    assert gauges == [0, 2, 60]


def test_draft_decisions_survive_a_restart(clock: Clock) -> None:
    recorder = MetricsRecorder(("ngram", "draft"), clock=clock)
    recorder.on_step(StepStats(step=5, drafting=DECIDED_MORE))
    recorder.on_step(StepStats(step=1, drafting=DECIDED))
    series = scrape(recorder)
    assert (series["spec_draft_length_count", "ngram"], series["spec_draft_length_sum", "ngram"]) == (
        4 + 3,
        16 + 9,
    )
    assert series["spec_no_draft_total", "not_worth_it"] == 7
    assert series["spec_realised_step_seconds_total",] == 1.75


@pytest.mark.parametrize("drafters", [(), ("ngram", "draft")])
@pytest.mark.parametrize("state", ["fresh", "idle", "busy"])
def test_metrics_and_logs_have_no_nan(
    drafters: tuple[str, ...], state: str, clock: Clock, lines: list[str]
) -> None:
    recorder = MetricsRecorder(drafters, clock=clock)
    if state != "fresh":
        submitted = request()
        recorder.on_submit(submitted)
        reason = "stop" if state == "idle" else None
        recorder.on_tokens(
            submitted, tokens(0, 1, DraftResult("ngram", 1, 0) if drafters else None, reason), 102.0
        )
    clock.now += 20
    recorder.log_if_due()
    clock.now += 20
    recorder.log_if_due()
    assert not any(math.isnan(value) for value in scrape(recorder).values())
    assert b"nan" not in recorder.render().lower()
    assert not any("nan" in line.lower() for line in lines)


def test_speculation_metrics_need_drafters(clock: Clock, lines: list[str]) -> None:
    recorder = MetricsRecorder((), clock=clock)
    submitted = record(recorder, tokens(0, 3))
    clock.now += 11
    recorder.log_if_due()
    recorder.on_tokens(submitted, tokens(3, 3, reason="length"), 112.0)
    assert b"spec" not in recorder.render()
    assert lines and not any("spec" in line.lower() or "draft" in line.lower() for line in lines)


def test_ratios_are_absent_before_a_draft(clock: Clock) -> None:
    series = scrape(MetricsRecorder(("ngram",), clock=clock))
    assert series["spec_drafts_total", "ngram"] == 0
    assert ("spec_system_efficiency_ratio", "ngram") not in series
    assert ("spec_acceptance_ratio", "ngram") not in series


INFO = {label: f"the {label}" for label in INFO_LABELS}


def labelled(recorder: MetricsRecorder) -> dict[str, list[tuple[dict[str, str], float]]]:
    """(labels, value) of each series by its name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(recorder.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_positions_have_series_from_the_start(clock: Clock) -> None:
    recorder = MetricsRecorder(("grammar", "ngram", "suffix"), clock=clock, num_positions=3)
    series = scrape(recorder)
    for name in ("spec_accepted_tokens_per_position_total", "spec_draft_tokens_per_position_total"):
        found = {key[1:]: value for key, value in series.items() if key[0] == name}
        assert found == {(drafter, str(p)): 0 for drafter in ("ngram", "suffix") for p in range(3)}


def test_step_times_are_absent_where_nothing_predicts(clock: Clock) -> None:
    fixed = MetricsRecorder(("ngram",), clock=clock, predictive=False)
    fixed.on_step(StepStats(step=1, drafting=DraftingStats(predicted_seconds=1.0, realised_seconds=1.0)))
    adaptive = scrape(MetricsRecorder(("ngram",), clock=clock))
    missing = {name for name, *_ in adaptive} - {name for name, *_ in scrape(fixed)}
    assert missing == {row.name for row in CATALOG if row.predictive}


def test_series_of_the_model_have_its_name(clock: Clock) -> None:
    recorder = MetricsRecorder(("ngram",), clock=clock, info=INFO)
    play(recorder, clock)
    recorder.on_http_response("/v1/models/{name}", 404)
    found = labelled(recorder)
    assert found.pop("foreword_info") == [(INFO, 1.0)]
    assert found.pop("foreword_http_requests_total") == [
        ({"route": "/v1/models/{name}", "status": "404"}, 1.0)
    ]
    assert found.pop("foreword_usage_db_errors_total") == [({}, 0.0)]
    for part in ("bucket", "count", "sum"):
        assert all(
            "model" not in labels for labels, _ in found.pop(f"foreword_event_loop_stall_seconds_{part}")
        )
    assert all(labels["model"] == "the model" for series in found.values() for labels, _ in series)


def test_keys_are_shown_on_request_and_bounded(clock: Clock) -> None:
    recorder = MetricsRecorder((), clock=clock, info=INFO)
    for number in range(300):
        recorder.on_usage(f"key {number}", "a model", 1, 10, 20)
    assert b"key " not in recorder.render() and b"foreword_key_" not in recorder.render()
    lines = [line for line in recorder.render(with_keys=True).decode().splitlines() if line[0] != "#"]
    requests = [line for line in lines if line.startswith("foreword_key_requests_total{")]
    assert requests[0] == 'foreword_key_requests_total{key="key 0",model="a model"} 1.0'
    assert len(requests) == 257
    assert 'foreword_key_generation_tokens_total{key="other",model="other"} 880.0' in lines


# Labels of vLLM 0.11 to 0.33, besides model_name and engine.
VLLM_LABELS = {
    "vllm:request_success_total": {"finished_reason"},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"position"},
}


def test_vllm_metrics_have_the_same_values(clock: Clock) -> None:
    recorder = MetricsRecorder(
        ("ngram", "suffix"), clock=clock, info=INFO, num_positions=4, vllm_metrics=True
    )
    play(recorder, clock)
    other = request("b-0")
    recorder.on_submit(other)
    recorder.on_tokens(other, tokens(0, 2, DraftResult("suffix", 3, 1), "length"), 105.0)
    recorder.on_step(StepStats(step=1, preemptions_total=2, prefix_cache_queries_total=9))
    recorder.get_stats = lambda: StepStats(requests_running=3, requests_waiting=1, kv_cache_usage_ratio=0.5)
    found = labelled(recorder)
    names = {name for name in found if name.startswith("vllm:")}
    for name in names:
        labels = {
            "model_name",
            "engine",
            *({"le"} if name.endswith("_bucket") else ()),
            *VLLM_LABELS.get(name, ()),
        }
        assert all(set(given) == labels and given["model_name"] == "the model" for given, _ in found[name]), (
            name
        )
    sums = {name: sum(value for _, value in series) for name, series in found.items()}
    for row in VLLM_METRICS:
        for suffix in ("", "_sum", "_count", "_bucket"):
            if PREFIX + row.source + suffix in sums:
                assert sums[row.name + suffix] == sums[PREFIX + row.source + suffix], row
    assert (sums["vllm:spec_decode_num_drafts_total"], sums["vllm:spec_decode_num_draft_tokens_total"]) == (
        3,
        11,
    )
    positions = {
        labels["position"]: value
        for labels, value in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    }
    assert positions == {"0": 3, "1": 2, "2": 1, "3": 0}
    assert {labels["finished_reason"]: value for labels, value in found["vllm:request_success_total"]}[
        "length"
    ] == 1


def test_vllm_metrics_are_off_by_default_and_need_speculation(clock: Clock) -> None:
    assert b"vllm" not in MetricsRecorder(("ngram",), clock=clock, info=INFO).render()
    plain = MetricsRecorder((), clock=clock, info=INFO, vllm_metrics=True).render()
    assert (
        b"vllm:num_requests_running" in plain and b"spec_decode" not in plain and b"nan" not in plain.lower()
    )


def test_vllm_bench_finds_its_acceptance_figures(clock: Clock) -> None:
    """As `vllm bench serve` reads them: by parts of the names, over all lines that begin with them."""
    recorder = MetricsRecorder(("ngram",), clock=clock, info=INFO, num_positions=4, vllm_metrics=True)
    play(recorder, clock)
    figures = dict.fromkeys(("num_drafts", "num_draft_tokens", "per_pos", "num_accepted_tokens"), 0.0)
    for line in recorder.render().decode().splitlines():
        if line.startswith("vllm:spec_decode"):
            figures[next(part for part in figures if part in line)] += float(line.split()[-1])
    assert figures == {"num_drafts": 2, "num_draft_tokens": 8, "per_pos": 5, "num_accepted_tokens": 5}


def test_processes_have_memory_and_processor_time(clock: Clock) -> None:
    recorder, engine = MetricsRecorder((), clock=clock, info=INFO), subprocess.Popen(["sleep", "60"])
    pids = {"": engine.pid}
    recorder._registry.add_own_process()
    recorder.add_engine_processes(lambda: pids)
    try:
        found = labelled(recorder)
        for prefix in ("process_", "foreword_engine_process_"):
            assert found[f"{prefix}resident_memory_bytes"][0][1] > 0
            assert found[f"{prefix}cpu_seconds_total"][0][1] >= 0
    finally:
        engine.kill()
        engine.wait()
    pids.clear()  # it crashed, and the next one has not started
    assert not any(name.startswith("foreword_engine_process") for name in labelled(recorder))


def test_processes_of_replicas_are_labelled(recorder: MetricsRecorder) -> None:
    recorder.add_engine_processes(lambda: {"0": os.getpid(), "1": os.getppid()})
    found = labelled(recorder)["foreword_engine_process_resident_memory_bytes"]
    assert [labels for labels, _ in found] == [{"replica": "0"}, {"replica": "1"}]
    assert all(value > 0 for _, value in found)


def test_totals_of_replicas_add_up(recorder: MetricsRecorder) -> None:
    """Each counts by itself; a new engine counts from zero, also if its first step is the old one's last."""
    for replica, step, total in (("0", 1, 5), ("1", 1, 7), ("0", 2, 6), ("1", 0, 0), ("1", 1, 4)):
        recorder.on_step(StepStats(step=step, preemptions_total=total, replica=replica))
        if step == 0:
            recorder.on_restart("killed")
    assert scrape(recorder)[("preemptions_total",)] == 6 + 7 + 4


def test_every_series_is_in_the_catalog(clock: Clock, recorder: MetricsRecorder) -> None:
    play(recorder, clock)
    names = {
        name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        for name, *_ in scrape(recorder)
    }
    assert names <= {row.name for row in CATALOG}


def test_throughput_is_not_diluted_by_idle_time(
    clock: Clock, recorder: MetricsRecorder, lines: list[str]
) -> None:
    play(recorder, clock)  # 4 s of work
    clock.now = 120.0
    recorder.log_if_due()
    throughput = [line for line in lines if line.startswith("Throughput")]
    assert throughput == [
        "Throughput: prompt 2.5 tokens/s, generation 1.8 tokens/s, busy 4.0 s, "
        "running 0, waiting 0, KV cache 0.0%"
    ]
    assert [line for line in lines if line.startswith("SpecDecoding")] == [
        "SpecDecoding metrics: Mean acceptance length: 3.00, Draft acceptance rate: 62.5%, "
        "System efficiency: 60.0%, "
        "Accepted: 5 tokens, Drafted: 8 tokens, Per-position acceptance rate: 1.000, 1.000, 0.500, 0.000"
    ]


def test_log_line_of_long_drafts_shows_the_first_positions() -> None:
    stats = SpecDecodeStats()
    stats.add(10, 9, 10)
    line = format_speculation(stats)
    assert line.endswith(f"acceptance rate: {', '.join(['1.000'] * 8)} and 2 more in /metrics")


@pytest.mark.parametrize(
    ("interval_s", "has_traffic", "seconds"), [(10, False, 11), (10, True, 5), (0, True, 1000)]
)
def test_no_line_without_traffic_or_interval(
    clock: Clock, lines: list[str], interval_s: int, has_traffic: bool, seconds: int
) -> None:
    recorder = MetricsRecorder(("ngram",), log_interval_s=interval_s, clock=clock)
    if has_traffic:
        record(recorder, tokens(0, 1))
    for _ in range(1 if has_traffic else 5):
        clock.now += seconds
        recorder.log_if_due()
    assert lines == []


def test_speculation_line_covers_its_interval(
    clock: Clock, recorder: MetricsRecorder, lines: list[str]
) -> None:
    submitted = request()
    recorder.on_submit(submitted)
    clock.now = 111.0
    recorder.on_tokens(submitted, tokens(0, 3, DraftResult("ngram", 2, 2)), 111.0)
    recorder.log_if_due()
    clock.now = 122.0
    recorder.on_tokens(submitted, tokens(3, 1), 122.0)
    recorder.log_if_due()
    assert [line.split(":")[0] for line in lines] == ["Throughput", "SpecDecoding metrics", "Throughput"]


def test_request_line(clock: Clock, recorder: MetricsRecorder, lines: list[str]) -> None:
    submitted = request(temperature=0.5, stop=("secret " * 50,))
    recorder.on_submit(submitted)
    recorder.on_tokens(submitted, tokens(0, 3, DraftResult("ngram", 2, 2)), 102.0)
    clock.now = 103.0
    recorder.on_tokens(submitted, tokens(3, 1, reason="length"), 103.0)
    (line,) = lines
    assert line.startswith("request a: length; n 1 requested, 1 returned; params temperature=0.5 stop=... ")
    assert line.endswith(
        "seed=7; tokens 10 prompt (0 cached), 4 generated; drafter ngram (2 of 2 accepted); "
        "times queue 1000.0 ms, first token 2000.0 ms, total 3000.0 ms"
    )
    assert len(line) < 400


def test_request_line_with_a_prediction(clock: Clock, lines: list[str]) -> None:
    recorder = MetricsRecorder(("prediction",), clock=clock)
    submitted = replace(request(), prediction_ids=(1, 2, 3))
    recorder.on_submit(submitted)
    recorder.on_tokens(submitted, tokens(0, 3, DraftResult("prediction", 2, 2), "stop"), 102.0)
    assert "(0 cached), 3 predicted, 3 generated; drafter prediction (2 of 2 accepted)" in lines[0]


def test_choices_of_a_prompt_share_a_log_line(recorder: MetricsRecorder, lines: list[str]) -> None:
    choices = [request(f"cmpl-1-{index}", seed=7 + index) for index in range(3)]
    for choice in choices:
        recorder.on_submit(choice)
    recorder.on_tokens(choices[1], tokens(0, 2, reason="stop"), 102.0)
    recorder.on_tokens(choices[2], tokens(0, 3, reason="stop"), 102.0)
    assert lines == []
    recorder.on_abort([choices[0]])
    (line,) = lines
    assert line.startswith(
        "request cmpl-1: abort 1, stop 2; n 3 requested, 2 returned; params seed=7; "
        "tokens 10 prompt (0 cached), 5"
    )


@pytest.mark.parametrize("error", [RequestFailed("broken"), None])
def test_requests_that_end_together_share_a_log_line(
    recorder: MetricsRecorder, lines: list[str], error: RequestFailed | None
) -> None:
    requests = [request(f"cmpl-{prompt}-{index}") for prompt in range(50) for index in range(2)]
    for submitted in requests:
        recorder.on_submit(submitted)
    if error is None:
        recorder.on_abort(requests)
    else:
        recorder.on_error(requests, error)
        assert lines.pop(0) == "request cmpl-0-0 and 99 more failed: broken"
    (line,) = lines
    reason = "error" if error else "abort"
    assert line.startswith(f"request cmpl-0: {reason} 2; n 2 requested, 0 returned; ")
    assert line.endswith(f"; 49 more prompts: {reason}")
    assert scrape(recorder)["requests_finished_total", reason] == 100 and not recorder.live_requests()


def test_image_metrics_need_a_vision_model(clock: Clock) -> None:
    stats = StepStats(step=1, images_encoded_total=3, image_cache_hits_total=5, stage_seconds={"encode": 0.5})
    seeing, blind = MetricsRecorder((), clock=clock, multimodal=True), MetricsRecorder((), clock=clock)
    seeing.on_step(stats)
    series = scrape(seeing)
    assert (series["images_encoded_total",], series["image_cache_hits_total",]) == (3, 5)
    names = {(name, *labels) for name, *labels in scrape(blind)}
    assert (
        not {("images_encoded_total",), ("image_cache_hits_total",), ("step_seconds_count", "encode")} & names
    )
    assert ("step_seconds_count", "encode") in series and ("engine_faults_total", "encode") in series
