"""Keeps the servers of one model running on a cluster, as many as its requests need. Knows no Ray.

Autoscaler decides on their number and choose_node() on the place: without calls and clocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import httpx

from foreword.config.options import Config
from foreword.engine_client.remote_messages import build_digest
from foreword.errors import ForewordError
from foreword.planning.memory import format_bytes

MIN_SPARE_SHARE: Final = 0.5  # free share of the remaining servers before one is removed
logger = logging.getLogger(__name__)
START_TIMEOUT_S: Final = 1800.0  # limit until a server answers, a download included
LOST_S: Final = 10.0  # silence after which a server that did answer is replaced
OUTAGE_S: Final = 60.0  # silence of the cluster after which only a new connection may help
RETRY_S: Final = 10.0  # pause after a server could not be placed, or ended while it was loading
CALL_TIMEOUT_S: Final = 10.0
END_TIMEOUT_S, END_POLL_S = 30.0, 0.2  # limit and poll interval of stopping servers


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that one server of a model takes."""

    num_bytes: int  # memory, of the GPU if it runs there
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A machine of the cluster, before a server is placed on it."""

    id: str
    address: str  # network address
    free_bytes: int  # free memory
    free_cores: float
    free_gpus: float
    has_files: bool  # whether it has the model's files
    build: str  # digest of its installation of Foreword, "" without one
    num_servers: int = 0  # servers of this model


def choose_node(nodes: Sequence[NodeFacts], needs: Needs, build: str) -> NodeFacts | None:
    """The machine for one more server; None if it fits on none.

    Machines with fewer servers of the model come first, then those that have its files, then those with more
    free memory.
    """
    fitting = [node for node in nodes if not why_not(node, needs, build)]
    return max(
        fitting, key=lambda node: (-node.num_servers, node.has_files, node.free_bytes, node.id), default=None
    )


def why_not(node: NodeFacts, needs: Needs, build: str) -> str:
    """Why a server does not run on this machine; "" if it does."""
    if node.build != build:
        return "another build of Foreword" if node.build else "no Foreword is installed"
    if not needs.gpus and node.free_bytes < needs.num_bytes:
        return f"{format_bytes(node.free_bytes)} of memory are free, it needs {format_bytes(needs.num_bytes)}"
    if node.free_cores < needs.cores:
        return f"{node.free_cores:g} cores are free, it needs {needs.cores}"
    if node.free_gpus < needs.gpus:
        return f"{node.free_gpus:g} GPUs are free, it needs {needs.gpus}"
    return ""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The requests of a model at one moment."""

    longest_wait_s: float  # age of the oldest request without a token
    num_requests: int  # running and waiting
    max_num_seqs: int  # requests that one server runs at a time


class Autoscaler:
    """The number of servers of one model, by the time that its requests wait.

    One more server as soon as a request has waited `up_wait_s`, unless one is starting already. One less
    once the others could have run all requests, with as much to spare, for `down_after_s`.
    """

    def __init__(self, minimum: int, maximum: int, up_wait_s: float, down_after_s: float) -> None:
        assert 1 <= minimum <= maximum
        self.target = minimum
        self._minimum, self._maximum = minimum, maximum
        self._up_wait_s, self._down_after_s = up_wait_s, down_after_s
        self._spare_since_s: float | None = None

    def update(self, load: ModelLoad, num_ready: int, now_s: float) -> int:
        """The number wanted now, where `num_ready` servers answer."""
        if load.longest_wait_s >= self._up_wait_s:
            self._spare_since_s = None
            if num_ready >= self.target:
                self.target = min(self.target + 1, self._maximum)
            return self.target
        others = (num_ready - 1) * load.max_num_seqs * MIN_SPARE_SHARE
        if num_ready < self.target or self.target <= self._minimum or load.num_requests > others:
            self._spare_since_s = None
        elif self._spare_since_s is None:
            self._spare_since_s = now_s
        elif now_s - self._spare_since_s >= self._down_after_s:
            self.target -= 1
            self._spare_since_s = None
        return self.target


class Cluster(Protocol):
    """See RayCluster."""

    def nodes(self, config: Config) -> list[NodeFacts]: ...

    def alive_nodes(self) -> set[str]: ...

    def plan(self, node: NodeFacts, config: Config) -> tuple[Config, Needs]: ...

    def start_server(self, node: NodeFacts, needs: Needs, environment: Mapping[str, str]) -> str: ...

    def why_ended(self, url: str) -> str | None: ...

    def forget(self, url: str) -> None: ...


class RouterClient:
    """The router's routes for replicas (server/routes/engine.py), and those of the servers."""

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"},
            timeout=CALL_TIMEOUT_S,
            trust_env=False,  # no proxy
            transport=transport,
        )

    def model(self) -> dict[str, Any] | None:
        """The first model with replicas; None as long as the router does not serve."""
        try:
            response = self._http.get(f"{self.url}/engine/replicas")
            return dict(response.json()["models"][0]) if response.is_success else None
        except (httpx.HTTPError, ValueError, LookupError):
            return None

    def add(self, server_url: str) -> None:
        self._send("POST", f"{self.url}/engine/replicas", json={"url": server_url})

    def drain(self, server_url: str) -> None:
        self._send("DELETE", f"{self.url}/engine/replicas/{address_of(server_url)}")

    def stop(self, server_url: str) -> None:
        """End a server; its open requests may finish."""
        self._send("POST", f"{server_url}/engine/shutdown")

    def is_running(self, server_url: str) -> bool:
        """Whether its port is open."""
        try:
            self._http.get(f"{server_url}/live")
        except httpx.ConnectError:
            return False
        except httpx.HTTPError:
            pass
        return True

    def _send(self, method: str, url: str, **options: Any) -> None:
        """A call that is repeated if it was lost, or that nobody needs any more."""
        try:
            self._http.request(method, url, **options)
        except httpx.HTTPError as error:
            logger.info("%s %s: %s", method, url, error or type(error).__name__)


def address_of(url: str) -> str:
    """The id of a server in the router's list."""
    return url.partition("://")[2]


@dataclass(slots=True)
class _Server:
    """A server that was started, or found in the router's list."""

    url: str
    node_id: str | None  # None: another controller has started it
    started_s: float
    answered_s: float | None = None  # when the router last had its answer


class ReplicaController:
    """tick() compares what runs with what is wanted, and starts or drains at most one server."""

    def __init__(
        self,
        cluster: Cluster,
        router: RouterClient,
        config: Config,
        autoscaler: Autoscaler,
        make_environment: Callable[[Config], Mapping[str, str]],
        on_change: Callable[[list[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """config            of the servers; the first plan completes it
        make_environment  their options as variables
        on_change         called with the URLs of all servers
        """
        self._cluster = cluster
        self._router = router
        self._config = config
        self._autoscaler = autoscaler
        self._make_environment = make_environment
        self._on_change = on_change
        self._clock = clock
        self._needs: Needs | None = None
        self._servers: dict[str, _Server] = {}  # keyed by address
        self._retry_s = 0.0  # no placement before
        self._logged = ""
        self._outage_since_s: float | None = None  # the cluster does not answer

    def tick(self) -> None:
        """Raises RuntimeError if the cluster has not answered for OUTAGE_S. The servers run without it."""
        try:
            self._tick()
        except ForewordError as error:
            if self._outage_since_s is None:
                logger.warning("the cluster does not answer: %s", error.message)
                self._outage_since_s = self._clock()
            elif self._clock() - self._outage_since_s > OUTAGE_S:
                raise RuntimeError(f"the cluster has not answered for {OUTAGE_S:g} s") from error
        else:
            self._outage_since_s = None

    def _tick(self) -> None:
        model = self._router.model()
        states: dict[str, Any] = {}
        if model is not None:
            states = {state["id"]: state for state in model["replicas"] if state["address"]}
            self._adopt(states)
        self._record_answers(model is not None, states)
        self._drop_dead(states)
        num_ready = sum(states.get(address, {}).get("status") == "ok" for address in self._servers)
        target = self._autoscaler.target
        if model is not None:
            load = ModelLoad(model["longest_wait_s"], model["num_requests"], model["max_num_seqs"])
            target = self._autoscaler.update(load, num_ready, self._clock())
        if len(self._servers) > target:
            self._remove(states)
        elif len(self._servers) < target and self._clock() >= self._retry_s:
            self._place()

    def _adopt(self, states: Mapping[str, Any]) -> None:
        """Take over servers of a controller before this one, and tell the router the ones it lacks."""
        for address in states:
            if address not in self._servers:
                self._servers[address] = _Server(f"http://{address}", None, self._clock())
                self._changed()
        for address, server in self._servers.items():
            if address not in states:
                self._router.add(server.url)

    def _record_answers(self, router_serves: bool, states: Mapping[str, Any]) -> None:
        """While the router does not serve, it cannot tell which servers answer: none is late then."""
        if not router_serves:
            for server in self._servers.values():
                server.answered_s = None if server.answered_s is None else self._clock()
        for address, server in self._servers.items():
            if states.get(address, {}).get("status") in ("ok", "restarting"):
                if server.answered_s is None:
                    logger.info("server %s is ready", address)
                server.answered_s = self._clock()

    def _drop_dead(self, states: Mapping[str, Any]) -> None:
        """Forget servers whose machine or process is gone: another one takes their place."""
        alive = self._cluster.alive_nodes()
        now = self._clock()
        for address, server in list(self._servers.items()):
            if states.get(address, {}).get("status") in ("ok", "restarting"):
                continue
            reason = None
            if server.node_id is not None:
                reason = "its machine is gone" if server.node_id not in alive else None
                reason = reason or self._cluster.why_ended(server.url)
            is_late = now - server.started_s > START_TIMEOUT_S
            if server.answered_s is not None and now - server.answered_s > LOST_S:
                reason = reason or f"it does not answer for {LOST_S:g} s"
            elif server.answered_s is None and (is_late or reason is not None):
                reason = reason or f"it did not answer within {START_TIMEOUT_S:g} s"
                self._retry_s = now + RETRY_S
            if reason is not None:
                logger.warning("removing server %s: %s", address, reason)
                self._forget(address)

    def _place(self) -> None:
        """Start one more server, or say why not and wait a while."""
        try:
            nodes = self._cluster.nodes(self._config)
            if self._needs is None:
                self._config, self._needs = self._plan(nodes)
            counts = [server.node_id for server in self._servers.values()]
            nodes = [replace(node, num_servers=counts.count(node.id)) for node in nodes]
            node = choose_node(nodes, self._needs, build_digest())
            if node is None:
                reasons = [f"{each.address}: {why_not(each, self._needs, build_digest())}" for each in nodes]
                self._log_once("no machine for one more server: " + ("; ".join(reasons) or "there is none"))
            else:
                url = self._cluster.start_server(node, self._needs, self._make_environment(self._config))
                self._servers[address_of(url)] = _Server(url, node.id, self._clock())
                logger.info("server %s starts on %s", address_of(url), node.address)
                self._router.add(url)
                self._changed()
                self._logged = ""
                return
        except ForewordError as error:
            self._log_once(f"no server could be started: {error.message}")
        self._retry_s = self._clock() + RETRY_S

    def _plan(self, nodes: list[NodeFacts]) -> tuple[Config, Needs]:
        """Choose every option once, on a machine that has the files if there is one."""
        usable = [node for node in nodes if node.build == build_digest()]
        if not usable:
            raise ForewordError("no machine has the same build of Foreword as the router")
        node = max(usable, key=lambda node: (node.has_files, node.free_bytes))
        return self._cluster.plan(node, self._config)

    def _remove(self, states: Mapping[str, Any]) -> None:
        """Drain the server with the fewest requests."""

        def load(address: str) -> tuple[bool, int]:
            state = states.get(address, {})
            return state.get("status") == "ok", state.get("running", 0) + state.get("waiting", 0)

        address = min(self._servers, key=load)
        logger.info("server %s is drained", address)
        url = self._servers[address].url
        self._forget(address)
        self._router.stop(url)

    def _forget(self, address: str) -> None:
        server = self._servers.pop(address)
        self._router.drain(server.url)
        self._cluster.forget(server.url)
        self._changed()

    def stop_all(self) -> None:
        """End all servers, and wait for them."""
        urls = [server.url for server in self._servers.values()]
        for url in urls:
            self._router.stop(url)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while (running := [url for url in urls if self._router.is_running(url)]) and (
            time.monotonic() < deadline_s
        ):
            time.sleep(END_POLL_S)
        for url in running:
            logger.warning("the server %s has not ended yet", url)
        self._servers.clear()
        for url in urls:
            self._cluster.forget(url)

    def _changed(self) -> None:
        self._on_change([server.url for server in self._servers.values()])

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            logger.warning("%s", text)
            self._logged = text
