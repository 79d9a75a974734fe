"""A request that goes on in another engine: its caller gets each token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.finish import Repetition
from foreword.core.outputs import BlockUpdate, DraftResult, ErrorEvent, TokenEvent, TokenLogprob
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.replica import (
    LOAD_SLACK,
    MAX_LOAD_RATIO,
    REPLAY_CHECK_TOKENS,
    TOKENS_PER_STREAM,
    BlockIndex,
    ReplicaLoad,
    RoutedRequest,
    choose,
)
from foreword.errors import RequestFailed
from foreword.kv_cache.block_pool import BlockPool

LENGTH = 20  # tokens of every answer
LOADS = st.builds(
    ReplicaLoad,
    id=st.just(""),
    num_streams=st.integers(0, 40),
    num_prompt_tokens=st.integers(0, 5000),
    num_matched=st.integers(0, 5),
    chosen_at=st.integers(0, 3),
)


def make_request(name: str, **params: Any) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(**params), seed=0)


def open_request(request: Request) -> RoutedRequest:
    return RoutedRequest(request, lambda event: None)


def said(request_id: str, start: int, stop: int, **fields: Any) -> TokenEvent:
    """An event with tokens [start, stop) of the request's only possible answer."""
    ids = tuple(_answer(request_id, position) for position in range(start, stop))
    logprobs = tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in ids)
    reason = "length" if stop == LENGTH else None
    return TokenEvent(request_id, start, ids, logprobs, logits_hashes=ids, finish_reason=reason, **fields)


def _answer(request_id: str, position: int) -> int:
    return ord(request_id[0]) * 1000 + position


def test_request_without_delivered_tokens_is_sent_as_it_was() -> None:
    request = replace(make_request("a", prompt_logprobs=2), queue_deadline_s=1.0, deadline_s=9.0)
    live = open_request(request)
    assert live.make_resume_request("a~1") == replace(request, id="a~1")
    live.has_run = True
    ran = live.make_resume_request("a~1")
    assert (ran.queue_deadline_s, ran.deadline_s) == (None, 9.0), "it does not wait to start"


def test_all_tokens_of_a_short_answer_are_sampled_again() -> None:
    live = open_request(make_request("a"))
    live.take_new(said("a", 0, 1))
    resumed = live.make_resume_request("a~1")
    assert resumed.is_resumed and not resumed.resume_output_ids


def test_events_have_the_id_of_the_request() -> None:
    live = open_request(make_request("a"))
    live.take_new(said("a", 0, 6))
    assert live.take_new(said("a", 6, 8)._replace(request_id="a~1")) == said("a", 6, 8)
    failed = live.take_new(said("a", 9, 12)._replace(request_id="a~1"))
    assert isinstance(failed, ErrorEvent) and failed.request_id == "a"


def test_delivered_tokens_are_resume_output() -> None:
    live = open_request(
        replace(
            make_request("a", prompt_logprobs=2),
            resume_output_ids=(7, 8),
            queue_deadline_s=1.0,
            deadline_s=9.0,
        )
    )
    live.take_new(said("a", 0, 6)._replace(index=2))
    resumed = live.make_resume_request("a~1")
    assert resumed.resume_output_ids == (7, 8, _answer("a", 0), _answer("a", 1))
    assert resumed.id == "a~1" and resumed.is_resumed
    assert resumed.params.prompt_logprobs is None, "already delivered"
    assert (resumed.queue_deadline_s, resumed.deadline_s) == (None, 9.0), "only the queue deadline is dropped"
    few = open_request(replace(make_request("a"), resume_output_ids=(7, 8)))
    few.take_new(said("a", 0, REPLAY_CHECK_TOKENS - 1)._replace(index=2))
    assert few.make_resume_request("a~1").resume_output_ids == (7, 8), "the caller's own output is kept"


def test_replayed_tokens_are_not_delivered_twice() -> None:
    live = open_request(make_request("a"))
    assert live.take_new(said("a", 0, 6)) == said("a", 0, 6)
    assert live.take_new(said("a", 2, 4)) is None
    use = DraftResult("suffix", num_drafted=4, num_accepted=3)
    new = live.take_new(said("a", 4, 8, draft=use))
    assert new == said("a", 6, 8, draft=DraftResult("suffix", 2, 1))
    assert live.take_new(said("a", 8, LENGTH)) == said("a", 8, LENGTH)


@pytest.mark.parametrize(
    "event", [said("a", 2, 5)._replace(token_ids=(1, 2, 3)), said("a", 7, 8), said("b", 4, 7)]
)
def test_different_tokens_after_a_crash_fail_the_request(event: TokenEvent) -> None:
    live = open_request(make_request("a"))
    live.take_new(said("a", 0, 6))
    failed = live.take_new(event)
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "same tokens" in failed.error.message
    )


def test_first_timing_and_repetition_are_kept() -> None:
    live = open_request(make_request("a"))
    first = live.take_new(said("a", 0, 6, num_cached=2, scheduled_s=5.0, repetition=Repetition(6, 3)))
    assert isinstance(first, TokenEvent) and first.repetition is not None
    again = live.take_new(said("a", 2, 8, num_cached=0, scheduled_s=8.0, repetition=Repetition(4, 3)))
    assert again == said("a", 6, 8, num_cached=2, scheduled_s=5.0), (
        "no second warning for the same repetition"
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
