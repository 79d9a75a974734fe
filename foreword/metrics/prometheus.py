"""A private Prometheus registry of the catalog's metrics, without default collectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from foreword.metrics.definitions import CATALOG, PREFIX, Metric

__all__ = ["CONTENT_TYPE", "MetricsRegistry"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
INSTRUMENTS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class MetricsRegistry:
    """The metrics of one server. An unknown name is a KeyError."""

    def __init__(self, speculative: bool, multimodal: bool = False) -> None:
        inner = CollectorRegistry()
        rows = [row for row in CATALOG if row.speculative <= speculative and row.multimodal <= multimodal]
        self._metrics = {row.name: _build_metric(row, inner) for row in rows}
        self._series: dict[tuple[str, ...], Any] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_WithoutCreated(inner))

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


class _WithoutCreated(Collector):
    """A registry's families without the `_created` series, which are not in the catalog."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _build_metric(metric: Metric, registry: CollectorRegistry) -> Any:
    options = {"buckets": metric.buckets} if metric.buckets else {}
    instrument = INSTRUMENTS[metric.metric_type]
    return instrument(PREFIX + metric.name, metric.help, metric.labels, registry=registry, **options)
