"""ImageMemory: reserved before decoding, exact after it, bounded."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import Overloaded, PayloadTooLarge
from foreword.server.answering.image_intake import ImageMemory


def memory(limit: int = 100) -> tuple[ImageMemory, Counter[str]]:
    reasons: Counter[str] = Counter()
    return ImageMemory(limit, lambda reason: reasons.update([reason]), lambda: 50.0), reasons


def test_upper_bound_is_reserved_until_decoded() -> None:
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


def test_one_request_may_use_all_memory_and_no_more() -> None:
    pool, reasons = memory()
    reservation = pool.start_reservation()
    reservation.commit(reservation.reserve(500), 90)
    reservation.commit(reservation.reserve(500), 10)
    with pytest.raises(PayloadTooLarge, match="--image-memory"):
        reservation.reserve(500)
    reservation.release()
    assert pool.held_bytes == 0 and not reasons, "a too large request is not counted as overload"
    reservation = pool.start_reservation()
    with pytest.raises(PayloadTooLarge):
        reservation.commit(reservation.reserve(500), 101)
    reservation.release()
    assert pool.held_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(1, 120), st.booleans()), max_size=60
    )
)
def test_held_bytes_match_the_reservations(steps: list[tuple[int, int, int, bool]]) -> None:
    pool, _ = memory()
    reservations = [pool.start_reservation() for _ in range(5)]
    for index, largest, size, leave in steps:
        try:
            reservations[index].commit(reservations[index].reserve(largest), size)
        except (Overloaded, PayloadTooLarge):
            reservations[index].release()
        if leave:
            reservations[index].release()
        assert pool.held_bytes == sum(reservation.num_bytes for reservation in reservations) <= 100
    for reservation in reservations:
        reservation.release()
    assert pool.held_bytes == 0
