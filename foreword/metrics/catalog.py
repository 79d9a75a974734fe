"""Every metric, one row each: what exists, what it means, and whether it needs speculation.

The registry, docs/metrics.md and the tests derive from these rows. Counters end in `_total`;
a label is named here or it does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CATALOG",
    "EMBEDDING_FINISH_REASONS",
    "EMBEDDING_TASKS",
    "ENCODE_STAGE",
    "FAULT_STAGES",
    "FINISH_REASONS",
    "PREFIX",
    "REJECT_REASONS",
    "STEP_STAGES",
    "Metric",
]

PREFIX = "foreword_"
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
STEP_STAGES = ("schedule", "assemble", "forward", "sample", "draft", "commit", "embed")
ENCODE_STAGE = "encode"  # the stage of a step, and of faults, where the model sees pictures
FAULT_STAGES = ("start", "assemble", "forward", "sample", "nonfinite", "commit", "embed")
REJECT_REASONS = (
    "queue",
    "queue_tokens",
    "queue_timeout",
    "image_memory",
    "image_queue",
    "rate_requests",
    "rate_tokens",
    "concurrency",
    "unauthorized",
    "forbidden",
    "draining",
)
EMBEDDING_TASKS = ("embed", "rank")
EMBEDDING_FINISH_REASONS = ("done", "abort", "error")

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
TOKEN_LATENCY_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
)
DRAFT_LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
STAGE_BUCKETS_S = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    name         without the prefix
    kind         "gauge", "counter" or "histogram"
    labels       label names
    buckets      upper bounds of a histogram, in its unit
    speculative  exists only where speculation is configured
    pictures     exists only where the model sees pictures
    """

    name: str
    metric_type: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    speculative: bool = False
    multimodal: bool = False


def _gauge(name: str, help_: str) -> Metric:
    return Metric(name, "gauge", help_)


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, "counter", help_, labels)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", help_, labels, buckets)


def _image_metric(metric_type: str, name: str, help_: str) -> Metric:
    return Metric(name, metric_type, help_, multimodal=True)


def _spec_metric(
    metric_type: str, name: str, help_: str, *labels: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name, metric_type, help_, labels, buckets, speculative=True)


CATALOG = (
    _gauge("requests_running", "Requests that the last step worked on."),
    _gauge("requests_waiting", "Requests that wait for room."),
    _gauge("longest_running_tokens", "Tokens of the longest answer that is under way."),
    _gauge("oldest_running_seconds", "Age of the oldest running request."),
    _gauge("kv_cache_usage_ratio", "Share of the KV cache's blocks that are in use."),
    _gauge("device_memory_bytes", "Memory that the engine holds on its device."),
    _counter("prompt_tokens_total", "Prompt tokens of requests that got a first token."),
    _counter("generation_tokens_total", "Tokens delivered, after every cut."),
    _counter("choices_returned_total", "Choices that were sent in answers."),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _counter("preemptions_total", "Requests put back to make room."),
    _counter("requests_finished_total", "Requests that ended, by reason.", "reason"),
    _counter(
        "requests_rejected_total", "Requests that were refused before any work was done, by reason.", "reason"
    ),
    _counter("engine_restarts_total", "Engines started anew under live requests."),
    _counter(
        "engine_faults_total",
        "Errors inside the engine that ended the request they belong to and no other, by stage.",
        "stage",
    ),
    _counter("runaway_requests_total", "Requests whose output fell into a repeating pattern."),
    _histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY_BUCKETS_S),
    _histogram(
        "inter_token_latency_seconds",
        "Time per token; a burst of m tokens after t counts m times t/m.",
        TOKEN_LATENCY_BUCKETS_S,
    ),
    _histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", LATENCY_BUCKETS_S),
    _histogram("request_queue_seconds", "From arrival to the first step.", LATENCY_BUCKETS_S),
    _counter(
        "embedding_requests_total",
        "Requests for vectors or scores that ended, by what they wanted and how.",
        "kind",
        "reason",
    ),
    _counter(
        "embedding_inputs_total", "Texts that became vectors, and pairs of texts that were scored.", "kind"
    ),
    _counter("embedding_tokens_total", "Tokens of these texts.", "kind"),
    _histogram(
        "embedding_seconds", "From arrival to all vectors or scores of a request.", LATENCY_BUCKETS_S, "kind"
    ),
    _histogram("step_seconds", "Time of one step, by stage.", STAGE_BUCKETS_S, "stage"),
    _image_metric("counter", "images_encoded_total", "Pictures that went through the model's tower."),
    _image_metric(
        "counter",
        "image_cache_hits_total",
        "Pictures of requests that need not: encoded for another, just being so, or all of their tokens in the prefix cache.",
    ),
    _spec_metric("counter", "spec_drafts_total", "Drafts that were verified.", "drafter"),
    _spec_metric("counter", "spec_draft_tokens_total", "Tokens that were drafted and verified.", "drafter"),
    _spec_metric("counter", "spec_accepted_tokens_total", "Drafted tokens that were delivered.", "drafter"),
    _spec_metric(
        "counter",
        "spec_emitted_tokens_total",
        "Tokens delivered by the steps that verified a draft, the one after the draft included.",
        "drafter",
    ),
    _spec_metric(
        "counter",
        "spec_accepted_tokens_per_position_total",
        "Drafted tokens delivered, by place in the draft.",
        "drafter",
        "position",
    ),
    _spec_metric(
        "counter",
        "spec_draft_tokens_per_position_total",
        "Tokens drafted, by place in the draft.",
        "drafter",
        "position",
    ),
    _spec_metric(
        "counter", "spec_drafter_errors_total", "Drafts dropped because the drafter failed.", "drafter"
    ),
    _spec_metric(
        "gauge",
        "spec_system_efficiency_ratio",
        "Delivered tokens per verified row (drafted + 1), over steps that verified a draft.",
        "drafter",
    ),
    _spec_metric("gauge", "spec_acceptance_ratio", "Delivered drafted tokens per drafted token.", "drafter"),
    _spec_metric(
        "histogram",
        "spec_draft_length",
        "Tokens of the drafts that were chosen.",
        "drafter",
        buckets=DRAFT_LENGTH_BUCKETS,
    ),
    _spec_metric(
        "counter",
        "spec_no_draft_total",
        "Times that a request that may be drafted for got no draft, by reason.",
        "reason",
    ),
    _spec_metric(
        "counter",
        "spec_forced_tokens_total",
        "Tokens delivered that a grammar forced; they are no part of any acceptance.",
    ),
    _spec_metric(
        "counter",
        "spec_predicted_step_seconds_total",
        "What the steps that verified a draft were thought to cost.",
    ),
    _spec_metric("counter", "spec_realised_step_seconds_total", "What the steps that verified a draft cost."),
    _spec_metric(
        "counter",
        "spec_exploration_seconds_total",
        "Spent on drafts and plain steps whose only use was to learn.",
    ),
)
