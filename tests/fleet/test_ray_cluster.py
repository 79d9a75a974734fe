"""Three machines of Ray on this one: a dead one loses no stream, waiting adds servers, draining ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.cli.configuration import to_environment
from foreword.cli.fleet import _node_config
from foreword.config.options import Config
from foreword.errors import ForewordError
from foreword.fleet.replica_controller import Autoscaler
from tests.support.processes import kill_tree
from tests.support.streams import NUM_STREAMS, ask_all
from tests.support.waiting import WAIT_S, wait_until

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
from foreword.fleet.ray_cluster import RayCluster  # noqa: E402
from foreword.fleet.replica_controller import ReplicaController, RouterClient  # noqa: E402

pytestmark = [
    pytest.mark.full,
    # of Ray's own code
    *(pytest.mark.filterwarnings(f"ignore::{name}") for name in ("FutureWarning", "DeprecationWarning")),
    *(pytest.mark.filterwarnings(f"ignore::{name}") for name in ("ResourceWarning", "UserWarning")),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "a key of the engines"
TICK_S = 0.3
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 1024, "kv_cache_memory": "40000tokens"}
NODE = {"num_cpus": 1, "memory": 2 << 30, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A head and two more, each with room for one server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of one undisturbed server."""
    with ServerProcess(Config(**OPTIONS)) as server:
        return asyncio.run(ask_all(server.url))


class Fleet:
    """A router, and a controller in a thread."""

    def __init__(self, address: str, minimum: int, maximum: int, **options: Any) -> None:
        self.cluster = RayCluster(address)
        self.urls: list[str] = []
        config = Config(**OPTIONS, **options, engine_key=KEY)
        scaler = Autoscaler(minimum, maximum, 0.5, 2.0)
        self.client = RouterClient("", KEY)  # a router without an address does not serve yet
        self.controller = ReplicaController(
            self.cluster, self.client, _node_config(config), scaler, to_environment, self.on_change
        )
        while not self.urls:
            self.controller.tick()
        flags = ("--replicas", "0", "--replica-urls", *self.urls, "--engine-key", KEY)
        self.router = ServerProcess(Config(), flags)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def on_change(self, urls: list[str]) -> None:
        self.urls = urls

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            self.controller.tick()

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.controller.stop_all)
            self.router = stack.enter_context(self.router)
            self.client.url = self.router.url
            self._thread.start()
            stack.callback(self._thread.join)
            stack.callback(self._stopped.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def num_ready(self) -> int:
        model = self.client.model()
        return 0 if model is None else sum(each["status"] == "ok" for each in model["replicas"])


def server_pid(url: str) -> int:
    """The process that was started with this port."""
    variable = f"FOREWORD_PORT={url.rpartition(':')[2]}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable in (path / "environ").read_bytes().split(b"\0"):
                pids.append(int(path.name))
    return min(pids)


def test_dead_head_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller knows no exceptions of Ray, and skips its ticks meanwhile."""

    def fail() -> None:
        raise ray.exceptions.RaySystemError("GCS is gone")

    cluster = RayCluster.__new__(RayCluster)
    cluster._ray = ray
    monkeypatch.setattr(ray, "nodes", fail)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", fail)
    for call in (cluster.alive_nodes, lambda: cluster.nodes(Config())):
        with pytest.raises(ForewordError, match="GCS is gone"):
            call()


def test_dead_machine_loses_no_stream(machines: Any, expected: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(machines.address, 2, 2))
        wait_until(lambda: fleet.num_ready() == 2)
        servers, own_node = fleet.controller._servers, ray.get_runtime_context().get_node_id()
        address = next(name for name, server in servers.items() if server.node_id != own_node)
        dead, num_events = f"http://{address}", 0
        node_id = servers[address].node_id
        machine = next(each for each in machines.list_all_nodes() if each.node_id == node_id)

        def on_event() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 5 * NUM_STREAMS:
                kill_tree(server_pid(dead))
                machines.remove_node(machine, allow_graceful=False)
                stack.callback(machines.add_node, **NODE)

        assert asyncio.run(ask_all(fleet.router.url, on_event)) == expected
        wait_until(lambda: fleet.num_ready() == 2 and dead not in fleet.urls)


def test_fleet_up_status_and_down(machines: Any, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"models": {"demo": {**OPTIONS, "replicas": 2}}}))
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    log = tmp_path / "up.log"  # not a pipe: unread, it would block the process

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "foreword", "fleet", *words, "--port", "21399"]

    def status() -> str:
        words, pipe = command("status"), subprocess.PIPE
        return subprocess.run(
            words, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S
        ).stdout

    with log.open("wb") as output:
        words = command("up", str(file), "--ray", machines.address)
        up = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
    try:
        # Beside other work, Ray's first call on a machine may reach its limit; it is repeated after minutes.
        wait_until(lambda: status().count(" ok, ") == 2, 3 * WAIT_S)
        assert asyncio.run(ask_all("http://127.0.0.1:21399")) == expected
        urls = [line.split()[0] for line in status().splitlines()[1:]]
        subprocess.run(command("down"), env=environment, check=True, timeout=WAIT_S)
        assert up.wait(WAIT_S) == 0
        for url in urls:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://{url}/live")
        assert "no fleet of this user runs on port 21399" in status()
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
            up.wait(WAIT_S)
        print(log.read_text())
