"""Prefixes that clients have pinned by a name: a sweep of the directory leaves their files.

A pin is a file of hashes (kv_cache/block_files.py), without a text or a name. The pin of another owner has
another file name: it is found as little as one that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from foreword.errors import InvalidRequest, shown
from foreword.kv_cache.block_files import (
    MAX_PINNED_SHARE,
    MAX_TEMPORARY_AGE_S,
    PIN_PATTERN,
    TEMPORARY,
    BlockFiles,
    RefusedFile,
    drop_old_pins,
    pack_pin,
    pinned_files,
    read_pin,
)
from foreword.kv_cache.prefix_cache import DIGEST_BYTES

NAME_PATTERN: Final = re.compile(r"\w[\w.@+=~-]{0,127}", re.ASCII)
MAX_PINS_PER_OWNER: Final = 64
MAX_PINS: Final = 1024  # limit of a namespace
MAX_BLOCKS_PER_OWNER: Final = 1 << 17  # sum over all its pins; each save looks at all files that are pinned
MAX_QUIET_S: Final = 2.0  # no further block on disk; an engine looks for deleted files each second
MAX_WAIT_S: Final = 5.0  # limit for all blocks
POLL_S: Final = 0.02


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that may not be saved."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            "filename must have 1 to 128 ASCII letters, digits and characters of _.@+=~-, first a letter, a "
            f"digit or _, got {shown(name)}",
            "filename",
        )


class PinnedPrefixes:
    """The pins of one model. Methods read and write files; they raise OSError."""

    def __init__(
        self,
        folder: Path,
        blocks: BlockFiles,
        states: BlockFiles | None,  # None: the model has none
        max_bytes: int,
    ) -> None:
        """folder  that of the model's namespace
        max_bytes  of the directory, of which pins may keep a share
        """
        self._namespace = folder
        self._folder = folder / "pins"
        self._blocks = blocks
        self._states = states
        self._max_pinned_bytes = int(max_bytes * MAX_PINNED_SHARE)

    def save(self, owner: str, name: str, digests: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Pin the leading blocks that are on disk; returns their hashes, and bytes.

        Raises InvalidRequest if there are none, for another name than NAME_PATTERN's, and beyond the bounds
        of pins. What was saved under the name then stays.
        """
        path = self._path(owner, name)
        prefix = self._usable_prefix(digests, self._num_stored(digests))
        if not prefix:
            raise InvalidRequest(
                f"nothing to save as {name!r}: no full block of the slot's conversation is on disk",
                "filename",
            )
        drop_old_pins([self._namespace])
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._check_number(path, len(prefix))
        sizes = {path: size for digest in prefix for path, size in self._files(digest)}
        pinned = pinned_files([self._namespace])
        others = {file: size for pin, files in pinned.items() if pin != path for file, size in files.items()}
        if sum((others | sizes).values()) > self._max_pinned_bytes:
            raise InvalidRequest(
                f"this prefix has {sum(sizes.values())} bytes: with those that are pinned they are more than "
                f"{MAX_PINNED_SHARE:.0%} of --kv-cache-disk; erase another one",
                "filename",
            )
        content = pack_pin(prefix)
        handle, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=self._folder)  # mode 600
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return prefix, sum(sizes.values()) + len(content)

    def restore(self, owner: str, name: str) -> tuple[list[bytes], int]:
        """Read a pinned prefix, so that its files are in memory and count as used; hashes, and bytes read.

        It ends at a file that is missing or damaged. Raises InvalidRequest for a name that was not saved.
        """
        prefix, num_bytes = [], 0
        digests = self._load(owner, name)
        with contextlib.suppress(FileNotFoundError):  # it may be erased meanwhile
            os.utime(self._path(owner, name))
        for digest in digests:
            try:
                if not self._blocks.file_size(digest):
                    break
                num_bytes += len(self._blocks.read(digest))
                prefix.append(digest)
                if self._states is not None and self._states.file_size(digest):
                    num_bytes += len(self._states.read(digest))
            except (FileNotFoundError, RefusedFile):
                break
        return prefix, num_bytes

    def erase(
        self, owner: str, name: str, find_used: Callable[[list[bytes]], set[bytes]] = lambda hashes: set()
    ) -> list[bytes]:
        """Drop a pin, and the files that neither another pin nor a slot uses; returns its hashes.

        find_used  which hashes, of these and others, slots use
        Raises InvalidRequest for a name that was not saved.
        """
        digests, path = self._load(owner, name), self._path(owner, name)
        pinned = pinned_files([self._namespace])
        kept = {file for pin, files in pinned.items() if pin != path for file in files}
        path.unlink(missing_ok=True)
        used = find_used(digests)
        for digest in digests:
            for file, _ in self._files(digest):
                if file not in kept and digest not in used:
                    Path(file).unlink(missing_ok=True)
        return digests

    def _load(self, owner: str, name: str) -> list[bytes]:
        """Raises InvalidRequest for a name that was not saved, and removes a pin that is damaged."""
        path = self._path(owner, name)
        digests = read_pin(path)
        if digests is None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise InvalidRequest(f"nothing is saved as {name!r}", "filename")
        return digests

    def _path(self, owner: str, name: str) -> Path:
        check_name(name)
        parts = (blake2b(text.encode(), digest_size=DIGEST_BYTES) for text in (owner, f"{owner}\0{name}"))
        return self._folder / "-".join(part.hexdigest() for part in parts)

    def _check_number(self, path: Path, num_blocks: int) -> None:
        """Raises InvalidRequest if no further pin may be made; removes what a killed server has left."""
        others: list[os.DirEntry[str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if PIN_PATTERN.fullmatch(entry.name):
                    others += [entry] if entry.name != path.name else []
                elif (
                    entry.name.endswith(TEMPORARY)
                    and time.time() - entry.stat(follow_symlinks=False).st_mtime > MAX_TEMPORARY_AGE_S
                ):
                    os.unlink(entry.path)
        own = [entry for entry in others if entry.name.startswith(path.name.partition("-")[0])]
        if len(own) >= MAX_PINS_PER_OWNER or len(others) >= MAX_PINS:
            raise InvalidRequest(
                f"a key may save {MAX_PINS_PER_OWNER} names, all keys {MAX_PINS}: erase another one",
                "filename",
            )
        num_blocks += sum(entry.stat(follow_symlinks=False).st_size // DIGEST_BYTES for entry in own)
        if num_blocks > MAX_BLOCKS_PER_OWNER:
            raise InvalidRequest(
                f"the names of a key may have {MAX_BLOCKS_PER_OWNER} blocks, with this prefix they have "
                f"{num_blocks}: erase another one",
                "filename",
            )

    def _files(self, digest: bytes) -> list[tuple[str, int]]:
        """Paths and sizes of a block's files."""
        kinds = (self._blocks,) if self._states is None else (self._blocks, self._states)
        sizes = ((str(kind.path(digest)), kind.file_size(digest)) for kind in kinds)
        return [(path, size) for path, size in sizes if size]

    def find_written(self, digests: Sequence[bytes], start: int = 0) -> tuple[int, bool]:
        """Number of leading blocks on disk, of which `start` are known; whether it is all, with a state."""
        num_stored = self._num_stored(digests, start)
        return num_stored, num_stored == len(digests) and self._has_state(digests)

    def _has_state(self, digests: Sequence[bytes]) -> bool:
        """Whether a request can go on after the last block; also if the model has no states."""
        return self._states is None or not digests or bool(self._states.file_size(digests[-1]))

    def _num_stored(self, digests: Sequence[bytes], start: int = 0) -> int:
        """Number of leading blocks on disk, of which `start` are known."""
        while start < len(digests) and self._blocks.file_size(digests[start]):
            start += 1
        return start

    def _usable_prefix(self, digests: Sequence[bytes], num_stored: int) -> list[bytes]:
        """The first `num_stored` blocks, to the last state of a model that has some."""
        while num_stored and not self._has_state(digests[:num_stored]):
            num_stored -= 1
        return list(digests[:num_stored])


async def wait_written(
    find_written: Callable[[int], Awaitable[tuple[int, bool]]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait while further blocks come on disk, at most MAX_WAIT_S: engines write behind.

    find_written  PinnedPrefixes.find_written() for a start
    """
    started_s = changed_s = clock()
    num_stored, is_all = await find_written(0)
    while not is_all and clock() - changed_s <= MAX_QUIET_S and clock() - started_s <= MAX_WAIT_S:
        await sleep(POLL_S)
        before, (num_stored, is_all) = num_stored, await find_written(num_stored)
        if num_stored > before:
            changed_s = clock()
