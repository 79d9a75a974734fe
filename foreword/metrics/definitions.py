"""All metrics, one row each. The registry, docs/metrics.md and the tests derive from these rows."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "foreword_"
MODEL_LABEL = "model"  # the served name
INFO_LABELS = (
    *("version", "model", "architecture", "device", "backend", "dtype", "quantization", "kv_cache_dtype"),
    *("speculate", "draft_model", "draft_length"),
)
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
STEP_STAGES = ("schedule", "assemble", "forward", "sample", "draft", "commit", "embed")
ENCODE_STAGE = "encode"  # stage of steps and faults of vision-language models
FAULT_STAGES = ("start", "assemble", "forward", "sample", "nonfinite", "commit", "embed")
REJECT_REASONS = (
    "queue",
    "queue_tokens",
    "queue_timeout",
    "intake_queue",
    "over_budget",
    "image_memory",
    "image_queue",
    "rate_requests",
    "rate_tokens",
    "quota",
    "concurrency",
    "unauthorized",
    "forbidden",
    "draining",
)
UNLOAD_REASONS = ("evicted", "keep_alive", "requested", "dead")
EMBEDDING_TASKS = ("embed", "rank")
EMBEDDING_FINISH_REASONS = ("done", "abort", "error")

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
TOKEN_LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
DRAFT_LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
STALL_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGE_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str  # name after PREFIX
    metric_type: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram
    speculative: bool = False  # exists only with speculation
    predictive: bool = False  # speculative, and exists only if step times are predicted
    multimodal: bool = False  # exists only for vision-language models
    of_model: bool = True  # has the label MODEL_LABEL besides `labels`
    of_key: bool = False  # names API keys: only for scrapes with the key of an admin, where there is one
    of_server: bool = False  # the server itself counts it too, with several models without their label
    of_loads: bool = False  # about loads of models: only the server counts it


def _gauge(name: str, help_: str) -> Metric:
    return Metric(name, "gauge", help_)


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, "counter", help_, labels)


def _key_counter(name: str, help_: str) -> Metric:
    return Metric(name, "counter", help_, ("key", MODEL_LABEL), of_model=False, of_key=True, of_server=True)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", help_, labels, buckets)


def _image_metric(metric_type: str, name: str, help_: str) -> Metric:
    return Metric(name, metric_type, help_, multimodal=True)


def _spec_metric(
    metric_type: str, name: str, help_: str, *labels: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name, metric_type, help_, labels, buckets, speculative=True)


def _fleet_metric(
    metric_type: str, name: str, help_: str, *labels: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name, metric_type, help_, labels, buckets, of_model=False, of_server=True, of_loads=True)


def _prediction_metric(name: str, help_: str) -> Metric:
    return Metric(name, "counter", help_, speculative=True, predictive=True)


CATALOG = (
    Metric("info", "gauge", "Always 1; what runs is in the labels.", INFO_LABELS, of_model=False),
    Metric(
        "http_requests_total",
        "counter",
        "HTTP responses since the model was loaded, by the route's template (`other`: none) and status.",
        ("route", "status"),
        of_model=False,
        of_server=True,
    ),
    _key_counter("key_requests_total", "Requests that ended, by key and by the model's name in answers."),
    _key_counter("key_prompt_tokens_total", "Their prompt tokens, of prompts that got a first token."),
    _key_counter("key_generation_tokens_total", "Their delivered tokens."),
    Metric(
        "usage_db_errors_total",
        "counter",
        "Writes to the usage database that failed or took longer than a second; they are repeated.",
        of_model=False,
        of_server=True,
    ),
    Metric(
        "event_loop_stall_seconds",
        "histogram",
        "Stalls of the event loop of the API process, of 0.05 s and more: no request is answered meanwhile.",
        buckets=STALL_BUCKETS_S,
        of_model=False,
        of_server=True,
    ),
    _fleet_metric("gauge", "models_loaded", "Models in memory."),
    _fleet_metric(
        "gauge", "model_memory_bytes", "Memory of a loaded model's processes (PSS), as measured.", MODEL_LABEL
    ),
    _fleet_metric("counter", "model_loads_total", "Loads of a model that succeeded.", MODEL_LABEL),
    _fleet_metric("counter", "model_load_failures_total", "Loads of a model that failed.", MODEL_LABEL),
    _fleet_metric(
        "counter",
        "model_unloads_total",
        "Unloads of a model, by reason; `dead`: its engine could not be restarted.",
        MODEL_LABEL,
        "reason",
    ),
    _fleet_metric(
        "histogram", "model_load_seconds", "Time to load a model.", MODEL_LABEL, buckets=LATENCY_BUCKETS_S
    ),
    _fleet_metric(
        "histogram",
        "model_wait_seconds",
        "Time that a request waited for its model to be loaded.",
        MODEL_LABEL,
        buckets=LATENCY_BUCKETS_S,
    ),
    _fleet_metric("gauge", "model_waiting_requests", "Requests that wait for a model.", MODEL_LABEL),
    _gauge("requests_running", "Requests in the last step."),
    _gauge("requests_waiting", "Requests in the waiting queue."),
    _gauge("longest_running_tokens", "Output tokens of the longest running request."),
    _gauge("oldest_running_seconds", "Age of the oldest running request."),
    _gauge("kv_cache_usage_ratio", "Share of KV blocks that are in use."),
    _gauge("device_memory_bytes", "Memory allocated by the engine on its device."),
    _counter("prompt_tokens_total", "Prompt tokens of requests that got a first token."),
    _counter("generation_tokens_total", "Tokens delivered, after truncation by stop conditions."),
    _counter("choices_returned_total", "Choices sent in responses."),
    _counter(
        "adapter_requests_total",
        "Choices with a LoRA adapter that ended, by its name (`other`: after 64 names).",
        "adapter",
    ),
    _counter("adapter_tokens_total", "Tokens delivered with a LoRA adapter, by its name.", "adapter"),
    Metric(
        "lora_requests_info",
        "gauge",
        "Unix time; the adapters of open requests, by commas, are in the labels. Without LoRA no series.",
        ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
    ),
    _counter("reasoning_tokens_total", "Tokens of reasoning, of answers that ended."),
    _counter("tool_calls_total", "Tool calls in answers, complete or cut off."),
    _counter("tool_call_tokens_total", "Tokens inside of tool calls, of answers that ended."),
    _counter("tool_parse_errors_total", "Texts that began as tool calls and were none; they stay content."),
    _counter(
        "tool_schema_keywords_dropped_total",
        "Keywords in schemas of tools without `strict` that are not enforced, by request.",
    ),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _counter(
        "kv_adopted_tokens_total", "Tokens of KV that engines took over from the memory of the one before."
    ),
    _counter(
        "kv_host_hit_tokens_total", "Tokens whose KV was read from host memory; cache hits include them."
    ),
    _counter("kv_host_bytes_total", "Bytes of KV read from host memory or written to it.", "direction"),
    _counter(
        "kv_host_seconds_total", "Time to read and write them; reads include the copy to blocks.", "direction"
    ),
    _counter(
        "kv_host_avoided_seconds_total",
        "Time that computing the tokens read from host memory would have taken, expected.",
    ),
    _counter("kv_host_lost_writes_total", "Blocks that were not written to it, by reason.", "reason"),
    _counter("kv_disk_hit_tokens_total", "Tokens whose KV was read from disk; cache hits include them."),
    _counter("kv_disk_bytes_total", "Bytes of KV that were read from disk or written to it.", "direction"),
    _counter(
        "kv_disk_seconds_total", "Time to read and write them; reads include the copy to blocks.", "direction"
    ),
    _counter(
        "kv_disk_avoided_seconds_total", "Time that computing the tokens read would have taken, expected."
    ),
    _counter("kv_disk_refused_files_total", "Files that were damaged or missing, by reason.", "reason"),
    _counter("kv_disk_lost_writes_total", "Blocks that were not written, by reason.", "reason"),
    _counter("preemptions_total", "Requests preempted to free KV blocks."),
    _counter("requests_finished_total", "Requests that ended, by reason.", "reason"),
    Metric(
        "requests_rejected_total",
        "counter",
        "Requests rejected before any work, by reason.",
        ("reason",),
        of_server=True,
    ),
    Metric(
        "ignored_message_fields_total",
        "counter",
        "Unknown fields of messages and content parts, which are ignored.",
        of_server=True,
    ),
    _counter(
        "engine_restarts_total",
        "Engines that died or hung and were replaced; planned reloads are not counted.",
    ),
    _counter("engine_faults_total", "Engine errors that failed a single request, by stage.", "stage"),
    _counter("runaway_requests_total", "Requests whose output fell into a repeating pattern."),
    _histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY_BUCKETS_S),
    _histogram(
        "inter_token_latency_seconds",
        "Time per token; a burst of m tokens after t counts m times t/m.",
        TOKEN_LATENCY_BUCKETS_S,
    ),
    _histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS_S),
    _histogram("request_queue_seconds", "From arrival to the first step.", LATENCY_BUCKETS_S),
    _counter(
        "embedding_requests_total", "Embedding and ranking requests that ended, by reason.", "kind", "reason"
    ),
    _counter("embedding_inputs_total", "Texts embedded, and text pairs scored.", "kind"),
    _counter("embedding_tokens_total", "Tokens of these texts.", "kind"),
    _histogram("embedding_seconds", "From arrival to the last result.", LATENCY_BUCKETS_S, "kind"),
    _histogram("step_seconds", "Time of one step, by stage.", STAGE_BUCKETS_S, "stage"),
    _image_metric("counter", "images_encoded_total", "Images encoded by the vision encoder."),
    _image_metric(
        "counter",
        "image_cache_hits_total",
        "Images not encoded: features cached or in progress, or all tokens in the prefix cache.",
    ),
    _spec_metric("counter", "spec_drafts_total", "Drafts verified.", "drafter"),
    _spec_metric("counter", "spec_draft_tokens_total", "Tokens drafted and verified.", "drafter"),
    _spec_metric("counter", "spec_accepted_tokens_total", "Drafted tokens delivered.", "drafter"),
    _spec_metric(
        "counter",
        "spec_emitted_tokens_total",
        "Tokens delivered by steps that verified a draft, including the token after the draft.",
        "drafter",
    ),
    _spec_metric(
        "counter",
        "spec_accepted_tokens_per_position_total",
        "Drafted tokens delivered, by position in the draft.",
        "drafter",
        "position",
    ),
    _spec_metric(
        "counter",
        "spec_draft_tokens_per_position_total",
        "Tokens drafted, by position in the draft.",
        "drafter",
        "position",
    ),
    _spec_metric(
        "counter",
        "spec_drafter_errors_total",
        "Drafts lost to errors of a drafter, and engines that it crashed or hung.",
        "drafter",
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
        "Tokens of the chosen drafts.",
        "drafter",
        buckets=DRAFT_LENGTH_BUCKETS,
    ),
    _spec_metric("counter", "spec_no_draft_total", "Steps of requests without a draft, by reason.", "reason"),
    _spec_metric(
        "counter",
        "spec_forced_tokens_total",
        "Delivered tokens that a grammar forced; not counted in acceptance.",
    ),
    _prediction_metric(
        "spec_predicted_step_seconds_total",
        "Predicted time of steps that verified a draft, or ran draft passes that were to pay.",
    ),
    _prediction_metric(
        "spec_realised_step_seconds_total", "Measured time of the steps of spec_predicted_step_seconds_total."
    ),
    _prediction_metric(
        "spec_plain_step_seconds_total",
        "Estimated time of plain decoding for the tokens of the steps of spec_predicted_step_seconds_total.",
    ),
    _prediction_metric(
        "spec_exploration_seconds_total",
        "Time of drafts and plain steps run only to measure, without draft passes that paid.",
    ),
)


@dataclass(frozen=True, slots=True)
class VLLMMetric:
    """A metric of vLLM whose values are those of a metric of the catalog."""

    name: str  # as vLLM exports it
    source: str  # name in CATALOG
    summed: tuple[str, ...] = ()  # labels of the source that vLLM does not have
    renamed: tuple[tuple[str, str], ...] = ()  # (label of the source, vLLM's label)


# As in vLLM 0.11 and later; until then inter_token_latency_seconds was called time_per_output_token_seconds.
VLLM_METRICS = (
    VLLMMetric("vllm:num_requests_running", "requests_running"),
    VLLMMetric("vllm:num_requests_waiting", "requests_waiting"),
    VLLMMetric("vllm:kv_cache_usage_perc", "kv_cache_usage_ratio"),
    VLLMMetric("vllm:prompt_tokens_total", "prompt_tokens_total"),
    VLLMMetric("vllm:generation_tokens_total", "generation_tokens_total"),
    VLLMMetric("vllm:prefix_cache_queries_total", "prefix_cache_queries_total"),
    VLLMMetric("vllm:prefix_cache_hits_total", "prefix_cache_hits_total"),
    VLLMMetric("vllm:num_preemptions_total", "preemptions_total"),
    VLLMMetric(
        "vllm:request_success_total", "requests_finished_total", renamed=(("reason", "finished_reason"),)
    ),
    VLLMMetric("vllm:lora_requests_info", "lora_requests_info"),
    VLLMMetric("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    VLLMMetric("vllm:inter_token_latency_seconds", "inter_token_latency_seconds"),
    VLLMMetric("vllm:time_per_output_token_seconds", "inter_token_latency_seconds"),
    VLLMMetric("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    VLLMMetric("vllm:request_queue_time_seconds", "request_queue_seconds"),
    VLLMMetric("vllm:spec_decode_num_drafts_total", "spec_drafts_total", ("drafter",)),
    VLLMMetric("vllm:spec_decode_num_draft_tokens_total", "spec_draft_tokens_total", ("drafter",)),
    VLLMMetric("vllm:spec_decode_num_accepted_tokens_total", "spec_accepted_tokens_total", ("drafter",)),
    VLLMMetric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "spec_accepted_tokens_per_position_total",
        ("drafter",),
    ),
)
