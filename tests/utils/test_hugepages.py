"""Allocation from huge pages."""

from pathlib import Path

import pytest

from foreword.utils.hugepages import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE_BYTES, HugePages

ROLLUP = Path("/proc/self/smaps_rollup")


def test_allocations_are_zeroed_and_disjoint():
    memory = HugePages()
    pieces = [memory.allocate(size) for size in (1, 63, 64, 65, 100_000)]
    for value, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % ALIGNMENT == 0 and not piece.any()
        piece.fill_(value)
    assert (
        [int(piece.amin()) for piece in pieces] == [int(piece.amax()) for piece in pieces] == [1, 2, 3, 4, 5]
    )


def test_large_allocation_starts_at_a_huge_page():
    memory = HugePages()
    memory.allocate(1)
    assert memory.allocate(CHUNK_BYTES + 1).data_ptr() % HUGE_PAGE_BYTES == 0


def test_memory_is_in_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text() or not ROLLUP.exists():
        pytest.skip("the system has no transparent huge pages")
    before = huge_kilobytes()
    piece = HugePages().allocate(8 * HUGE_PAGE_BYTES)
    piece.fill_(1)
    assert huge_kilobytes() - before > 0


def huge_kilobytes() -> int:
    (line,) = (line for line in ROLLUP.read_text().splitlines() if line.startswith("AnonHugePages"))
    return int(line.split()[1])
