"""Refusing at the door, before anything is read, what could not be served now; and telling limited keys what they have left."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.serve.access import KeyPermissions
from foreword.serve.admission import Admission
from foreword.serve.errors import error_response
from foreword.serve.limits import UsageMeter

__all__ = ["AdmissionMiddleware"]

NO_ENGINE_PATHS = frozenset({"/tokenize", "/detokenize"})  # the engine is not asked


class AdmissionMiddleware:
    """Counts every POST but those of operators: each costs something. Refused here, one costs next to nothing."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/admin/"):
            return await self._app(scope, receive, send)
        access: KeyPermissions | None = scope.get("state", {}).get("access")
        if access is None:  # a path that is open to everybody, and takes no POST
            return await self._app(scope, receive, send)
        try:
            if scope["path"] not in NO_ENGINE_PATHS:
                self._admission.check(1, access.meter)
            access.meter.check_request()
        except ForewordError as error:
            return await error_response(error)(scope, receive, _with_rate_limit_headers(send, access.meter))
        await self._app(scope, receive, _with_rate_limit_headers(send, access.meter))


def _with_rate_limit_headers(send: Send, meter: UsageMeter) -> Send:
    """`send`, with what is left of the key's limits in the head of the answer."""

    async def send_telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in meter.headers().items():
                headers[name] = value
        await send(message)

    return send_telling
