import asyncio

from hypothesis import given
from hypothesis import strategies as st

from foreword.embedding.batcher import EncodeCall, FairBatcher
from foreword.embedding.messages import EncoderInput


def add(turns: FairBatcher, *sizes: int) -> EncodeCall:
    loop = asyncio.new_event_loop()
    try:
        return turns.add([EncoderInput((0,) * size) for size in sizes], loop.create_future())
    finally:
        loop.close()


def test_a_batch_is_filled_up_to_its_budget_in_order() -> None:
    turns = FairBatcher()
    call = add(turns, 30, 30, 50)
    assert turns.next_batch(64) == [(call, 0), (call, 1)]
    assert turns.next_batch(64) == [(call, 2)]
    assert turns.next_batch(64) == [] and turns.num_waiting == 0


def test_an_input_beyond_the_budget_goes_alone() -> None:
    turns = FairBatcher()
    call = add(turns, 500, 1)
    assert turns.next_batch(64) == [(call, 0)]
    assert turns.next_batch(64) == [(call, 1)]


def test_a_long_list_does_not_hold_up_a_newcomer() -> None:
    turns = FairBatcher()
    long = add(turns, *[20] * 1000)
    for _ in range(5):
        turns.next_batch(60)
    short = add(turns, 20)
    assert (short, 0) in turns.next_batch(60)
    assert turns.next_batch(60) == [(long, index) for index in range(17, 20)]


def test_newcomers_do_not_starve_a_long_list() -> None:
    turns = FairBatcher()
    long = add(turns, *[20] * 10)
    batches = 0
    while long.num_dispatched < 10:
        add(turns, 20)
        add(turns, 20)
        turns.next_batch(40)
        batches += 1
        assert batches < 1000


def test_what_nobody_waits_for_is_not_computed() -> None:
    turns = FairBatcher()
    first, second = add(turns, 10, 10, 10), add(turns, 10)
    assert turns.next_batch(10) == [(first, 0)]
    turns.cancel(first)
    turns.cancel(first)
    assert turns.num_waiting == 1
    assert turns.next_batch(100) == [(second, 0)] and turns.num_waiting == 0


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), max_size=8), st.integers(1, 60))
def test_every_input_is_handed_out_once(calls: list[list[int]], budget: int) -> None:
    turns = FairBatcher()
    open_calls = [add(turns, *sizes) for sizes in calls]
    handed_out: list[tuple[EncodeCall, int]] = []
    while taken := turns.next_batch(budget):
        sizes = [len(call.inputs[index].token_ids) for call, index in taken]
        assert sum(sizes) <= budget or len(sizes) == 1
        handed_out += taken
    assert len(handed_out) == len(set(handed_out)) == sum(map(len, calls))
    for call in open_calls:
        assert [index for other, index in handed_out if other is call] == list(range(len(call.inputs)))
