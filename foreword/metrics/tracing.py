"""OpenTelemetry traces over OTLP/HTTP: a span for each HTTP request, and below it the phases of each choice.

open_tracer() imports the packages of the extra `otel`, if there is an endpoint. Spans hold names, counts and
times, never a text.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from foreword.core.request import Request
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.metrics.request_stats import RequestProgress

logger = logging.getLogger("foreword.metrics")

ENDPOINT_PATTERN = re.compile(r"https?://[^/\s]+/\S")  # a URL of gRPC has no path
FLUSH_TIMEOUT_S = 2.0  # limit of the last flush, at the end of the server
OPERATIONS = {  # gen_ai.operation.name of a route
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# Fields of SamplingParams under their names in the semantic conventions.
SAMPLING_ATTRIBUTES = {
    name: f"gen_ai.request.{name}"
    for name in ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
}

current_span: ContextVar[RequestSpan | None] = ContextVar("current_span", default=None)


def open_tracer(endpoint: str | None, version: str) -> RequestTracer | None:
    """A tracer that exports to a URL of OTLP/HTTP; None without one.

    Raises ConfigError for another URL, and without the packages.
    """
    if endpoint is None:
        return None
    if not ENDPOINT_PATTERN.match(endpoint):
        raise ConfigError(
            "otlp_traces_endpoint must be a URL of OTLP/HTTP with its path, such as "
            f"http://localhost:4318/v1/traces, got {endpoint!r:.200}",
            "otlp_traces_endpoint",
        )
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return RequestTracer(_LoggedExporter(exporter.OTLPSpanExporter(endpoint=endpoint), endpoint), version)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'foreword[otel]'",
            "otlp_traces_endpoint",
        ) from None


class RequestTracer:
    """Makes the spans of requests. A thread exports them: a collector that is down costs spans, never time.

    exporter  a SpanExporter of the SDK
    version   of this server, for `service.version`

    The SDK's own variables apply (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_MAX_QUEUE_SIZE, ...).
    """

    def __init__(self, exporter: Any, version: str) -> None:
        sdk = import_module("opentelemetry.sdk.trace")
        resources = import_module("opentelemetry.sdk.resources")
        resource = resources.Resource.create({"service.version": version})
        if resource.attributes["service.name"].startswith("unknown_service"):
            resource = resource.merge(resources.Resource({"service.name": "foreword"}))
        processor = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("foreword", version)
        self._propagator = import_module(
            "opentelemetry.trace.propagation.tracecontext"
        ).TraceContextTextMapPropagator()
        self._trace = import_module("opentelemetry.trace")

    def start(self, method: str, route: str, headers: Mapping[str, str]) -> RequestSpan:
        """The span of a request that arrives now, below that of its header `traceparent` if it has one."""
        attributes = {"http.request.method": method, "http.route": route}
        if route in OPERATIONS:
            attributes |= {"gen_ai.operation.name": OPERATIONS[route], "gen_ai.provider.name": "foreword"}
        parent, start_s, start_ns = self._propagator.extract(headers), time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            f"{method} {route}", parent, self._trace.SpanKind.SERVER, attributes, start_time=start_ns
        )
        return RequestSpan(self._tracer, self._trace, span, start_s, start_ns)

    def flush(self) -> None:
        """Wait until every span that has ended is exported, or lost."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export the last spans, for at most FLUSH_TIMEOUT_S."""
        thread = Thread(target=self._provider.shutdown, name="flush traces", daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)


class RequestSpan:
    """The span of an HTTP request: `current_span` while the request is handled.

    `route` ends when its first choice is submitted: key, loading of its model, template, tokens. Each choice
    adds `queue`, `prefill` and `decode`, as far as it came. Times are of time.monotonic().
    """

    def __init__(self, tracer: Any, trace: Any, span: Any, start_s: float, start_ns: int) -> None:
        self._tracer = tracer
        self._trace = trace
        self._span = span
        self._start_s = start_s
        self._start_ns = start_ns  # the same in Unix time
        self._context = trace.set_span_in_context(span)
        self._prompts: dict[str, tuple[int, int]] = {}  # (tokens, cached tokens) by prompt
        self._num_generated = 0
        self._finish_reasons: list[str] = []

    def on_model(self, asked: str, model: str) -> None:
        """The request asks for a model by this name, and gets answers of that name."""
        self._set(self._span, {"gen_ai.request.model": asked, "gen_ai.response.model": model})

    def on_submit(self, request: Request) -> None:
        """A choice was submitted. Parameters are those of the first one."""
        prompt = request.id.rpartition("-")[0]
        if self._prompts or not self._span.is_recording():
            return
        self._prompts[prompt] = len(request.prompt_ids), 0
        values = {name: getattr(request.params, field) for field, name in SAMPLING_ATTRIBUTES.items()}
        self._set(self._span, {**values, "gen_ai.response.id": prompt})
        self._add_phase("route", self._start_s, request.arrival_s or self._start_s, {})

    def on_finish(self, progress: RequestProgress, reason: str, now_s: float) -> None:
        """A choice ended: stop, length, repetition, abort or error."""
        if not self._span.is_recording():
            return
        request, stats = progress.request, progress.spec_stats
        choice = {"foreword.choice_id": request.id}
        scheduled_s, first_token_s = progress.scheduled_s, progress.first_token_at_s
        self._add_phase("queue", progress.arrival_s, scheduled_s or now_s, choice)
        if scheduled_s is not None:
            values: dict[str, Any] = choice | {
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "gen_ai.usage.cache_read.input_tokens": progress.num_cached,
            }
            self._add_phase("prefill", scheduled_s, first_token_s or now_s, values)
        if first_token_s is not None:
            values = choice | {
                "gen_ai.usage.output_tokens": progress.num_tokens,
                "foreword.draft_tokens": stats.num_drafted,
                "foreword.accepted_tokens": stats.num_accepted,
                "foreword.acceptance_rate": stats.acceptance_rate,
                "foreword.verify_steps": stats.num_verify_steps,
                "foreword.drafters": sorted(progress.drafters) or None,
            }
            self._add_phase("decode", first_token_s, now_s, values)
        self._prompts[request.id.rpartition("-")[0]] = len(request.prompt_ids), progress.num_cached
        self._num_generated += progress.num_tokens
        self._finish_reasons.append(reason)
        if reason == "error":
            self._span.set_status(self._trace.StatusCode.ERROR)

    def on_embedding(self, num_tokens: int) -> None:
        """An embedding or ranking request ended; it has no phases."""
        self._set(self._span, {"gen_ai.usage.input_tokens": num_tokens})

    def on_restart(self) -> None:
        """The engine is replaced while this request is open."""
        self._span.add_event("engine restarted")

    def end(self, status: int, request_id: str, key: str) -> None:
        """The response was sent, or given up. `key` is the name of the API key; empty without one."""
        values: dict[str, Any] = {
            "http.response.status_code": status,
            "error.type": str(status) if status >= 400 else None,
            "foreword.request_id": request_id,
            "foreword.key": key or None,
        }
        if self._finish_reasons:
            values |= {
                "gen_ai.response.finish_reasons": self._finish_reasons,
                "gen_ai.usage.input_tokens": sum(tokens for tokens, _ in self._prompts.values()),
                "gen_ai.usage.cache_read.input_tokens": sum(cached for _, cached in self._prompts.values()),
                "gen_ai.usage.output_tokens": self._num_generated,
            }
        self._set(self._span, values)
        if status >= 500:
            self._span.set_status(self._trace.StatusCode.ERROR)
        self._span.end(self._unix_ns(time.monotonic()))

    def _add_phase(self, name: str, start_s: float, end_s: float, values: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(name, self._context, start_time=self._unix_ns(start_s))
        self._set(span, values)
        span.end(self._unix_ns(max(start_s, end_s)))

    def _set(self, span: Any, values: Mapping[str, Any]) -> None:
        span.set_attributes({name: value for name, value in values.items() if value is not None})

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._start_ns + int((monotonic_s - self._start_s) * 1e9)


class _LoggedExporter:
    """Logs once that the collector does not take spans, and once that it does again.

    The SDK's own loggers would write several lines for each batch.
    """

    def __init__(self, exporter: Any, endpoint: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = exporter
        self._host = urlsplit(endpoint).netloc.rpartition("@")[2]  # excludes the password
        self._num_lost = 0

    def export(self, spans: Any) -> Any:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            if not self._num_lost:
                logger.warning("traces: %s takes no spans; they are dropped until it does", self._host)
            self._num_lost += len(spans)
        elif self._num_lost:
            logger.info("traces: %s takes spans again; %d were dropped", self._host, self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))
