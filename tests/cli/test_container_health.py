"""Docker's health check finds the server's address in the command line of process 1."""

import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from foreword.cli.container_health import check
from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_server

ENTRY = "/opt/foreword/bin/python /opt/foreword/bin/foreword"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server() as server:
        yield server


def write_command(path: Path, text: str) -> Path:
    """A file like /proc/1/cmdline."""
    path.write_text("\0".join(shlex.split(text)) + "\0")
    return path


def port_of(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "flags",
    [
        "--port {}",
        "--port={} /models/a",
        "/models/a --served-model-name a b --port {}",
        "--root-path '' --port {}",
    ],
)
def test_port_of_the_command_line_is_asked(tmp_path: Path, server: RunningServer, flags: str) -> None:
    command = f"{ENTRY} serve {flags.format(port_of(server))}"
    assert check(write_command(tmp_path / "cmdline", command)) == 0


def test_environment_and_config_file_are_read(
    tmp_path: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_PORT", str(port_of(server)))
    monkeypatch.setenv("FOREWORD_HOST", "0.0.0.0")
    assert check(write_command(tmp_path / "cmdline", f"/sbin/docker-init -- {ENTRY} serve")) == 0
    monkeypatch.delenv("FOREWORD_PORT")
    (tmp_path / "config.yaml").write_text(f"port: {port_of(server)}\n")
    assert check(write_command(tmp_path / "cmdline", f"{ENTRY} serve --config {tmp_path}/config.yaml")) == 0


def test_server_that_is_not_healthy_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_server() as server:
        command = write_command(tmp_path / "cmdline", f"{ENTRY} serve --port {port_of(server)}")
        server.client.kill()
        assert check(command) == 1
    assert check(command) == 1 and "no answer from 127.0.0.1 port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"status": "loading"}', 1),
        ('{"status": "restarting"}', 0),
        ('{"status": "draining"}', 0),
        ('{"status": "unresponsive"}', 1),
        ('{"status": "dead"}', 1),
        ("no JSON", 1),
    ],
)
def test_transient_states_are_healthy(tmp_path: Path, body: str, code: int) -> None:
    """A supervisor must not kill a server that replaces its engine, or finishes its answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        command = write_command(tmp_path / "cmdline", f"{ENTRY} serve --port {server.server_port}")
        assert check(command) == code
        thread.join()


def test_container_without_a_server_is_healthy(tmp_path: Path) -> None:
    assert check(write_command(tmp_path / "cmdline", f"{ENTRY} bench latency")) == 0


def test_unix_socket_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with run_server(Config(uds=str(path))):
        assert check(write_command(tmp_path / "cmdline", f"{ENTRY} serve --uds {path}")) == 0
    assert check(write_command(tmp_path / "cmdline", f"{ENTRY} serve --uds {path}")) == 1
