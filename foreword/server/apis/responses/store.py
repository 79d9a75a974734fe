"""Responses that later ones continue: in memory, bounded in bytes and age, each visible to its own key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foreword.errors import ResponseNotFound, shown

ENTRY_BYTES = 1024  # overhead of Python objects per response
ITEM_BYTES = 256  # overhead of Python objects per id of an item
MB = 1_000_000


@dataclass(slots=True)
class StoredResponse:
    """One response as JSON, with the input items that it added to its conversation."""

    previous_id: str | None
    input: bytes  # list of items
    item_ids: tuple[str, ...]  # input's, later also the output's
    response: bytes = b""  # empty until it is complete
    used_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the bound."""
        ids = sum(len(item_id.encode("utf-8", "replace")) + ITEM_BYTES for item_id in self.item_ids)
        return ENTRY_BYTES + len(self.input) + len(self.response) + ids


@dataclass(slots=True)
class _Tenant:
    responses: OrderedDict[str, StoredResponse] = field(
        default_factory=OrderedDict
    )  # by id, oldest use first
    # Ids of the responses that hold an item, oldest first, by its id: clients send an item again.
    responses_of_item: dict[str, dict[str, None]] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """Responses of all keys, by key ("tenant") and id. Used from one event loop.

    The least recently used response of the key that holds most bytes is dropped first. A response is used by
    reading it, and by continuing it, which uses the whole conversation before it.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    @property
    def enabled(self) -> bool:
        return self.max_bytes > 0

    def __len__(self) -> int:
        return sum(len(tenant.responses) for tenant in self._tenants.values())

    def begin(self, tenant: str, response_id: str, entry: StoredResponse) -> None:
        """Keep the input of a response that is being generated. It cannot be read before complete()."""
        self._put(tenant, response_id, entry)

    def complete(self, tenant: str, response: Mapping[str, Any], encoded: bytes) -> None:
        """Add the answer of begin()'s response. Without effect if it was dropped meanwhile.

        encoded  the response as JSON
        """
        entry = self._remove(tenant, response["id"])
        if entry is not None:
            entry.item_ids += tuple(item["id"] for item in response["output"])
            entry.response = encoded
            self._put(tenant, response["id"], entry)

    def discard(self, tenant: str, response_id: str) -> None:
        """Drop a response that begin() announced and that will not be completed."""
        entry = self._find(tenant, response_id)
        if entry is not None and not entry.response:
            self._remove(tenant, response_id)

    def get(self, tenant: str, response_id: str, field_name: str | None = None) -> StoredResponse:
        """Raises ResponseNotFound, also for another key's response."""
        entry = self._find(tenant, response_id)
        if entry is None or not entry.response or self._is_expired(entry):
            raise ResponseNotFound(self._explain(response_id), field_name)
        self._touch(tenant, response_id)
        return entry

    def conversation(self, tenant: str, response_id: str, field_name: str) -> list[StoredResponse]:
        """The response and those that it continues, first one first. Raises ResponseNotFound."""
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            chain.append(self.get(tenant, next_id, field_name))
            next_id = chain[-1].previous_id
        return chain[::-1]

    def find_item(self, tenant: str, item_id: str, field_name: str) -> StoredResponse:
        """The response with this item. Raises ResponseNotFound."""
        held = self._tenants.get(tenant)
        for response_id in () if held is None else held.responses_of_item.get(item_id, ()):
            entry = self._find(tenant, response_id)
            if entry is not None and entry.response and not self._is_expired(entry):
                return self.get(tenant, response_id, field_name)
        raise ResponseNotFound(self._explain(item_id), field_name)

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(tenant, response_id)
        self._remove(tenant, response_id)

    def expire(self) -> None:
        """Drop responses that were not used for the time to live; call it about once a second."""
        for name, tenant in list(self._tenants.items()):
            while tenant.responses and self._is_expired(next(iter(tenant.responses.values()))):
                self._remove(name, next(iter(tenant.responses)))

    def _is_expired(self, entry: StoredResponse) -> bool:
        return entry.used_s <= self._clock() - self._ttl_s

    def _put(self, tenant: str, response_id: str, entry: StoredResponse) -> None:
        """Insert as the most recently used, and drop others until all fit. It never holds one too many."""
        self._remove(tenant, response_id)
        size = entry.num_bytes
        if size > self.max_bytes:
            return
        while self.num_bytes + size > self.max_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._remove(largest, next(iter(self._tenants[largest].responses)))
        held = self._tenants.setdefault(tenant, _Tenant())
        entry.used_s = self._clock()
        held.responses[response_id] = entry
        for item_id in set(entry.item_ids):
            held.responses_of_item.setdefault(item_id, {})[response_id] = None
        held.num_bytes += size
        self.num_bytes += size

    def _remove(self, tenant: str, response_id: str) -> StoredResponse | None:
        held = self._tenants.get(tenant)
        entry = None if held is None else held.responses.pop(response_id, None)
        if held is None or entry is None:
            return None
        for item_id in set(entry.item_ids):  # a client may send one id twice
            holders = held.responses_of_item[item_id]
            del holders[response_id]
            if not holders:
                del held.responses_of_item[item_id]
        held.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        if not held.responses:
            del self._tenants[tenant]
        return entry

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        held = self._tenants.get(tenant)
        return None if held is None else held.responses.get(response_id)

    def _touch(self, tenant: str, response_id: str) -> None:
        responses = self._tenants[tenant].responses
        responses[response_id].used_s = self._clock()
        responses.move_to_end(response_id)

    def _explain(self, wanted_id: str) -> str:
        """Why there is no response or item with this id."""
        if not self.enabled:
            return (
                "this server stores no responses (--response-store-mb 0): "
                "send the whole conversation as input instead"
            )
        return (
            f"there is no stored response or item {shown(wanted_id)}: it was not stored, was deleted, is "
            f"another key's, was not used for {self._ttl_s:g} s (--response-store-ttl), or gave way to newer "
            f"ones beyond {self.max_bytes / MB:g} MB (--response-store-mb). Send the whole conversation as "
            "input instead"
        )
