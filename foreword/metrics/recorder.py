"""Records events of requests and steps for Prometheus, the log, and the `metrics` object of responses."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from foreword.core.outputs import GRAMMAR, DraftingStats, DraftResult, KVTierStats, StepStats, TokenEvent
from foreword.core.request import Request
from foreword.errors import ForewordError, safe_message
from foreword.metrics import logging_stats as log
from foreword.metrics.definitions import (
    EMBEDDING_FINISH_REASONS,
    EMBEDDING_TASKS,
    ENCODE_STAGE,
    FAULT_STAGES,
    FINISH_REASONS,
    INFO_LABELS,
    MODEL_LABEL,
    REJECT_REASONS,
    STEP_STAGES,
)
from foreword.metrics.prometheus import MetricsRegistry
from foreword.metrics.request_stats import (
    AnswerMetrics,
    ChoiceStats,
    RequestProgress,
    SpecDecodeStats,
    summarize_choices,
)
from foreword.metrics.tracing import current_span

Number = TypeVar("Number", int, float)

DRAFT_STAGE = "draft"  # exists only with drafters
MAX_ADAPTER_NAMES = 64  # labels of series; later ones count as "other"
MAX_KEY_SERIES = 256  # pairs of key and model with series; later ones count as ("other", "other")
MAX_FINISHED_STATS = 4096  # finished requests whose statistics are kept

STEP_GAUGES = (
    "requests_running",
    "requests_waiting",
    "longest_running_tokens",
    "oldest_running_seconds",
    "kv_cache_usage_ratio",
    "device_memory_bytes",
)
IMAGE_COUNTERS = ("images_encoded_total", "image_cache_hits_total")
STEP_COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "preemptions_total")
TIER_COUNTERS = {  # fields of KVTierStats, and what follows foreword_kv_TIER_
    "hit_tokens": ("hit_tokens_total",),
    "avoided_seconds": ("avoided_seconds_total",),
    "read_bytes": ("bytes_total", "read"),
    "written_bytes": ("bytes_total", "write"),
    "read_seconds": ("seconds_total", "read"),
    "write_seconds": ("seconds_total", "write"),
    "write_errors": ("lost_writes_total", "error"),
    "dropped_blocks": ("lost_writes_total", "queue"),
}
DRAFTING_SECONDS = {
    "spec_predicted_step_seconds_total": "predicted_seconds",
    "spec_realised_step_seconds_total": "realised_seconds",
    "spec_plain_step_seconds_total": "plain_seconds",
    "spec_exploration_seconds_total": "exploring_seconds",
}
EMBEDDING_METRICS = ("embedding_inputs_total", "embedding_tokens_total", "embedding_seconds")
POSITION_METRICS = ("spec_draft_tokens_per_position_total", "spec_accepted_tokens_per_position_total")
DRAFTER_METRICS = (
    "spec_drafts_total",
    "spec_draft_tokens_total",
    "spec_accepted_tokens_total",
    "spec_emitted_tokens_total",
    "spec_drafter_errors_total",
    "spec_draft_length",
)


class ParseCounts(Protocol):
    """Counts of a parser of an answer."""

    num_calls: int
    num_parse_errors: int
    num_reasoning_tokens: int
    num_call_tokens: int


class ServerCounters:
    """Counts what happens before the model of a request is known, or to keys."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._key_series: set[tuple[str, str]] = set()
        registry.init_series("requests_rejected_total", REJECT_REASONS)

    def on_reject(self, reason: str) -> None:
        """A request was rejected for one of REJECT_REASONS."""
        self._registry.add("requests_rejected_total", 1, reason)

    def on_http_response(self, route: str, status: int) -> None:
        """An HTTP response was sent; `route` is a template."""
        self._registry.add("http_requests_total", 1, route, str(status))

    def on_usage(
        self, key: str, model: str, requests: int, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """A key used a model (its name in answers) since the last call for both."""
        if len(self._key_series) < MAX_KEY_SERIES:
            self._key_series.add((key, model))
        if (key, model) not in self._key_series:
            key = model = "other"
        self._registry.add("key_requests_total", requests, key, model)
        self._registry.add("key_prompt_tokens_total", prompt_tokens, key, model)
        self._registry.add("key_generation_tokens_total", generated_tokens, key, model)

    def on_usage_db_error(self) -> None:
        """A write to the usage database failed or took too long."""
        self._registry.add("usage_db_errors_total", 1)

    def on_event_loop_stall(self, seconds: float) -> None:
        """The event loop of the API process stood still."""
        self._registry.observe("event_loop_stall_seconds", seconds)

    def on_ignored_fields(self, num_fields: int) -> None:
        """Unknown fields of messages and content parts were ignored."""
        self._registry.add("ignored_message_fields_total", num_fields)


class MetricsRecorder(ServerCounters):
    """Metrics of one model, and of its server if that has no other. Not thread-safe; no global state.

    drafters        names of the drafters, which have series from the start
    log_interval_s  seconds between throughput lines; 0 for none
    clock           monotonic seconds, as in Request.arrival_s and TokenEvent.scheduled_s
    multimodal      whether there are image metrics
    info            values of INFO_LABELS, with the model's name; None: series have no label for the model
    num_positions   maximum of drafted tokens, whose positions have series from the start
    predictive      whether the times of steps are predicted, and compared with the measured ones
    vllm_metrics    whether to export vLLM's names too
    max_loras       LoRA adapters in memory at a time; 0: LoRA is off
    speculative     whether there are speculation metrics; None: with drafters. Replicas may have further ones
    """

    def __init__(
        self,
        drafters: tuple[str, ...],
        log_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        multimodal: bool = False,
        info: Mapping[str, str] | None = None,
        num_positions: int = 0,
        predictive: bool = True,
        vllm_metrics: bool = False,
        max_loras: int = 0,
        speculative: bool | None = None,
    ) -> None:
        self._speculative = bool(drafters) if speculative is None else speculative
        self._predictive = predictive
        self._multimodal = multimodal
        self._log_interval_s = log_interval_s
        self._max_loras = max_loras
        self._adapter_names: set[str] = set()
        self.get_stats: Callable[[], StepStats] | None = None  # source of gauges; None: the last step
        self._clock = clock
        self._live: dict[str, RequestProgress] = {}
        self._choices: dict[str, log.PromptChoices] = {}
        self._finished: OrderedDict[str, ChoiceStats] = OrderedDict()
        self._num_embedding = 0
        self._stats: dict[str, StepStats] = {}  # last step by replica
        self._gauges = StepStats()  # last step
        self._spec_stats: defaultdict[str, SpecDecodeStats] = defaultdict(SpecDecodeStats)  # by drafter
        self._interval = log.LogInterval()
        self._busy_since_s = clock()
        self._logged_s = clock()
        model = "" if info is None else info[MODEL_LABEL]
        super().__init__(MetricsRegistry(self._speculative, multimodal, predictive, model, vllm_metrics))
        if info is not None:
            self._registry.set("info", 1, *(info[label] for label in INFO_LABELS))
        self._init_series([name for name in drafters if name != GRAMMAR], num_positions)

    def _init_series(self, drafters: Sequence[str], num_positions: int) -> None:
        init_series = self._registry.init_series
        init_series("requests_finished_total", FINISH_REASONS)
        init_series(
            "step_seconds", [name for name in STEP_STAGES if name != DRAFT_STAGE or self._speculative]
        )
        init_series("engine_faults_total", FAULT_STAGES)
        for name in ("step_seconds", "engine_faults_total") if self._multimodal else ():
            init_series(name, (ENCODE_STAGE,))
        for task in EMBEDDING_TASKS:
            init_series("embedding_requests_total", EMBEDDING_FINISH_REASONS, task)
        for name in EMBEDDING_METRICS:
            init_series(name, EMBEDDING_TASKS)
        for name in DRAFTER_METRICS if self._speculative else ():
            init_series(name, drafters)
        for drafter in drafters:
            for name in POSITION_METRICS:
                init_series(name, map(str, range(num_positions)), drafter)

    def add_engine_processes(self, get_engine_pids: Callable[[], Mapping[str, int]]) -> None:
        """Export metrics of the engines' processes; the server exports its own."""
        self._registry.add_engine_processes(get_engine_pids)

    def on_submit(self, request: Request) -> None:
        """A choice was submitted: "X-0", "X-1", ... of one prompt, all before any of them ends."""
        now, span = self._clock(), current_span.get()
        self._count_busy(now)
        self._live[request.id] = RequestProgress(request, request.arrival_s or now, span)
        if span is not None:
            span.on_submit(request)
        self._choices.setdefault(_prompt_id(request.id), log.PromptChoices()).num_requested += 1

    def on_tokens(self, request: Request, event: TokenEvent, now_s: float) -> None:
        """Tokens were delivered. `event` is truncated by stop conditions; its finish_reason is final."""
        progress = self._live.get(request.id)
        if progress is None:
            return  # aborted before the event arrived
        self._count_prompt(request)
        gap_s = progress.record_tokens(event, now_s)
        if event.token_ids:
            self._count_tokens(progress, len(event.token_ids), gap_s)
        if event.draft is not None and event.draft.num_drafted:
            self._count_draft(event.draft, len(event.token_ids))
        if event.repetition is not None:
            self._registry.add("runaway_requests_total", 1)
            log.logger.warning("%s", log.format_repetition(request, event, event.repetition))
        if event.finish_reason is not None:
            self._finish([progress], event.finish_reason, now_s)

    def on_error(self, requests: Sequence[Request], error: ForewordError) -> None:
        """The requests ended together with an error, which is logged once."""
        live = self._select_live(requests)
        if live:
            first_id = live[0].request.id
            fields = {"id": first_id, "status": error.status, "code": error.code}
            name = f"request {first_id}" + (f" and {len(live) - 1} more" if len(live) > 1 else "")
            log.logger.warning("%s failed: %s", name, safe_message(error), extra={"fields": fields})
            self._finish(live, "error", self._clock())

    def on_abort(self, requests: Sequence[Request]) -> None:
        """The requests were aborted together."""
        self._finish(self._select_live(requests), "abort", self._clock())

    def _select_live(self, requests: Sequence[Request]) -> Sequence[RequestProgress]:
        return [self._live[request.id] for request in requests if request.id in self._live]

    def live_requests(self) -> Sequence[RequestProgress]:
        return list(self._live.values())

    def on_parsed(self, counts: ParseCounts | None) -> None:
        """An answer ended, also by an error or an abort; None: its text was not parsed."""
        if counts is None:
            return
        self._registry.add("tool_calls_total", counts.num_calls)
        self._registry.add("tool_parse_errors_total", counts.num_parse_errors)
        self._registry.add("reasoning_tokens_total", counts.num_reasoning_tokens)
        self._registry.add("tool_call_tokens_total", counts.num_call_tokens)

    def on_dropped_keywords(self, num_keywords: int) -> None:
        """A request's tools have keywords in their schemas that are not enforced."""
        self._registry.add("tool_schema_keywords_dropped_total", num_keywords)

    def on_response(self, num_choices: int) -> None:
        """A response with `num_choices` choices was sent."""
        self._registry.add("choices_returned_total", num_choices)

    def on_embedding_start(self) -> None:
        """An embedding or ranking request was accepted."""
        self._count_busy(self._clock())
        self._num_embedding += 1

    def on_embedding_finish(
        self, task: str, reason: str, num_inputs: int, num_tokens: int, seconds: float
    ) -> None:
        """It ended; task and reason as in the catalog. Inputs and tokens count only if all are done."""
        self._count_busy(self._clock())
        self._num_embedding -= 1
        self._registry.add("embedding_requests_total", 1, task, reason)
        if reason == "done":
            self._registry.add("embedding_inputs_total", num_inputs, task)
            self._registry.add("embedding_tokens_total", num_tokens, task)
            self._registry.observe("embedding_seconds", seconds, task)
            self._interval.embedding_tokens += num_tokens
            if (span := current_span.get()) is not None:
                span.on_embedding(num_tokens)
        log.logger.info("%s", log.format_embedding(task, reason, num_inputs, num_tokens, seconds))

    def answer_metrics(self, *request_ids: str) -> AnswerMetrics | None:
        """Metrics of one or several choices that are live or finished recently."""
        choices = [stats for stats in map(self._choice_stats, request_ids) if stats is not None]
        return summarize_choices(choices) if choices else None

    def _choice_stats(self, request_id: str) -> ChoiceStats | None:
        if request_id in self._live:
            return self._live[request_id].snapshot(_prompt_id(request_id))
        return self._finished.get(request_id)

    def on_step(self, stats: StepStats) -> None:
        """The engine finished a step. A step that is reported twice counts once."""
        before = self._stats.get(stats.replica) or StepStats()
        if stats.step == before.step:
            return
        if stats.step < before.step:  # a restarted engine counts from zero
            before = StepStats()
        for name in (*STEP_COUNTERS, *(IMAGE_COUNTERS if self._multimodal else ())):
            self._registry.add(name, _delta(getattr(before, name), getattr(stats, name)))
        self._registry.add("kv_adopted_tokens_total", _delta(before.adopted_tokens, stats.adopted_tokens))
        for stage, seconds in stats.stage_seconds.items():
            self._registry.observe("step_seconds", seconds, stage)
        for drafter, errors in stats.drafter_errors.items():
            new_errors = _delta(before.drafter_errors.get(drafter, 0), errors)
            self._registry.add("spec_drafter_errors_total", new_errors, drafter)
        for stage, faults in stats.faults.items():
            self._registry.add("engine_faults_total", _delta(before.faults.get(stage, 0), faults), stage)
        for tier, totals in stats.kv_tiers.items():
            self._count_tier(tier, before.kv_tiers.get(tier, KVTierStats()), totals)
        if self._speculative:
            self._count_decisions(before.drafting, stats.drafting)
        interval = self._interval
        interval.prefix_queries += _delta(before.prefix_cache_queries_total, stats.prefix_cache_queries_total)
        interval.prefix_hits += _delta(before.prefix_cache_hits_total, stats.prefix_cache_hits_total)
        self._stats[stats.replica] = self._gauges = stats

    def on_restart(self, reason: str | None) -> None:
        """The engine is restarted, as planned without a reason: the new one counts from zero."""
        if reason is not None:
            self._registry.add("engine_restarts_total", 1)
        self._stats.pop("", None)  # a replica reports the step 0
        self._gauges = StepStats()
        for span in {progress.span for progress in self._live.values() if progress.span is not None}:
            span.on_restart()

    def _count_tier(self, tier: str, before: KVTierStats, now: KVTierStats) -> None:
        """Count what a tier of the KV cache did since the last step."""
        for field, (name, *labels) in TIER_COUNTERS.items():
            count = _delta(getattr(before, field), getattr(now, field))
            self._registry.add(f"kv_{tier}_{name}", count, *labels)
        for reason, count in now.refused.items():
            new_count = _delta(before.refused.get(reason, 0), count)
            self._registry.add("kv_disk_refused_files_total", new_count, reason)

    def _count_decisions(self, before: DraftingStats, now: DraftingStats) -> None:
        """Count decisions on drafts since the last step."""
        for drafter, lengths in now.draft_length_counts.items():
            old_counts = before.draft_length_counts.get(drafter, {})
            for length, count in lengths.items():
                if count != old_counts.get(length):  # cheaper than looking up the series: most are unchanged
                    times = _delta(old_counts.get(length, 0), count)
                    self._registry.observe("spec_draft_length", length, drafter, times=times)
        for reason, count in now.no_draft_counts.items():
            new_count = _delta(before.no_draft_counts.get(reason, 0), count)
            self._registry.add("spec_no_draft_total", new_count, reason)
        for name, seconds in DRAFTING_SECONDS.items() if self._predictive else ():
            self._registry.add(name, _delta(getattr(before, seconds), getattr(now, seconds)))

    def on_unload(self) -> None:
        """The engine is gone; one of a later load counts from zero."""
        self._stats.clear()
        self._gauges = StepStats()
        self.get_stats = None

    def render(self, with_keys: bool = False) -> bytes:
        """The metrics as text of type prometheus.CONTENT_TYPE; `with_keys`: also those that name API keys."""
        return self.collect().render(with_keys)

    def collect(self) -> MetricsRegistry:
        """The registry, with gauges of this moment."""
        stats = self._current_stats()
        for name in STEP_GAUGES:
            self._registry.set(name, getattr(stats, name))
        for drafter, spec_stats in self._spec_stats.items():
            self._set_speculation(drafter, spec_stats)
        if self._max_loras:
            names = {
                is_running: ",".join(
                    sorted(
                        {
                            self._adapter_label(progress.request)
                            for progress in self._live.values()
                            if progress.request.adapter and progress.is_prompt_computed == is_running
                        }
                    )
                )
                for is_running in (True, False)
            }
            labels = names[True], names[False], str(self._max_loras)
            self._registry.set_only("lora_requests_info", time.time(), *labels)
        return self._registry

    def _set_speculation(self, drafter: str, stats: SpecDecodeStats) -> None:
        """The sums of a drafter that has drafted."""
        for name, value in {
            "spec_drafts_total": stats.num_verify_steps,
            "spec_draft_tokens_total": stats.num_drafted,
            "spec_accepted_tokens_total": stats.num_accepted,
            "spec_emitted_tokens_total": stats.num_emitted,
            "spec_system_efficiency_ratio": stats.system_efficiency,
            "spec_acceptance_ratio": stats.acceptance_rate,
        }.items():
            assert value is not None
            self._registry.set(name, value, drafter)
        counts = (stats.drafted_per_position, stats.accepted_per_position)
        for name, per_position in zip(POSITION_METRICS, counts, strict=True):
            for position, count in enumerate(per_position):
                self._registry.set(name, count, drafter, str(position))

    def _current_stats(self) -> StepStats:
        return self._gauges if self.get_stats is None else self.get_stats()

    def _adapter_label(self, request: Request) -> str:
        """The adapter's name, for a limited number of names."""
        name = request.adapter_name or request.adapter
        if name not in self._adapter_names and len(self._adapter_names) >= MAX_ADAPTER_NAMES:
            return "other"
        self._adapter_names.add(name)
        return name

    def log_if_due(self) -> None:
        """Log throughput if it is due; call it about once a second."""
        now = self._clock()
        if self._log_interval_s <= 0 or now - self._logged_s < self._log_interval_s:
            return
        self._count_busy(now)
        self._logged_s = now
        if not self._interval.has_traffic:
            return
        stats = self._current_stats()
        fields = log.throughput_fields(self._interval, stats)
        log.logger.info("%s", log.format_throughput(self._interval, stats), extra={"fields": fields})
        spec_stats = self._interval.spec_stats
        if spec_stats.num_drafted:
            fields = log.speculation_fields(spec_stats)
            log.logger.info("%s", log.format_speculation(spec_stats), extra={"fields": fields})
        self._interval = log.LogInterval()

    def _count_prompt(self, request: Request) -> None:
        choices = self._choices[_prompt_id(request.id)]
        if not choices.is_prompt_computed:
            choices.is_prompt_computed = True
            self._registry.add("prompt_tokens_total", len(request.prompt_ids))
            self._interval.prompt_tokens += len(request.prompt_ids)

    def _count_tokens(self, progress: RequestProgress, count: int, gap_s: float | None) -> None:
        self._registry.add("generation_tokens_total", count)
        if progress.request.adapter:
            self._registry.add("adapter_tokens_total", count, self._adapter_label(progress.request))
        self._interval.generation_tokens += count
        if gap_s is not None:
            self._registry.observe("inter_token_latency_seconds", gap_s / count, times=count)
            return
        if progress.first_token_s is not None:
            self._registry.observe("time_to_first_token_seconds", progress.first_token_s)
        if progress.queue_s is not None:
            self._registry.observe("request_queue_seconds", progress.queue_s)

    def _count_draft(self, draft: DraftResult, num_emitted: int) -> None:
        num_accepted = min(draft.num_accepted, num_emitted)
        if draft.is_forced:
            self._registry.add("spec_forced_tokens_total", num_accepted)
            return
        for stats in (self._spec_stats[draft.drafter], self._interval.spec_stats):
            stats.add(draft.num_drafted, num_accepted, num_emitted)

    def _finish(self, ended: Sequence[RequestProgress], reason: str, now: float) -> None:
        """Choices ended together. The prompts whose last choice is among them share a log line."""
        self._count_busy(now)
        complete: dict[str, log.PromptChoices] = {}
        for progress in ended:
            self._count_finished(progress, reason, now)
            name = _prompt_id(progress.request.id)
            choices = self._choices[name]
            choices.finished.append((progress, reason))
            if choices.is_complete:
                complete[name] = self._choices.pop(name)
        if complete and log.logger.isEnabledFor(logging.INFO):
            name, choices = next(iter(complete.items()))
            line, fields = log.format_request(name, choices, now), log.request_fields(name, choices, now)
            if num_more := len(complete) - 1:
                line += f"; {num_more} more prompts: {reason}"
                fields["num_more_prompts"] = num_more
            log.logger.info("%s", line, extra={"fields": fields})

    def _count_finished(self, progress: RequestProgress, reason: str, now: float) -> None:
        request = progress.request
        del self._live[request.id]
        self._registry.add("requests_finished_total", 1, reason)
        if request.adapter:
            self._registry.add("adapter_requests_total", 1, self._adapter_label(request))
        self._registry.observe("e2e_request_latency_seconds", max(now - progress.arrival_s, 0.0))
        if progress.span is not None:
            progress.span.on_finish(progress, reason, now)
        self._finished[request.id] = progress.snapshot(_prompt_id(request.id))
        while len(self._finished) > MAX_FINISHED_STATS:
            self._finished.popitem(last=False)

    def _count_busy(self, now: float) -> None:
        """Add the time since the last call if any request was open in it."""
        if self._live or self._num_embedding:
            self._interval.busy_s += max(now - self._busy_since_s, 0.0)
        self._busy_since_s = now


def _prompt_id(request_id: str) -> str:
    """The prompt "X" of the choice "X-0"."""
    return request_id.rpartition("-")[0] or request_id


def _delta(before: Number, after: Number) -> Number:
    """Increase of a total. Never negative: Prometheus would raise, and the step's events would be lost."""
    return max(after - before, 0)
