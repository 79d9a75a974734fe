"""Fair shares between fairness keys, such as API keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from foreword.core.request import RequestState

DEFAULT_OUTPUT_TOKENS: Final = 256  # expected output tokens of a request, if its limit allows as many
MAX_TAG_UPDATES: Final = 256  # waiting requests per step whose tag may be updated


@dataclass(slots=True)
class _Entry:
    """A live request."""

    virtual_arrival: int  # virtual time when it came
    cost: int  # estimated tokens


@dataclass(slots=True)
class _Flow:
    """The requests of one fairness key."""

    num_live: int = 0
    served_tag: int = 0  # finish tag of its started requests
    finish_tag: int = 0  # finish tag of all its requests


class FairQueue:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996) between fairness keys, in tokens.

    A request's start tag is the later of its virtual arrival and the finish tag of its flow. The smallest
    tag starts first and advances virtual time. So busy flows get equal shares, a flow with few requests is
    served at once, and each flow is served in order of arrival. Costs are estimated on arrival; actual
    costs update the tags of waiting requests, less often the more of them wait.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._steps_since_update = 0
        self._stale_flows: set[str] = set()  # flows whose costs have changed since the last update
        self._entries: dict[str, _Entry] = {}
        self._flows: dict[str, _Flow] = {}

    def __len__(self) -> int:
        """The number of flows."""
        return len(self._flows)

    def add(self, state: RequestState) -> None:
        flow = self._flows.setdefault(state.request.fairness_key, _Flow())
        flow.num_live += 1
        num_tokens = len(state.tokens)
        cost = num_tokens + min(state.max_len - num_tokens, DEFAULT_OUTPUT_TOKENS)
        self._entries[state.id] = _Entry(self._virtual_time, cost)
        self._tag(state)

    def on_start(self, state: RequestState) -> None:
        """Called when a request runs for the first time."""
        flow = self._flows[state.request.fairness_key]
        flow.served_tag = max(flow.served_tag, state.virtual_start) + self._entries[state.id].cost
        flow.finish_tag = max(flow.finish_tag, flow.served_tag)
        if state.virtual_start > self._virtual_time:
            self._virtual_time = state.virtual_start
            self._prune()

    def on_finish(self, state: RequestState) -> None:
        entry, key = self._entries.pop(state.id), state.request.fairness_key
        flow = self._flows[key]
        flow.num_live -= 1
        if state.scheduled_s is not None:
            flow.served_tag += len(state.tokens) - state.num_cached - entry.cost
        self._stale_flows.add(key)
        self._prune()

    def update_tags(self, waiting: Collection[RequestState]) -> bool:
        """Called every step with the waiting requests by rank; returns whether tags have changed."""
        self._steps_since_update += 1
        too_many = self._steps_since_update * MAX_TAG_UPDATES < len(waiting)
        if too_many or not self._stale_flows or len(self._flows) < 2:
            return False
        self._steps_since_update = 0
        for key in self._stale_flows & self._flows.keys():
            self._flows[key].finish_tag = self._flows[key].served_tag
        for state in waiting:
            if state.request.fairness_key in self._stale_flows and state.scheduled_s is None:
                self._tag(state)
        self._stale_flows.clear()
        return True

    def _tag(self, state: RequestState) -> None:
        """Set the start tag of a request, and move the finish tag of its flow."""
        entry, flow = self._entries[state.id], self._flows[state.request.fairness_key]
        state.virtual_start = max(entry.virtual_arrival, flow.finish_tag)
        flow.finish_tag = state.virtual_start + entry.cost

    def _prune(self) -> None:
        """Forget flows without live requests whose served tag has passed."""
        if not self._entries:
            self._flows.clear()
            self._stale_flows.clear()
            self._virtual_time = 0
        elif len(self._flows) > 1:
            self._flows = {
                key: flow
                for key, flow in self._flows.items()
                if flow.num_live or flow.served_tag > self._virtual_time
            }
