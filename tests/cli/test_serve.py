"""`foreword serve` as a process: start-up lines, shutdown, exit codes."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.cli.main import main
from foreword.cli.serve import bind
from foreword.config.options import Config
from foreword.errors import ConfigError, ForewordError
from tests.support.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
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
def plain_server(tiny: Path) -> Iterator[ServerProcess]:
    """A server without speculation; the last test ends it."""
    with ServerProcess(
        Config(model=str(tiny), speculate="off", log_interval=0.5, max_model_len=192)
    ) as server:
        yield server


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_pid(server: ServerProcess) -> int:
    """The newest child of the forkserver, the only child of the server with children of its own."""
    (spawner,) = [child for child in children(server.pid) if children(child)]
    return children(spawner)[-1]


@pytest.mark.full
def test_printed_curl_line_works(plain_server: ServerProcess) -> None:
    (line,) = [line.removeprefix("try: ") for line in plain_server.banner_lines if line.startswith("try: ")]
    words = shlex.split(line)
    got = httpx.post(
        words[1],
        content=words[words.index("-d") + 1],
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert got.status_code == 200
    assert got.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.full
def test_start_up_lines(plain_server: ServerProcess) -> None:
    kinds = [line.split(":")[0] for line in plain_server.banner_lines]
    assert kinds[:4] == ["loaded", "memory", "address", "try"]


@pytest.mark.full
def test_speculation_off_is_not_mentioned(plain_server: ServerProcess) -> None:
    assert ask(plain_server.url).status_code == 200
    time.sleep(2.2)  # so that a throughput line is due
    assert ask(plain_server.url).status_code == 200
    scraped = httpx.get(f"{plain_server.url}/metrics").text
    log_text = "\n".join(plain_server.read_log())
    assert "Throughput: " in log_text
    assert "request chatcmpl-" in log_text
    for text in (scraped, log_text):
        assert "spec" not in text.lower() and "draft" not in text.lower()
        assert "nan" not in text.lower().split()


def test_sigterm_exits_with_0_and_ends_the_engine(tiny: Path) -> None:
    with ServerProcess(Config(model=str(tiny))) as server:
        engine = engine_pid(server)
        assert any(
            line.startswith("speculation: grammar, prediction, suffix; as much as pays")
            for line in server.banner_lines
        )
        assert server.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


@pytest.mark.full
def test_dead_engine_exits_with_1(tmp_path: Path) -> None:
    """Open requests get an error and /health answers 503 before the process exits."""
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


# Shutdown

LONG = {**ASK, "stream": True, "max_tokens": 60_000, "ignore_eos": True}


def start_long_answer(url: str, log_text: list[str]) -> threading.Thread:
    """Starts reading an endless stream in a thread."""
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as response:
            for line in response.iter_lines():
                log_text.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread


@pytest.fixture(scope="module")
def long_context_model(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A model whose answers outlast the tests."""
    path = write_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=65_536)
    return Config(model=str(path), speculate="off", on_runaway="off", kv_cache_memory="66000tokens")


@pytest.mark.full
def test_sigterm_drains_or_fails_open_answers(long_context_model: Config) -> None:
    """Meanwhile /health is 503 and new requests are refused; the exit code is 0."""
    log_text: list[str] = []
    with ServerProcess(long_context_model, ["--drain-timeout", "2"]) as server:
        reader = start_long_answer(server.url, log_text)
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            assert time.monotonic() < deadline
        assert health.json()["status"] == "draining"
        refused = ask(server.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "shutting_down",
        ) and refused.headers["Retry-After"]
        assert server.wait(30) == 0
        reader.join(30)
        assert "Traceback" not in "".join(server.read_log())
    assert log_text[-2] == "data: [DONE]" and '"code":"shutting_down"' in log_text[-4]


@pytest.mark.full
def test_second_signal_does_not_wait(long_context_model: Config) -> None:
    log_text: list[str] = []
    with ServerProcess(long_context_model, ["--drain-timeout", "3600"]) as server:
        reader = start_long_answer(server.url, log_text)
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while httpx.get(f"{server.url}/health").status_code == 200:
            assert time.monotonic() < deadline
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 0
        reader.join(30)
    assert '"code":"shutting_down"' in log_text[-4]


# Start


@pytest.mark.full
def test_server_listens_while_loading(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foreword", "serve", str(tiny), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    seen: list[tuple[str, int]] = []
    try:
        deadline = time.monotonic() + 60
        while not seen or seen[-1][0] != "ok":
            assert time.monotonic() < deadline and process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                body = httpx.get(f"http://127.0.0.1:{port}/health").json()
                status = body["status"]
                if status == "loading":
                    other = httpx.get(f"http://127.0.0.1:{port}/v1/models")
                    seen.append((status, other.status_code))
                else:
                    seen.append((status, httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code))
    finally:
        process.send_signal(signal.SIGTERM)
        _, log_text = process.communicate(timeout=30)
    assert seen[0][0] == "loading" and seen[0][1] in (200, 503), seen[:3]
    assert seen[-1] == ("ok", 200) and "address: " in log_text and process.returncode == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["nowhere/at/all"], "there is no directory or file nowhere/at/all"),
        (["text.txt"], "not in GGUF format"),
        (["text.gguf"], "this is no GGUF file"),
        (["empty"], "empty has no"),
        (["--api-key-file", "text.txt"], "key file text.txt"),
        (["--api-key-file", "missing.yaml"], "key file missing.yaml cannot be read"),
        (["--kv-cache-memory", "90000GiB"], "needs 90000.00 GiB and the weights"),
        (["--trust-remote-code"], "no code of a checkpoint is ever run"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1 port 0"),
    ],
)
def test_start_errors_are_one_line(tmp_path: Path, flags: list[str], reason: str) -> None:
    for name in ("text.txt", "text.gguf"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "foreword", "serve", "--port", "0", *flags]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("foreword serve: ") and reason in line


def test_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"foreword serve: port {port} on 127.0.0.1 is in use; "
        "choose another with --port (0 takes a free one)\n"
    )


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1 port"):
        bind("203.0.113.1", 0)


@pytest.mark.full
def test_ctrl_c_while_loading(tiny: Path) -> None:
    command = [sys.executable, "-m", "foreword", "serve", str(tiny), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, log_text = process.communicate(timeout=30)
    assert (process.returncode, log_text) == (0, "")


@pytest.mark.full
def test_unsupported_model_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ForewordError, match="the server did not start: foreword serve: "),
        ServerProcess(Config(model=str(tmp_path))),
    ):
        pass
