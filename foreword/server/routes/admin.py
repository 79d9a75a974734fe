"""Routes below /admin, for operators: what is open, by whom, and which keys there are. Never a text, a key or a hash.

They exist where the key file has a key with `admin: true`, and are no part of /docs.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Response

from foreword.errors import Aborted, ConfigError, InvalidRequest
from foreword.metrics.request_stats import RequestProgress
from foreword.server.auth.key_file import Key
from foreword.server.auth.keys import PermissionsDep
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.context import ServerDep
from foreword.server.json_response import JSONResponse

__all__ = ["router"]


def _require_admin(permissions: PermissionsDep, server: ServerDep) -> None:
    """Raises Forbidden for ordinary keys, and 404 where no key could be an operator's."""
    if not server.keyring.has_admin:
        raise HTTPException(404)
    server.check_admin(permissions)


router = APIRouter(dependencies=[Depends(_require_admin)], include_in_schema=False)


@router.get("/admin/requests")
async def requests(server: ServerDep) -> Response:
    """The choices that are open, the oldest first; texts for vectors and scores are in the sums alone."""
    now = time.monotonic()
    choices = sorted(server.recorder.live_requests(), key=lambda progress: progress.arrival_s)
    return JSONResponse(
        {
            "open": server.admission.num_open,
            "open_prompt_tokens": server.admission.num_open_tokens,
            "requests": [_request_json(progress, now) for progress in choices],
        }
    )


def _request_json(progress: RequestProgress, now: float) -> dict[str, Any]:
    request = progress.request
    return {
        "id": request.id,
        "account": request.fairness_key,
        "state": "running" if progress.is_prompt_computed else "waiting",
        "age_s": round(now - progress.arrival_s, 3),
        "priority": request.priority,
        "prompt_tokens": len(request.prompt_ids),
        "generated_tokens": progress.num_tokens,
        "max_tokens": request.params.max_tokens,
        "drafters": sorted(progress.drafters),
    }


@router.post("/admin/requests/{name}/abort")
async def abort(name: str, server: ServerDep) -> Response:
    """End a choice by its id, or all choices of an answer by the answer's; their callers get an error that says so."""
    found = [
        progress.request.id
        for progress in server.recorder.live_requests()
        if _matches(name, progress.request.id)
    ]
    if not found:
        raise HTTPException(404)
    for request_id in found:
        server.generations[request_id].abort(
            request_id, Aborted("an operator of this server ended the request")
        )
    return JSONResponse({"aborted": found})


def _matches(name: str, request_id: str) -> bool:
    return request_id == name or request_id.startswith(f"{name}-")


@router.post("/admin/keys/reload")
async def reload(server: ServerDep) -> Response:
    """Read the key file again, now. 400 for one that is broken; then the keys stay as they were."""
    try:
        await server.keyring.reload()
    except ConfigError as error:
        raise InvalidRequest(f"{error}; the keys stay as they were") from None
    return JSONResponse({"keys": len(server.keyring.entries)})


@router.get("/admin/keys")
async def keys(server: ServerDep) -> Response:
    """The keys by name, their limits, and what was used since the server began."""
    return JSONResponse({"keys": [_key_json(key, meter) for key, meter in server.keyring.entries]})


def _key_json(key: Key, meter: UsageMeter) -> dict[str, Any]:
    expires = None if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    return {
        "name": key.name,
        "admin": key.admin,
        "models": key.models,
        "expires": expires,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "max_concurrency": key.max_concurrency,
        "priority": key.priority,
        "usage": meter.usage(),
    }
