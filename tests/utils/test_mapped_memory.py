"""Pages of mapped files are released by address, and other memory is left alone."""

import re
from pathlib import Path

import pytest
import torch

from foreword.utils.mapped_memory import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE_BYTES, HugePages, release_pages
from foreword.weights.mapped_file import MappedFile

NUM_BYTES = 8 << 20
ROLLUP = Path("/proc/self/smaps_rollup")


def resident_bytes() -> int:
    """Of mapped files in this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"RssFile:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) << 10


def test_pages_of_a_mapped_file_are_released(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    file = MappedFile(tmp_path / "file")
    tensor = file.tensor(torch.uint8, 0, NUM_BYTES)
    total = int(tensor.sum(dtype=torch.int64))
    before = resident_bytes()
    release_pages(tensor.data_ptr() + NUM_BYTES // 2, NUM_BYTES)  # beyond its end
    assert before - resident_bytes() > NUM_BYTES // 4
    assert int(tensor.sum(dtype=torch.int64)) == total, "a later read loads them again"


def test_other_memory_is_left_alone() -> None:
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8)
    release_pages(tensor.data_ptr(), NUM_BYTES)
    assert bool(tensor.all())


def test_file_that_is_closed_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * NUM_BYTES)
    file = MappedFile(tmp_path / "file")
    address = file.tensor(torch.uint8, 0, 1).data_ptr()
    del file
    release_pages(address, NUM_BYTES)


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
