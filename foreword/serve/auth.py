"""API keys."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import ForewordError, Unauthorized
from foreword.serve.errors import error_response

__all__ = ["OPEN_PATHS", "ApiKeys", "Authentication"]

OPEN_PATHS = frozenset({"/health", "/live", "/metrics", "/version", "/docs", "/openapi.json"})


class ApiKeys:
    """The keys that clients may send; without any, everybody may come in.

    keys    joined by commas, or None
    shared  all keys share one namespace of the prefix cache
    """

    __slots__ = ("_keys", "_shared")

    def __init__(self, keys: str | None, shared: bool) -> None:
        self._keys = tuple(key.strip().encode() for key in (keys or "").split(",") if key.strip())
        self._shared = shared

    def tenant(self, authorization: str | None) -> str:
        """Namespace of the caller's prefix cache, from the Authorization header.

        Raises Unauthorized. The time taken does not depend on how much of a key is right.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("an API key is required: Authorization: Bearer KEY")
        matches = [hmac.compare_digest(given.strip().encode("utf-8", "replace"), key) for key in self._keys]
        if not any(matches):
            raise Unauthorized("the API key is not known")
        return "" if self._shared else hashlib.sha256(self._keys[matches.index(True)]).hexdigest()[:16]


class Authentication:
    """Refuses callers without a key, and says for the others which tenant they are."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["tenant"] = self._keys.tenant(Headers(scope=scope).get("authorization"))
            except ForewordError as error:
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)
