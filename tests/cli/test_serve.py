"""`foreword serve` as a process: what it prints works, how it ends, and what it never mentions."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foreword.cli.main import main
from foreword.cli.serve import bind
from foreword.cli.server_process import ServerProcess
from foreword.config import Config
from foreword.errors import ConfigError, ForewordError
from tests.checkpoints import write_checkpoint

ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the thing in the thing in the"}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[ServerProcess]:
    """A server without speculation that may be used, but is ended by the test that comes last."""
    with ServerProcess(Config(model=str(tiny), speculate="off", log_interval=0.5, max_model_len=192)) as server:
        yield server


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60)


def engine_pid(server: ServerProcess) -> int:
    """The only child of the server."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def test_the_curl_line_works_when_pasted(plain: ServerProcess) -> None:
    (line,) = [line.removeprefix("try: ") for line in plain.lines if line.startswith("try: ")]
    words = shlex.split(line)
    got = httpx.post(words[1], content=words[words.index("-d") + 1], headers={"Content-Type": "application/json"}, timeout=60)
    assert got.status_code == 200
    assert got.json()["choices"][0]["message"]["role"] == "assistant"


def test_start_up_lines(plain: ServerProcess) -> None:
    kinds = [line.split(":")[0] for line in plain.lines]
    assert kinds[:5] == ["loaded", "memory", "speculation", "address", "try"]
    assert "speculation: off" in plain.lines[2]


def test_with_speculation_off_nothing_of_it_is_there(plain: ServerProcess) -> None:
    assert ask(plain.url).status_code == 200
    time.sleep(2.2)  # a throughput line is due
    assert ask(plain.url).status_code == 200
    scraped = httpx.get(f"{plain.url}/metrics").text
    said = "\n".join(plain.read()[len(plain.lines) :])
    assert "Throughput: " in said
    assert "request chatcmpl-" in said
    for text in (scraped, said):
        assert "spec" not in text.lower()
        assert "nan" not in text.lower().split()


def test_sigterm_ends_it_with_0_and_takes_the_engine_along(tiny: Path) -> None:
    with ServerProcess(Config(model=str(tiny))) as server:
        engine = engine_pid(server)
        assert any(line.startswith("speculation: grammar, prediction, suffix; as much as pays") for line in server.lines)
        assert server.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_an_engine_that_cannot_be_replaced_ends_it_with_a_failure(tmp_path: Path) -> None:
    """Open requests get an error and /health says 503 before the process goes."""
    path = write_checkpoint(tmp_path / "gone")
    body = {**ASK, "model": "gone", "stream": True, "max_tokens": 150, "ignore_eos": True}
    with ServerProcess(Config(model=str(path), speculate="off", max_model_len=192)) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            (path / "config.json").unlink()
            os.kill(engine_pid(server), signal.SIGKILL)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "error" in rest[-1]
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait(60) == 1


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"foreword serve: port {port} on 127.0.0.1 is in use; choose another with --port (0 takes a free one)\n"
    )


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1 port"):
        bind("203.0.113.1", 0)


def test_ctrl_c_while_loading(tiny: Path) -> None:
    command = [sys.executable, "-m", "foreword", "serve", str(tiny), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    with (
        pytest.raises(ForewordError, match="the server did not start: foreword serve: "),
        ServerProcess(Config(model=str(tmp_path))),
    ):
        pass
