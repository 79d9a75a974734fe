"""The controller over a fake cluster and a fake router: placement, deaths, scaling, restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from foreword.config.options import Config
from foreword.engine_client.remote_messages import build_digest
from foreword.errors import ConfigError
from foreword.fleet.replica_controller import Autoscaler, Needs, NodeFacts, ReplicaController, RouterClient
from tests.support.waiting import FakeClock

KEY = "a key of the engines"
ROUTER = "http://router:8000"
GIB = 1 << 30


class FakeCluster:
    """Machines with four cores each; a server needs one."""

    def __init__(self, num_nodes: int = 3) -> None:
        self.alive = {f"n{index}" for index in range(num_nodes)}
        self.servers: dict[str, str] = {}  # node by URL
        self.ended: dict[str, str] = {}  # reason by URL
        self.plans = self.num_started = 0
        self.error: ConfigError | None = None
        self.is_lost = False  # Ray's head has died
        self.builds: dict[str, str] = {}

    def nodes(self, config: Config) -> list[NodeFacts]:
        placed = list(self.servers.values())
        return [
            NodeFacts(
                node,
                node,
                8 * GIB,
                4.0 - placed.count(node),
                0.0,
                True,
                self.builds.get(node, build_digest()),
            )
            for node in sorted(self.alive)
        ]

    def alive_nodes(self) -> set[str]:
        if self.is_lost:
            raise ConfigError("ray: no head")
        return self.alive

    def plan(self, node: NodeFacts, config: Config) -> tuple[Config, Needs]:
        self.plans += 1
        return config, Needs(GIB, 1)

    def start_server(self, node: NodeFacts, needs: Needs, environment: Mapping[str, str]) -> str:
        if self.error is not None:
            raise self.error
        self.num_started += 1
        url = f"http://{node.id}:{self.num_started}"
        self.servers[url] = node.id
        return url

    def why_ended(self, url: str) -> str | None:
        return self.ended.get(url)

    def forget(self, url: str) -> None:
        self.servers.pop(url, None)


class FakeRouter:
    """The routes of a router, as an httpx transport; it keeps the states of its replicas."""

    def __init__(self) -> None:
        self.serves = True
        self.states: dict[str, str] = {}  # status by address
        self.stopped: list[str] = []  # servers
        self.num_polls = 0  # of servers that were stopped; the first finds them running
        self.wait_s, self.num_requests = 0.0, 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        if request.url.path == "/engine/shutdown":
            self.stopped.append(request.url.netloc.decode())
            return httpx.Response(204)
        if request.url.path == "/live":
            self.num_polls += 1
            if self.num_polls > len(self.stopped):
                raise httpx.ConnectError("refused")
            return httpx.Response(200)
        if not self.serves:
            raise httpx.ConnectError("refused")
        if request.method == "POST":
            self.states.setdefault(json.loads(request.content)["url"].removeprefix("http://"), "loading")
            return httpx.Response(204)
        if request.method == "DELETE":
            self.states.pop(request.url.path.rpartition("/")[2], None)
            return httpx.Response(204)
        replicas: list[dict[str, Any]] = [
            {"id": address, "address": address, "status": status, "running": 0, "waiting": 0}
            for address, status in self.states.items()
        ]
        load = {"longest_wait_s": self.wait_s, "num_requests": self.num_requests, "max_num_seqs": 8}
        return httpx.Response(200, json={"models": [{"name": "m", **load, "replicas": replicas}]})

    def all_ready(self) -> None:
        self.states = dict.fromkeys(self.states, "ok")


class Fleet:
    def __init__(self, minimum: int = 2, maximum: int = 3) -> None:
        self.cluster, self.router, self.clock = FakeCluster(), FakeRouter(), FakeClock()
        self.urls: list[str] = []
        self.controller = self.make_controller(minimum, maximum)

    def make_controller(self, minimum: int, maximum: int) -> ReplicaController:
        return ReplicaController(
            self.cluster,
            RouterClient(ROUTER, KEY, httpx.MockTransport(self.router.answer)),
            Config(),
            Autoscaler(minimum, maximum, 5.0, 60.0),
            lambda config: {},
            self.urls_changed,
            self.clock,
        )

    def urls_changed(self, urls: list[str]) -> None:
        self.urls = urls

    def tick(self, count: int = 1, *, ready: bool = True) -> None:
        for _ in range(count):
            self.controller.tick()
            if ready:
                self.router.all_ready()
            self.clock.now += 1.0


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.tick(3)
    return fleet


def test_servers_are_spread_over_the_machines(fleet: Fleet) -> None:
    assert sorted(fleet.cluster.servers.values()) == ["n1", "n2"]
    assert sorted(fleet.router.states) == [url.removeprefix("http://") for url in sorted(fleet.urls)]
    assert fleet.cluster.plans == 1  # all get the options of one plan
    fleet.tick(10)
    assert fleet.cluster.num_started == 2


@pytest.mark.parametrize("cause", ["machine", "process", "silence"])
def test_dead_server_is_replaced(fleet: Fleet, cause: str) -> None:
    url, node = next(iter(fleet.cluster.servers.items()))
    fleet.router.states[url.removeprefix("http://")] = "unresponsive"
    if cause == "machine":
        fleet.cluster.alive.remove(node)
    elif cause == "process":
        fleet.cluster.ended[url] = "out of memory"
    fleet.tick(9, ready=False)
    assert (url in fleet.cluster.servers) == (cause == "silence")
    fleet.tick(3, ready=False)
    assert url not in fleet.cluster.servers
    assert url.removeprefix("http://") not in fleet.router.states
    fleet.tick(2)
    assert len(fleet.cluster.servers) == 2
    assert (node in fleet.cluster.servers.values()) <= (cause != "machine")


def test_server_whose_engine_restarts_is_left_alone(fleet: Fleet) -> None:
    fleet.router.states = dict.fromkeys(fleet.router.states, "restarting")
    fleet.tick(100, ready=False)
    assert fleet.cluster.num_started == 2


def test_absent_router_condemns_no_server(fleet: Fleet) -> None:
    fleet.router.serves = False
    fleet.tick(100, ready=False)
    fleet.router.serves, fleet.router.states = True, {}  # it was started again, and knows no server
    fleet.tick(1, ready=False)
    assert sorted(fleet.router.states.values()) == ["loading", "loading"]
    fleet.tick(9)
    assert fleet.cluster.num_started == 2


def test_waiting_requests_get_a_further_server_which_is_drained_later(fleet: Fleet) -> None:
    fleet.router.wait_s = 6.0
    fleet.tick(3)
    assert len(fleet.cluster.servers) == 3
    fleet.router.wait_s = 0.0
    fleet.tick(60)
    assert len(fleet.cluster.servers) == 3
    fleet.tick(5)
    assert len(fleet.cluster.servers) == len(fleet.router.states) == 2
    (stopped,) = fleet.router.stopped
    assert stopped not in fleet.router.states


def test_next_controller_takes_over_the_servers(fleet: Fleet) -> None:
    before = set(fleet.router.states)
    fleet.controller = fleet.make_controller(2, 3)
    fleet.tick(5)
    assert set(fleet.router.states) == before
    assert {url.removeprefix("http://") for url in fleet.urls} == before
    assert fleet.cluster.num_started == 2
    fleet.controller.stop_all()
    assert set(fleet.router.stopped) == before and fleet.router.num_polls == 4


def test_outage_of_the_cluster_is_logged_once_and_ends_no_server(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(fleet.router.states)
    for outage in (1, 2):
        fleet.cluster.is_lost = True
        fleet.tick(50)
        assert fleet.router.states == before and not fleet.router.stopped
        assert caplog.text.count("the cluster does not answer: ray: no head") == outage
        fleet.cluster.is_lost = False
        fleet.tick(3)
    assert fleet.cluster.num_started == 2


def test_long_outage_ends_the_controller(fleet: Fleet) -> None:
    """A new process connects to the cluster again."""
    fleet.cluster.is_lost = True
    with pytest.raises(RuntimeError, match="has not answered for 60 s"):  # no refusal of the configuration
        fleet.tick(100)
    assert not fleet.router.stopped


def test_failed_start_waits_before_the_next(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    lonely = Fleet()
    lonely.cluster.error = ConfigError("ray: no room")
    lonely.tick(30)
    assert caplog.text.count("no server could be started: ray: no room") == 1
    lonely.cluster.error = None
    lonely.tick(12)
    assert lonely.cluster.num_started == 2


def test_server_that_ends_while_it_loads_is_tried_again_after_a_while(fleet: Fleet) -> None:
    fleet = Fleet(1, 1)
    fleet.tick(1, ready=False)
    (first,) = fleet.urls
    fleet.cluster.ended[first] = "the model does not fit"
    fleet.tick(9, ready=False)
    assert fleet.urls == []
    fleet.tick(5, ready=False)
    assert fleet.cluster.num_started == 2


def test_machine_of_another_build_gets_no_server(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.cluster.builds = {"n0": "old", "n1": ""}
    fleet.tick(3)
    assert set(fleet.cluster.servers.values()) == {"n2"}
    fleet.cluster.builds["n2"] = "old"
    fleet.cluster.ended[fleet.urls[0]] = "gone"
    fleet.router.states = dict.fromkeys(fleet.router.states, "unresponsive")
    fleet.tick(20, ready=False)
    assert "n0: another build of Foreword; n1: no Foreword is installed" in caplog.text
