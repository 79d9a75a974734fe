"""Ray as a control plane: which machines there are, and the processes on them. No token goes through Ray.

A server is a `foreword serve` that outlives the actor that started it: it ends by itself once no router has
a session with it (--router-timeout). So the loss of Ray's head, or of this process, ends no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from foreword.config.models_file import ModelEntry, ModelsConfig
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import read_proc_stat
from foreword.engine_client.remote_messages import build_digest
from foreword.errors import ConfigError, ForewordError
from foreword.fleet.memory import plan_fleet
from foreword.fleet.replica_controller import Needs, NodeFacts
from foreword.planning.hardware import hardware_info, probe_hardware

LOCAL: Final = "local"  # address of a cluster on this machine alone, which ends with this process
NAMESPACE: Final = "foreword"
CALL_TIMEOUT_S: Final = 60.0  # limit on a call on a machine; the first one starts a process there
LOG_BYTES: Final = 4096  # read from the end of a server's log
# Starts a process that is nobody's child, and prints its id. Ray ends the children of an actor with it.
LAUNCHER: Final = """
import subprocess, sys
log = open(sys.argv[1], "ab")
process = subprocess.Popen(
    sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
)
print(process.pid)
"""


class RayCluster:
    """A connection to Ray's head. Calls block; a machine that does not answer raises ForewordError."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError without Ray, or without a cluster at this address."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray: Any = importlib.import_module("ray")
            self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        except ImportError:
            raise ConfigError("ray needs its Python package: pip install 'foreword[ray]'", "ray") from None
        where = {"include_dashboard": False} if address == LOCAL else {"address": address}
        try:
            self._ray.init(**where, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"ray: no cluster at {address}: {reason}", "ray") from None
        self._supervisors: dict[str, Any] = {}  # actors, by URL of their server

    def nodes(self, config: Config) -> list[NodeFacts]:
        """The machines that answer. `config` names the model whose files are looked for.

        Raises ForewordError if Ray's head does not answer.
        """
        available = self._checked(self._ray._private.state.available_resources_per_node)
        probes = {node: self._task(probe_node, node).remote(config.model) for node in self.alive_nodes()}
        nodes = []
        for node, probe in probes.items():
            try:
                address, free_bytes, has_files, build = self._ray.get(probe, timeout=CALL_TIMEOUT_S)
            except Exception:  # it died meanwhile
                continue
            free = available.get(node, {})
            cores, gpus = free.get("CPU", 0.0), free.get("GPU", 0.0)
            nodes.append(NodeFacts(node, address, free_bytes, cores, gpus, has_files, build))
        return nodes

    def alive_nodes(self) -> set[str]:
        """Raises ForewordError if Ray's head does not answer."""
        return {node["NodeID"] for node in self._checked(self._ray.nodes) if node["Alive"]}

    def plan(self, node: NodeFacts, config: Config) -> tuple[Config, Needs]:
        """The options that all servers of the model get, and their needs. Raises ForewordError."""
        return self._call(self._task(plan_server, node.id).remote(config))  # type: ignore[no-any-return]

    def start_server(self, node: NodeFacts, needs: Needs, environment: Mapping[str, str]) -> str:
        """Start a server there; returns its URL, at which it will answer. Raises ForewordError."""
        actor_class = self._ray.remote(ServerSupervisor)
        actor = actor_class.options(
            num_cpus=needs.cores,
            num_gpus=needs.gpus,
            memory=0 if needs.gpus else needs.num_bytes,
            max_concurrency=1,
            scheduling_strategy=self._strategy(node.id),
        ).remote(node.address, dict(environment))
        url: str = self._call(actor.start.remote())
        self._supervisors[url] = actor
        return url

    def why_ended(self, url: str) -> str | None:
        """Exit reason of a dead server (its log's tail); None while it runs."""
        try:
            reason: str | None = self._call(self._supervisors[url].why_ended.remote())
        except ForewordError as error:
            return error.message
        return reason

    def forget(self, url: str) -> None:
        """Free what a server that ends has reserved."""
        actor = self._supervisors.pop(url, None)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):  # Ray forgot it, with its machine
                self._ray.kill(actor)

    def close(self) -> None:
        self._ray.shutdown()

    def _strategy(self, node_id: str) -> Any:
        return self._strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)

    def _task(self, function: Any, node_id: str) -> Any:
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._strategy(node_id)}
        return self._ray.remote(function).options(**options)

    def _call(self, reference: Any) -> Any:
        return self._checked(lambda: self._ray.get(reference, timeout=CALL_TIMEOUT_S))

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            cause = getattr(error, "cause", None)  # an exception of the function itself
            if isinstance(cause, ForewordError):
                raise cause from None
            reason = str(cause or error).strip().splitlines()
            raise ConfigError(f"ray: {reason[-1] if reason else type(error).__name__}", "ray") from None


# What runs on the machines


def probe_node(model: str | None) -> tuple[str, int, bool, str]:
    """Address, free bytes of memory, whether the model's files are there, and the build."""
    address = importlib.import_module("ray.util").get_node_ip_address()
    has_files = model is None or Path(model).expanduser().exists()
    return address, hardware_info(probe_hardware("cpu")).free_bytes, has_files, build_digest()


def plan_server(config: Config) -> tuple[Config, Needs]:
    """The config with every option that answers depend on, and the needs. Raises ForewordError."""
    models = ModelsConfig((ModelEntry("model", config),), None, None, 0.0)
    plan = asyncio.run(plan_fleet(models, ForkServer())).plans[0]
    resolved = plan.resolved
    assert resolved is not None, "a server has an engine"
    config = replace(
        config,
        device=resolved.device,
        dtype=resolved.dtype,
        threads=resolved.threads,
        max_model_len=resolved.max_model_len,
        kv_cache_memory=plan.entry.config.kv_cache_memory,
    )
    on_gpu = resolved.device == "cuda"
    return config, Needs(plan.num_bytes, 1 if on_gpu else resolved.threads, int(on_gpu))


class ServerSupervisor:
    """An actor: it starts one server, and holds its resources."""

    def __init__(self, host: str, environment: dict[str, str]) -> None:
        """environment  the server's options as variables"""
        self._host = host
        self._environment = environment
        self._pid = 0
        self._log = Path()

    def start(self) -> str:
        """Start the server; returns its URL."""
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        file, name = tempfile.mkstemp(prefix=f"foreword-{port}-", suffix=".log")
        os.close(file)
        self._log = Path(name)
        own = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "FOREWORD_"))}
        options = {"FOREWORD_HOST": self._host, "FOREWORD_PORT": str(port)}
        serve = (sys.executable, "-m", "foreword", "serve")
        started = subprocess.run(
            (sys.executable, "-c", LAUNCHER, name, *serve),
            env={**own, **self._environment, **options},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self._pid = int(started.stdout)
        return f"http://{self._host}:{port}"

    def why_ended(self) -> str | None:
        """The last line of the log if the process has ended; None: it runs."""
        try:
            is_running = read_proc_stat(self._pid)[0] != "Z"
        except OSError:
            is_running = False
        if not is_running:
            with self._log.open("rb") as file:
                file.seek(max(self._log.stat().st_size - LOG_BYTES, 0))
                lines = file.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else "it ended without a word"
        return None
