"""The catalog as a Prometheus registry of its own: no global registry, no default collectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from foreword.metrics.catalog import CATALOG, PREFIX, Metric

__all__ = ["CONTENT_TYPE", "Registry"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Registry:
    """The metrics that exist in one server. A name outside the catalog is a KeyError."""

    def __init__(self, speculative: bool, pictures: bool = False) -> None:
        inner = CollectorRegistry()
        rows = [row for row in CATALOG if row.speculative <= speculative and row.pictures <= pictures]
        self._metrics = {row.name: _build(row, inner) for row in rows}
        self._series: dict[tuple[str, ...], Any] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_Plain(inner))

    def add(self, name: str, amount: float, *labels: str) -> None:
        self._of(name, labels).inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._of(name, labels).set(value)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        instrument = self._of(name, labels)
        for _ in range(times):
            instrument.observe(value)

    def start(self, name: str, labels: Iterable[str], *before: str) -> None:
        """Let the series of these labels exist from the start, at zero; `before` are the labels before the last."""
        for label in labels:
            self._of(name, (*before, label))

    def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _of(self, name: str, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, *labels))
        if series is None:
            metric = self._metrics[name]
            series = self._series[name, *labels] = metric.labels(*labels) if labels else metric
        return series


class _Plain(Collector):
    """The families of a registry without the `_created` series, which no row of the catalog names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _build(row: Metric, registry: CollectorRegistry) -> Any:
    more = {"buckets": row.buckets} if row.buckets else {}
    return KINDS[row.kind](PREFIX + row.name, row.help, row.labels, registry=registry, **more)
