"""Fetches models from the hub: the files of a checkpoint, or one GGUF file. Imports no torch."""

from __future__ import annotations

import difflib
import glob
import importlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foreword.errors import CheckpointError
from foreword.planning.memory import format_bytes
from foreword.weights.gguf.header import SPLIT_FILE_NAME

logger = logging.getLogger(__name__)

# Files of a checkpoint; of sentence-transformers also those in the folders of its modules.
CHECKPOINT_FILE = re.compile(r"(\d+_\w+/)?([^/]+\.(json|safetensors|jinja|txt)|tokenizer\.model)")
SAFETENSORS = ".safetensors"
STANDARD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # others are copies where these exist
GGUF = ".gguf"
QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|FP16|F32))$", re.I)
OTHER_GGUF = re.compile(r"(^|[-._/])(mmproj|imatrix)[-._]", re.I)  # no language models
DEFAULT_QUANTIZATION = "Q4_K_M"  # as in llama.cpp
BLOB_NAME = re.compile(
    r"[0-9A-Za-z_-]{1,128}"
)  # an ETag; the hub's are SHA-1 or SHA-256, a mirror's any digest
MAX_FILES = 12  # that an error lists
NUM_STREAMS = 4  # files at once
POLL_S = 0.2
TIMEOUT_S = 10.0  # then the cache serves
BLOCK_BYTES = 512  # unit of st_blocks

OnBytes = Callable[[int, int], None]  # bytes done and in total


@dataclass(frozen=True, slots=True)
class _Listing:
    """Files of a repository, and the cache's folder of their commit."""

    repository: str
    folder: Path
    sizes: Mapping[str, int]  # bytes by path
    error: Exception | None = None  # why the hub was not reached: the files are those in the cache


def fetch(repository: str, wanted: str, on_bytes: OnBytes | None = None) -> Path:
    """The local path of a model, which is downloaded unless the hub's cache has it.

    wanted  end of a GGUF file's name such as "Q4_K_M", or a file name; empty: the checkpoint
    Returns a directory for a checkpoint, else the GGUF file, or the first part of a split one.
    Raises CheckpointError, which lists the repository's files where `wanted` names none or several.
    """
    hub = importlib.import_module("huggingface_hub")  # slow to import, and rarely needed
    listing = _list_files(hub, repository, wanted)
    names = _choose_files(listing, wanted)
    if listing.error is None:
        _download(hub, listing, names, on_bytes)
    is_file = names[0].endswith(GGUF)
    return listing.folder / names[0] if is_file else listing.folder


def _list_files(hub: Any, repository: str, wanted: str) -> _Listing:
    """The hub's files, or those in the cache if it cannot be reached."""
    constants = importlib.import_module("huggingface_hub.constants")
    cache = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        info = hub.HfApi().model_info(repository, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:  # the client raises errors of several libraries
        reference = cache / "refs" / "main"
        folder = cache / "snapshots" / (reference.read_text() if reference.is_file() else "")
        files = [path for path in folder.rglob("*") if path.is_file()] if reference.is_file() else []
        if not files:
            lines = str(error).splitlines() or [type(error).__name__]
            name, one_file = (f"{repository}:{wanted}", " FILE") if wanted else (repository, "")
            raise CheckpointError(
                f"{name} is neither a path here nor available from the hub ({lines[0]}). Without a network, "
                f"download it elsewhere with `hf download {repository}{one_file} --local-dir DIR` and use "
                f"the {'file' if wanted else 'directory'}",
                "model",
            ) from error
        return _Listing(
            repository,
            folder,
            {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
            error,
        )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Listing(repository, cache / "snapshots" / info.sha, sizes)


def _choose_files(listing: _Listing, wanted: str) -> list[str]:
    """Paths of the files to load, sorted. Raises CheckpointError."""
    if wanted:
        return _choose_gguf(listing, wanted)
    names = [name for name in sorted(listing.sizes) if CHECKPOINT_FILE.fullmatch(name)]
    if any(map(STANDARD_WEIGHTS.fullmatch, names)):
        names = [
            name
            for name in names
            if not name.endswith(SAFETENSORS) or "/" in name or STANDARD_WEIGHTS.fullmatch(name)
        ]
    if any(name.endswith(SAFETENSORS) for name in names):
        return names
    groups = _group_gguf(listing.sizes)
    if not groups:
        rest = _describe_sizes({name: listing.sizes[name] for name in sorted(listing.sizes)})
        where = "" if listing.error is None else " in the hub's cache"
        raise CheckpointError(
            f"{listing.repository} has neither safetensors nor GGUF files{where}; it has {rest}", "model"
        )
    default = [name for name in groups if _quantization(name) == DEFAULT_QUANTIZATION]
    chosen = default if len(default) == 1 else list(groups)
    if len(chosen) > 1:
        tags = _describe_sizes(_sizes_by_tag(listing, groups))
        raise CheckpointError(
            f"{listing.repository} has several GGUF files: append one of {tags}, such as "
            f"{listing.repository}:{next(iter(_sizes_by_tag(listing, groups)))}",
            "model",
        )
    logger.info("%s: %s of %d GGUF files", listing.repository, chosen[0], len(groups))
    return groups[chosen[0]]


def _choose_gguf(listing: _Listing, wanted: str) -> list[str]:
    """The parts of the one GGUF file that `wanted` names, without regard to case."""
    groups = _group_gguf(listing.sizes)
    lower = _without_part(wanted).lower()
    if lower.endswith(GGUF):
        stem = lower.removesuffix(GGUF)
        matches = [name for name in groups if name.lower() == stem]
        matches = matches or [name for name in groups if name.lower().endswith(f"/{stem}")]
    else:
        matches = [name for name in groups if _quantization(name).lower() == lower]
        ends = tuple(f"{separator}{lower}" for separator in "-._/")
        matches = matches or [name for name in groups if name.lower().endswith(ends)]
    if len(matches) != 1:
        sizes = _sizes_by_tag(listing, groups if not matches else {name: groups[name] for name in matches})
        nearness = {tag: difflib.SequenceMatcher(None, lower, tag.lower()).ratio() for tag in sizes}
        listed = _describe_sizes({tag: sizes[tag] for tag in sorted(sizes, key=nearness.__getitem__)[::-1]})
        where = "" if listing.error is None else " in the hub's cache"
        count = f"no GGUF file{where} called" if not matches else f"{len(matches)} GGUF files{where} called"
        has = f"it has {listed}" if sizes else "it has none at all"
        raise CheckpointError(f"{listing.repository} has {count} {wanted}; {has}", "model") from listing.error
    parts = groups[matches[0]]
    split = SPLIT_FILE_NAME.fullmatch(parts[0])
    if split is not None and len(parts) != int(split[3]):
        where = "" if listing.error is None else f"; the hub was not reached ({listing.error!r:.200})"
        problem = f"{matches[0]}{GGUF} has {len(parts)} of {int(split[3])} parts"
        raise CheckpointError(f"{listing.repository}: {problem}{where}", "model")
    return parts


def _group_gguf(names: Sequence[str] | Mapping[str, int]) -> dict[str, list[str]]:
    """GGUF files of language models: all parts by the name without number and suffix."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(GGUF) and not OTHER_GGUF.search(name):
            groups.setdefault(_without_part(name)[: -len(GGUF)], []).append(name)
    return groups


def _without_part(name: str) -> str:
    """model-00001-of-00003.gguf -> model.gguf"""
    split = SPLIT_FILE_NAME.fullmatch(name)
    return name if split is None else f"{split[1]}{GGUF}"


def _quantization(name: str) -> str:
    """Quantization in a file's name without suffix: "UD-Q4_K_XL"; empty if it has none."""
    match = QUANTIZATION.search(name)
    return "" if match is None else match[1].upper()


def _sizes_by_tag(listing: _Listing, groups: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Bytes of GGUF files, by what may be appended to the repository: the quantization if it is unique."""
    tags = [_quantization(name) for name in groups]
    return {
        tag if tag and tags.count(tag) == 1 else f"{name}{GGUF}": sum(map(listing.sizes.__getitem__, parts))
        for tag, (name, parts) in zip(tags, groups.items(), strict=True)
    }


def _describe_sizes(sizes: Mapping[str, int]) -> str:
    listed = [f"{name} ({format_bytes(size)})" for name, size in list(sizes.items())[:MAX_FILES]]
    more = len(sizes) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "") if listed else "no files"


def _download(hub: Any, listing: _Listing, names: Sequence[str], on_bytes: OnBytes | None) -> None:
    """Download what the cache lacks; an interrupted file is continued. Raises CheckpointError."""
    missing = [name for name in names if not (listing.folder / name).exists()]
    if not missing:
        return
    cache = listing.folder.parent.parent
    begun = sum(map(_disk_bytes, cache.glob("blobs/*.incomplete")))
    total = sum(map(listing.sizes.__getitem__, missing))
    free = shutil.disk_usage(next(path for path in cache.parents if path.is_dir())).free
    if free < total - begun:
        raise CheckpointError(
            f"{listing.repository} needs {format_bytes(total - begun)} of disk space, and {cache.parent} "
            f"has {format_bytes(free)}; the variable HF_HOME names another folder for the hub's cache",
            "model",
        )
    try:
        report = _report_bytes(cache / "blobs", total, begun, on_bytes)
        with report, ThreadPoolExecutor(NUM_STREAMS) as pool:
            large = [name for name in missing if name.lower().endswith((GGUF, SAFETENSORS))]
            list(pool.map(partial(_download_blob, hub, listing), large))
            small = [
                hub.hf_hub_url(listing.repository, name, revision=listing.folder.name)
                for name in missing
                if name not in large
            ]
            list(pool.map(partial(_get_metadata, hub), small))  # the client names files by ETags unchecked
            hub.snapshot_download(listing.repository, allow_patterns=[glob.escape(name) for name in missing])
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{listing.repository} could not be fetched ({lines[0]}); a second start continues where this "
            "one ended",
            "model",
        ) from error


def _get_metadata(hub: Any, url: str) -> Any:
    """A file's metadata. Raises ValueError for an ETag that could name a file outside of the cache."""
    metadata = hub.get_hf_file_metadata(url)
    if not BLOB_NAME.fullmatch(metadata.etag or ""):
        raise ValueError(f"{url} has the ETag {metadata.etag!r:.80}, which is no digest")
    return metadata


def _download_blob(hub: Any, listing: _Listing, name: str) -> None:
    """Download a file's contents into the cache, from where they ended: the client begins anew."""
    client = importlib.import_module("huggingface_hub.file_download")
    utils = importlib.import_module("huggingface_hub.utils")
    url = hub.hf_hub_url(listing.repository, name, revision=listing.folder.name)
    metadata = _get_metadata(hub, url)
    headers = utils.build_hf_headers()
    if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # meant for the hub, not for its store
    cache = listing.folder.parent.parent
    blob = cache / "blobs" / metadata.etag
    unfinished = blob.with_name(f"{blob.name}.incomplete")
    lock = cache.parent / ".locks" / cache.name / f"{blob.name}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with utils.WeakFileLock(lock), unfinished.open("ab") as file:
        if file.tell() > metadata.size:
            file.truncate(0)
        client.http_get(
            metadata.location, file, resume_size=file.tell(), headers=headers, expected_size=metadata.size
        )
        file.flush()
        unfinished.rename(blob)


@contextmanager
def _report_bytes(blobs: Path, total: int, begun: int, on_bytes: OnBytes | None) -> Iterator[None]:
    """Report the bytes on disk while the block runs, instead of the client's own progress bars.

    begun  bytes of an earlier download
    """
    if on_bytes is None:
        yield
        return
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    before = sum(map(_disk_bytes, blobs.glob("*"))) - begun
    done = threading.Event()

    def report() -> None:
        while not done.wait(POLL_S):
            on_bytes(min(sum(map(_disk_bytes, blobs.glob("*"))) - before, total - 1), total)

    thread = threading.Thread(target=report, name="download progress", daemon=True)
    on_bytes(begun, total)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    on_bytes(total, total)


def _disk_bytes(path: Path) -> int:
    """Bytes of a file that are on disk: some clients write to several places of a sparse file."""
    try:
        status = path.stat()
    except FileNotFoundError:  # renamed meanwhile
        return 0
    return min(status.st_blocks * BLOCK_BYTES, status.st_size)
