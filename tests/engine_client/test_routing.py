"""Routing: load bounds the choice, then matched blocks decide; the index of blocks equals the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.outputs import BlockUpdate
from foreword.engine_client.routing import (
    LOAD_SLACK,
    MAX_LOAD_RATIO,
    TOKENS_PER_STREAM,
    BlockIndex,
    ReplicaLoad,
    choose,
)
from foreword.kv_cache.block_pool import BlockPool

LOADS = st.builds(
    ReplicaLoad,
    id=st.just(""),
    num_streams=st.integers(0, 40),
    num_prompt_tokens=st.integers(0, 5000),
    num_matched=st.integers(0, 5),
    chosen_at=st.integers(0, 3),
)


def named(loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    return [ReplicaLoad(str(i), *_values(load)[1:]) for i, load in enumerate(loads)]


def _values(load: ReplicaLoad) -> tuple[object, ...]:
    return load.id, load.num_streams, load.num_prompt_tokens, load.num_matched, load.chosen_at


@given(st.lists(LOADS, min_size=1, max_size=6), st.integers(0, 8))
def test_no_replica_within_the_bound_has_more_blocks(loads: list[ReplicaLoad], last: int) -> None:
    candidates = {load.id: load for load in named(loads)}
    chosen = candidates[choose(list(candidates.values()), str(last))]
    bound = MAX_LOAD_RATIO * sum(load.load for load in candidates.values()) / len(candidates) + LOAD_SLACK
    assert chosen.load <= bound
    for other in candidates.values():
        if other.load <= bound:
            assert other.num_matched <= chosen.num_matched
            if other.num_matched == chosen.num_matched and chosen.id != str(last):
                assert other.id != str(last)
                assert (chosen.load, chosen.chosen_at) <= (other.load, other.chosen_at)


def test_load_goes_before_blocks() -> None:
    idle, busy = ReplicaLoad("idle", 0, 0), ReplicaLoad("busy", 9, 0, num_matched=100)
    assert choose([busy, idle]) == "idle"
    assert choose([ReplicaLoad("busy", 2, 0, num_matched=1), idle]) == "busy"
    assert choose([ReplicaLoad("busy", 0, 9 * TOKENS_PER_STREAM, num_matched=1), idle]) == "idle", (
        "a prompt that is computed is load"
    )


def test_replicas_of_equal_load_take_turns() -> None:
    last, order = {"a": 0, "b": 0, "c": 0}, []
    for number in range(1, 7):
        chosen = choose([ReplicaLoad(name, 0, 0, 0, at) for name, at in last.items()])
        last[chosen] = number
        order.append(chosen)
    assert order == list("abcabc")


def test_missing_update_makes_the_cache_unknown_until_a_snapshot() -> None:
    index = BlockIndex()
    assert not index.update(BlockUpdate(4, (b"a",))), "the first update must be a snapshot"
    assert (
        index.update(BlockUpdate(5, (b"a", b"b"), is_snapshot=True)) and index.num_matched([b"a", b"b"]) == 2
    )
    assert index.update(BlockUpdate(6, (b"c",), (b"a",))) and index.num_matched([b"c", b"b"]) == 2
    assert not index.update(BlockUpdate(8, (b"d",)))
    assert index.num_matched([b"c"]) == 0 and not index.update(BlockUpdate(9, (b"e",)))
    assert index.update(BlockUpdate(10, (b"d",), is_snapshot=True)) and index.num_matched([b"d"]) == 1


def test_blocks_that_are_computed_count_once_for_each_request() -> None:
    index = BlockIndex()
    for digests in ([b"a", b"b"], [b"a"]):
        index.add_computing(digests)
    index.remove_computing([b"a", b"b"])
    assert index.num_matched([b"a", b"b"]) == 1
    index.remove_computing([b"a"])
    assert index.num_matched([b"a"]) == 0 and not index._computing


@given(st.data())
def test_index_equals_the_cache_of_the_engine(data: st.DataObject) -> None:
    """Whatever it allocates, publishes and evicts between two updates; lost updates ask for a snapshot."""
    pool, index, held = BlockPool(4), BlockIndex(), []
    pool.record_changes()
    sequence, is_snapshot_due = 0, True
    for _ in range(data.draw(st.integers(1, 30), "operations")):
        match data.draw(st.sampled_from(("allocate", "publish", "release", "update", "lose")), "operation"):
            case "allocate" if pool.num_free:
                held.append(pool.allocate())
            case "publish" if held:
                pool.publish(data.draw(st.sampled_from(held)), bytes([data.draw(st.integers(0, 5))]))
            case "release" if held:
                pool.release([held.pop(data.draw(st.integers(0, len(held) - 1)))])
            case "update" | "lose" as kind:
                added, removed = pool.pop_changes()
                sequence += 1
                update = BlockUpdate(sequence, pool.digests if is_snapshot_due else added, removed)
                update = update._replace(is_snapshot=is_snapshot_due)
                is_snapshot_due = False
                if kind == "update":
                    is_snapshot_due = not index.update(update)
                    assert is_snapshot_due or index._cached == set(pool.digests)
