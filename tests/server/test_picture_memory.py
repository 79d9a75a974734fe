"""Memory for pictures: reserved before they are read, settled then, and never more than there is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import Overloaded, PayloadTooLarge
from foreword.server.image_intake import ImageMemory


def memory(limit: int = 100) -> tuple[ImageMemory, Counter[str]]:
    reasons: Counter[str] = Counter()
    return ImageMemory(limit, lambda reason: reasons.update([reason]), lambda: 50.0), reasons


def test_as_much_as_a_picture_can_take_is_reserved_until_its_size_is_known() -> None:
    pool, reasons = memory()
    first, second = pool.start_reservation(), pool.start_reservation()
    reserved = first.reserve(60)
    assert pool.held_bytes == reserved == 60
    with pytest.raises(Overloaded, match=r"of at most 0\.0 MiB; try again in 1 s"):
        second.reserve(60)
    assert reasons == {"image_memory": 1}
    first.commit(reserved, 10)
    assert pool.held_bytes == 10
    second.commit(second.reserve(60), 60)
    assert pool.held_bytes == 70
    first.release()
    first.release()
    assert pool.held_bytes == 60
    second.release()
    assert pool.held_bytes == 0


def test_one_request_alone_may_use_all_of_it_and_no_more() -> None:
    pool, reasons = memory()
    hold = pool.start_reservation()
    hold.commit(hold.reserve(500), 90)
    hold.commit(hold.reserve(500), 10)
    with pytest.raises(PayloadTooLarge, match="--image-memory"):
        hold.reserve(500)
    hold.release()
    assert pool.held_bytes == 0 and not reasons, "that is no matter of load"
    hold = pool.start_reservation()
    with pytest.raises(PayloadTooLarge):
        hold.commit(hold.reserve(500), 101)
    hold.release()
    assert pool.held_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(1, 120), st.booleans()), max_size=60
    )
)
def test_what_is_held_is_what_was_taken(steps: list[tuple[int, int, int, bool]]) -> None:
    pool, _ = memory()
    holds = [pool.start_reservation() for _ in range(5)]
    for index, largest, size, leave in steps:
        try:
            holds[index].commit(holds[index].reserve(largest), size)
        except (Overloaded, PayloadTooLarge):
            holds[index].release()
        if leave:
            holds[index].release()
        assert pool.held_bytes == sum(hold.num_bytes for hold in holds) <= 100
    for hold in holds:
        hold.release()
    assert pool.held_bytes == 0
