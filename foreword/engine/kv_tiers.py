"""Tiers of an engine's KV cache below its pools: host memory, files; and memory that outlives the engine.

Options: --kv-cache-host-memory, --kv-cache-dir, --kv-cache-shared-memory.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from foreword.config.options import Config
from foreword.config.units import parse_bytes
from foreword.core.states import SEGMENT
from foreword.engine.engine import Engine
from foreword.engine.fingerprint import sample_digest
from foreword.errors import ConfigError
from foreword.kv_cache.block_files import BlockFiles, check_private, folder_name
from foreword.kv_cache.disk_tier import DiskTier, PooledFiles
from foreword.kv_cache.host_tier import HostImages, HostTier
from foreword.kv_cache.prefix_cache import DIGEST_BYTES
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.kv_cache.surviving_index import SurvivingIndex
from foreword.kv_cache.tier import Tier
from foreword.models.model_loader import weight_files
from foreword.planning.memory import format_bytes
from foreword.planning.resolve import KVFiles
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from foreword.utils.mapped_memory import MemoryFile

logger = logging.getLogger(__name__)


def make_prefix_loader(config: Config, engine: Engine, is_restart: bool) -> PrefixLoader | None:
    """The tiers of an engine's KV cache, the nearest first; None without any. Raises ConfigError.

    A restart goes on without one that fails: requests wait for it.
    """
    tiers: list[Tier] = []
    for name, make_tier in (("kv_cache_host_memory", _make_host_tier), ("kv_cache_dir", _make_disk_tier)):
        if getattr(config, name) is None:
            continue
        try:
            tiers.append(make_tier(config, engine))
        except (OSError, RuntimeError, ConfigError) as error:
            if not isinstance(error, ConfigError):
                reason = str(error).partition("\n")[0]
                if isinstance(error, OSError):
                    reason = f"{error.filename or getattr(config, name)}: {error.strerror or error}"
                error = ConfigError(f"{name} cannot be used: {reason}", name)
            if not is_restart:
                raise error from None
            logger.error("engine: restarts without a tier of the KV cache: %s", error)
    if not tiers:
        return None
    scheduler = engine.scheduler
    for tier in tiers:
        scheduler.pool.on_gained.append(partial(tier.on_gained, tier.blocks))
        if scheduler.state_cache is not None and tier.anchors is not None:
            scheduler.state_cache.on_kept.append(partial(tier.on_gained, tier.anchors))
        tier.start()
    row_seconds = _row_seconds(engine.proposer.timings)
    loader = PrefixLoader(tiers, scheduler.prefix_cache, scheduler.state_cache, row_seconds)
    scheduler.prefix_cache.on_invalid = loader.forget
    return loader


def adopt_blocks(config: Config, engine: Engine, memory: MemoryFile) -> None:
    """Index the whole blocks and anchors that the engine before has left, if it had the same namespace."""
    scheduler = engine.scheduler
    pools = (
        [scheduler.pool] if scheduler.state_cache is None else [scheduler.pool, scheduler.state_cache.pool]
    )
    sizes = [pool.num_blocks for pool in pools]
    namespace = _namespace(config, engine, (sizes, engine.model_runner.kv.nbytes))
    counts = [SurvivingIndex(memory, pool, namespace).adopt() for pool in pools]
    memory.claim(namespace)
    engine.num_adopted_tokens = counts[0] * scheduler.block_size
    if counts[0]:
        logger.info(
            "engine: %d tokens of the KV cache are those of the engine before", engine.num_adopted_tokens
        )


def _make_host_tier(config: Config, engine: Engine) -> HostTier:
    """Blocks and states share the memory as those of the pools do. Raises ConfigError, RuntimeError."""
    scheduler, kv, plan = engine.scheduler, engine.model_runner.kv, engine.info.resolved.states
    images, anchor_images = kv.block_images(), kv.anchor_images()
    max_bytes = parse_bytes("kv_cache_host_memory", str(config.kv_cache_host_memory))
    state_share = 0 if plan is None else plan.block_share(kv.block_size)
    state_bytes = 0 if plan is None else anchor_images.nbytes
    num_blocks = min(max_bytes // (images.nbytes + state_share), (max_bytes - state_bytes) // images.nbytes)
    num_anchors = 0 if plan is None else (max_bytes - num_blocks * images.nbytes) // state_bytes
    if num_blocks < 1:
        needed = format_bytes(images.nbytes + state_bytes)
        limit = f"a block of {kv.block_size} tokens has {needed}" + (", with a state" if plan else "")
        problem = f"kv_cache_host_memory {config.kv_cache_host_memory} holds no block: {limit}"
        raise ConfigError(problem, "kv_cache_host_memory")
    blocks, states = HostImages(scheduler.pool, images, num_blocks), scheduler.state_cache
    return HostTier(blocks, None if states is None else HostImages(states.pool, anchor_images, num_anchors))


def _make_disk_tier(config: Config, engine: Engine) -> DiskTier:
    """Raises ConfigError, OSError."""
    root, scheduler, kv = Path(str(config.kv_cache_dir)), engine.scheduler, engine.model_runner.kv
    states, images = scheduler.state_cache, kv.block_images()
    namespace = _namespace(config, engine)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(root.resolve())
    folder = root / f"{folder_name(Path(str(config.model)))}-{namespace.hex()}"
    files = BlockFiles(folder / "blocks", namespace, images.nbytes)
    max_bytes = parse_bytes("kv_cache_disk", config.kv_cache_disk)
    if max_bytes < files.file_bytes:
        limit = f"a block of {kv.block_size} tokens has {format_bytes(files.file_bytes)}"
        raise ConfigError(f"kv_cache_disk {config.kv_cache_disk} holds no block: {limit}", "kv_cache_disk")
    blocks, anchors = PooledFiles(scheduler.pool, images, files), None
    if states is not None:
        anchor_images = kv.anchor_images()
        files = BlockFiles(folder / "states", namespace, anchor_images.nbytes)
        anchors = PooledFiles(states.pool, anchor_images, files)
    state_bytes = None if anchors is None else anchors.images.nbytes
    kv_files = KVFiles(folder.name, namespace, images.nbytes, state_bytes)
    engine.info = replace(engine.info, kv_files=kv_files)
    return DiskTier(root, max_bytes, blocks, anchors)


def _namespace(config: Config, engine: Engine, sizes: object = ()) -> bytes:
    """A hash of all that the bytes of a cached block depend on, besides its tokens.

    The fingerprint knows weights by samples, so times of their files are included: files outlive an edit. It
    does not know a trained head, whose memory is part of a block.
    """
    kv = engine.model_runner.kv
    layouts = (kv.block_size, kv.block_images().layout, SEGMENT, kv.anchor_images().layout)
    heads = [] if kv.head is None else weight_files(Path(str(config.draft_model)))
    files = [*weight_files(Path(str(config.model))), *heads]
    times = [(file.name, file.stat().st_mtime_ns) for file in files]
    samples = [sample_digest(file) for file in heads]
    facts = json.dumps((engine.info.fingerprint, layouts, times, samples, sizes))
    return blake2b(facts.encode(), digest_size=DIGEST_BYTES, person=b"kv namespace").digest()


def _row_seconds(timings: MeasuredCosts | None) -> float:
    """Time of a prompt's row in the largest step that was timed; 0 if none was."""
    if timings is None:
        return 0.0
    num_rows, seconds = max(timings.calibration.one_row_sampled.items(), default=(1, 0.0))
    return seconds / num_rows
