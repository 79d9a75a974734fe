"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.errors import CheckpointError, Forbidden, InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import JSONResponse
from foreword.server.registry import ManagedModel, ModelsDep, ServedModels
from foreword.server.routes.models import model_card

router = APIRouter()


class LoadAdapterBody(StrictModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None  # None: the default model


class UnloadAdapterBody(StrictModel):
    lora_name: str
    lora_int_id: int | None = None  # a field of vLLM's, without effect


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(
    body: LoadAdapterBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Load a LoRA adapter of --lora-dir under a name; needs --allow-runtime-lora-updating."""
    models.check_fields(body, request)
    base = models.find_allowed(body.base_model_name, permissions)
    _check_allowed(models, base, permissions)
    if any(model is not base and model.names.find(body.lora_name) for model in models.models):
        raise InvalidRequest(f"a model is called {body.lora_name!r} already", "lora_name")
    server = await models.acquire(body.base_model_name, permissions, request)
    try:
        await server.names.load_adapter(body.lora_name, body.lora_path, body.load_inplace)
    except CheckpointError as error:
        raise InvalidRequest(error.message, "lora_path") from None
    return JSONResponse(model_card(models, body.lora_name))


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadAdapterBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Forget a LoRA adapter's name at once; answers once its last open request has ended."""
    models.check_fields(body, request)
    _check_allowed(models, models.find_allowed(body.lora_name, permissions), permissions)
    server = await models.acquire(body.lora_name, permissions, request)
    await server.names.unload_adapter(body.lora_name)
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


def _check_allowed(models: ServedModels, model: ManagedModel, permissions: KeyPermissions) -> None:
    """Raises Forbidden without the model's option; where keys of admins exist, for all other keys too."""
    if not model.config.allow_runtime_lora_updating:
        raise Forbidden("adapters are fixed here: --allow-runtime-lora-updating lets clients change them")
    if models.keyring.has_admin:
        models.check_admin(permissions)
