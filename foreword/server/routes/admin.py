"""Operators' routes under /admin: open requests, keys and new engines; never a text, a key or a hash.

Those of `admin_router` exist only if the key file has a key with `admin: true`. None is in /docs.
"""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Response
from starlette.responses import StreamingResponse

from foreword.errors import Aborted, ConfigError, ForewordError, InvalidRequest, Unsupported
from foreword.metrics.request_stats import RequestProgress
from foreword.server.auth.keys import PermissionsDep
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.auth.usage_db import (
    DIMENSIONS,
    parse_day,
    parse_dimensions,
    read_usage,
    write_csv,
)
from foreword.server.http.errors import error_body
from foreword.server.http.responses import JSONResponse, json_bytes
from foreword.server.registry import ModelsDep, ServedModels
from foreword.utils.threads import run_in_own_thread


def check_is_admin(permissions: PermissionsDep, models: ModelsDep) -> None:
    """Raises 404 if no key is an admin key, Forbidden if this key is not."""
    if not models.keyring.has_admin:
        raise HTTPException(404)
    models.check_admin(permissions)


router = APIRouter(include_in_schema=False)
admin_router = APIRouter(dependencies=[Depends(check_is_admin)], include_in_schema=False)


@admin_router.get("/admin/requests")
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


@admin_router.post("/admin/requests/{name}/abort")
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


@admin_router.post("/admin/keys/reload")
async def reload_keys(models: ModelsDep) -> Response:
    """Reload the key file now. 400 for an invalid file, which leaves the keys as they were."""
    try:
        await models.keyring.reload()
    except ConfigError as error:
        raise InvalidRequest(f"{error}; the keys stay as they were") from None
    return JSONResponse({"keys": len(models.keyring.meters)})


@admin_router.get("/admin/usage")
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
    rows = await run_in_own_thread(read_usage, path, names, first, last, key, model)
    if format == "csv":
        text = io.StringIO()
        write_csv(text, names, rows)
        return Response(text.getvalue(), media_type="text/csv")
    data = [dict(zip(names, group, strict=True)) | total._asdict() for group, total in rows]
    return JSONResponse({"usage": data})


@admin_router.get("/admin/keys")
async def keys(models: ModelsDep) -> Response:
    """Names and limits of all keys, and their usage since the server started."""
    return JSONResponse({"keys": [_key_json(meter) for meter in models.keyring.meters]})


def _key_json(meter: UsageMeter) -> dict[str, Any]:
    key = meter.key
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


@router.post("/admin/reload")
async def reload_engines(models: ModelsDep, permissions: PermissionsDep) -> Response:
    """Replace each engine, streaming the progress as lines of JSON.

    Needs an admin key; a server without keys has this route on the loopback and on a Unix socket only.
    """
    if not models.keyring.is_open:
        check_is_admin(permissions, models)
    elif not models.config.is_local:
        raise HTTPException(404)
    return StreamingResponse(_lines(models), media_type="application/x-ndjson")


async def _lines(models: ServedModels) -> AsyncIterator[bytes]:
    """{"status": text} for each stage, or last {"error": ...}.

    A model that is not loaded gets a new engine with its next load.
    """
    try:
        for model in models.models:
            prefix = f"{model.log_name}: " if model.log_name else ""
            with models.hold(model) as loaded:
                if loaded is None:
                    continue
                progress: Any = loaded.client.reload()
                async with aclosing(progress):
                    async for text in progress:
                        yield json_bytes({"status": f"{prefix}{text}"}) + b"\n"
    except ForewordError as error:
        yield json_bytes(error_body(error)) + b"\n"
