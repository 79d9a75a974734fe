"""A private Prometheus registry of the catalog's metrics, without default collectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from foreword.metrics.definitions import CATALOG, MODEL_LABEL, PREFIX, VLLM_METRICS, Metric, VLLMMetric

__all__ = ["CONTENT_TYPE", "ENGINE_PROCESS", "MetricsRegistry"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
INSTRUMENTS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
ENGINE_PROCESS = f"{PREFIX}engine"  # prefix of the engine's process metrics
VLLM_ENGINE = {"engine": "0"}  # label of vLLM's data-parallel engines


class MetricsRegistry:
    """The metrics of one server. An unknown name is a KeyError.

    speculative, predictive, multimodal  whether the metrics with this mark exist
    model   value of MODEL_LABEL; "" for none
    vllm    whether to export VLLM_METRICS too
    """

    def __init__(
        self,
        speculative: bool,
        multimodal: bool = False,
        predictive: bool = True,
        model: str = "",
        vllm: bool = False,
    ) -> None:
        inner = CollectorRegistry()
        rows = [
            row
            for row in CATALOG
            if row.speculative <= speculative
            and row.multimodal <= multimodal
            and row.predictive <= predictive
        ]
        self._metrics = {row.name: _build_metric(row, inner) for row in rows}
        self._series: dict[tuple[str, ...], Any] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_CatalogCollector(inner, rows, model, vllm))

    def add_processes(self, get_engine_pid: Callable[[], int | None]) -> None:
        """Export memory, processor time and open files of this process (`process_*`) and the engine's."""
        ProcessCollector(registry=self._registry)
        # Without an engine there is no such directory in /proc, and no series.
        ProcessCollector(ENGINE_PROCESS, lambda: get_engine_pid() or "none", registry=self._registry)

    def add(self, name: str, amount: float, *labels: str) -> None:
        self._get_series(name, labels).inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._get_series(name, labels).set(value)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        instrument = self._get_series(name, labels)
        for _ in range(times):
            instrument.observe(value)

    def init_series(self, name: str, labels: Iterable[str], *leading_labels: str) -> None:
        """Create a series at zero for each value of the last label."""
        for label in labels:
            self._get_series(name, (*leading_labels, label))

    def render(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _get_series(self, name: str, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, *labels))
        if series is None:
            metric = self._metrics[name]
            series = self._series[name, *labels] = metric.labels(*labels) if labels else metric
        return series


class _CatalogCollector(Collector):
    """A registry's families with the model's label, without `_created` series, and under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, rows: Iterable[Metric], model: str, vllm: bool) -> None:
        self._registry = registry
        self._of_model = {_family_name(PREFIX + row.name): row.of_model for row in rows}
        self._model = model
        self._vllm = vllm

    def collect(self) -> Iterator[Family]:
        families = {family.name: family for family in self._registry.collect()}
        if self._vllm:
            yield from self._vllm_families(families)
        for name, family in families.items():
            extra = {MODEL_LABEL: self._model} if self._model and self._of_model[name] else {}
            family.samples = [
                sample._replace(labels={**extra, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family

    def _vllm_families(self, families: dict[str, Family]) -> Iterator[Family]:
        for row in VLLM_METRICS:
            source = families.get(_family_name(PREFIX + row.source))
            if source is not None:
                yield _vllm_family(row, source, {"model_name": self._model, **VLLM_ENGINE})


def _vllm_family(row: VLLMMetric, source: Family, labels: dict[str, str]) -> Family:
    """The source's samples under vLLM's name and labels; sums over labels that vLLM does not have."""
    name, renamed = _family_name(row.name), dict(row.renamed)
    family = Family(name, f"vLLM's name for {PREFIX}{row.source}.", source.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # by the sample's suffix and labels
    for sample in source.samples:
        if sample.name.endswith("_created"):
            continue
        kept = {renamed.get(key, key): value for key, value in sample.labels.items() if key not in row.summed}
        series = sample.name.removeprefix(source.name), tuple({**labels, **kept}.items())
        sums[series] = sums.get(series, 0.0) + sample.value
    for (suffix, pairs), value in sums.items():
        family.add_sample(name + suffix, dict(pairs), value)
    return family


def _family_name(name: str) -> str:
    """prometheus_client names a counter's family without `_total`."""
    return name.removesuffix("_total")


def _build_metric(metric: Metric, registry: CollectorRegistry) -> Any:
    options = {"buckets": metric.buckets} if metric.buckets else {}
    instrument = INSTRUMENTS[metric.metric_type]
    return instrument(PREFIX + metric.name, metric.help, metric.labels, registry=registry, **options)
