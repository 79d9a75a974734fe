"""Files of cache images: one image a file, named by its hash, in a directory of one namespace.

    ROOT / MODEL-NAMESPACE / blocks | states / 2 digits / HASH
    magic | namespace | hash | bytes | checksum | image

    ROOT / MODEL-NAMESPACE / pins / OWNER-NAME      both are hashes
    magic | checksum | hash of block 0 | hash of block 1 ...

A file is whole or refused: the checksum covers all of it, so a crash at any instant, a full disk or a flipped
bit costs a hit. Nothing is ever trusted for its name alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from foreword.errors import ConfigError
from foreword.kv_cache.prefix_cache import DIGEST_BYTES

MAGIC: Final = b"fwkv\x00\x00\x00\x01"  # the last byte is the version of the format
HEADER: Final = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sQ{DIGEST_BYTES}s")
CHECKSUM_PERSON: Final = b"kv image"
TEMPORARY: Final = ".tmp"
MAX_TEMPORARY_AGE_S: Final = 600.0  # a write takes seconds: an older temporary file is a dead engine's
CLOCK_TICK_NS: Final = 2_000_000_000  # resolution of the coarsest file systems
SWEEP_TARGET: Final = 0.9  # share of the limit that a sweep leaves
# ROOT / namespace / kind / shard / file
SHARD_PATTERN: Final = re.compile(r"[0-9a-f]{2}")
FOLDER_PATTERNS: Final = (re.compile(r".*-[0-9a-f]{32}"), re.compile(r"blocks|states"), SHARD_PATTERN)
MAX_NAME_CHARS: Final = 64
PIN_MAGIC: Final = b"fwpin\x00\x00\x01"
PIN_PERSON: Final = b"kv pin"
PIN_PATTERN: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
MAX_PIN_BYTES: Final = 64 << 20
MAX_PIN_AGE_S: Final = 30 * 86_400.0  # since a pin was saved or restored
MAX_PINNED_SHARE: Final = 0.5  # share of the limit that a sweep leaves for pins
DIGEST_PATTERN: Final = re.compile(r"[0-9a-f]{32}")
FILE_PATTERN: Final = re.compile(r"[0-9a-f]{32}(-\d+\.tmp)?")


def folder_name(model: Path) -> str:
    """The readable part of a namespace's name."""
    return re.sub(r"[^\w.-]", "_", model.name, flags=re.ASCII)[:MAX_NAME_CHARS]


class RefusedFile(Exception):
    """Its content is not what its name says. The message is one word: a label of metrics."""


def check_private(path: Path) -> None:
    """Raises ConfigError unless it is a directory of this user's that no one else may write to; OSError."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ConfigError(
            f"kv_cache_dir: {path} must be a directory of this user that no one else may write to",
            "kv_cache_dir",
        )


class BlockFiles:
    """The images of one kind in one namespace. Errors of the file system are raised as OSError."""

    def __init__(self, folder: Path, namespace: bytes, image_bytes: int) -> None:
        """Creates the folder. Raises OSError, and ConfigError if other users may write to it."""
        assert len(namespace) == DIGEST_BYTES
        self.image_bytes = image_bytes
        self.file_bytes = HEADER.size + image_bytes
        self._namespace = namespace
        self._folder = folder
        self._scanned_at: dict[str, int] = {}  # time of the last change of each shard that was scanned
        self._make_folders()

    def _make_folders(self) -> None:
        """Also after a user has deleted the whole directory."""
        self._folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._folder.parent, self._folder):
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)

    def digests(self) -> set[bytes]:
        """Hashes of all files, by their names. Raises OSError."""
        self._scanned_at.clear()
        return set[bytes]().union(*self.changed_shards().values())

    def changed_shards(self) -> dict[int, set[bytes]]:
        """Hashes of the files in each shard that has changed since the last call, by first byte; OSError.

        A shard that is gone has none.
        """
        times = self._shard_times()
        changed: dict[int, set[bytes]] = {int(name, 16): set() for name in self._scanned_at.keys() - times}
        for name, changed_at in times.items():
            if self._scanned_at.get(name) == changed_at:
                continue
            # A change in the same tick of the file system's clock would not be seen later
            if time.time_ns() - changed_at <= CLOCK_TICK_NS:
                times[name] = 0
            files: list[str] = []
            with contextlib.suppress(FileNotFoundError):
                files = os.listdir(self._folder / name)
            changed[int(name, 16)] = {
                bytes.fromhex(file) for file in files if DIGEST_PATTERN.fullmatch(file) and file[:2] == name
            }
        self._scanned_at = times
        return changed

    def _shard_times(self) -> dict[str, int]:
        """Time of the last change of each shard, in ns. Raises OSError."""
        times: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as shards:
            for shard in shards:
                if SHARD_PATTERN.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        times[shard.name] = shard.stat(follow_symlinks=False).st_mtime_ns
        return times

    def write(self, digest: bytes, image: bytes | memoryview) -> None:
        """Write a file under a temporary name, then rename it: no reader sees a part of it."""
        assert len(image) == self.image_bytes
        path = self.path(digest)
        temporary = path.with_name(f"{path.name}-{os.getpid()}{TEMPORARY}")
        header = HEADER.pack(MAGIC, self._namespace, digest, len(image), self._checksum(digest, image))
        self._scanned_at.setdefault(path.parent.name, 0)  # else a shard that goes before a scan is not missed
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            self._make_folders()
            path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb", buffering=0) as file:
                _write_all(file.fileno(), header, image)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, digest: bytes) -> bytes:
        """The image, and note the use of its file.

        Raises RefusedFile for a file that is not what its name says, and removes it.
        """
        path = self.path(digest)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            try:
                image = self._read_image(file, digest)
            except RefusedFile:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
            with contextlib.suppress(OSError):
                os.utime(fd)
        return image

    def _read_image(self, file: BinaryIO, digest: bytes) -> bytes:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size != self.file_bytes:
            raise RefusedFile("size")
        header, image = file.read(HEADER.size), file.read(self.image_bytes)
        if len(header) + len(image) != self.file_bytes:
            raise RefusedFile("size")
        magic, namespace, name, size, checksum = HEADER.unpack(header)
        if (magic, namespace, name, size) != (MAGIC, self._namespace, digest, self.image_bytes):
            raise RefusedFile("header")
        if self._checksum(digest, image) != checksum:
            raise RefusedFile("checksum")
        return image

    def _checksum(self, digest: bytes, image: bytes | memoryview) -> bytes:
        checksum = blake2b(self._namespace + digest, digest_size=DIGEST_BYTES, person=CHECKSUM_PERSON)
        checksum.update(image)
        return checksum.digest()

    def file_size(self, digest: bytes) -> int:
        """file_bytes; 0: there is no such file. Raises OSError."""
        try:
            info = self.path(digest).lstat()
        except FileNotFoundError:
            return 0
        return self.file_bytes if stat.S_ISREG(info.st_mode) and info.st_size == self.file_bytes else 0

    def path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name


def _write_all(fd: int, header: bytes, image: bytes | memoryview) -> None:
    parts = [memoryview(header), memoryview(image)]
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


def pack_pin(digests: Sequence[bytes]) -> bytes:
    content = b"".join(digests)
    return PIN_MAGIC + blake2b(content, digest_size=DIGEST_BYTES, person=PIN_PERSON).digest() + content


def read_pin(path: Path) -> list[bytes] | None:
    """The hashes of a pin; None without a whole file. Raises OSError for one that cannot be read now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            data = file.read(MAX_PIN_BYTES)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link
            return None
        raise
    start = len(PIN_MAGIC) + DIGEST_BYTES
    digests = [data[i : i + DIGEST_BYTES] for i in range(start, len(data), DIGEST_BYTES)]
    return digests if pack_pin(digests) == data else None


def pinned_files(namespaces: Iterable[Path]) -> dict[Path, dict[str, int]]:
    """Sizes of the files that each pin of these directories keeps, by their paths.

    The pin that was used last comes first. Raises OSError: a pin that cannot be read keeps files too.
    """
    sizes: dict[str, int] = {}  # 0: no file
    pinned: dict[Path, dict[str, int]] = {}
    for _, path in sorted(_pins(namespaces), reverse=True):
        folder, pinned[path] = path.parent.parent, {}
        names = (digest.hex() for digest in read_pin(path) or ())
        for file in (f"{folder}/{kind}/{name[:2]}/{name}" for name in names for kind in ("blocks", "states")):
            if file not in sizes:
                sizes[file] = _file_size(file)
            if sizes[file]:
                pinned[path][file] = sizes[file]
    return pinned


def _file_size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _pins(namespaces: Iterable[Path]) -> list[tuple[float, Path]]:
    """Time of the last use, and path, of each pin. Raises OSError."""
    pins: list[tuple[float, Path]] = []
    for entry in (entry for folder in namespaces for entry in _scan(str(folder / "pins"))):
        with contextlib.suppress(FileNotFoundError):
            if PIN_PATTERN.fullmatch(entry.name):
                pins.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    return pins


def drop_old_pins(namespaces: Iterable[Path]) -> None:
    """Remove pins that nobody has saved or restored for MAX_PIN_AGE_S; their files are evicted as others.

    Raises OSError.
    """
    for used_s, path in _pins(namespaces):
        if time.time() - used_s > MAX_PIN_AGE_S:
            with contextlib.suppress(OSError):
                path.unlink()


def _kept_files(root: Path, max_bytes: int) -> Collection[str]:
    """Files of the pins that were used last and fit together."""
    kept: set[str] = set()
    total = 0
    for sizes in pinned_files(_namespaces(root)).values():
        num_bytes = sum(size for path, size in sizes.items() if path not in kept)
        if total + num_bytes <= max_bytes:
            kept |= sizes.keys()
            total += num_bytes
    return kept


def _namespaces(root: Path) -> list[Path]:
    return [Path(entry.path) for entry in _scan(str(root)) if FOLDER_PATTERNS[0].fullmatch(entry.name)]


def namespace_folders(root: Path, name: str) -> list[Path]:
    """Directories of engines of a model of this name. Raises OSError."""
    return [path for path in _namespaces(root) if path.name.rpartition("-")[0] == name]


def stored_bytes(root: Path) -> int:
    """Bytes in the files of all engines. Raises OSError."""
    return sum(file.num_bytes for file in _stored_files(root))


class _StoredFile(NamedTuple):
    used_s: float  # time of the last use
    num_bytes: int
    path: str


def sweep(root: Path, max_bytes: int) -> int:
    """Remove the least recently used files of all namespaces beyond `max_bytes`; returns the bytes left.

    One process at a time sweeps; another one only counts. Files that no engine writes are left alone, and so
    are those of the pins that were used last, up to MAX_PINNED_SHARE. Raises OSError.
    """
    with open(os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as lock:
        is_sweeping = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_sweeping = False
        except OSError:  # a file system without locks: two sweeps at once remove too much
            pass
        if is_sweeping:
            drop_old_pins(_namespaces(root))
        files = sorted(_stored_files(root))
        total, now_s = sum(file.num_bytes for file in files), time.time()
        limit = total if total <= max_bytes else int(max_bytes * SWEEP_TARGET)
        kept = _kept_files(root, int(max_bytes * MAX_PINNED_SHARE)) if is_sweeping and total > limit else ()
        for file in files if is_sweeping else ():
            if file.path in kept:
                continue
            is_stale = file.path.endswith(TEMPORARY) and now_s - file.used_s > MAX_TEMPORARY_AGE_S
            if total > limit or is_stale:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
                    total -= file.num_bytes
        return total


def _stored_files(root: Path) -> Iterator[_StoredFile]:
    """Files of all engines; symbolic links are not followed."""
    folders = [str(root)]
    for pattern in FOLDER_PATTERNS:
        entries = [entry for folder in folders for entry in _scan(folder) if pattern.fullmatch(entry.name)]
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        for entry in _scan(folder):
            with contextlib.suppress(OSError):
                if FILE_PATTERN.fullmatch(entry.name):
                    info = entry.stat(follow_symlinks=False)
                    yield _StoredFile(info.st_mtime, info.st_size, entry.path)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """Entries of a directory; none of one that is gone, or another user's. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
