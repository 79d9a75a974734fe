"""Protection of a server without keys from web pages: the browser of a trusted user sends their requests."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.types import Scope

from foreword.config.options import Config
from foreword.errors import Forbidden, shown

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # change nothing, and another site cannot read their answer
OWN_SITES = ("same-origin", "none")  # values of Sec-Fetch-Site; none: the user entered the address
# Names that cannot be registered, so that no web page has them: of containers, services and local machines.
LOCAL_DOMAINS = (".localhost", ".local", ".internal")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class BrowserGuard:
    """Refuses requests by which a web page uses a server that its user can reach.

    A page whose own name resolves to this server (DNS rebinding) sends that name as Host. A page of another
    site sends its Origin; CORS hides the answer from it, but not the request's effect.
    """

    def __init__(self, config: Config) -> None:
        listed = _split_list(config.allowed_hosts.lower())
        self._allows_all_hosts = "*" in listed or config.uds is not None  # no browser opens a Unix socket
        self._hosts = {config.host.lower(), *listed}
        self._domains = (
            *LOCAL_DOMAINS,
            *(name.removeprefix("*") for name in listed if name.startswith((".", "*."))),
        )
        self._origins = split_origins(config)

    def check(self, scope: Scope) -> None:
        """Raises Forbidden for a request of a page that is not this server's own."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if not self._allows_all_hosts and not self._is_own_name(name := _host_name(host)):
            raise Forbidden(
                f"this server has no keys and is not known as {shown(name, 200)}: web pages could reach it "
                "by any name; start it with --allowed-hosts and this name, or with --api-key"
            )
        if scope["method"] in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site", "none") not in OWN_SITES:
                raise Forbidden(
                    "this server has no keys and takes no such request from the page of another site"
                )
        elif not self._is_own_origin(origin, host):
            raise Forbidden(
                f"this server has no keys and takes no such request from pages of {shown(origin, 200)}: "
                "start it with --cors-origins and this origin, or let the proxy pass on the Host of its "
                "clients"
            )

    def _is_own_name(self, name: str) -> bool:
        """Whether no other site's page can have this name: an address, a local name, or a listed one."""
        is_local = "." not in name or name in self._hosts or name.endswith(self._domains)
        return is_local or _is_address(name)

    def _is_own_origin(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, netloc = origin.lower().partition("://")
        port = DEFAULT_PORTS.get(scheme)
        return port is not None and netloc.removesuffix(port) == host.removesuffix(port)


def split_origins(config: Config) -> list[str]:
    """--cors-origins as a list."""
    return _split_list(config.cors_origins)


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _host_name(host: str) -> str:
    """A Host header without port and final dot: "[::1]:8000" -> "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
