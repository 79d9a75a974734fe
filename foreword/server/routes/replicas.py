"""The servers that a router uses: listed, added and drained by who has their key. Not in /docs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, HTTPException, Response

from foreword.config.options import Config
from foreword.engine_client.make_client import remote_replica
from foreword.engine_client.router import EngineRouter
from foreword.errors import ConfigError, InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.http.responses import JSONResponse
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep, ServedModels

REPLICAS_PATH = "/engine/replicas"
router = APIRouter(include_in_schema=False)


class AddReplicaBody(StrictModel):
    url: str
    model: str | None = None  # None: the default model


@router.get(REPLICAS_PATH)
async def list_replicas(models: ModelsDep) -> Response:
    """The models with replicas, their load, and the state of each replica."""
    return JSONResponse({"models": [_describe(server, client) for server, client in _replicated(models)]})


@router.post(REPLICAS_PATH, status_code=204)
async def add_replica(body: AddReplicaBody, models: ModelsDep) -> None:
    """Use the engine of one more server, once it answers. One that is used already stays."""
    server, client = _find(models, body.model)
    try:
        (url,) = Config(replica_urls=body.url, engine_key=server.config.engine_key).remote_urls
    except (ConfigError, ValueError):
        raise InvalidRequest("url must be like http://10.0.0.7:8000", "url") from None
    added = remote_replica(server.config, url)
    if added.id not in {state.id for state in client.replica_states()}:
        client.add(added)


@router.delete(f"{REPLICAS_PATH}/{{replica_id}}", status_code=204)
async def drain_replica(replica_id: str, models: ModelsDep, model: str | None = None) -> None:
    """Move the streams of a replica to others, and forget it."""
    _, client = _find(models, model)
    await client.drain(replica_id)


def _replicated(models: ServedModels) -> Iterator[tuple[LoadedModel, EngineRouter]]:
    for server in models.loaded:
        if isinstance(server.client, EngineRouter) and server.client.has_replicas:
            yield server, server.client


def _find(models: ServedModels, name: str | None) -> tuple[LoadedModel, EngineRouter]:
    """Raises HTTPException."""
    for server, client in _replicated(models):
        if name is None or name in server.names.all:
            return server, client
    raise HTTPException(404, "no model of this name has replicas")


def _describe(server: LoadedModel, client: EngineRouter) -> dict[str, Any]:
    now, live = time.monotonic(), list(server.recorder.live_requests())
    waits = (now - progress.arrival_s for progress in live if not progress.is_prompt_computed)
    return {
        "name": server.model_name,
        "num_requests": len(live),
        "longest_wait_s": round(max(waits, default=0.0), 3),
        "max_num_seqs": server.info().resolved.max_num_seqs,
        "replicas": [asdict(state) for state in client.replica_states()],
    }
