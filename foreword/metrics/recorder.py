"""Counts what was delivered: the server reports, Prometheus, the log and each answer read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from foreword.core.events import FORCED, DraftingStats, DraftUse, StepStats, Tokens
from foreword.core.request import Request
from foreword.core.runaway import Repetition
from foreword.errors import ForewordError, loggable
from foreword.metrics import log
from foreword.metrics.answer import AnswerMetrics, Figures, Progress, metrics_of
from foreword.metrics.catalog import EMBEDDING_KINDS, EMBEDDING_REASONS, ENCODE, FAULTS, REASONS, REJECTIONS, STAGES
from foreword.metrics.prometheus import Registry
from foreword.metrics.tally import DraftTally

__all__ = ["Recorder"]

Number = TypeVar("Number", int, float)

DRAFT = "draft"  # the stage that does not exist without drafters
KEPT_ANSWERS = 4096  # ended requests whose figures may still be asked for

GAUGES = (
    "requests_running",
    "requests_waiting",
    "longest_running_tokens",
    "oldest_running_seconds",
    "kv_cache_usage_ratio",
    "device_memory_bytes",
)
IMAGE_TOTALS = ("images_encoded_total", "image_cache_hits_total")
TOTALS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "preemptions_total")
SECONDS = {
    "spec_predicted_step_seconds_total": "predicted_seconds",
    "spec_realised_step_seconds_total": "realised_seconds",
    "spec_exploration_seconds_total": "exploring_seconds",
}
EMBEDDING_TOTALS = ("embedding_inputs_total", "embedding_tokens_total", "embedding_seconds")
BY_DRAFTER = (
    "spec_drafts_total",
    "spec_draft_tokens_total",
    "spec_accepted_tokens_total",
    "spec_emitted_tokens_total",
    "spec_drafter_errors_total",
    "spec_draft_length",
)


class Recorder:
    """The metrics of one server. Used from one thread; holds no global state.

    drafters        names of those that may run; empty: nothing of speculation exists here
    log_interval_s  seconds between throughput lines; 0 for none
    clock           monotonic seconds, the same clock as Request.arrival_s and Tokens.scheduled_s
    pictures        the model sees pictures; else nothing of them exists here
    stats_now       asked for the gauges; None: they are those of the last step
    """

    def __init__(
        self,
        drafters: tuple[str, ...],
        log_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        pictures: bool = False,
    ) -> None:
        self._drafters = drafters
        self._pictures = pictures
        self._log_interval_s = log_interval_s
        self.stats_now: Callable[[], StepStats] | None = None
        self._clock = clock
        self._live: dict[str, Progress] = {}
        self._choices: dict[str, log.Choices] = {}
        self._ended: OrderedDict[str, Figures] = OrderedDict()
        self._num_embedding = 0
        self._stats = StepStats()
        self._tallies = {name: DraftTally() for name in drafters}
        self._interval = log.Interval()
        self._busy_since = clock()
        self._logged_s = clock()
        self._registry = Registry(bool(drafters), pictures)
        self._start_series()

    def _start_series(self) -> None:
        self._registry.start("requests_finished_total", REASONS)
        self._registry.start("step_seconds", [stage for stage in STAGES if stage != DRAFT or self._drafters])
        self._registry.start("engine_faults_total", FAULTS)
        self._registry.start("requests_rejected_total", REJECTIONS)
        for name in ("step_seconds", "engine_faults_total") if self._pictures else ():
            self._registry.start(name, (ENCODE,))
        for kind in EMBEDDING_KINDS:
            self._registry.start("embedding_requests_total", EMBEDDING_REASONS, kind)
        for name in EMBEDDING_TOTALS:
            self._registry.start(name, EMBEDDING_KINDS)
        for name in BY_DRAFTER if self._drafters else ():
            self._registry.start(name, [drafter for drafter in self._drafters if drafter != FORCED])

    # What happened to a request.

    def arrived(self, request: Request) -> None:
        """A choice was submitted. The choices of one prompt are "X-0", "X-1", ... and arrive before any of them ends."""
        now = self._clock()
        self._count_busy(now)
        self._live[request.id] = Progress(request, now)
        self._choices.setdefault(_prompt_name(request.id), log.Choices()).asked += 1

    def delivered(self, request: Request, event: Tokens, now_s: float) -> None:
        """Tokens reached the caller; `event` is what is left after the cut, its finish_reason ends the request."""
        progress = self._live.get(request.id)
        if progress is None:
            return  # aborted while the event was under way
        self._count_prompt(request)
        gap_s = progress.deliver(event, now_s)
        if event.token_ids:
            self._count_tokens(progress, len(event.token_ids), gap_s)
        if event.draft is not None and event.draft.drafted:
            self._count_draft(event.draft, len(event.token_ids))
        if event.repeating is not None:
            self._count_runaway(request, event, event.repeating)
        if event.finish_reason is not None:
            self._end(progress, event.finish_reason, now_s)

    def failed(self, request: Request, error: ForewordError) -> None:
        """The request ended with an error."""
        progress = self._live.get(request.id)
        if progress is not None:
            log.logger.warning("request %s failed: %s", request.id, loggable(error))
            self._end(progress, "error", self._clock())

    def aborted(self, request: Request) -> None:
        """Nobody wanted the answer any more."""
        progress = self._live.get(request.id)
        if progress is not None:
            self._end(progress, "abort", self._clock())

    def rejected(self, reason: str) -> None:
        """A request was refused; one of the catalog's REJECTIONS."""
        self._registry.add("requests_rejected_total", 1, reason)

    def live(self) -> Sequence[Progress]:
        """The choices that are open."""
        return list(self._live.values())

    def returned(self, num_choices: int) -> None:
        """An answer with that many choices was sent."""
        self._registry.add("choices_returned_total", num_choices)

    def embedding_began(self) -> None:
        """A request for vectors or scores was taken."""
        self._count_busy(self._clock())
        self._num_embedding += 1

    def embedding_ended(self, kind: str, reason: str, num_inputs: int, num_tokens: int, seconds: float) -> None:
        """kind and reason as in the catalog; texts and tokens count if all of them are done."""
        self._count_busy(self._clock())
        self._num_embedding -= 1
        self._registry.add("embedding_requests_total", 1, kind, reason)
        if reason == "done":
            self._registry.add("embedding_inputs_total", num_inputs, kind)
            self._registry.add("embedding_tokens_total", num_tokens, kind)
            self._registry.observe("embedding_seconds", seconds, kind)
            self._interval.embedded += num_tokens
        log.logger.info("%s", log.embedding_line(kind, reason, num_inputs, num_tokens, seconds))

    def answer_metrics(self, *request_ids: str) -> AnswerMetrics | None:
        """Figures of a choice, or of several together, that are live or ended not long ago."""
        figures = [found for found in map(self._figures, request_ids) if found is not None]
        return metrics_of(figures) if figures else None

    def _figures(self, request_id: str) -> Figures | None:
        if request_id in self._live:
            return self._live[request_id].figures(_prompt_name(request_id))
        return self._ended.get(request_id)

    # What happened to the engine.

    def step(self, stats: StepStats) -> None:
        """The engine after a step. The same step may be told twice; it counts once."""
        if stats.step == self._stats.step:
            return
        before = self._stats if stats.step > self._stats.step else StepStats()  # an engine started again counts from zero
        for name in (*TOTALS, *(IMAGE_TOTALS if self._pictures else ())):
            self._registry.add(name, _growth(getattr(before, name), getattr(stats, name)))
        for stage, seconds in stats.stage_seconds.items():
            self._registry.observe("step_seconds", seconds, stage)
        for drafter, errors in stats.drafter_errors.items():
            self._registry.add("spec_drafter_errors_total", _growth(before.drafter_errors.get(drafter, 0), errors), drafter)
        for stage, faults in stats.faults.items():
            self._registry.add("engine_faults_total", _growth(before.faults.get(stage, 0), faults), stage)
        if self._drafters:
            self._count_decisions(before.drafting, stats.drafting)
        self._interval.prefix_queries += _growth(before.prefix_cache_queries_total, stats.prefix_cache_queries_total)
        self._interval.prefix_hits += _growth(before.prefix_cache_hits_total, stats.prefix_cache_hits_total)
        self._stats = stats

    def restarted(self, reason: str) -> None:
        """The engine died or hung, and is replaced: its successor counts from zero, and runs nothing yet."""
        self._registry.add("engine_restarts_total", 1)
        self._stats = StepStats()

    def _count_decisions(self, before: DraftingStats, now: DraftingStats) -> None:
        """What was decided about drafts since the step before."""
        for drafter, lengths in now.lengths.items():
            known = before.lengths.get(drafter, {})
            for length, count in lengths.items():
                if count != known.get(length):  # most are as they were, and looking a series up costs more than this
                    self._registry.observe("spec_draft_length", length, drafter, times=_growth(known.get(length, 0), count))
        for reason, count in now.none.items():
            self._registry.add("spec_no_draft_total", _growth(before.none.get(reason, 0), count), reason)
        for name, seconds in SECONDS.items():
            self._registry.add(name, _growth(getattr(before, seconds), getattr(now, seconds)))

    # Who reads.

    def render(self) -> bytes:
        """The scrape; its type is prometheus.CONTENT_TYPE."""
        stats = self._stats if self.stats_now is None else self.stats_now()
        for name in GAUGES:
            self._registry.set(name, getattr(stats, name))
        return self._registry.render()

    def tick(self, now: float | None = None) -> None:
        """Write the periodic log lines if they are due; call it about once a second."""
        now = self._clock() if now is None else now
        if self._log_interval_s <= 0 or now - self._logged_s < self._log_interval_s:
            return
        self._count_busy(now)
        self._logged_s = now
        if self._interval.traffic:
            self._write_lines()
            self._interval = log.Interval()

    def _write_lines(self) -> None:
        log.logger.info("%s", log.throughput_line(self._interval, self._stats))
        if self._interval.tally.drafted:
            log.logger.info("%s", log.speculation_line(self._interval.tally))

    def _count_prompt(self, request: Request) -> None:
        choices = self._choices[_prompt_name(request.id)]
        if not choices.computed:
            choices.computed = True
            self._registry.add("prompt_tokens_total", len(request.prompt_ids))
            self._interval.prompt += len(request.prompt_ids)

    def _count_tokens(self, progress: Progress, count: int, gap_s: float | None) -> None:
        self._registry.add("generation_tokens_total", count)
        self._interval.generated += count
        if gap_s is not None:
            self._registry.observe("inter_token_latency_seconds", gap_s / count, times=count)
            return
        for name, span_s in (
            ("time_to_first_token_seconds", progress.first_token_s),
            ("request_queue_seconds", progress.queue_s),
        ):
            if span_s is not None:
                self._registry.observe(name, span_s)

    def _count_runaway(self, request: Request, event: Tokens, found: Repetition) -> None:
        self._registry.add("runaway_requests_total", 1)
        log.logger.warning("%s", log.runaway_line(request, event, found))

    def _count_draft(self, use: DraftUse, emitted: int) -> None:
        accepted = min(use.accepted, emitted)
        if use.forced:
            self._registry.add("spec_forced_tokens_total", accepted)
            return
        tally = self._tallies[use.drafter]
        tally.add(use.drafted, accepted, emitted)
        self._interval.tally.add(use.drafted, accepted, emitted)
        self._registry.add("spec_drafts_total", 1, use.drafter)
        self._registry.add("spec_draft_tokens_total", use.drafted, use.drafter)
        self._registry.add("spec_accepted_tokens_total", accepted, use.drafter)
        self._registry.add("spec_emitted_tokens_total", emitted, use.drafter)
        self._count_positions("spec_draft_tokens_per_position_total", use.drafter, use.drafted)
        self._count_positions("spec_accepted_tokens_per_position_total", use.drafter, accepted)
        self._registry.set("spec_system_efficiency_ratio", _sure(tally.efficiency), use.drafter)
        self._registry.set("spec_acceptance_ratio", _sure(tally.acceptance), use.drafter)

    def _count_positions(self, name: str, drafter: str, length: int) -> None:
        for position in range(length):
            self._registry.add(name, 1, drafter, str(position))

    def _end(self, progress: Progress, reason: str, now: float) -> None:
        request = progress.request
        self._count_busy(now)
        del self._live[request.id]
        self._registry.add("requests_finished_total", 1, reason)
        self._registry.observe("e2e_request_latency_seconds", max(now - progress.arrived_s, 0.0))
        self._ended[request.id] = progress.figures(_prompt_name(request.id))
        while len(self._ended) > KEPT_ANSWERS:
            self._ended.popitem(last=False)
        self._log_choice(progress, reason, now)

    def _log_choice(self, progress: Progress, reason: str, now: float) -> None:
        """One line for all choices of a prompt, when the last has ended."""
        name = _prompt_name(progress.request.id)
        choices = self._choices[name]
        choices.ended.append((progress, reason))
        if choices.complete:
            del self._choices[name]
            log.logger.info("%s", log.request_line(name, choices, now))

    def _count_busy(self, now: float) -> None:
        """Add the time since the last call if any request was open in it."""
        if self._live or self._num_embedding:
            self._interval.busy_s += max(now - self._busy_since, 0.0)
        self._busy_since = now


def _prompt_name(request_id: str) -> str:
    """ "X" of the choice "X-0"."""
    return request_id.rpartition("-")[0] or request_id


def _growth(before: Number, after: Number) -> Number:
    """Of a total, never negative: a counter that went back would be an error here, and cost the step its events."""
    return max(after - before, 0)


def _sure(ratio: float | None) -> float:
    assert ratio is not None, "a ratio of nothing"
    return ratio
