"""The models of a server, loaded or not: names and access are resolved here, once for each request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol
from urllib.parse import quote

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from foreword.config.models_file import ModelEntry, ModelVariant
from foreword.config.options import Config
from foreword.errors import InvalidRequest, ModelLoading, ModelNotFound, Overloaded, Unsupported, shown
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.request_stats import RequestProgress
from foreword.metrics.server_metrics import ServerMetrics
from foreword.metrics.tracing import current_span
from foreword.server.admission import Admission
from foreword.server.apis.body import RequestBody, StrictModel, suggest_field
from foreword.server.apis.responses.store import ResponseStore
from foreword.server.auth.key_file import stored_salt
from foreword.server.auth.keys import KeyPermissions, Keyring
from foreword.server.auth.usage_log import UsageLog
from foreword.server.http.middleware import EarlyStream
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.intake import Intake
from foreword.server.loaded_model import Abortable, LoadedModel, count_forbidden
from foreword.server.model_names import ModelNames
from foreword.utils.logging import log_model

MAX_FIELD_CHARS = 200  # length of an unknown field's name in an error
MAX_LISTED_FIELDS, MAX_LISTED_CHARS = 16, 64  # ignored fields in a header, length of each name
MB = 1_000_000
COMMENT_INTERVAL_S = 1.0  # between comments in a stream that waits for its model


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


@dataclass(slots=True, eq=False)
class ManagedModel:
    """One model of a server, loaded or not."""

    entry: ModelEntry
    names: ModelNames
    log_name: str  # prefix of log lines; "" if the server has no other model
    loaded: LoadedModel | None = None
    max_model_len: int | None = None  # limit of the engine that was loaded last

    @property
    def name(self) -> str:
        """Its name in answers."""
        return self.entry.name

    @property
    def config(self) -> Config:
        """The options of its first load."""
        return self.entry.config

    def find_variant(self, name: str | None) -> ModelVariant | None:
        return next((variant for variant in self.entry.variants if variant.name == name), None)


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
        """Metrics of the models that were loaded once."""


class ServedModels:
    """The models of a server. Keys, limits and stored responses are shared; `loader` loads the models."""

    def __init__(
        self, config: Config, metrics: ServerMetrics, models: Sequence[ManagedModel], loader: ModelLoader
    ) -> None:
        """config   of the server, for what is not a model's
        metrics  counts requests before their model is known
        models   the first is the default
        Raises ConfigError for an invalid key file.
        """
        key_file = Path(config.api_key_file) if config.api_key_file else None
        self.config = config
        self.metrics = metrics
        self.admission = Admission(config.max_waiting, config.max_waiting_tokens, metrics.on_reject)
        self.intake = Intake(config.max_body_mb * MB, metrics.on_reject)
        self.usage = UsageLog(
            Path(config.usage_db) if config.usage_db else None, metrics.on_usage, metrics.on_usage_db_error
        )
        self.keyring = Keyring(
            config.api_key,
            key_file,
            config.share_prefix_cache,
            self.usage,
            metrics.on_reject,
            engine_key=config.engine_key,
            salt=stored_salt(Path(config.kv_cache_dir)) if config.kv_cache_dir else None,
        )
        self.response_store = ResponseStore(config.response_store_mb * MB, config.response_store_ttl)
        self.generations: dict[str, Abortable] = {}  # by the request id of each choice
        self.created = int(time.time())  # Unix time of the start
        self.models = tuple(models)
        self.loader = loader
        self._request_ids = itertools.count()

    @property
    def loaded(self) -> Sequence[LoadedModel]:
        return [model.loaded for model in self.models if model.loaded is not None]

    @property
    def max_model_len(self) -> int | None:
        """The longest context of the models; None while one of them was never loaded."""
        limits = [model.max_model_len or 0 for model in self.models]
        return max(limits) if all(limits) else None

    async def acquire(
        self,
        name: str | None,
        permissions: KeyPermissions,
        request: Request,
        stream: bool | None = False,
        allow_encoder: bool = False,
    ) -> LoadedModel:
        """The loaded model called `name`; None is the default. It stays loaded until the request has ended.

        stream         the answer is a stream, which gets comments while it waits
        allow_encoder  the model's encoder may answer: the caller checks access to it if there is no name
        Raises ModelNotFound, Forbidden, Unsupported, ModelLoadFailed, InvalidRequest, Overloaded,
        ClientDisconnect.
        """
        model = self.find_allowed(name, permissions, or_encoder=allow_encoder)
        log_model.set(model.log_name)
        request_id = f"hold-{next(self._request_ids)}"
        loading = self.loader.submit(request_id, model.name)
        request.state.model_holds.callback(self.loader.end, request_id)
        if not loading.done():
            with self.admission.reserve(1, permissions.meter):
                early = request.state.early_stream if stream else None
                work = self._wait_loaded(model, loading, early)
                if await cancel_on_disconnect(request.receive, work) is None:
                    raise ClientDisconnect
        loading.result()
        if model.loaded is None:
            raise ModelLoading(f"the model {model.name!r} is not loaded")
        served = model.names.find(name) or model.names.default
        if served.is_encoder and not allow_encoder:
            raise Unsupported(f"{name} is an encoder; {model.name!r} generates text", "model")
        if (span := current_span.get()) is not None:
            span.on_model(name or served.name, served.name)
        return replace(model.loaded, served=served, variant=model.find_variant(name))

    @contextmanager
    def hold(self, model: ManagedModel) -> Iterator[LoadedModel | None]:
        """Keep the model loaded meanwhile. Raises ShuttingDown.

        Yields None for a model that is not loaded, or about to be unloaded.
        """
        if model.loaded is None:
            yield None
            return
        request_id = f"hold-{next(self._request_ids)}"
        try:
            loading = self.loader.submit(request_id, model.name)
            if loading.done():
                loading.result()
            yield model.loaded if loading.done() else None
        finally:
            self.loader.end(request_id)

    async def _wait_loaded(
        self, model: ManagedModel, loading: asyncio.Future[None], stream: EarlyStream | None
    ) -> Literal[True]:
        """Raises Overloaded after the model's --queue-timeout."""
        name, limit_s, started_s = model.name, model.config.queue_timeout, time.monotonic()
        try:
            async with asyncio.timeout(limit_s or None):
                while not (await asyncio.wait((loading,), timeout=COMMENT_INTERVAL_S))[0]:
                    if stream is not None:
                        await stream.comment(_describe_wait(name, self.loader.status(name)))
        except TimeoutError:
            self.metrics.on_reject("queue_timeout")
            raise Overloaded(f"the model {name!r} was not loaded within {limit_s:g} seconds") from None
        self.metrics.on_wait(name, time.monotonic() - started_s)
        return True

    def find_allowed(
        self, name: str | None, permissions: KeyPermissions, or_encoder: bool = False
    ) -> ManagedModel:
        """The model called `name`. Raises ModelNotFound, Forbidden.

        or_encoder  None may also mean the model's encoder, which is allowed too
        """
        model = self.find(name)
        if model is None:
            allowed = " and ".join(map(repr, self.allowed_names(permissions))) or "none to this key"
            problem = f"the model {shown(name, 200)} does not exist; this server serves {allowed}"
            raise ModelNotFound(problem, "model")
        served = model.names.find(name) or model.names.default
        names = model.names.all if name is None and or_encoder else served.names
        with count_forbidden(self.metrics):
            permissions.check_model(name if name is not None and name in names else model.name, names)
        return model

    def find(self, name: str | None) -> ManagedModel | None:
        """The model that `name` is a name of; None is the default model."""
        model = next((model for model in self.models if model.names.find(name) is not None), None)
        return self.models[0] if model is None and self.config.any_model_name else model

    def allowed_names(self, permissions: KeyPermissions) -> tuple[str, ...]:
        """The served names that this key may use."""
        return tuple(
            name
            for model in self.models
            for name in model.names.all
            if (served := model.names.find(name)) is not None and permissions.may_use(served.names)
        )

    async def check_fields(self, body: StrictModel, request: Request, ignored: Sequence[str] = ()) -> None:
        """Refuse unknown fields, or ignore and name them in a header. Take `request_id` over from the body.

        ignored  further fields to name
        Raises InvalidRequest. Unknown fields of messages and content parts are always ignored.
        """
        found, num_ignored = await self.intake.offload_if_large(request, lambda: _find_unknown(body))
        if found and self.config.unknown_fields == "refuse":
            path, item, name = found[0]
            field = f"{path}{name}"[:MAX_FIELD_CHARS]
            raise InvalidRequest(f"unknown field {field!r}{suggest_field(item, name)}", field)
        unknown = [*ignored, *(f"{path}{name}" for path, _, name in found)]
        if num_ignored:
            self.metrics.on_ignored_fields(num_ignored)
        if unknown:
            request.state.response_headers = {"X-Foreword-Ignored-Fields": _list_in_header(unknown)}
        if isinstance(body, RequestBody) and body.request_id is not None:
            request.state.request_id = body.request_id

    def check_admin(self, permissions: KeyPermissions) -> None:
        """Raises Forbidden unless this is an admin key."""
        with count_forbidden(self.metrics):
            permissions.check_admin()

    def check_operator(self, permissions: KeyPermissions) -> None:
        """Raises Forbidden unless this is an admin key, or the server has no keys."""
        if not self.keyring.is_open:
            self.check_admin(permissions)

    def live_requests(self) -> Sequence[RequestProgress]:
        """Open choices of all models."""
        return [progress for model in self.loaded for progress in model.recorder.live_requests()]

    def render_metrics(self, with_keys: bool) -> bytes:
        """Metrics in Prometheus' text format; `with_keys`: also those that name API keys."""
        statuses = {model.name: self.loader.status(model.name) for model in self.models}
        for name, status in statuses.items():
            memory_bytes = status.memory_bytes if status.status == "loaded" else 0
            self.metrics.set_model(name, memory_bytes, status.waiting_requests)
        self.metrics.set_num_loaded(sum(status.status == "loaded" for status in statuses.values()))
        return self.metrics.render(self.loader.recorders(), with_keys)


def _find_unknown(body: StrictModel) -> tuple[list[tuple[str, StrictModel, str]], int]:
    """Unknown fields as (path of the object, object, name), and the number of those in lenient objects."""
    found: list[tuple[str, StrictModel, str]] = []
    num_lenient = 0
    for path, item in body.walk():
        if item.is_lenient:
            num_lenient += item.num_unknown()
        else:
            found += [(path, item, name) for name in item.model_extra or ()]
    return found, num_lenient


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
