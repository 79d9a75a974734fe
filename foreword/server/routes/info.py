"""GET /v1/models and /metrics"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.errors import Unauthorized
from foreword.metrics.prometheus import CONTENT_TYPE
from foreword.server.auth.keys import PermissionsDep, key_from_headers
from foreword.server.http.responses import JSONResponse
from foreword.server.model_names import ServedModel
from foreword.server.registry import ManagedModel, ModelsDep, ServedModels

router = APIRouter()


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
    return JSONResponse(model_card(models, name if name in model.names else model.name))


def model_card(models: ServedModels, name: str) -> dict[str, Any]:
    """A served name as in /v1/models."""
    model = models.find(name)
    served = None if model is None else model.find(name)
    assert model is not None and served is not None, "a name of no model"
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "foreword",
        "root": served.root,
        "parent": served.parent,
        **_limits(model, served),
        "variant_of": model.name if name in model.variants else None,
        **asdict(models.status(model)),
        **_replicas(model, served),
    }


def _limits(model: ManagedModel, served: ServedModel) -> dict[str, Any]:
    """Of a model that is not loaded, those of its last engine."""
    server, variant = model.context, model.variants.get(served.name)
    if served.is_encoder:
        encoder = None if server is None or server.encoder is None else server.encoder.info
        return {"max_model_len": None if encoder is None else encoder.max_tokens}
    info = None if server is None else server.client.info  # None while the engine is loading
    limits = [model.max_model_len if info is None else info.resolved.max_model_len]
    limits += [] if variant is None else [variant.max_model_len]
    defaults = {} if server is None else server.tokenizer.generation_config.as_dict()
    sees = server is not None and server.image_intake is not None
    return {
        "max_model_len": min((limit for limit in limits if limit is not None), default=None),
        "sampling_defaults": {**defaults, **({} if variant is None else variant.sampling)},
        "input_modalities": ["text", "image"] if sees else ["text"],
        "drafters": [] if server is None else list(server.config.drafter_names()),
    }


def _replicas(model: ManagedModel, served: ServedModel) -> dict[str, Any]:
    """The engines of a loaded model."""
    client = None if model.context is None or served.is_encoder else model.context.client
    info = None if client is None else client.info
    states = () if client is None else client.replica_states()
    return {
        "fingerprint": None if info is None else served.fingerprint(info.fingerprint),
        "replicas": [asdict(state) for state in states],
    }


@router.get("/metrics")
async def metrics(request: Request, models: ModelsDep) -> Response:
    """Metrics in Prometheus' text format; those by API key only with the key of an admin."""
    text = models.render_metrics(with_keys=_may_see_keys(request, models))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


def _may_see_keys(request: Request, models: ServedModels) -> bool:
    """Whether this is an admin, or a server without keys. Everybody may read the other metrics."""
    if models.keyring.is_open:
        return True
    try:
        return models.keyring.identify(key_from_headers(request.scope["headers"])).admin
    except Unauthorized:
        return False
