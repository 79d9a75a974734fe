"""API keys: who holds which, and the door where they are asked for.

Who asks, and what they may do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import ConfigError, ExpiredKey, Forbidden, ForewordError, Unauthorized
from foreword.server.auth.key_file import SALT_BYTES, Key, hash_key, read_key_file
from foreword.server.auth.rate_limit import KeyLimits, UsageMeter
from foreword.server.errors import error_response

__all__ = [
    "PUBLIC_PATHS",
    "AuthenticationMiddleware",
    "KeyPermissions",
    "Keyring",
    "PermissionsDep",
    "RequestContext",
    "key_from_headers",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who wants one request, and how.

    tenant     namespace of the prefix cache
    priority   lower is served first
    timeout_s  seconds that the request may take in all; None: as long as the server allows
    account    whose share of the engine it takes
    meter      what it is counted by
    """

    cache_salt: str
    priority: int
    timeout_s: float | None = None
    fairness_key: str = ""
    meter: UsageMeter = field(default_factory=UsageMeter)


@dataclass(frozen=True, slots=True)
class KeyPermissions:
    """What a key opens; without keys, what everybody may do.

    account   name of the key; "" without keys
    tenant    namespace of the prefix cache
    models    names of the models; None: all
    priority  the best that may be asked for; None: any
    """

    fairness_key: str
    cache_salt: str
    meter: UsageMeter
    admin: bool = False
    models: tuple[str, ...] | None = None
    priority: int | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def allowed_models(self, models: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in models if self.may_use(name))

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_use(model):
            raise Forbidden(f"this key may not use the model {model!r:.200}", "model")

    def check_admin(self) -> None:
        """Raises Forbidden."""
        if not self.admin:
            raise Forbidden("this key may not use the admin routes")

    def request_context(self, priority: int | None = None, timeout_s: float | None = None) -> RequestContext:
        """Of one request, with what it asks for. Raises Forbidden for a better priority than this key's."""
        best = self.priority
        if best is not None and priority is not None and priority < best:
            raise Forbidden(
                f"priority: this key may ask for {best} and above, which is served later, got {priority}",
                "priority",
            )
        chosen = max(0, best or 0) if priority is None else priority
        return RequestContext(self.cache_salt, chosen, timeout_s, self.fairness_key, self.meter)


def _get_permissions(request: Request) -> KeyPermissions:
    access: KeyPermissions = request.state.access
    return access


PermissionsDep = Annotated[KeyPermissions, Depends(_get_permissions)]


PUBLIC_PATHS = frozenset({"/health", "/live", "/metrics", "/version", "/docs", "/openapi.json"})
MAX_KEY_BYTES = 512  # bytes; what is longer is nobody's, and is not hashed
RawHeaders = Sequence[tuple[bytes, bytes]]
FileStamp = tuple[int, int, int]


class Keyring:
    """The keys that open this server: those of the command line, and those of a file, which may change; without any, it is open.

    plain      keys joined by commas, or None
    path       of the key file, or None
    shared     all keys share one namespace of the prefix cache
    on_refusal is told why a key's limits refused a request
    now        Unix time, for what expires; clock: monotonic seconds, for limits
    """

    def __init__(
        self,
        cli_keys: str | None,
        path: Path | None,
        share_prefix_cache: bool,
        on_refusal: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._cli_keys = _parse_cli_keys(cli_keys)
        self._path = path
        self._share_prefix_cache = share_prefix_cache
        self._on_refusal = on_refusal
        self._now = now
        self._clock = clock
        self._meters: dict[str, UsageMeter] = {}
        self._anonymous = KeyPermissions("", "", UsageMeter())
        self._file_stamp = _file_stamp(path)
        self._keys: tuple[Key, ...] = ()
        self._install(() if path is None else read_key_file(path))

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a key."""
        return not self._cli_keys and self._path is None

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._keys)

    @property
    def entries(self) -> Sequence[tuple[Key, UsageMeter]]:
        return [(key, self._meters[key.name]) for key in self._keys]

    def identify(self, secret: bytes | None) -> KeyPermissions:
        """What this key opens. Raises Unauthorized, ExpiredKey.

        Every entry is compared, so that the time does not tell which of them is nearly right.
        """
        if self.is_open:
            return self._anonymous
        if secret is None:
            raise Unauthorized("an API key is required: Authorization: Bearer KEY")
        matches = self._matches(secret) if len(secret) <= MAX_KEY_BYTES else []
        if True not in matches:
            raise Unauthorized("the API key is not known")
        key = self._keys[matches.index(True)]
        if key.expires is not None and self._now() >= key.expires:
            raise ExpiredKey("the API key has expired")
        return self._permissions_of(key)

    def _matches(self, secret: bytes) -> list[bool]:
        digests = {salt: hash_key(secret, salt) for salt in self._salts}
        return [compare_digest(digests[key.salt], key.digest) for key in self._keys]

    def _permissions_of(self, key: Key) -> KeyPermissions:
        tenant = "" if self._share_prefix_cache else hashlib.sha256(key.digest).hexdigest()[:16]
        return KeyPermissions(key.name, tenant, self._meters[key.name], key.admin, key.models, key.priority)

    async def refresh(self) -> None:
        """Read the file again if it has changed. One that is broken changes nothing, and is told of once."""
        if self._path is None:
            return
        stamp = await asyncio.to_thread(_file_stamp, self._path)
        if stamp != self._file_stamp:
            try:
                await self.reload()
            except ConfigError as error:
                logger.error("%s; the keys stay as they were", error)

    async def reload(self) -> None:
        """Read the file again. Raises ConfigError; then the keys stay as they were."""
        assert self._path is not None, "no file to read"
        self._file_stamp = await asyncio.to_thread(
            _file_stamp, self._path
        )  # before it is read: what changes meanwhile is seen later
        keys = await asyncio.to_thread(read_key_file, self._path)
        before, after = ({key.name for key in some} for some in (self._keys[len(self._cli_keys) :], keys))
        self._install(keys)
        logger.info(
            "key file read: %d keys, %d of them new, %d gone",
            len(keys),
            len(after - before),
            len(before - after),
        )

    def _install(self, keys: Sequence[Key]) -> None:
        """Let these keys of the file hold. What a key has taken it keeps, under its name."""
        self._keys = (*self._cli_keys, *keys)
        self._salts = frozenset(key.salt for key in self._keys)
        self._meters = {key.name: self._meter_for(key) for key in self._keys}

    def _meter_for(self, key: Key) -> UsageMeter:
        limits = KeyLimits(key.requests_per_minute, key.tokens_per_minute, key.max_concurrency)
        meter = self._meters.get(key.name)
        if meter is None:
            return UsageMeter(limits, self._clock, self._on_refusal)
        meter.limits = limits
        return meter


def _parse_cli_keys(text: str | None) -> tuple[Key, ...]:
    """The keys of the command line: without limits, and named "#1", "#2" ..., as no entry of a file can be."""
    given = [part.strip().encode() for part in (text or "").split(",") if part.strip()]
    salt = secrets.token_bytes(SALT_BYTES)
    return tuple(
        Key(f"#{index}", salt, hash_key(key, salt), priority=None) for index, key in enumerate(given, start=1)
    )


def _file_stamp(path: Path | None) -> FileStamp | None:
    """Changes when the file does; None while there is none."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None


def key_from_headers(headers: RawHeaders) -> bytes | None:
    """The key of `Authorization: Bearer KEY`, or else of `x-api-key`, which Anthropic's clients send; None without either.

    Raises Unauthorized for another scheme, and for more than one: a proxy in front may have looked at the other.
    """
    found: Mapping[bytes, list[bytes]] = {
        wanted: [value for name, value in headers if name == wanted]
        for wanted in (b"authorization", b"x-api-key")
    }
    if any(len(values) > 1 for values in found.values()):
        raise Unauthorized("more than one API key was sent")
    if not found[b"authorization"]:
        return found[b"x-api-key"][0].strip() if found[b"x-api-key"] else None
    scheme, _, given = found[b"authorization"][0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not given.strip():
        raise Unauthorized("an API key is required: Authorization: Bearer KEY")
    return given.strip()


class AuthenticationMiddleware:
    """Refuses callers without a key, and says for the others what they may do: `request.state.access`."""

    def __init__(self, app: ASGIApp, keys: Keyring, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._keys = keys
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                scope.setdefault("state", {})["access"] = self._identify(scope["headers"])
            except ForewordError as error:
                self._on_refusal("unauthorized")
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)

    def _identify(self, headers: RawHeaders) -> KeyPermissions:
        return self._keys.identify(None if self._keys.is_open else key_from_headers(headers))
