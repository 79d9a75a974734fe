"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from foreword.errors import Forbidden
from foreword.serve.limits import UsageMeter

__all__ = ["KeyPermissions", "PermissionsDep", "RequestContext"]


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
            raise Forbidden(f"priority: this key may ask for {best} and above, which is served later, got {priority}", "priority")
        chosen = max(0, best or 0) if priority is None else priority
        return RequestContext(self.cache_salt, chosen, timeout_s, self.fairness_key, self.meter)


def _get_permissions(request: Request) -> KeyPermissions:
    access: KeyPermissions = request.state.access
    return access


PermissionsDep = Annotated[KeyPermissions, Depends(_get_permissions)]
