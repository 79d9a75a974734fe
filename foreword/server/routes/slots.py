"""GET /slots and POST /slots/{id_slot}?action=save|restore|erase: llama-server's, over --kv-cache-dir

A saved name pins the prefix of a conversation in the directory. Restoring reads it, so that the next request
finds it in memory; it would find it on disk without, as long as it is not evicted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from foreword.config.units import parse_bytes
from foreword.errors import ConfigError, InvalidRequest, RequestFailed, Unsupported, shown
from foreword.kv_cache.block_files import BlockFiles
from foreword.kv_cache.pinned_prefixes import PinnedPrefixes, check_name, wait_written
from foreword.server.apis.body import ModelName, SlotId, StrictModel
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.responses import JSONResponse
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ManagedModel, ModelsDep
from foreword.server.slots import SlotKey, shared_hashes

logger = logging.getLogger(__name__)
T = TypeVar("T")
router = APIRouter(route_class=IntakeRoute)


class SlotBody(StrictModel):
    model: ModelName = None
    filename: str | None = None


NO_BODY = SlotBody()  # erase needs none


@router.get("/slots")
async def list_slots(permissions: PermissionsDep, models: ModelsDep, model: str | None = None) -> Response:
    """The slots of this key; none while the model is not loaded."""
    managed = models.find_allowed(model or None, permissions)
    _check_directory(managed)
    server = managed.loaded
    if server is None:
        return JSONResponse([])
    resolved, slots = server.info().resolved, []
    for number in range(resolved.max_num_seqs):
        slot = server.slots.find(SlotKey(permissions.slot_owner, number))
        facts = {"n_ctx": server.max_model_len, "speculative": bool(resolved.drafters)}
        slots.append({"id": number, **facts, "is_processing": slot.num_open > 0})
    return JSONResponse(slots)


@router.post("/slots/{id_slot}")
async def change_slot(
    id_slot: SlotId,
    request: Request,
    permissions: PermissionsDep,
    models: ModelsDep,
    action: str = "",
    body: SlotBody = NO_BODY,
) -> Response:
    """Save, restore or erase the prefix of a conversation by a name."""
    await models.check_fields(body, request)
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest(f"action must be save, restore or erase, got {shown(action)}", "action")
    if action != "erase" and body.filename is None:
        raise InvalidRequest(f"{action} needs a filename", "filename")
    if body.filename is not None:
        check_name(body.filename)
    _check_directory(models.find_allowed(body.model, permissions))
    server = await models.acquire(body.model, permissions, request)
    server.check_slot(id_slot)
    key = SlotKey(permissions.slot_owner, id_slot)
    if action == "save":
        answer = await _save(request, server, key, str(body.filename))
    elif action == "restore":
        answer = await _restore(request, server, key, str(body.filename))
    else:
        answer = await _erase(request, server, key, body.filename)
    return JSONResponse({"id_slot": id_slot, **answer})


def _check_directory(model: ManagedModel) -> None:
    """Raises Unsupported without a directory of this machine's engines."""
    if model.config.kv_cache_dir is None:
        raise Unsupported("slots are saved with --kv-cache-dir DIR, which this server does not have")
    if model.config.remote_urls:
        raise Unsupported(
            "slots are not saved with --replica-urls: their engines have directories of their own"
        )


async def _save(request: Request, server: LoadedModel, key: SlotKey, name: str) -> dict[str, Any]:
    started_s, size = time.monotonic(), server.info().resolved.block_size
    slot = server.slots.find(key)
    hashes = await _access(request, server, lambda pins: slot.block_hashes(size))
    await wait_written(lambda start: _access(request, server, lambda pins: pins.find_written(hashes, start)))
    async with server.slots.lock:
        prefix, num_bytes = await _access(request, server, lambda pins: pins.save(key.owner, name, hashes))
    counts = {"n_saved": len(prefix) * size, "n_written": num_bytes}
    return {"filename": name, **counts, "timings": {"save_ms": _milliseconds_since(started_s)}}


async def _restore(request: Request, server: LoadedModel, key: SlotKey, name: str) -> dict[str, Any]:
    started_s, size = time.monotonic(), server.info().resolved.block_size
    prefix, num_bytes = await _access(request, server, lambda pins: pins.restore(key.owner, name))
    server.slots.restore(key, prefix)
    counts = {"n_restored": len(prefix) * size, "n_read": num_bytes}
    return {"filename": name, **counts, "timings": {"restore_ms": _milliseconds_since(started_s)}}


async def _erase(request: Request, server: LoadedModel, key: SlotKey, name: str | None) -> dict[str, Any]:
    """With a name, drop what is saved under it and leave the slot; else forget the slot's conversation."""
    size = server.info().resolved.block_size
    if name is None:
        num_blocks = server.slots.find(key).num_blocks(size)
        server.slots.erase(key)
        return {"n_erased": num_blocks * size}
    async with server.slots.lock:
        others = server.slots.others(key)
        hashes = await _access(
            request,
            server,
            lambda pins: pins.erase(key.owner, name, lambda hashes: shared_hashes(others, hashes, size)),
        )
    return {"n_erased": len(hashes) * size}


async def _access(request: Request, server: LoadedModel, work: Callable[[PinnedPrefixes], T]) -> T:
    """Work on files, in a thread: it may wait for the disk.

    Raises RequestFailed for an error of the file system, Overloaded if no thread is free in time.
    """

    def run() -> T:
        config, files = server.config, server.info().kv_files
        if files is None:
            raise RequestFailed("the engine has started without its directory of KV blocks: see the log")
        folder = Path(str(config.kv_cache_dir)) / files.folder
        blocks, states = BlockFiles(folder / "blocks", files.namespace, files.block_bytes), None
        if files.state_bytes is not None:
            states = BlockFiles(folder / "states", files.namespace, files.state_bytes)
        max_bytes = parse_bytes("kv_cache_disk", config.kv_cache_disk)
        return work(PinnedPrefixes(folder, blocks, states, max_bytes))

    try:
        return await server.intake.access_saved(request, run)
    except ConfigError as error:
        logger.error("server: saved conversations cannot be used: %s", error)
        raise RequestFailed("the directory of KV blocks cannot be used: see the log") from None
    except OSError as error:
        raise RequestFailed(f"the directory of KV blocks fails: {error.strerror or error}") from None


def _milliseconds_since(start_s: float) -> float:
    return round((time.monotonic() - start_s) * 1000, 3)
