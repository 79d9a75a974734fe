"""Operators' routes under /admin: open requests and keys, never a text, a key or a hash.

They exist only if the key file has a key with `admin: true`, and are not in /docs.
"""

from __future__ import annotations

import asyncio
import io
import time
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Response

from foreword.errors import Aborted, ConfigError, InvalidRequest, Unsupported
from foreword.metrics.request_stats import RequestProgress
from foreword.server.auth.key_file import Key
from foreword.server.auth.keys import PermissionsDep
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.auth.usage_db import (
    DIMENSIONS,
    parse_day,
    parse_dimensions,
    read_usage,
    write_csv,
)
from foreword.server.http.responses import JSONResponse
from foreword.server.registry import ModelsDep


def check_is_admin(permissions: PermissionsDep, models: ModelsDep) -> None:
    """Raises 404 if no key is an admin key, Forbidden if this key is not."""
    if not models.keyring.has_admin:
        raise HTTPException(404)
    models.check_admin(permissions)


router = APIRouter(dependencies=[Depends(check_is_admin)], include_in_schema=False)


@router.get("/admin/requests")
async def requests(models: ModelsDep) -> Response:
    """Open choices, oldest first; texts to embed or score are only in the sums."""
    now = time.monotonic()
    live = sorted(models.live_requests(), key=lambda progress: progress.arrival_s)
    return JSONResponse(
        {
            "open": models.admission.num_open,
            "open_prompt_tokens": models.admission.num_open_tokens,
            "requests": [_request_json(progress, now) for progress in live],
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
async def abort(name: str, models: ModelsDep) -> Response:
    """End one choice by its id, or all choices by the id of the response; clients get an error."""
    live_ids = [progress.request.id for progress in models.live_requests()]
    aborted = [id_ for id_ in live_ids if id_ == name or id_.startswith(f"{name}-")]
    if not aborted:
        raise HTTPException(404)
    for request_id in aborted:
        error = Aborted("an operator of this server ended the request")
        models.generations[request_id].abort(request_id, error)
    return JSONResponse({"aborted": aborted})


@router.post("/admin/keys/reload")
async def reload(models: ModelsDep) -> Response:
    """Reload the key file now. 400 for an invalid file, which leaves the keys as they were."""
    try:
        await models.keyring.reload()
    except ConfigError as error:
        raise InvalidRequest(f"{error}; the keys stay as they were") from None
    return JSONResponse({"keys": len(models.keyring.entries)})


@router.get("/admin/usage")
async def usage(
    models: ModelsDep,
    by: str = ",".join(DIMENSIONS),
    since: str | None = None,
    until: str | None = None,
    key: str | None = None,
    model: str | None = None,
    format: Literal["json", "csv"] = "json",
) -> Response:
    """Usage by day, key and model, as in the usage database now."""
    path = models.usage.path
    if path is None:
        raise Unsupported("this server keeps no usage; --usage-db FILE does")
    try:
        names = parse_dimensions(by)
        first = None if since is None else parse_day(since, "since")
        last = None if until is None else parse_day(until, "until")
    except ConfigError as error:
        raise InvalidRequest(error.message, error.param) from None
    await models.usage.flush()
    rows = await asyncio.to_thread(read_usage, path, names, first, last, key, model)
    if format == "csv":
        text = io.StringIO()
        write_csv(text, names, rows)
        return Response(text.getvalue(), media_type="text/csv")
    data = [dict(zip(names, group, strict=True)) | total._asdict() for group, total in rows]
    return JSONResponse({"usage": data})


@router.get("/admin/keys")
async def keys(models: ModelsDep) -> Response:
    """Names and limits of all keys, and their usage since the server started."""
    return JSONResponse({"keys": [_key_json(key, meter) for key, meter in models.keyring.entries]})


def _key_json(key: Key, meter: UsageMeter) -> dict[str, Any]:
    expires = None if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    return {
        "name": key.name,
        "admin": key.admin,
        "models": key.models,
        "expires": expires,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "tokens_per_day": key.tokens_per_day,
        "max_concurrency": key.max_concurrency,
        "priority": key.priority,
        "usage": meter.usage(),
    }
