"""The store of responses against a model, its bound, and what each key sees."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foreword.errors import ResponseNotFound
from foreword.server.apis.responses.store import ENTRY_BYTES, ITEM_BYTES, ResponseStore, StoredResponse
from foreword.server.http.responses import json_bytes
from tests.support.budget import examples

TTL_S = 100.0
MAX_BYTES = 6 * ENTRY_BYTES
TENANTS = ("", "alice", "bob")
IDS = tuple(f"resp_{i}" for i in range(6))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def complete(store: ResponseStore, tenant: str, answer: dict[str, object]) -> None:
    store.complete(tenant, answer, json_bytes(answer))


def response(response_id: str, text: str = "") -> dict[str, object]:
    return {"id": response_id, "output": [{"id": f"out_{response_id}"}], "text": text}


def add(
    store: ResponseStore, tenant: str, response_id: str, previous_id: str | None = None, size: int = 0
) -> None:
    store.begin(tenant, response_id, StoredResponse(previous_id, b"[]", (f"in_{response_id}",)))
    complete(store, tenant, response(response_id, "x" * size))


def ids_of(store: ResponseStore, tenant: str) -> list[str]:
    return [response_id for response_id in IDS if is_stored(store, tenant, response_id)]


def is_stored(store: ResponseStore, tenant: str, response_id: str) -> bool:
    try:
        store.get(tenant, response_id)
    except ResponseNotFound:
        return False
    return True


class StoreMachine(RuleBasedStateMachine):
    """The model: what was begun, completed and used, in order of use. It says what may be visible."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = ResponseStore(MAX_BYTES, TTL_S, self.clock)
        self.used: dict[tuple[str, str], float] = {}  # of complete responses
        self.begun: set[tuple[str, str]] = set()

    @rule(tenant=st.sampled_from(TENANTS), response_id=st.sampled_from(IDS), size=st.integers(0, 3000))
    def begin(self, tenant: str, response_id: str, size: int) -> None:
        entry = StoredResponse(None, b"x" * size, (f"in_{response_id}",))
        self.store.begin(tenant, response_id, entry)
        self.used.pop((tenant, response_id), None)
        self.begun.add((tenant, response_id))

    @rule(tenant=st.sampled_from(TENANTS), response_id=st.sampled_from(IDS), size=st.integers(0, 3000))
    def complete(self, tenant: str, response_id: str, size: int) -> None:
        complete(self.store, tenant, response(response_id, "x" * size))
        if (tenant, response_id) in self.begun:
            self.begun.discard((tenant, response_id))
            self.used[tenant, response_id] = self.clock.now

    @rule(tenant=st.sampled_from(TENANTS), response_id=st.sampled_from(IDS))
    def discard(self, tenant: str, response_id: str) -> None:
        self.store.discard(tenant, response_id)
        self.begun.discard((tenant, response_id))

    @rule(tenant=st.sampled_from(TENANTS), response_id=st.sampled_from(IDS))
    def read(self, tenant: str, response_id: str) -> None:
        used_s = self.used.get((tenant, response_id))
        if is_stored(self.store, tenant, response_id):
            assert used_s is not None and self.clock.now < used_s + TTL_S
            assert self.store.get(tenant, response_id).response.startswith(
                b'{"id":"%b"' % response_id.encode()
            )
            assert self.store.find_item(tenant, f"out_{response_id}", "input") is not None
            self.used[tenant, response_id] = self.clock.now

    @rule(tenant=st.sampled_from(TENANTS), response_id=st.sampled_from(IDS))
    def delete(self, tenant: str, response_id: str) -> None:
        if is_stored(self.store, tenant, response_id):
            self.store.delete(tenant, response_id)
        assert not is_stored(self.store, tenant, response_id)
        self.used.pop((tenant, response_id), None)

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.expire()

    @invariant()
    def bound_holds(self) -> None:
        entries = [
            (name, entry) for name, held in self.store._tenants.items() for entry in held.responses.values()
        ]
        assert self.store.num_bytes == sum(entry.num_bytes for _, entry in entries) <= MAX_BYTES
        assert len(self.store) == len(entries)
        assert all(self.clock.now < entry.used_s + TTL_S for _, entry in entries)
        for held in self.store._tenants.values():
            assert held.num_bytes == sum(entry.num_bytes for entry in held.responses.values()) > 0
            times = [entry.used_s for entry in held.responses.values()]
            assert times == sorted(times)
            holders = {(name, item) for item, names in held.responses_of_item.items() for name in names}
            assert holders == {(name, i) for name, entry in held.responses.items() for i in entry.item_ids}
            assert all(held.responses_of_item.values())


StoreMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
test_store_agrees_with_its_model = StoreMachine.TestCase


def test_least_recently_used_response_of_the_largest_key_is_dropped() -> None:
    store = ResponseStore(4 * (ENTRY_BYTES + 2 * ITEM_BYTES + 200), TTL_S)
    add(store, "alice", "resp_0")
    for response_id in IDS[1:4]:
        add(store, "bob", response_id)
    store.get("bob", "resp_1")
    add(store, "bob", "resp_4")
    assert ids_of(store, "alice") == ["resp_0"]
    assert ids_of(store, "bob") == ["resp_1", "resp_3", "resp_4"]


def test_use_of_a_conversation_is_a_use_of_all_of_it() -> None:
    store = ResponseStore(4 * (ENTRY_BYTES + 2 * ITEM_BYTES + 200), TTL_S)
    add(store, "", "resp_0")
    add(store, "", "resp_1", "resp_0")
    add(store, "", "resp_2")
    chain = store.conversation("", "resp_1", "previous_response_id")
    assert [entry.item_ids[0] for entry in chain] == ["in_resp_0", "in_resp_1"]
    add(store, "", "resp_3")
    add(store, "", "resp_4")
    assert ids_of(store, "") == ["resp_0", "resp_1", "resp_3", "resp_4"]


def test_other_keys_see_nothing() -> None:
    store = ResponseStore(MAX_BYTES, TTL_S)
    add(store, "alice", "resp_0")
    for call in (
        lambda: store.get("bob", "resp_0"),
        lambda: store.delete("bob", "resp_0"),
        lambda: store.conversation("bob", "resp_0", "previous_response_id"),
        lambda: store.find_item("bob", "out_resp_0", "input[0].id"),
    ):
        with pytest.raises(ResponseNotFound):
            call()
    assert is_stored(store, "alice", "resp_0")


def test_too_large_response_is_not_kept_and_drops_no_other() -> None:
    store = ResponseStore(MAX_BYTES, TTL_S)
    add(store, "", "resp_0")
    add(store, "", "resp_1", size=MAX_BYTES)
    assert ids_of(store, "") == ["resp_0"]


def test_unfinished_response_is_not_visible_and_can_be_discarded() -> None:
    store = ResponseStore(MAX_BYTES, TTL_S)
    store.begin("", "resp_0", StoredResponse(None, b"[]", ("in_0",)))
    assert not is_stored(store, "", "resp_0") and len(store) == 1
    store.discard("", "resp_0")
    assert store.num_bytes == len(store) == 0
    add(store, "", "resp_0")
    store.discard("", "resp_0")
    assert is_stored(store, "", "resp_0")


def test_item_is_found_in_any_response_that_holds_it() -> None:
    store = ResponseStore(20 * ENTRY_BYTES, TTL_S)
    add(store, "", "resp_0")
    for response_id in IDS[1:3]:  # clients send the item again
        store.begin("", response_id, StoredResponse("resp_0", b"[]", ("out_resp_0", "out_resp_0")))
        assert store.find_item("", "out_resp_0", "input[0].id").item_ids[0] == "in_resp_0"
    store.discard("", "resp_1")
    complete(store, "", response("resp_2"))
    store.delete("", "resp_0")
    assert store.find_item("", "out_resp_0", "input[0].id").item_ids[0] == "out_resp_0"
    store.delete("", "resp_2")
    with pytest.raises(ResponseNotFound):
        store.find_item("", "out_resp_0", "input[0].id")


class CountedId(str):
    """An id that counts its comparisons."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.num_compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def test_drop_of_a_response_reads_no_other_holder_of_its_items() -> None:
    """Clients send the items of a conversation again with each turn."""
    num_responses, num_items = 100, 5
    items = tuple(f"in_{i}" for i in range(num_items))
    store = ResponseStore(1000 * num_responses * ENTRY_BYTES, TTL_S)
    for number in range(num_responses):
        store.begin("", CountedId(number), StoredResponse(None, b"[]", items))
    CountedId.num_compared = 0
    for number in range(num_responses):
        store.discard("", CountedId(number))
    assert len(store) == 0
    assert CountedId.num_compared <= num_responses * (num_items + 4)


def test_errors_name_the_options() -> None:
    with pytest.raises(ResponseNotFound, match="--response-store-mb 0"):
        ResponseStore(0, TTL_S).get("", "resp_0")
    with pytest.raises(ResponseNotFound, match=r"not used for 100 s .--response-store-ttl") as caught:
        ResponseStore(MAX_BYTES, TTL_S).conversation("", "resp_0", "previous_response_id")
    assert caught.value.param == "previous_response_id" and caught.value.status == 404
