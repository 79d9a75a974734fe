"""`foreword fleet up | status | down`: a model's servers on the machines of a Ray cluster, behind one router.

`up` is a process that watches two others: the router, a `foreword serve` that clients talk to, and `place`,
which talks to Ray and starts servers. Each may die and be started again without the other's notice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from foreword.cli.banner import local_url
from foreword.cli.configuration import check_foreign_keys, read_config, to_environment
from foreword.cli.flags import add_config_options
from foreword.cli.terminal import set_up_logging
from foreword.cli.uvicorn_server import ShutdownSignals, wait_first
from foreword.config.models_file import read_models
from foreword.config.options import Config, option_fields
from foreword.engine_client.heartbeat import read_proc_stat
from foreword.errors import ConfigError
from foreword.fleet.ray_cluster import RayCluster
from foreword.fleet.replica_controller import Autoscaler, ReplicaController, RouterClient

logger = logging.getLogger("foreword.fleet")

TICK_S: Final = 1.0
UP_WAIT_S, DOWN_AFTER_S = (
    5.0,
    300.0,
)  # a request waits this long for one more server; spare servers end after this
ROUTER_TIMEOUT_S: Final = 120.0  # servers without a router end after this
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0  # limits of the backoff between restarts
STOP_TIMEOUT_S: Final = 60.0
START_TIME: Final = 19  # index in read_proc_stat()
EXIT_CONFIG: Final = 2
# Options of the group server that servers take over; the others concern the router and its clients.
SERVER_OPTIONS = ("log_level", "log_format", "test_mode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start the fleet, and keep it running until SIGTERM or Ctrl-C")
    up.add_argument("file", metavar="FILE", help="models file with one model; docs/fleet.md")
    add_config_options(up)
    up.set_defaults(run=_up)
    place = actions.add_parser("place")  # a part of `up`
    place.add_argument("router_url")
    add_config_options(place)
    place.set_defaults(run=_place)
    for name, action, help_ in (
        ("status", _status, "the servers of a running fleet"),
        ("down", _down, "end a fleet"),
    ):
        sub = actions.add_parser(name, help=help_)
        add_config_options(sub, (), more=("port",))
        sub.set_defaults(run=action)


def _up(args: argparse.Namespace) -> int:
    args.models = args.file
    config = read_config(args)
    return run_up(config if config.ray is not None else replace(config, ray="auto"))


def run_up(config: Config) -> int:
    """Start the fleet, and keep it running; returns the exit code. Raises ConfigError."""
    set_up_logging(config.log_level, config.log_format)
    if config.uds is not None or not config.port:
        raise ConfigError("a fleet's router needs --port, not 0 and no Unix socket", "port")
    check_foreign_keys(config)
    key = config.engine_key or secrets.token_urlsafe(32)
    config = replace(config, engine_key=key)
    _model_of(config)
    with _recorded(config):
        return asyncio.run(_Fleet(config).run())


def _model_of(config: Config) -> Config:
    """The options of the fleet's model. Raises ConfigError."""
    if config.models is None:
        return config
    entries = read_models(config).entries
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise ConfigError(f"a fleet has one model, and {config.models} has {names}", "models")
    return entries[0].config


def _router_config(config: Config, urls: Sequence[str]) -> Config:
    changes: dict[str, Any] = {item.name: getattr(config, item.name) for item in _server_options()}
    changes |= {"replicas": 0, "max_replicas": None, "replica_urls": ",".join(urls)}
    changes |= {"draft_model": None, "speculate": "auto"}  # options of the servers
    return replace(_model_of(config), ray=None, models=None, **changes)


def _node_config(config: Config) -> Config:
    """The options of the servers, without their address. Clients have no business with them."""
    changes: dict[str, Any] = {
        item.name: getattr(config, item.name) if item.name in SERVER_OPTIONS else item.default
        for item in _server_options()
    }
    changes |= {"engine_key": config.engine_key, "api_key": config.engine_key}
    changes |= {"router_timeout": ROUTER_TIMEOUT_S, "replicas": 1, "max_replicas": None}
    return replace(_model_of(config), ray=None, models=None, **changes)


def _server_options() -> list[Any]:
    return [item for item in option_fields() if item.metadata["group"] == "server"]


# up


class _Fleet:
    """Two processes that are started again when they end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._url = local_url(config.host, config.port)
        self._urls: list[str] = []  # servers, as `place` reports them
        self._has_servers = asyncio.Event()
        self._environment = {key: text for key, text in os.environ.items() if not key.startswith("FOREWORD_")}

    async def run(self) -> int:
        signals = ShutdownSignals()
        signals.install()
        place = asyncio.create_task(self._keep(self._start_place))
        router = asyncio.create_task(self._run_router())
        asked = asyncio.create_task(signals.graceful.wait())
        done, _ = await asyncio.wait((asked, place, router), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        code = signals.exit_code if asked in done else next(iter(done & {place, router})).result()
        for task in (router, place):  # streams end before their servers
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return code

    async def _run_router(self) -> int:
        await self._has_servers.wait()
        return await self._keep(self._start_router)

    async def _keep(self, start: Any) -> int:
        """Start a process again whenever it ends, unless the first one refuses the configuration.

        Later ones have the same configuration: they miss something that may come back, such as Ray's head.
        Returns the first one's code.
        """
        backoff_s = MIN_BACKOFF_S
        is_first = True
        while True:
            started_s = time.monotonic()
            process: Process = await start()
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _stop(process)
                raise
            if code == EXIT_CONFIG and is_first:
                return code
            is_first = False
            if time.monotonic() - started_s > MAX_BACKOFF_S:
                backoff_s = MIN_BACKOFF_S
            logger.warning("a process ended with code %d, and is started again in %g s", code, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _start_router(self) -> Process:
        config = _router_config(self._config, self._urls)
        return await self._spawn(("serve",), config)

    async def _start_place(self) -> Process:
        process = await self._spawn(("fleet", "place", self._url), self._config, PIPE)
        self._reader = asyncio.create_task(self._read_urls(process))
        return process

    async def _read_urls(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._urls = json.loads(line)
            if self._urls:
                self._has_servers.set()

    async def _spawn(self, words: Sequence[str], config: Config, stdout: int | None = None) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "foreword", *words),
            env=self._environment | to_environment(config),
            stdout=stdout,
            start_new_session=True,  # Ctrl-C is for this process, which ends them in order
        )


async def _stop(process: Process) -> None:
    """End a process; a second SIGTERM if it takes long."""
    for _ in range(2):
        if process.returncode is None:
            process.terminate()
            await wait_first(process.wait(), timeout_s=STOP_TIMEOUT_S)
    if process.returncode is None:
        process.kill()
        await process.wait()


# place


def _place(args: argparse.Namespace) -> int:
    """Start servers and watch them, until SIGTERM ends them all."""
    config = read_config(args)
    set_up_logging(config.log_level, config.log_format)
    assert config.ray is not None and config.engine_key is not None, "a part of `fleet up`"
    stopped = threading.Event()
    cluster = RayCluster(config.ray)
    for number in (signal.SIGTERM, signal.SIGINT):  # replaces Ray's handlers, which end the process at once
        signal.signal(number, lambda *_: stopped.set())
    servers = _node_config(config)
    wanted = _model_of(config)
    minimum = max(wanted.replicas, 1)
    controller = ReplicaController(
        cluster,
        RouterClient(args.router_url, config.engine_key),
        servers,
        Autoscaler(minimum, wanted.max_replicas or minimum, UP_WAIT_S, DOWN_AFTER_S),
        to_environment,
        lambda urls: print(json.dumps(urls), flush=True),
    )
    while not stopped.wait(TICK_S):
        controller.tick()
    controller.stop_all()
    return 0


# status and down


@dataclass(frozen=True, slots=True)
class _Record:
    """A running fleet, as other commands find it."""

    pid: int
    start_time: str  # identifies the process, since pids are reused
    url: str
    engine_key: str


def _record_path(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "foreword" / "fleets" / f"{port}.json"


@contextmanager
def _recorded(config: Config) -> Iterator[None]:
    """Keep the record of this process. Raises ConfigError if a fleet has this port already."""
    path = _record_path(config.port)
    if _read_record(config.port) is not None:
        raise ConfigError(f"a fleet runs on port {config.port}: `foreword fleet down` ends it", "port")
    assert config.engine_key is not None
    pid, url = os.getpid(), local_url(config.host, config.port)
    record = _Record(pid, _start_time(pid), url, config.engine_key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(record), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read_record(port: int) -> _Record | None:
    """The fleet of a port, if it runs."""
    try:
        record = _Record(**json.loads(_record_path(port).read_text()))
        return record if _start_time(record.pid) == record.start_time else None
    except (OSError, ValueError, TypeError):
        return None


def _start_time(pid: int) -> str:
    return read_proc_stat(pid)[START_TIME]


def _running_fleet(args: argparse.Namespace) -> _Record:
    """Raises ConfigError."""
    port = read_config(args).port
    record = _read_record(port)
    if record is None:
        raise ConfigError(f"no fleet of this user runs on port {port}", "port")
    return record


def _status(args: argparse.Namespace) -> int:
    record = _running_fleet(args)
    model = RouterClient(record.url, record.engine_key).model()
    if model is None:
        print(f"{record.url}: the router is starting")
        return 1
    print(f"{record.url}: {model['name']}, {model['num_requests']} open requests")
    for state in model["replicas"]:
        detail = f": {state['detail']}" if state["detail"] else ""
        load = f"{state['running']} running, {state['waiting']} waiting"
        fingerprint = state["fingerprint"] or "not loaded yet"
        print(f"  {state['id']}  {state['status']}{detail}, {load}, {fingerprint}")
    return 0


def _down(args: argparse.Namespace) -> int:
    record = _running_fleet(args)
    os.kill(record.pid, signal.SIGTERM)
    while _read_record(read_config(args).port) is not None:
        time.sleep(0.1)
    return 0
