"""POST /models/load and /models/unload, with llama-server's bodies"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.errors import InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import JSONResponse
from foreword.server.registry import ModelLoader, ModelsDep, ServedModels
from foreword.server.routes.info import model_card

router = APIRouter()


class LoadModelBody(StrictModel):
    model: str
    pin: bool | None = None


class UnloadModelBody(StrictModel):
    model: str


@router.post("/models/load")
async def load_model(
    body: LoadModelBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Begin to load a model, and pin it; /v1/models has the progress. Needs an admin key where keys exist."""
    models.check_fields(body, request)
    _require_loader(models, permissions).load(models.find_allowed(body.model, permissions).name, body.pin)
    return JSONResponse({"success": True, **model_card(models, body.model)})


@router.post("/models/unload")
async def unload_model(
    body: UnloadModelBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Unload a model once its open requests have ended. Needs an admin key where keys exist."""
    models.check_fields(body, request)
    _require_loader(models, permissions).unload(models.find_allowed(body.model, permissions).name)
    return JSONResponse({"success": True, **model_card(models, body.model)})


def _require_loader(models: ServedModels, permissions: KeyPermissions) -> ModelLoader:
    """Raises Forbidden, InvalidRequest."""
    if not models.keyring.is_open:
        models.check_admin(permissions)
    if models.loader is None:
        raise InvalidRequest("this server has one model, which stays loaded; see --models", "model")
    return models.loader
