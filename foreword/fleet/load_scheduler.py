"""Which model to load, which to unload, and which waiting request may run.

Pure: no clocks, no processes. The caller reports events, then asks decide() what to do:

    unloaded --load--> loading --on_loaded--> loaded --unload--> unloading --on_unloaded--> unloaded
                          |
                          +--on_load_failed--> failed --a request after the backoff--> loading

1. A model with open answers is never unloaded, and nothing is loaded that exceeds the memory limit.
2. Models are loaded one at a time, in the order of their first waiting requests.
3. Requests of a model that is loaded, or fits beside the others, pass those of a model that waits, for at
   most `max_swap_wait_s` from its first request on. Then the models in its way get no new answers, their
   open ones end, and they are unloaded.
4. A model that was just loaded answers all requests that waited for it: every swap answers some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foreword.fleet.memory import ModelPlan
from foreword.planning.memory import format_bytes

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]

MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0  # wait for the next attempt, doubled after each failed load
PRELOAD_ORDER = 1 << 62  # rank behind all requests


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that ends without an answer."""

    request_id: str
    model: str
    reason: Literal["load_failed", "does_not_fit"]
    retry_at_s: float | None = None  # when the model may be loaded again; None: never
    detail: str = ""  # arithmetic of does_not_fit


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions for the caller, which are not decided again: the scheduler counts them as done."""

    admitted: tuple[str, ...] = ()  # ids of requests that may run
    load: str | None = None
    unload: tuple[str, ...] = ()
    wake_s: float | None = None  # time of the next decide() if nothing happens before; None: not needed
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request, or a load without one."""

    order: int  # order of arrival
    since_s: float
    may_evict: bool = True


@dataclass(slots=True, eq=False)
class _Model:
    plan: ModelPlan
    num_bytes: int  # planned, or the largest measured size
    pinned: bool
    state: ModelState = "unloaded"
    open: set[str] = field(default_factory=set)  # ids of admitted requests
    waiting: dict[str, _Waiter] = field(default_factory=dict)  # by request id, in order of arrival
    wanted: _Waiter | None = None  # a load that no request asks for
    must_unload: bool = False  # an operator asked
    is_draining: bool = False  # gets no new answers, so that a waiting model can take its place
    is_fresh: bool = False  # loaded, and nobody has been admitted yet
    loaded_s: float = 0.0
    last_used_s: float = 0.0  # when its last answer ended, or it was loaded
    num_failures: int = 0
    retry_at_s: float = -math.inf

    @property
    def takes_memory(self) -> bool:
        return self.state in ("loading", "loaded", "unloading")

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted now."""
        return self.state == "loaded" and not self.open and not self.pinned and not self.is_fresh

    def first_waiter(self) -> _Waiter | None:
        waiters = (next(iter(self.waiting.values()), None), self.wanted)
        return min(filter(None, waiters), key=lambda waiter: waiter.order, default=None)


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Memory and places that a model lacks to be loaded."""

    num_bytes: int  # memory of its device; at most 0: none
    num_models: int  # above `max_loaded`

    @property
    def is_none(self) -> bool:
        return self.num_bytes <= 0 and self.num_models <= 0

    def without(self, models: Sequence[_Model], device: str) -> _Shortage:
        """Once these models are gone."""
        freed = sum(model.num_bytes for model in models if model.plan.device == device)
        return _Shortage(self.num_bytes - freed, self.num_models - len(models))


class LoadScheduler:
    """See the module. Times are seconds of the caller's clock."""

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        memory_limits: Mapping[str, int],
        max_loaded: int | None = None,
        max_swap_wait_s: float = 10.0,
    ) -> None:
        """memory_limits    bytes of all models of a device
        max_loaded       models in memory at a time; None: as many as fit
        max_swap_wait_s  see the module
        """
        assert all(plan.device in memory_limits for plan in plans), "a device without a memory limit"
        self._models = {plan.entry.name: _Model(plan, plan.num_bytes, plan.entry.pinned) for plan in plans}
        self._limits = dict(memory_limits)
        self._max_loaded = max_loaded
        self._max_swap_wait_s = max_swap_wait_s
        self._model_of: dict[str, _Model] = {}  # by id of each waiting or open request
        self._arrivals = itertools.count()
        self._refused: list[Refusal] = []  # for the next decision
        for model in self._models.values():
            if model.pinned:
                model.wanted = _Waiter(next(self._arrivals), math.inf)
            elif model.plan.entry.preload:
                model.wanted = _Waiter(next(self._arrivals) + PRELOAD_ORDER, math.inf, may_evict=False)

    # Events

    def submit(self, request_id: str, model: str, now_s: float) -> None:
        """A request wants an answer of this model; decide() admits or refuses it."""
        assert request_id not in self._model_of, f"request {request_id} is submitted twice"
        chosen = self._models[model]
        self._model_of[request_id] = chosen
        chosen.waiting[request_id] = _Waiter(next(self._arrivals), now_s)

    def end(self, request_id: str, now_s: float) -> None:
        """The request is answered, failed or withdrawn; without effect if it was refused."""
        model = self._model_of.pop(request_id, None)
        if model is None:
            return
        model.waiting.pop(request_id, None)
        if request_id in model.open:
            model.open.remove(request_id)
            model.last_used_s = now_s

    def on_loaded(self, model: str, resident_bytes: int, now_s: float) -> None:
        loaded = self._models[model]
        assert loaded.state == "loading", f"{model} is {loaded.state}"
        loaded.state, loaded.wanted, loaded.is_fresh = "loaded", None, True
        loaded.loaded_s = loaded.last_used_s = now_s
        loaded.num_failures = 0
        self.on_measured(model, resident_bytes)

    def on_load_failed(self, model: str, now_s: float) -> None:
        """Also: the engine of a loaded model is gone for good. Its memory is free again."""
        failed = self._models[model]
        failed.num_failures += 1
        backoff_s = min(MIN_BACKOFF_S * 2 ** (failed.num_failures - 1), MAX_BACKOFF_S)
        failed.retry_at_s = now_s + backoff_s
        failed.state, failed.must_unload, failed.is_draining, failed.is_fresh = "failed", False, False, False
        failed.wanted = _Waiter(next(self._arrivals), math.inf) if failed.pinned else None
        self._refused += self._drop_waiting(failed, "load_failed", failed.retry_at_s)

    def on_unloaded(self, model: str) -> None:
        unloaded = self._models[model]
        unloaded.state = "unloaded"
        unloaded.must_unload = unloaded.is_draining = unloaded.is_fresh = False

    def on_measured(self, model: str, resident_bytes: int) -> None:
        """A size above the estimate counts from now on; a smaller one may still grow up to the estimate."""
        measured = self._models[model]
        measured.num_bytes = max(measured.num_bytes, resident_bytes)

    def set_pinned(self, model: str, pinned: bool) -> None:
        """Whether it may be evicted; load() loads it."""
        self._models[model].pinned = pinned

    def load(self, model: str) -> None:
        """An operator asks; a failed model is tried at once."""
        chosen = self._models[model]
        chosen.must_unload = False
        chosen.retry_at_s = -math.inf
        if not chosen.takes_memory or chosen.state == "unloading":
            chosen.wanted = chosen.wanted or _Waiter(next(self._arrivals), math.inf)

    def unload(self, model: str) -> None:
        """An operator asks: new requests wait, open answers end, the model is unloaded, pinned or not."""
        chosen = self._models[model]
        chosen.wanted = None
        chosen.must_unload = chosen.state in ("loading", "loaded")

    # State

    def state(self, model: str) -> ModelState:
        return self._models[model].state

    def is_pinned(self, model: str) -> bool:
        return self._models[model].pinned

    def num_bytes(self, model: str) -> int:
        """Memory that the model counts for."""
        return self._models[model].num_bytes

    def num_open(self, model: str) -> int:
        return len(self._models[model].open)

    def num_waiting(self, model: str) -> int:
        return len(self._models[model].waiting)

    def used_bytes(self, device: str = "cpu") -> int:
        """Memory of all models that are loaded, loading or unloading on the device."""
        models = self._models.values()
        return sum(each.num_bytes for each in models if each.takes_memory and each.plan.device == device)

    def why_not(self, model: str) -> str | None:
        """Why the model can never be loaded beside the pinned ones, in words; None if it can."""
        chosen = self._models[model]
        others = [
            each for each in self._models.values() if each is not chosen and self._holds_its_place(each)
        ]
        if self._max_loaded is not None and len(others) >= self._max_loaded:
            names = ", ".join(each.plan.entry.name for each in others)
            return f"of {self._max_loaded} models at a time, {len(others)} are pinned ({names})"
        device, limit = chosen.plan.device, self._limits[chosen.plan.device]
        pinned = [each for each in others if each.plan.device == device]
        taken = sum(each.num_bytes for each in pinned)
        if chosen.num_bytes + taken <= limit:
            return None
        beside = f", of which pinned models take {format_bytes(taken)}" if pinned else ""
        return f"{model} needs {format_bytes(chosen.num_bytes)}; models may use {format_bytes(limit)}{beside}"

    def _holds_its_place(self, model: _Model) -> bool:
        return model.pinned and (model.state in ("loading", "loaded") or model.wanted is not None)

    # Decisions

    def decide(self, now_s: float) -> Decision:
        """Decide what to do; call it after events, and at `wake_s` of the decision before."""
        self._start_waiting(now_s)
        self._refuse(now_s)
        refused, self._refused = tuple(self._refused), []
        demands = self._demands(now_s)
        self._update_draining(demands, now_s)
        admitted = tuple(self._admit())
        unload = [*self._unload(self._expire(now_s)), *self._unload(self._evict_excess())]
        load = None
        if not any(model.state == "loading" for model in self._models.values()):
            chosen, victims = self._next_load(demands, now_s)
            unload += self._unload(victims)
            if chosen is not None:
                chosen.state, load = "loading", chosen.plan.entry.name
        return Decision(admitted, load, tuple(unload), self._wake_s(now_s), refused)

    def _unload(self, models: Iterable[_Model]) -> list[str]:
        names = []
        for model in tuple(models):
            assert model.state == "loaded" and not model.open, f"{model.plan.entry.name} has open answers"
            model.state = "unloading"
            names.append(model.plan.entry.name)
        return names

    def _start_waiting(self, now_s: float) -> None:
        """Loads without a request wait from the first decision on."""
        for model in self._models.values():
            wanted = model.wanted
            if wanted is not None and wanted.since_s == math.inf:
                model.wanted = _Waiter(wanted.order, now_s, wanted.may_evict)

    def _refuse(self, now_s: float) -> None:
        """End the requests of models that cannot be loaded, now or ever."""
        for model in self._models.values():
            if model.state not in ("unloaded", "failed") or model.first_waiter() is None:
                continue
            problem = self.why_not(model.plan.entry.name)
            if problem is not None:
                model.wanted = None
                self._refused += self._drop_waiting(model, "does_not_fit", None, problem)
            elif model.retry_at_s > now_s:
                self._refused += self._drop_waiting(model, "load_failed", model.retry_at_s)

    def _drop_waiting(
        self,
        model: _Model,
        reason: Literal["load_failed", "does_not_fit"],
        retry_at_s: float | None,
        detail: str = "",
    ) -> list[Refusal]:
        ids = list(model.waiting)
        model.waiting.clear()
        for request_id in ids:
            del self._model_of[request_id]
        return [Refusal(each, model.plan.entry.name, reason, retry_at_s, detail) for each in ids]

    def _demands(self, now_s: float) -> list[tuple[_Waiter, _Model]]:
        """Models to load, by their first waiter."""
        demands = []
        for model in self._models.values():
            waiter = model.first_waiter()
            if waiter is not None and model.state in ("unloaded", "failed") and model.retry_at_s <= now_s:
                demands.append((waiter, model))
        return sorted(demands, key=lambda demand: demand[0].order)

    def _is_urgent(self, waiter: _Waiter, now_s: float) -> bool:
        return waiter.may_evict and now_s >= waiter.since_s + self._max_swap_wait_s

    def _update_draining(self, demands: Sequence[tuple[_Waiter, _Model]], now_s: float) -> None:
        """Choose the models that make room for an excess, else for the first demand of a device if urgent."""
        draining: list[_Model] = []
        handled: set[str] = set()
        for device in self._limits:
            excess = self._excess(device)
            if not excess.is_none:
                draining += self._make_room(device, excess)
                handled |= self._shared_devices(device)
        for waiter, model in demands:
            device = model.plan.device
            if device not in handled and self._is_urgent(waiter, now_s):
                draining += self._make_room(device, self._shortage(model, after_unloading=True))
            handled |= self._shared_devices(device)
        for model in self._models.values():
            model.is_draining = model in draining

    def _make_room(self, device: str, shortage: _Shortage) -> list[_Model]:
        """Models that get no new answers until the shortage ends; what drains goes on draining.

        Idle models are free to answer while others drain.
        """
        models = [each for each in self._models.values() if each.state == "loaded" and not each.pinned]
        models = [each for each in models if each.plan.device in self._shared_devices(device)]
        draining = [each for each in models if each.is_draining]
        left = shortage.without(draining, device)
        if shortage.is_none:
            return []
        idle = [each for each in models if each.is_idle and not each.is_draining]
        busy = [each for each in models if not each.is_idle and not each.is_draining]
        busy.sort(key=lambda model: model.loaded_s)  # each has its turn
        more = _smallest_set(busy, device, left.without(idle, device)) or []
        if not more and all(each.is_idle for each in draining):
            idle.sort(key=lambda model: model.last_used_s)
            more = _smallest_set(idle, device, left) or []
        return draining + more

    def _admit(self) -> Iterable[str]:
        for model in self._models.values():
            is_closed = model.must_unload or model.is_draining
            if model.state != "loaded" or (is_closed and not model.is_fresh):
                continue
            model.is_fresh = False
            yield from model.waiting
            model.open.update(model.waiting)
            model.waiting.clear()

    def _expire(self, now_s: float) -> Iterable[_Model]:
        """Models that an operator or `keep_alive` unloads."""
        for model in self._models.values():
            if model.state == "loaded" and not model.open:
                expiry_s = _expiry_s(model)
                if model.must_unload or (expiry_s is not None and expiry_s <= now_s):
                    yield model

    def _evict_excess(self) -> Iterable[_Model]:
        """Idle models to unload because measured sizes exceed the limit."""
        for device in self._limits:
            excess = self._excess(device)
            if not excess.is_none:
                yield from self._idle_victims(device, excess) or []

    def _excess(self, device: str) -> _Shortage:
        """Excess of measured sizes over the limit, as far as models can be evicted."""
        models = [m for m in self._models.values() if m.state == "loaded" and m.plan.device == device]
        evictable = sum(model.num_bytes for model in models if not model.pinned)
        used = self.used_bytes(device) - self._unloading_bytes(device)
        return _Shortage(min(used - self._limits[device], evictable), 0)

    def _next_load(
        self, demands: Sequence[tuple[_Waiter, _Model]], now_s: float
    ) -> tuple[_Model | None, list[_Model]]:
        """The model to load, or idle models to evict for one."""
        blocked: set[str] = set()
        for waiter, model in demands:
            device = model.plan.device
            if device in blocked:
                continue
            if self._shortage(model).is_none:
                return model, []
            is_waiting_for_room = self._shortage(model, after_unloading=True).is_none
            if not is_waiting_for_room:
                if not waiter.may_evict:
                    model.wanted = None  # a preload that does not fit
                    continue
                victims = self._idle_victims(device, self._shortage(model, after_unloading=True))
                if victims is not None:
                    return None, victims
            if is_waiting_for_room or self._is_urgent(waiter, now_s):
                blocked |= self._shared_devices(device)
        return None, []

    def _idle_victims(self, device: str, shortage: _Shortage) -> list[_Model] | None:
        """The fewest idle models that make room, the least recently used first; None if they cannot."""
        idle = [model for model in self._models.values() if model.is_idle]
        idle.sort(key=lambda model: (not model.is_draining, model.last_used_s))
        return _smallest_set(idle, device, shortage)

    def _shortage(self, model: _Model, after_unloading: bool = False) -> _Shortage:
        """The model's shortage now, or once the models that are being unloaded are gone."""
        device = model.plan.device
        used = self.used_bytes(device) - (self._unloading_bytes(device) if after_unloading else 0)
        states = ("loading", "loaded") if after_unloading else ("loading", "loaded", "unloading")
        count = sum(each.state in states for each in self._models.values())
        excess = 0 if self._max_loaded is None else count + 1 - self._max_loaded
        return _Shortage(used + model.num_bytes - self._limits[device], excess)

    def _unloading_bytes(self, device: str) -> int:
        models = self._models.values()
        return sum(m.num_bytes for m in models if m.state == "unloading" and m.plan.device == device)

    def _shared_devices(self, device: str) -> set[str]:
        """Devices on which a load may take what a model of `device` waits for."""
        return {device} if self._max_loaded is None else set(self._limits)

    def _wake_s(self, now_s: float) -> float | None:
        """When a model expires, a demand becomes urgent, or a pinned model may be tried again."""
        times = []
        for model in self._models.values():
            expiry_s = _expiry_s(model)
            if model.state == "loaded" and not model.open and expiry_s is not None:
                times.append(expiry_s)
            waiter = model.first_waiter()
            if waiter is not None and model.state in ("unloaded", "failed"):
                times += [waiter.since_s + self._max_swap_wait_s, model.retry_at_s]
        first = min((time_s for time_s in times if time_s > now_s), default=math.inf)
        return None if first == math.inf else first


def _expiry_s(model: _Model) -> float | None:
    """When `keep_alive` unloads the model, if it gets no answer before."""
    keep_alive_s = model.plan.entry.keep_alive
    return None if model.pinned or keep_alive_s is None else model.last_used_s + keep_alive_s


def _smallest_set(candidates: Sequence[_Model], device: str, shortage: _Shortage) -> list[_Model] | None:
    """The fewest candidates that end the shortage; of sets of that size, the one with the first candidates.

    None if all together do not.
    """

    def freed(models: Iterable[_Model]) -> list[int]:
        return sorted((m.num_bytes for m in models if m.plan.device == device), reverse=True)

    sizes = list(itertools.accumulate(freed(candidates), initial=0))
    count = next((n for n, size in enumerate(sizes) if size >= shortage.num_bytes), None)
    if count is None or len(candidates) < shortage.num_models:
        return None
    count = max(count, shortage.num_models)
    chosen: list[_Model] = []
    for index, candidate in enumerate(candidates):
        num_more = count - len(chosen) - 1
        if num_more < 0:
            break
        largest = freed(candidates[index + 1 :])[:num_more]
        if sum(freed([*chosen, candidate])) + sum(largest) >= shortage.num_bytes:
            chosen.append(candidate)
    return chosen
