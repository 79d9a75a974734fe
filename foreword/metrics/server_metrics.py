"""Metrics of a server besides those of its models: loads of models, and requests that reach none."""

from __future__ import annotations

from collections.abc import Iterable

from foreword.metrics.definitions import UNLOAD_REASONS
from foreword.metrics.prometheus import MetricsRegistry, render_together
from foreword.metrics.recorder import MetricsRecorder, ServerCounters

LOAD_COUNTERS = ("model_loads_total", "model_load_failures_total")


class ServerMetrics(ServerCounters):
    """Beside one MetricsRecorder for each model that was loaded."""

    def __init__(self, models: Iterable[str], only_model: str = "") -> None:
        """only_model  labels what is counted before the model of a request is known; "": several models"""
        super().__init__(MetricsRegistry(speculative=False, model=only_model, of_server=True))
        self._registry.add_own_process()
        for model in models:
            for name in LOAD_COUNTERS:
                self._registry.init_series(name, (model,))
            self._registry.init_series("model_unloads_total", UNLOAD_REASONS, model)

    def on_load(self, model: str, seconds: float) -> None:
        self._registry.add("model_loads_total", 1, model)
        self._registry.observe("model_load_seconds", seconds, model)

    def on_load_failed(self, model: str) -> None:
        self._registry.add("model_load_failures_total", 1, model)

    def on_unload(self, model: str, reason: str) -> None:
        """A model was unloaded for one of UNLOAD_REASONS."""
        self._registry.add("model_unloads_total", 1, model, reason)

    def on_wait(self, model: str, seconds: float) -> None:
        """A request waited until its model was loaded."""
        self._registry.observe("model_wait_seconds", seconds, model)

    def set_model(self, model: str, memory_bytes: int | None, num_waiting: int) -> None:
        """memory_bytes  0: not loaded; None: not measured"""
        if memory_bytes is not None:
            self._registry.set("model_memory_bytes", memory_bytes, model)
        self._registry.set("model_waiting_requests", num_waiting, model)

    def set_num_loaded(self, count: int) -> None:
        self._registry.set("models_loaded", count)

    def render(self, models: Iterable[MetricsRecorder], with_keys: bool = False) -> bytes:
        """With the metrics of the models; as MetricsRecorder.render()."""
        return render_together(self._registry, [model.collect() for model in models], with_keys)
