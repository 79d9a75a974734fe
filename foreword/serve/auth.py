"""API keys."""

from __future__ import annotations

import hashlib
import hmac

from foreword.errors import Unauthorized

__all__ = ["OPEN_PATHS", "ApiKeys"]

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
