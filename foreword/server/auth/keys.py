"""API keys: which keys are valid, and what each may do."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import ConfigError, ExpiredKey, Forbidden, ForewordError, Unauthorized, shown
from foreword.server.auth.browser_guard import BrowserGuard
from foreword.server.auth.key_file import SALT_BYTES, Key, check_quotas, hash_key, read_key_file
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.auth.usage_log import UsageLog
from foreword.server.http.errors import error_response
from foreword.server.slots import SlotKey
from foreword.utils.threads import run_in_own_thread

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset(
    {"/", "/health", "/ready", "/live", "/healthz", "/metrics", "/version", "/docs", "/openapi.json"}
)
ENGINE_PREFIX = "/engine/"  # prefix of routes that take the engine key and no other
PUBLIC_PREFIX = "/ui/"  # files of the page, which has no data of its own
MAX_KEY_BYTES = 512  # longer keys are refused without hashing
RawHeaders = Sequence[tuple[bytes, bytes]]
FileStamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Scheduling and accounting of one request."""

    cache_salt: str  # namespace of the prefix cache
    priority: int  # lower is served first
    timeout_s: float | None = None  # limit on the whole request; None: no limit
    fairness_key: str = ""
    meter: UsageMeter = field(default_factory=UsageMeter)
    model: str = ""  # name in answers
    adapter: str = ""  # digest of the LoRA adapter
    is_seeded: bool = False  # its answer is a function of the request alone
    slot: SlotKey | None = None  # None: slots are off


@dataclass(frozen=True, slots=True)
class KeyPermissions:
    """The rights of one key, or of every client if the server has no keys."""

    fairness_key: str  # name of the key; "" without keys
    cache_salt: str  # namespace of the prefix cache
    meter: UsageMeter
    admin: bool = False
    models: tuple[str, ...] | None = None  # None: all
    priority: int | None = None  # best allowed; None: any
    slot_owner: str = ""  # namespace of slots and their names, which outlive the server; "" without keys

    def may_use(self, names: Sequence[str]) -> bool:
        """Whether the key may use the model with these names: one name in the key file allows all of them."""
        return self.models is None or not set(names).isdisjoint(self.models)

    def check_model(self, name: str, names: Sequence[str]) -> None:
        """Raises Forbidden for the model that is called `name`, and has these names."""
        if not self.may_use(names):
            raise Forbidden(f"this key may not use the model {shown(name, 200)}", "model")

    def check_admin(self) -> None:
        """Raises Forbidden."""
        if not self.admin:
            raise Forbidden("this key may not use the admin routes")

    def request_context(self, priority: int | None = None, timeout_s: float | None = None) -> RequestContext:
        """Context of a request. Raises Forbidden for a better priority than the key's."""
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


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


class Keyring:
    """The keys of the command line and of the key file, which is reloaded when it changes."""

    def __init__(
        self,
        cli_keys: str | None,  # joined by commas
        path: Path | None,  # the key file
        share_prefix_cache: bool,
        usage: UsageLog | None = None,  # counts tokens of the day
        on_refusal: Callable[[str], None] | None = None,  # called with the limit that refused a request
        now: Callable[[], float] = time.time,  # Unix time, for expiry
        engine_key: str | None = None,
        salt: bytes | None = None,  # salt for the command line's keys; None: random
    ) -> None:
        """Raises ConfigError for an invalid file, and for limits a day without a usage database."""
        self._engine_key = None if engine_key is None else engine_key.strip().encode()
        self._cli_keys = _parse_cli_keys(cli_keys, salt or secrets.token_bytes(SALT_BYTES))
        self._path = path
        self._share_prefix_cache = share_prefix_cache
        self._usage = usage
        self._on_refusal = on_refusal
        self._now = now
        self._meters: dict[str, UsageMeter] = {}
        self._anonymous = KeyPermissions("", "", UsageMeter())
        self._file_stamp = _file_stamp(path)
        self._keys: tuple[Key, ...] = ()
        self._install(self._read())

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._cli_keys and self._path is None

    @property
    def has_engine_key(self) -> bool:
        return self._engine_key is not None

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._keys)

    @property
    def meters(self) -> Sequence[UsageMeter]:
        """The meters of all keys."""
        return list(self._meters.values())

    def identify(self, secret: bytes | None) -> KeyPermissions:
        """Permissions of a key. Raises Unauthorized, ExpiredKey.

        It compares every entry, so that the response time does not depend on which entry matches.
        """
        if self.is_open:
            return self._anonymous
        if secret is None:
            raise Unauthorized("an API key is required: Authorization: Bearer KEY")
        matches = []
        if len(secret) <= MAX_KEY_BYTES:
            digests = {salt: hash_key(secret, salt) for salt in self._salts}
            matches = [compare_digest(digests[key.salt], key.digest) for key in self._keys]
        if True not in matches:
            raise Unauthorized("the API key is not known")
        key = self._keys[matches.index(True)]
        if key.expires is not None and self._now() >= key.expires:
            raise ExpiredKey("the API key has expired")
        owner, rights = hashlib.sha256(key.digest).hexdigest()[:16], (key.admin, key.models, key.priority)
        salt = "" if self._share_prefix_cache else owner
        return KeyPermissions(key.name, salt, self._meters[key.name], *rights, owner)

    def check_engine_key(self, secret: bytes | None) -> None:
        """Raises Unauthorized for another key than the engine's, in a time that depends on neither."""
        assert self._engine_key is not None, "the server has no engine key"
        if not compare_digest(*(hashlib.sha256(key).digest() for key in (secret or b"", self._engine_key))):
            raise Unauthorized("the engine key is not right: Authorization: Bearer KEY")

    async def refresh(self) -> None:
        """Reload a changed file. An invalid file is logged once and changes nothing."""
        if self._path is None:
            return
        stamp = await run_in_own_thread(_file_stamp, self._path)
        if stamp != self._file_stamp:
            try:
                await self.reload()
            except ConfigError as error:
                logger.error("%s; the keys stay as they were", error)

    async def reload(self) -> None:
        """Reload the file. Raises ConfigError, which leaves the keys as they were."""
        assert self._path is not None, "reload() needs a key file"
        # Stamp before the read, so that a later change is noticed.
        self._file_stamp = await run_in_own_thread(_file_stamp, self._path)
        keys = await run_in_own_thread(self._read)
        before = {key.name for key in self._keys[len(self._cli_keys) :]}
        after = {key.name for key in keys}
        self._install(keys)
        logger.info(
            "key file read: %d keys, %d new, %d removed", len(keys), len(after - before), len(before - after)
        )

    def _read(self) -> tuple[Key, ...]:
        if self._path is None:
            return ()
        keys = read_key_file(self._path)
        check_quotas(keys, self._path, self._usage is not None and self._usage.path is not None)
        return keys

    def _install(self, keys: Sequence[Key]) -> None:
        """Use these keys of the file. A key of the same name keeps its usage."""
        self._keys = (*self._cli_keys, *keys)
        self._salts = frozenset(key.salt for key in self._keys)
        self._meters = {key.name: self._meter_for(key) for key in self._keys}

    def _meter_for(self, key: Key) -> UsageMeter:
        meter = self._meters.get(key.name)
        if meter is None:
            return UsageMeter(key, on_refusal=self._on_refusal, usage=self._usage)
        meter.set_key(key)
        return meter


def _parse_cli_keys(text: str | None, salt: bytes) -> tuple[Key, ...]:
    """Keys without limits, named "#1", "#2" ..., which are no valid names in a file."""
    secret_keys = [part.strip().encode() for part in (text or "").split(",") if part.strip()]
    return tuple(
        Key(f"#{index}", salt, hash_key(secret, salt), priority=None)
        for index, secret in enumerate(secret_keys, start=1)
    )


def _file_stamp(path: Path | None) -> FileStamp | None:
    """Differs after a change of the file; None without a file."""
    try:
        stat = os.stat(path) if path is not None else None
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat is not None else None


def key_from_headers(headers: RawHeaders) -> bytes | None:
    """The key of `Authorization: Bearer KEY`, else of `x-api-key` (Anthropic's clients), else None.

    Raises Unauthorized for another scheme, and for several keys, of which a proxy may have checked another.
    """
    authorization = [value.strip() for name, value in headers if name == b"authorization"]
    api_key = [value.strip() for name, value in headers if name == b"x-api-key"]
    if len(authorization) > 1 or len(api_key) > 1:
        raise Unauthorized("more than one API key was sent")
    if not authorization:
        return api_key[0] if api_key else None
    scheme, _, key = authorization[0].partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise Unauthorized("an API key is required: Authorization: Bearer KEY")
    return key.strip()


class AuthenticationMiddleware:
    """Refuses clients without a valid key, or without keys web pages of others.

    `request.state.access` holds the permissions of all other clients.
    """

    def __init__(
        self, app: ASGIApp, keys: Keyring, browser_guard: BrowserGuard, on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._browser_guard = browser_guard
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_public(scope["path"]):
            try:
                if self._keys.has_engine_key and scope["path"].startswith(ENGINE_PREFIX):
                    self._keys.check_engine_key(key_from_headers(scope["headers"]))
                else:
                    secret = None
                    if self._keys.is_open:
                        self._browser_guard.check(scope)
                    else:
                        secret = key_from_headers(scope["headers"])
                    scope.setdefault("state", {})["access"] = self._keys.identify(secret)
            except ForewordError as error:
                self._on_refusal("forbidden" if isinstance(error, Forbidden) else "unauthorized")
                return await error_response(error, scope)(scope, receive, send)
        await self._app(scope, receive, send)
