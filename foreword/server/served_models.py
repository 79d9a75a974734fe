"""The models of one server, and what their clients share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request

from foreword.config.options import Config
from foreword.errors import Forbidden, InvalidRequest
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.request_stats import RequestProgress
from foreword.server.admission import Admission
from foreword.server.auth.keys import KeyPermissions, Keyring
from foreword.server.auth.usage_log import UsageLog
from foreword.server.context import Abortable, ServerContext
from foreword.server.protocol.base import RequestBody, StrictModel, suggest_field
from foreword.server.response_store import ResponseStore

__all__ = ["ModelsDep", "ServedModels"]

MAX_FIELD_CHARS = 200  # of the name of an unknown field in an error
MAX_LISTED_FIELDS, MAX_LISTED_CHARS = 16, 64  # of the ignored fields in a header, and of the name of each
MB = 1_000_000


class ServedModels:
    """Routes ask it for the model of a request. Keys, limits and stored responses are of all models."""

    def __init__(self, config: Config, recorder: MetricsRecorder) -> None:
        """recorder  counts what belongs to no model. Raises ConfigError for an invalid key file."""
        key_file = Path(config.api_key_file) if config.api_key_file else None
        self.config = config
        self.recorder = recorder
        self.admission = Admission(config.max_waiting, config.max_waiting_tokens, recorder.on_reject)
        self.usage = UsageLog(
            Path(config.usage_db) if config.usage_db else None, recorder.on_usage, recorder.on_usage_db_error
        )
        self.keyring = Keyring(
            config.api_key, key_file, config.share_prefix_cache, self.usage, recorder.on_reject
        )
        self.response_store = ResponseStore(config.response_store_mb * MB, config.response_store_ttl)
        self.generations: dict[str, Abortable] = {}  # by the request id of each choice
        self.created = int(time.time())  # Unix time of the start
        self._contexts: list[ServerContext] = []

    def add(self, context: ServerContext) -> None:
        """Serve a loaded model."""
        self._contexts.append(context)

    @property
    def default(self) -> ServerContext:
        """The model of requests that name none."""
        return self._contexts[0]

    @property
    def loaded(self) -> Sequence[ServerContext]:
        return self._contexts

    async def acquire(
        self, name: str | None, permissions: KeyPermissions, request: Request, stream: bool | None = False
    ) -> ServerContext:
        """The loaded model called `name`; None is the default. It stays loaded until the request has ended.

        stream  the answer is a stream
        """
        return self.default

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
        with self._count_forbidden():
            permissions.check_admin()

    @contextmanager
    def _count_forbidden(self) -> Iterator[None]:
        try:
            yield
        except Forbidden:
            self.recorder.on_reject("forbidden")
            raise

    def live_requests(self) -> Sequence[RequestProgress]:
        """Open choices of all models."""
        return [progress for context in self.loaded for progress in context.recorder.live_requests()]


def _list_in_header(names: Sequence[str]) -> str:
    """Names in a header's value; characters beyond its alphabet, and commas, are percent-encoded."""
    shown = (name[:MAX_LISTED_CHARS] for name in names[:MAX_LISTED_FIELDS])
    listed = [quote(name, safe="[]", errors="replace")[:MAX_LISTED_CHARS] for name in shown]
    return ", ".join(listed + ["..."] * (len(names) > MAX_LISTED_FIELDS))


def _get_models(request: Request) -> ServedModels:
    models: ServedModels = request.app.state.models
    return models


ModelsDep = Annotated[ServedModels, Depends(_get_models)]
