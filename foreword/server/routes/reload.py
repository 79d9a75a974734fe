"""POST /admin/reload: replace the engines under open streams"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, HTTPException, Response
from starlette.responses import StreamingResponse

from foreword.errors import ForewordError
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.errors import error_body
from foreword.server.http.responses import json_bytes
from foreword.server.registry import ModelsDep, ServedModels
from foreword.server.routes.admin import check_is_admin

router = APIRouter(include_in_schema=False)


@router.post("/admin/reload")
async def reload(models: ModelsDep, permissions: PermissionsDep) -> Response:
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
