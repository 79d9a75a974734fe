import asyncio

from hypothesis import given
from hypothesis import strategies as st

from foreword.embedding.client import EncodeCall, FairBatcher
from foreword.embedding.encoder_messages import EncoderInput


def add(batcher: FairBatcher, *sizes: int) -> EncodeCall:
    loop = asyncio.new_event_loop()
    try:
        return batcher.add([EncoderInput((0,) * size) for size in sizes], loop.create_future())
    finally:
        loop.close()


def test_batch_is_filled_in_order_up_to_its_budget() -> None:
    batcher = FairBatcher()
    call = add(batcher, 30, 30, 50)
    assert batcher.next_batch(64) == [(call, 0), (call, 1)]
    assert batcher.next_batch(64) == [(call, 2)]
    assert batcher.next_batch(64) == [] and batcher.num_waiting == 0


def test_input_above_the_budget_is_a_batch_of_its_own() -> None:
    batcher = FairBatcher()
    call = add(batcher, 500, 1)
    assert batcher.next_batch(64) == [(call, 0)]
    assert batcher.next_batch(64) == [(call, 1)]


def test_new_call_does_not_wait_for_a_long_one() -> None:
    batcher = FairBatcher()
    long = add(batcher, *[20] * 1000)
    for _ in range(5):
        batcher.next_batch(60)
    short = add(batcher, 20)
    assert (short, 0) in batcher.next_batch(60)
    assert batcher.next_batch(60) == [(long, index) for index in range(17, 20)]


def test_new_calls_do_not_starve_a_long_one() -> None:
    batcher = FairBatcher()
    long = add(batcher, *[20] * 10)
    batches = 0
    while long.num_dispatched < 10:
        add(batcher, 20)
        add(batcher, 20)
        batcher.next_batch(40)
        batches += 1
        assert batches < 1000


def test_cancelled_inputs_are_not_dispatched() -> None:
    batcher = FairBatcher()
    first, second = add(batcher, 10, 10, 10), add(batcher, 10)
    assert batcher.next_batch(10) == [(first, 0)]
    batcher.cancel(first)
    batcher.cancel(first)
    assert batcher.num_waiting == 1
    assert batcher.next_batch(100) == [(second, 0)] and batcher.num_waiting == 0


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), max_size=8), st.integers(1, 60))
def test_each_input_is_dispatched_once(calls: list[list[int]], budget: int) -> None:
    batcher = FairBatcher()
    open_calls = [add(batcher, *sizes) for sizes in calls]
    dispatched: list[tuple[EncodeCall, int]] = []
    while batch := batcher.next_batch(budget):
        sizes = [len(call.inputs[index].token_ids) for call, index in batch]
        assert sum(sizes) <= budget or len(sizes) == 1
        dispatched += batch
    assert len(dispatched) == len(set(dispatched)) == sum(map(len, calls))
    for call in open_calls:
        assert [index for other, index in dispatched if other is call] == list(range(len(call.inputs)))
