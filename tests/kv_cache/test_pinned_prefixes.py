"""Prefixes that are pinned by a name: what a sweep leaves, whose they are, and their bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.errors import InvalidRequest
from foreword.kv_cache import block_files, pinned_prefixes
from foreword.kv_cache.block_files import BlockFiles, pack_pin, read_pin, sweep
from foreword.kv_cache.pinned_prefixes import PinnedPrefixes
from tests.kv_cache.test_block_files import IMAGE, NAMESPACE, digest_of

CHAIN = [digest_of(number) for number in range(10)]
FILE_BYTES = 64 + len(IMAGE)


class Store:
    """A directory of blocks, of which a prefix is pinned."""

    def __init__(self, root: Path, limit_blocks: int = 40, with_states: bool = False) -> None:
        self.root, self.limit = root, limit_blocks * FILE_BYTES
        self.folder = root / f"model-{NAMESPACE.hex()}"
        kinds = ("blocks", "states") if with_states else ("blocks",)
        self.kinds = [BlockFiles(self.folder / kind, NAMESPACE, len(IMAGE)) for kind in kinds]
        self.now = 0.0
        self.on_sleep: Callable[[], Any] = lambda: None
        states = self.kinds[1] if with_states else None
        self.pins = PinnedPrefixes(self.folder, self.kinds[0], states, self.limit)

    def wait_written(self, digests: Sequence[bytes]) -> int:
        """Number of blocks that are on disk after the wait."""

        async def find_written(start: int) -> tuple[int, bool]:
            return self.pins.find_written(digests, start)

        async def sleep(seconds: float) -> None:
            self.now += seconds
            self.on_sleep()

        asyncio.run(pinned_prefixes.wait_written(find_written, lambda: self.now, sleep))
        return self.pins.find_written(digests)[0]

    def write(self, digests: list[bytes], used_s: float = 1000.0, kind: int = 0) -> None:
        for digest in digests:
            self.kinds[kind].write(digest, IMAGE)
            os.utime(self.kinds[kind].path(digest), (used_s, used_s))

    def stored(self) -> set[bytes]:
        return self.kinds[0].digests()


def test_pinned_blocks_outlive_newer_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    others = [digest_of(100 + number) for number in range(40)]
    store.write(CHAIN, used_s=1000.0)
    assert store.pins.save("one", "talk", CHAIN) == (CHAIN, 10 * FILE_BYTES + 24 + 160)
    store.write(others, used_s=2000.0)
    assert sweep(tmp_path, store.limit) <= store.limit
    assert store.stored() >= set(CHAIN) and len(store.stored()) <= 36
    assert store.pins.erase("one", "talk") == CHAIN and not store.stored() & set(CHAIN)
    store.write(CHAIN, used_s=1000.0)
    store.write(others, used_s=2000.0)
    sweep(tmp_path, store.limit)
    assert not store.stored() & set(CHAIN), "without a pin the oldest go first"


def test_restored_prefix_is_read_and_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    assert store.pins.restore("one", "talk") == (CHAIN, 10 * len(IMAGE))
    assert store.kinds[0].path(CHAIN[0]).stat().st_mtime > 2000
    path = store.kinds[0].path(CHAIN[6])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert store.pins.restore("one", "talk")[0] == CHAIN[:6], "a damaged block ends it"
    assert not path.exists()


@pytest.mark.parametrize("name", ["scandir", "open", "lstat"])
def test_pins_that_cannot_be_read_now_keep_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    for pin in "ab":
        store.pins.save("one", pin, CHAIN)
    store.write([digest_of(100 + number) for number in range(40)], used_s=2000.0)
    before = getattr(os, name)

    def fail(path: Any, *args: Any) -> Any:
        if ("blocks" if name == "lstat" else "pins") in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return before(path, *args)

    monkeypatch.setattr(os, name, fail)
    for action in (lambda: sweep(tmp_path, store.limit), lambda: store.pins.erase("one", "a")):
        with pytest.raises(OSError, match="Too many open files"):
            action()
    monkeypatch.undo()
    assert store.pins.restore("one", "a") == store.pins.restore("one", "b") == (CHAIN, 10 * len(IMAGE))


@pytest.mark.parametrize("kind", ["link", "torn", "directory"])
def test_prefix_ends_at_what_is_no_file_of_a_block(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    path = store.kinds[0].path(CHAIN[6])
    if kind == "torn":
        os.truncate(path, FILE_BYTES // 2)
    else:
        path.rename(tmp_path / "block")
    if kind == "link":
        path.symlink_to(tmp_path / "block")
    elif kind == "directory":
        path.mkdir()
    assert store.pins.restore("one", "talk")[0] == CHAIN[:6]
    assert store.pins.save("one", "talk", CHAIN)[0] == CHAIN[:6]


def test_blocks_that_are_still_to_be_written_are_waited_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rest = CHAIN[::-1]
    store.on_sleep = lambda: rest and store.write([rest.pop()])
    assert store.wait_written(CHAIN) == 10
    assert store.wait_written([*CHAIN, digest_of(99)]) == 10, "for a moment only"
    assert store.now < pinned_prefixes.MAX_QUIET_S + 1 and store.wait_written([]) == 0
    endless = [digest_of(1000 + number) for number in range(1000)]
    rest = endless[::-1]
    assert 0 < store.wait_written(endless) < 1000 and rest, "the wait has a limit"


def test_nothing_on_disk_is_not_saved(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    for hashes in ([], [digest_of(99)]):
        with pytest.raises(InvalidRequest, match="nothing to save as 'talk'"):
            store.pins.save("one", "talk", hashes)
    assert store.pins.restore("one", "talk")[0] == CHAIN, "what was saved stays"


def test_states_are_waited_for_until_the_last(tmp_path: Path) -> None:
    store = Store(tmp_path, with_states=True)
    store.write(CHAIN)
    store.on_sleep = lambda: store.write([CHAIN[9]], kind=1)
    assert store.wait_written(CHAIN) == 10 and store.now == pinned_prefixes.POLL_S


def test_blocks_of_a_slot_outlive_their_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    assert store.pins.erase("one", "talk", lambda hashes: set(hashes[:4])) == CHAIN
    assert store.stored() == set(CHAIN[:4])


def test_each_pinned_file_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    for name in "abc":
        store.pins.save("one", name, CHAIN)
    paths: list[str] = []
    monkeypatch.setattr(block_files, "_file_size", lambda path: paths.append(path) or 1)
    assert [len(files) for files in block_files.pinned_files([store.folder]).values()] == [20] * 3
    assert len(paths) == len(set(paths)) == 20


def test_pins_without_use_are_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    old = time.time() - block_files.MAX_PIN_AGE_S - 60
    for drop in (lambda: sweep(tmp_path, store.limit), lambda: store.pins.save("one", "new", CHAIN[5:])):
        store.pins.save("one", "talk", CHAIN[:5])
        store.pins.save("one", "used", CHAIN)
        for path in store.folder.glob("pins/*"):
            os.utime(path, (old, old))
        store.pins.restore("one", "used")
        drop()
        with pytest.raises(InvalidRequest, match="nothing is saved as 'talk'"):
            store.pins.restore("one", "talk")
        assert store.pins.restore("one", "used")[0] == CHAIN and store.stored() == set(CHAIN)


def test_failed_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        store.pins.save("one", "talk", CHAIN)
    assert not list(store.folder.glob("pins/*"))


def test_prefix_ends_at_the_last_state(tmp_path: Path) -> None:
    store = Store(tmp_path, with_states=True)
    store.write(CHAIN)
    store.write([CHAIN[3], CHAIN[7]], kind=1)
    assert store.pins.save("one", "talk", CHAIN)[0] == CHAIN[:8]
    store.write([digest_of(100 + number) for number in range(60)], used_s=2000.0)
    sweep(tmp_path, store.limit)
    assert store.kinds[1].digests() == {CHAIN[3], CHAIN[7]} and not store.stored() & {CHAIN[8], CHAIN[9]}
    assert store.pins.restore("one", "talk")[1] == 10 * len(IMAGE)


def test_names_are_the_owners_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    for action in (store.pins.restore, store.pins.erase):
        with pytest.raises(InvalidRequest, match="nothing is saved as 'talk'"):
            action("two", "talk")
    store.pins.save("two", "talk", CHAIN[:3])
    assert store.pins.restore("one", "talk")[0] == CHAIN
    store.pins.erase("one", "talk")
    assert store.stored() == set(CHAIN[:3]), "blocks that another pin keeps stay"
    (path,) = store.folder.glob("pins/*")
    assert b"talk" not in path.read_bytes() and "talk" not in path.name
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0b", "a\nb", "-x", "x" * 129, "é", "a b"]
)
def test_hostile_names_are_refused(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    for action in (lambda: store.pins.save("one", name, CHAIN), lambda: store.pins.restore("one", name)):
        with pytest.raises(InvalidRequest, match="filename must have 1 to 128 ASCII letters, digits"):
            action()
    assert not list(store.folder.glob("pins/*"))


def test_share_of_the_directory_and_number_of_names_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_prefixes, "MAX_PINS_PER_OWNER", 2)
    store = Store(tmp_path, limit_blocks=24)
    more = [digest_of(50 + number) for number in range(3)]
    store.write([*CHAIN, *more])
    store.pins.save("one", "a", CHAIN)
    with pytest.raises(InvalidRequest, match="more than 50% of --kv-cache-disk"):
        store.pins.save("one", "b", more)
    store.pins.save("one", "b", CHAIN[:5])  # its blocks are pinned already
    store.pins.save("one", "a", CHAIN)  # a name that exists
    with pytest.raises(InvalidRequest, match="a key may save 2 names, all keys 1024"):
        store.pins.save("one", "c", CHAIN[:2])
    store.pins.save("two", "c", CHAIN[:2])
    monkeypatch.setattr(pinned_prefixes, "MAX_BLOCKS_PER_OWNER", 20)
    with pytest.raises(InvalidRequest, match="may have 20 blocks, with this prefix they have 2"):
        store.pins.save("one", "b", CHAIN)


def test_smaller_limit_drops_the_oldest_pins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    for order, (name, digests) in enumerate({"old": CHAIN[:5], "new": CHAIN[5:]}.items()):
        before = set(store.folder.glob("pins/*"))
        store.pins.save("one", name, digests)
        (path,) = set(store.folder.glob("pins/*")) - before
        os.utime(path, (1000 + order, 1000 + order))
    sweep(tmp_path, 12 * FILE_BYTES // 2)
    assert store.stored() == {*CHAIN[5:]}


def test_damaged_pin_keeps_and_restores_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    (path,) = store.folder.glob("pins/*")
    data = path.read_bytes()
    assert read_pin(path) == CHAIN and pack_pin(CHAIN) == data
    for damaged in (b"", data[:-1], data[:-16], data[:30] + b"!" + data[31:], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequest, match="nothing is saved"):
            store.pins.restore("one", "talk")
        assert not path.exists(), "it would count as one of the owner's names"
    path.symlink_to("/etc/passwd")
    assert read_pin(path) is None


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(CHAIN)
    store.pins.save("one", "talk", CHAIN)
    left = store.folder / "pins" / "xyz.tmp"
    left.write_bytes(b"")
    os.utime(left, (1, 1))
    store.pins.save("one", "other", CHAIN)
    assert not left.exists()
