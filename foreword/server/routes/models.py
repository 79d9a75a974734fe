"""Models and their adapters: GET /v1/models, POST /models/{load,unload}, /v1/{load,unload}_lora_adapter

/models/load and /models/unload take llama-server's bodies.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.errors import CheckpointError, Forbidden, InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import JSONResponse
from foreword.server.intake import IntakeRoute
from foreword.server.model_names import ServedName
from foreword.server.registry import ManagedModel, ModelsDep, ServedModels

router = APIRouter(route_class=IntakeRoute)


@router.get("/v1/models")
async def list_models(permissions: PermissionsDep, models: ModelsDep) -> Response:
    """The models that this key may use, with their variants, encoders and adapters."""
    cards = [model_card(models, name) for name in models.allowed_names(permissions)]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, permissions: PermissionsDep, models: ModelsDep) -> Response:
    """Facts of one model."""
    if not name:  # a slash at the end of the path
        return await list_models(permissions, models)
    model = models.find_allowed(name, permissions)
    return JSONResponse(model_card(models, name if model.names.find(name) else model.name))


def model_card(models: ServedModels, name: str) -> dict[str, Any]:
    """A served name as in /v1/models."""
    model = models.find(name)
    served = None if model is None else model.names.find(name)
    assert model is not None and served is not None, "a name of no model"
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "foreword",
        "root": served.root,
        "parent": served.parent,
        **_limits(model, served),
        "variant_of": None if model.find_variant(name) is None else model.name,
        **asdict(models.loader.status(model.name)),
        **_replicas(model, served),
    }


def _limits(model: ManagedModel, served: ServedName) -> dict[str, Any]:
    """The limits and defaults of a model; while it is not loaded, those of its last engine."""
    loaded, variant = model.loaded, model.find_variant(served.name)
    if served.is_encoder:
        encoder = None if loaded is None or loaded.encoder is None else loaded.encoder.info
        return {"max_model_len": None if encoder is None else encoder.max_tokens}
    limits = [model.max_model_len, None if variant is None else variant.max_model_len]
    defaults = {} if loaded is None else loaded.tokenizer.generation_config.as_dict()
    info = None if loaded is None else loaded.client.info
    sees = loaded is not None and loaded.image_intake is not None
    return {
        "max_model_len": min((limit for limit in limits if limit is not None), default=None),
        "sampling_defaults": {**defaults, **({} if variant is None else variant.sampling)},
        "input_modalities": ["text", "image"] if sees else ["text"],
        "drafters": [] if info is None else list(info.resolved.drafters),
    }


def _replicas(model: ManagedModel, served: ServedName) -> dict[str, Any]:
    """The engines of a loaded model."""
    client = None if model.loaded is None or served.is_encoder else model.loaded.client
    info = None if client is None else client.info
    states = () if client is None else client.replica_states()
    return {
        "fingerprint": None if info is None else served.fingerprint(info.fingerprint),
        "replicas": [asdict(state) for state in states],
    }


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
    await models.check_fields(body, request)
    models.check_operator(permissions)
    models.loader.load(models.find_allowed(body.model, permissions).name, body.pin)
    return JSONResponse({"success": True, **model_card(models, body.model)})


@router.post("/models/unload")
async def unload_model(
    body: UnloadModelBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Unload a model once its open requests have ended. Needs an admin key where keys exist."""
    await models.check_fields(body, request)
    models.check_operator(permissions)
    models.loader.unload(models.find_allowed(body.model, permissions).name)
    return JSONResponse({"success": True, **model_card(models, body.model)})


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
    await models.check_fields(body, request)
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
    await models.check_fields(body, request)
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
