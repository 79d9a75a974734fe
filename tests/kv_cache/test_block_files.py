"""Files of cache images: whole or refused, private, and bounded."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.kv_cache import block_files
from foreword.kv_cache.block_files import BlockFiles, RefusedFile, sweep

NAMESPACE = bytes(range(16))
IMAGE = bytes(i % 251 for i in range(1000))


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def files_of(root: Path, namespace: bytes = NAMESPACE, image_bytes: int = len(IMAGE)) -> BlockFiles:
    folder = root / f"model-{namespace.hex()}"
    return BlockFiles(folder / "blocks", namespace, image_bytes)


def test_image_is_read_back_and_its_files_are_private(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    files.write(digest_of(7), IMAGE)
    again = files_of(tmp_path)
    assert again.digests() == {digest_of(7)} and again.read(digest_of(7)) == IMAGE
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    with pytest.raises(FileNotFoundError):
        files.read(digest_of(8))


@pytest.mark.parametrize("position", [0, 10, 30, 41, 60, 500, -1])
def test_any_flipped_bit_is_refused_and_the_file_removed(tmp_path: Path, position: int) -> None:
    files = files_of(tmp_path)
    files.write(digest_of(7), IMAGE)
    (path,) = tmp_path.glob("*/blocks/*/*")
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)
    with pytest.raises(RefusedFile):
        files.read(digest_of(7))
    assert not path.exists()


def test_file_of_another_namespace_or_size_is_refused(tmp_path: Path) -> None:
    files_of(tmp_path).write(digest_of(7), IMAGE)
    (path,) = tmp_path.glob("*/blocks/*/*")
    for other in (files_of(tmp_path, bytes(16)), files_of(tmp_path, image_bytes=999)):
        copy = other.path(digest_of(7))
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        with pytest.raises(RefusedFile):
            other.read(digest_of(7))


def test_directory_of_others_is_refused(tmp_path: Path) -> None:
    files_of(tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="no one else may write"):
        files_of(tmp_path)
    folder.chmod(0o700)
    (folder / "blocks").rmdir()
    (folder / "blocks").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="directory of this user"):
        files_of(tmp_path)


def test_sweep_removes_the_least_recently_used_of_all_namespaces(tmp_path: Path) -> None:
    first, second = files_of(tmp_path), files_of(tmp_path, bytes(16))
    for number in range(10):
        (first if number % 2 else second).write(digest_of(number), IMAGE)
    for number in range(10):
        os.utime((first if number % 2 else second).path(digest_of(number)), (number + 1, number + 1))
    first.read(digest_of(1))  # now the last to be removed
    assert sweep(tmp_path, 10 * first.file_bytes) == 10 * first.file_bytes
    assert sweep(tmp_path, 6 * first.file_bytes) == 5 * first.file_bytes
    assert {int.from_bytes(digest) for digest in first.digests() | second.digests()} == {1, 6, 7, 8, 9}


def test_sweep_leaves_files_of_others_and_removes_stale_temporary_ones(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    files.write(digest_of(1), IMAGE)
    shard = files.path(digest_of(1)).parent
    others = [tmp_path / "photo.jpg", shard.parent / "notes", shard / "README", tmp_path / "other" / "file"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(IMAGE)
    stale, young = (shard / f"{digest_of(1).hex()}-{pid}.tmp" for pid in (1, 2))
    for path in (stale, young):
        path.write_bytes(b"")
    os.utime(stale, (1, 1))
    assert sweep(tmp_path, 0) == 0
    assert all(path.exists() for path in others) and not files.digests()
    assert not stale.exists()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EAGAIN])
def test_limit_is_kept_without_locks_and_by_one_process_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", fail)
    files = files_of(tmp_path)
    for number in range(10):
        files.write(digest_of(number), IMAGE)
    left = sweep(tmp_path, 6 * files.file_bytes) // files.file_bytes
    assert left == len(files.digests()) == (5 if error == errno.ENOLCK else 10)


def test_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    (tmp_path / "lock").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        sweep(tmp_path, 1)
    assert file.read_bytes() == b"precious"


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, header: bytes, image: bytes) -> None:
        os.write(fd, header)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files, "_write_all", fail)
    files = files_of(tmp_path)
    with pytest.raises(OSError, match="No space"):
        files.write(digest_of(1), IMAGE)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_process_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    """SIGKILL at many instants: what has a file's name is whole."""
    for attempt in range(20):
        pid = os.fork()
        if pid == 0:
            files = files_of(tmp_path)
            for number in range(attempt * 1000, 1 << 30):
                files.write(digest_of(number), IMAGE)
        files = files_of(tmp_path)
        while not any(int.from_bytes(digest) >= attempt * 1000 for digest in files.digests()):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    digests = files_of(tmp_path).digests()
    assert len(digests) >= 20 and all(files_of(tmp_path).read(digest) == IMAGE for digest in digests)


def test_files_that_come_and_go_are_found(tmp_path: Path) -> None:
    files, digests = files_of(tmp_path), [bytes([number, *range(15)]) for number in range(3)]
    for digest in digests:
        files.write(digest, IMAGE)
    (files.path(digests[0]).parent / "README").write_bytes(b"")
    for digest in digests:
        os.utime(files.path(digest).parent, (1000, 1000))
    assert files.changed_shards() == {number: {digests[number]} for number in range(3)}
    assert files.changed_shards() == {}, "only what has changed"
    files.path(digests[0]).unlink()
    shutil.rmtree(files.path(digests[1]).parent)
    assert files.changed_shards() == {0: set(), 1: set()}
    assert files.changed_shards() == {0: set()}, "its change was just now: there may be another one"
    shutil.rmtree(tmp_path)
    assert files.changed_shards() == {0: set(), 2: set()} and files.digests() == set()
    files.write(digests[2], IMAGE)
    assert files.digests() == {digests[2]}
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
