"""The catalog's metrics, counted in plain numbers and exported in Prometheus' text format.

prometheus_client's own counters and histograms cost 3 us an observation, which each token and step would pay
a few times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from foreword.metrics.definitions import CATALOG, MODEL_LABEL, PREFIX, VLLM_METRICS, Metric, VLLMMetric

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINE_PROCESS = f"{PREFIX}engine"  # prefix of the engine's process metrics
VLLM_PREFIX = "vllm:"
VLLM_ENGINE = {"engine": "0"}  # label of vLLM's data-parallel engines


class MetricsRegistry:
    """The metrics of one model, or of a server. An unknown name is a KeyError.

    speculative, predictive, multimodal  whether the metrics with this mark exist
    of_server  only what the server counts itself
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
        of_server: bool = False,
    ) -> None:
        rows = [
            row
            for row in CATALOG
            if row.speculative <= speculative
            and row.multimodal <= multimodal
            and row.predictive <= predictive
            and row.of_loads <= of_server <= row.of_server
        ]
        self.model = model
        self._numbers = {row.name: _Numbers(row) for row in rows if not row.buckets}
        self._histograms = {row.name: _Histogram(row) for row in rows if row.buckets}
        self._registry = CollectorRegistry()
        self._collector = _CatalogCollector(
            [*self._numbers.values(), *self._histograms.values()], model, vllm
        )
        self._registry.register(self._collector)

    def add_engine_processes(self, get_engine_pids: Callable[[], Mapping[str, int]]) -> None:
        """Export memory, processor time and open files of the engines that run, by replica."""
        self._registry.register(_EngineProcessCollector(get_engine_pids))

    def add_own_process(self) -> None:
        """The same of this process, as `process_*`."""
        ProcessCollector(registry=self._registry)

    def add(self, name: str, amount: float, *labels: str) -> None:
        values = self._numbers[name].values
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name].values[labels] = value

    def set_only(self, name: str, value: float, *labels: str) -> None:
        """Replace all series by this one."""
        self._numbers[name].values = {labels: value}

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        histogram = self._histograms[name]
        series = histogram.series.get(labels) or histogram.add_series(labels)
        series.counts[bisect_left(histogram.bounds, value)] += times
        series.sum += value * times

    def init_series(self, name: str, labels: Iterable[str], *leading_labels: str) -> None:
        """Create a series at zero for each value of the last label."""
        for label in labels:
            if name in self._histograms:
                self._histograms[name].add_series((*leading_labels, label))
            else:
                self.add(name, 0.0, *leading_labels, label)

    def render(self, with_keys: bool = False) -> bytes:
        """Metrics in Prometheus' text format; `with_keys`: also those that name API keys."""
        self._collector.with_keys = with_keys
        return generate_latest(self._registry)


def render_together(
    server: MetricsRegistry, models: Iterable[MetricsRegistry], with_keys: bool = False
) -> bytes:
    """Metrics of a server and its models as one text, as of render(). A model's samples have its label."""
    server._collector.with_keys = with_keys
    families = {family.name: family for family in server._registry.collect()}
    for registry in models:
        for family in registry._registry.collect():
            if family.name in ONLY_OF_SERVER:
                continue
            merged = families.setdefault(family.name, Family(family.name, family.documentation, family.type))
            label = {MODEL_LABEL: registry.model} if registry.model else {}
            for sample in family.samples:
                labels = sample.labels if family.name.startswith(VLLM_PREFIX) else {**label, **sample.labels}
                merged.samples.append(sample._replace(labels=labels))
    for name in COUNTED_BY_BOTH & families.keys():
        families[name].samples = _sum_samples(families[name].samples)
    return generate_latest(_Families(families.values()))


def _sum_samples(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each set of labels."""
    sums: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in samples:
        key = sample.name, frozenset(sample.labels.items())
        before = sums[key].value if key in sums else 0.0
        sums[key] = sample._replace(value=before + sample.value)
    return list(sums.values())


class _Families(Collector):
    """Families that are collected already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


class _EngineProcessCollector(Collector):
    """`process_*` of engines, by replica; an engine that does not run has no series."""

    def __init__(self, get_pids: Callable[[], Mapping[str, int]]) -> None:
        self._get_pids = get_pids

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for replica, pid in self._get_pids().items():
            labels = {"replica": replica} if replica else {}
            for own in ProcessCollector(ENGINE_PROCESS, partial(int, pid), registry=None).collect():
                family = families.setdefault(
                    own.name, Family(own.name, own.documentation, own.type, own.unit)
                )
                for sample in own.samples:
                    family.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
        yield from families.values()


class _Numbers:
    """A counter or gauge: a number for each series, by the values of its labels."""

    def __init__(self, row: Metric) -> None:
        self.row = row
        self.values: dict[tuple[str, ...], float] = {} if row.labels else {(): 0.0}

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(suffix of the name, labels, value)"""
        for labels, value in self.values.items():
            yield "", dict(zip(self.row.labels, labels, strict=True)), value


class _Histogram:
    def __init__(self, row: Metric) -> None:
        self.row = row
        self.bounds = row.buckets
        self.series: dict[tuple[str, ...], _HistogramSeries] = {}
        if not row.labels:
            self.add_series(())

    def add_series(self, labels: tuple[str, ...]) -> _HistogramSeries:
        return self.series.setdefault(labels, _HistogramSeries(len(self.bounds) + 1))

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(suffix of the name, labels, value)"""
        for values, series in self.series.items():
            labels = dict(zip(self.row.labels, values, strict=True))
            totals = list(accumulate(series.counts))
            for bound, total in zip((*self.bounds, float("inf")), totals, strict=True):
                le = floatToGoString(bound)  # type: ignore[no-untyped-call]
                yield "_bucket", {**labels, "le": le}, total
            yield "_count", labels, totals[-1]
            yield "_sum", labels, series.sum


class _HistogramSeries:
    __slots__ = ("counts", "sum")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets  # observations by bucket; the last has no bound
        self.sum = 0.0


class _CatalogCollector(Collector):
    """The families of all metrics with the model's label, and under vLLM's names."""

    def __init__(self, instruments: Sequence[_Numbers | _Histogram], model: str, vllm: bool) -> None:
        self._instruments = instruments
        self._model = model
        self._vllm = vllm
        self.with_keys = False

    def collect(self) -> Iterator[Family]:
        if self._vllm:
            yield from self._vllm_families({each.row.name: _family(each, {}) for each in self._instruments})
        for each in self._instruments:
            if each.row.of_key and not self.with_keys:
                continue
            is_labelled = self._model and each.row.of_model
            yield _family(each, {MODEL_LABEL: self._model} if is_labelled else {})

    def _vllm_families(self, families: dict[str, Family]) -> Iterator[Family]:
        for row in VLLM_METRICS:
            source = families.get(row.source)
            if source is not None:
                yield _vllm_family(row, source, {"model_name": self._model, **VLLM_ENGINE})


def _family(instrument: _Numbers | _Histogram, extra_labels: dict[str, str]) -> Family:
    row = instrument.row
    family = Family(_family_name(PREFIX + row.name), row.help, row.metric_type)
    for suffix, labels, value in instrument.samples():
        family.add_sample(PREFIX + row.name + suffix, {**extra_labels, **labels}, value)
    return family


def _vllm_family(row: VLLMMetric, source: Family, labels: dict[str, str]) -> Family:
    """The source's samples under vLLM's name and labels; sums over labels that vLLM does not have."""
    name, renamed = _family_name(row.name), dict(row.renamed)
    family = Family(name, f"vLLM's name for {PREFIX}{row.source}.", source.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # by the sample's suffix and labels
    for sample in source.samples:
        kept = {renamed.get(key, key): value for key, value in sample.labels.items() if key not in row.summed}
        series = sample.name.removeprefix(source.name), tuple({**labels, **kept}.items())
        sums[series] = sums.get(series, 0.0) + sample.value
    for (suffix, pairs), value in sums.items():
        family.add_sample(name + suffix, dict(pairs), value)
    return family


def _family_name(name: str) -> str:
    """prometheus_client names a counter's family without `_total`."""
    return name.removesuffix("_total")


# Families that a server has once, and those that models have too.
ONLY_OF_SERVER = frozenset(
    _family_name(PREFIX + row.name) for row in CATALOG if row.of_server and not row.of_model
)
COUNTED_BY_BOTH = frozenset(
    _family_name(PREFIX + row.name) for row in CATALOG if row.of_server and row.of_model
)
