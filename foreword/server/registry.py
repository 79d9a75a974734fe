"""The models of one server, which may come and go, and what their clients share."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol
from urllib.parse import quote

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.config.models_file import ModelVariant
from foreword.config.options import Config
from foreword.errors import InvalidRequest, ModelLoading, ModelNotFound, Overloaded
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.request_stats import RequestProgress
from foreword.metrics.server_metrics import ServerMetrics
from foreword.server.admission import Admission
from foreword.server.answering.streaming import EarlyStream
from foreword.server.apis.body import RequestBody, StrictModel, suggest_field
from foreword.server.apis.responses.store import ResponseStore
from foreword.server.auth.keys import KeyPermissions, Keyring
from foreword.server.auth.usage_log import UsageLog
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.loaded_model import Abortable, LoadedModel, count_forbidden
from foreword.server.model_names import ServedModel
from foreword.utils.logging import log_model

MAX_FIELD_CHARS = 200  # of the name of an unknown field in an error
MAX_LISTED_FIELDS, MAX_LISTED_CHARS = 16, 64  # of the ignored fields in a header, and of the name of each
MB = 1_000_000
COMMENT_INTERVAL_S = 1.0  # of comments in a stream that waits for its model


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as an operator sees it."""

    status: Literal["unloaded", "loading", "loaded", "unloading", "failed"] = "loaded"
    progress: float | None = None  # share of a stage of loading
    error: str | None = None  # why it could not be loaded, or ended
    pinned: bool = True
    memory_bytes: int | None = None  # measured; None: not loaded, or not measured
    estimated_bytes: int | None = None
    open_requests: int = 0
    waiting_requests: int = 0


@dataclass(slots=True)
class ManagedModel:
    """One model of a server, loaded or not."""

    name: str  # in answers
    served: Mapping[str, ServedModel]  # what its names stand for while it is not loaded
    variants: Mapping[str, ModelVariant]  # by name
    config: Config  # of its first load
    context: LoadedModel | None = None  # None: not loaded
    max_model_len: int | None = None  # of the engine that was loaded last

    def find(self, name: str) -> ServedModel | None:
        if self.context is None:
            return self.served.get(name)
        return self.context.names.resolve(name) if name in self.context.names.all else None

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.served) if self.context is None else self.context.names.all


class ModelLoader(Protocol):
    """Loads the models of a server on demand."""

    def submit(self, request_id: str, model: str) -> asyncio.Future[None]:
        """Done once the model is loaded for this request, perhaps at once; end() must follow.

        The future may raise ModelLoadFailed, InvalidRequest, ShuttingDown.
        """

    def end(self, request_id: str) -> None:
        """The request needs its model no longer."""

    def status(self, model: str) -> ModelStatus: ...

    def load(self, model: str, pin: bool | None = None) -> None:
        """Begin to load it, and pin it or not. Raises InvalidRequest for a model that can never fit."""

    def unload(self, model: str) -> None:
        """Unload it once open requests have ended."""

    def recorders(self) -> Sequence[MetricsRecorder]:
        """Of all models that were loaded once."""


class ServedModels:
    """Routes ask it for the model of a request. Keys, limits and stored responses are of all models.

    With one model, that is loaded from the start. With several, `loader` loads and unloads them.
    """

    def __init__(
        self,
        config: Config,
        recorder: MetricsRecorder | ServerMetrics,
        models: Sequence[ManagedModel] = (),
        loader: ModelLoader | None = None,
    ) -> None:
        """config    of the server, for what is not a model's
        recorder  counts requests before their model is known
        models    the first is the default; with one model, add() follows
        Raises ConfigError for an invalid key file.
        """
        key_file = Path(config.api_key_file) if config.api_key_file else None
        self.config = config
        self.recorder = recorder
        self.admission = Admission(config.max_waiting, config.max_waiting_tokens, recorder.on_reject)
        self.usage = UsageLog(
            Path(config.usage_db) if config.usage_db else None, recorder.on_usage, recorder.on_usage_db_error
        )
        self.keyring = Keyring(
            config.api_key,
            key_file,
            config.share_prefix_cache,
            self.usage,
            recorder.on_reject,
            engine_key=config.engine_key,
        )
        self.response_store = ResponseStore(config.response_store_mb * MB, config.response_store_ttl)
        self.generations: dict[str, Abortable] = {}  # by the request id of each choice
        self.created = int(time.time())  # Unix time of the start
        self.models = list(models)
        self.loader = loader
        self._request_ids = itertools.count()

    def add(self, context: LoadedModel) -> None:
        """Serve the only model."""
        self.models.append(ManagedModel(context.model_name, {}, {}, context.config, context))

    @property
    def default(self) -> LoadedModel:
        """The model of requests that name none. Raises ModelLoading."""
        return _require_context(self.models[0])

    @property
    def loaded(self) -> Sequence[LoadedModel]:
        return [model.context for model in self.models if model.context is not None]

    async def acquire(
        self, name: str | None, permissions: KeyPermissions, request: Request, stream: bool | None = False
    ) -> LoadedModel:
        """The loaded model called `name`; None is the default. It stays loaded until the request has ended.

        stream  the answer is a stream, which gets comments while it waits
        Raises ModelNotFound, Forbidden, ModelLoadFailed, InvalidRequest, Overloaded, ClientDisconnect.
        """
        if self.loader is None:
            return self.default
        model = self.find_allowed(name, permissions)
        log_model.set(model.name)
        request_id = f"hold-{next(self._request_ids)}"
        loaded = self.loader.submit(request_id, model.name)
        request.state.model_holds.callback(self.loader.end, request_id)
        if not loaded.done():
            with self.admission.reserve(1, permissions.meter):
                early = request.state.early_stream if stream else None
                work = self._wait_loaded(model, loaded, early)
                if await cancel_on_disconnect(request.receive, work) is None:
                    raise ClientDisconnect
        loaded.result()
        context = _require_context(model)
        variant = model.variants.get(name or "")
        return context if variant is None else context.as_variant(variant)

    @contextmanager
    def hold(self, model: ManagedModel) -> Iterator[LoadedModel | None]:
        """The model's context; it stays loaded meanwhile. Raises ShuttingDown.

        None: it is not loaded, or about to be unloaded.
        """
        if self.loader is None or model.context is None:
            yield model.context
            return
        request_id = f"hold-{next(self._request_ids)}"
        try:
            loaded = self.loader.submit(request_id, model.name)
            if loaded.done():
                loaded.result()
            yield model.context if loaded.done() else None
        finally:
            self.loader.end(request_id)

    async def _wait_loaded(
        self, model: ManagedModel, loaded: asyncio.Future[None], stream: EarlyStream | None
    ) -> Literal[True]:
        """Raises Overloaded after the model's --queue-timeout."""
        assert self.loader is not None and isinstance(self.recorder, ServerMetrics)
        name, limit_s, started_s = model.name, model.config.queue_timeout, time.monotonic()
        try:
            async with asyncio.timeout(limit_s or None):
                while not (await asyncio.wait((loaded,), timeout=COMMENT_INTERVAL_S))[0]:
                    if stream is not None:
                        await stream.comment(_describe_wait(name, self.loader.status(name)))
        except TimeoutError:
            self.recorder.on_reject("queue_timeout")
            raise Overloaded(f"the model {name!r} was not loaded within {limit_s:g} seconds") from None
        self.recorder.on_wait(name, time.monotonic() - started_s)
        return True

    def find_allowed(self, name: str | None, permissions: KeyPermissions) -> ManagedModel:
        """The model called `name`. Raises ModelNotFound, Forbidden."""
        model = self.find(name)
        if model is None:
            allowed = " and ".join(map(repr, self.allowed_names(permissions))) or "none to this key"
            problem = f"the model {name!r:.200} does not exist; this server serves {allowed}"
            raise ModelNotFound(problem, "model")
        served = None if name is None else model.find(name) or model.find(model.name)
        with count_forbidden(self.recorder):
            # Of None the route chooses: the generating model, or its encoder.
            permissions.check_model(name or model.name, model.names if served is None else served.names)
        return model

    def find(self, name: str | None) -> ManagedModel | None:
        """The model that `name` is a name of; None is the default model."""
        if name is None:
            return self.models[0]
        model = next((model for model in self.models if model.find(name) is not None), None)
        return self.models[0] if model is None and self.config.any_model_name else model

    def allowed_names(self, permissions: KeyPermissions) -> tuple[str, ...]:
        """The served names that this key may use."""
        return tuple(
            name
            for model in self.models
            for name in model.names
            if (served := model.find(name)) is not None and permissions.may_use(served.names)
        )

    def status(self, model: ManagedModel) -> ModelStatus:
        return ModelStatus() if self.loader is None else self.loader.status(model.name)

    def check_fields(self, body: StrictModel, request: Request, ignored: Sequence[str] = ()) -> None:
        """Refuse unknown fields, or ignore and name them in a header. Take `request_id` over from the body.

        ignored  further fields to name
        Raises InvalidRequest. Unknown fields of messages and content parts are always ignored.
        """
        unknown = list(ignored)
        num_ignored = 0
        for path, item in body.walk():
            if item.is_lenient:
                num_ignored += item.num_unknown()
                continue
            for name in item.model_extra or ():
                unknown.append(f"{path}{name}")
                if self.config.unknown_fields == "refuse":
                    field = unknown[-1][:MAX_FIELD_CHARS]
                    raise InvalidRequest(f"unknown field {field!r}{suggest_field(item, name)}", field)
        if num_ignored:
            self.recorder.on_ignored_fields(num_ignored)
        if unknown:
            request.state.response_headers = {"X-Foreword-Ignored-Fields": _list_in_header(unknown)}
        if isinstance(body, RequestBody) and body.request_id is not None:
            request.state.request_id = body.request_id

    def check_admin(self, permissions: KeyPermissions) -> None:
        """Raises Forbidden unless this is an admin key."""
        with count_forbidden(self.recorder):
            permissions.check_admin()

    def live_requests(self) -> Sequence[RequestProgress]:
        """Open choices of all models."""
        return [progress for server in self.loaded for progress in server.recorder.live_requests()]

    def render_metrics(self, with_keys: bool) -> bytes:
        """Metrics in Prometheus' text format; `with_keys`: also those that name API keys."""
        if isinstance(self.recorder, MetricsRecorder):
            return self.recorder.render(with_keys)
        assert self.loader is not None
        statuses = {model.name: self.loader.status(model.name) for model in self.models}
        for name, status in statuses.items():
            self.recorder.set_model(name, status.memory_bytes or 0, status.waiting_requests)
        self.recorder.set_num_loaded(sum(status.status == "loaded" for status in statuses.values()))
        return self.recorder.render(self.loader.recorders(), with_keys)


class HeldModelsMiddleware:
    """Keeps the models of a request loaded until its ASGI call has ended. Only for several models."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        stream = EarlyStream(scope, send)
        with ExitStack() as holds:
            scope.setdefault("state", {}).update(model_holds=holds, early_stream=stream)
            await self._app(scope, receive, stream.send)


def _require_context(model: ManagedModel) -> LoadedModel:
    if model.context is None:
        raise ModelLoading(f"the model {model.name!r} is not loaded")
    return model.context


def _describe_wait(name: str, status: ModelStatus) -> str:
    share = "" if status.progress is None else f" {status.progress:.0%}"
    return f"loading {name}{share}" if status.status == "loading" else f"waiting for {name}"


def _list_in_header(names: Sequence[str]) -> str:
    """Names in a header's value; characters beyond its alphabet, and commas, are percent-encoded."""
    shown = (name[:MAX_LISTED_CHARS] for name in names[:MAX_LISTED_FIELDS])
    listed = [quote(name, safe="[]", errors="replace")[:MAX_LISTED_CHARS] for name in shown]
    return ", ".join(listed + ["..."] * (len(names) > MAX_LISTED_FIELDS))


def _get_models(request: Request) -> ServedModels:
    models: ServedModels = request.app.state.models
    return models


ModelsDep = Annotated[ServedModels, Depends(_get_models)]
