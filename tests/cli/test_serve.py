"""`foreword serve` as a process: start-up lines, shutdown, exit codes."""

import contextlib
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword import __version__
from foreword.bench.server import ServerProcess
from foreword.cli.listener import bind_unix
from foreword.config.options import Config
from foreword.errors import ConfigError, ForewordError
from foreword.server.auth.usage_db import read_usage
from tests.server.auth.test_keys import key_of
from tests.server.auth.test_keys import write as write_keys
from tests.server.conftest import run_server
from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import WAIT_S, wait_until

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
    return httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=WAIT_S)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def without_log(lines: list[str]) -> list[str]:
    """What is printed: a line of the log may come between."""
    return [line for line in lines if " INFO foreword." not in line]


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
        timeout=WAIT_S,
    )
    assert got.status_code == 200
    assert got.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.full
def test_start_up_lines(plain_server: ServerProcess, tiny: Path) -> None:
    waiting = [line for line in plain_server.banner_lines if line.startswith("foreword ")]
    assert waiting[0] == f"foreword {__version__}: loading {tiny} ..."
    kinds = [line.split(":")[0] for line in without_log(plain_server.banner_lines) if line not in waiting]
    assert kinds[:4] == ["loaded", "memory", "address", "try"]


@pytest.mark.full
def test_speculation_off_is_not_mentioned(plain_server: ServerProcess) -> None:
    assert ask(plain_server.url).status_code == 200
    wait_until(lambda: any("Throughput: " in line for line in plain_server.read_log()))
    lines = httpx.get(f"{plain_server.url}/metrics").text.splitlines()
    (info,) = [line for line in lines if line.startswith("foreword_info{")]
    assert 'speculate="off"' in info and 'quantization="none"' in info and 'model="tiny"' in info
    scraped = "\n".join(line for line in lines if line != info)
    log_text = "\n".join(plain_server.read_log())
    assert "request chatcmpl-" in log_text
    for text in (scraped, log_text):
        assert "spec" not in text.lower() and "draft" not in text.lower()
        assert "nan" not in text.lower().split()


def test_sigterm_exits_with_0_and_ends_the_engine(tiny: Path) -> None:
    with ServerProcess(Config(model=str(tiny))) as server:
        engine = engine_pid(server)
        assert any(
            line.startswith("speculation: grammar, prediction, suffix, text; as much as pays")
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
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S) as response:
            lines = response.iter_lines()
            next(lines)
            (path / "config.json").unlink()
            os.kill(engine_pid(server), signal.SIGKILL)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "error" in rest[-1]
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait(WAIT_S) == 1


# Shutdown

LONG = {**ASK, "stream": True, "max_tokens": 60_000, "ignore_eos": True}


def start_long_answer(url: str, log_text: list[str]) -> threading.Thread:
    """Starts reading an endless stream in a thread."""
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                log_text.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(WAIT_S)
    return thread


def change_slot(server: ServerProcess, action: str, headers: dict[str, str]) -> dict[str, Any]:
    url, body = f"{server.url}/slots/0?action={action}", {"filename": "talk"}
    answer: dict[str, Any] = httpx.post(url, json=body, headers=headers, timeout=WAIT_S).json()
    return answer


@pytest.mark.full
def test_conversation_is_read_from_disk_after_a_restart(tiny: Path, tmp_path: Path) -> None:
    """By its key alone, which may have saved it by a name; a key of the command line is the same one later.

    The second server has timed no prompt when it reads: it reads all, however fast it would compute.
    """
    config = Config(
        model=str(tiny),
        speculate="off",
        max_model_len=192,
        api_key="one,two",
        kv_cache_dir=str(tmp_path),
    )
    said = {**ASK, "messages": [{"role": "user", "content": "the thing in " * 8}]}
    replies, slots = [], []
    for keys, action in ((("one",), "save"), (("one", "two"), "restore")):
        with ServerProcess(config) as server:
            url = f"{server.url}/v1/chat/completions"
            for key in keys:
                headers = {"Authorization": f"Bearer {key}"}
                if action == "restore":
                    slots.append(change_slot(server, "restore", headers))
                replies.append(httpx.post(url, json=said, headers=headers, timeout=WAIT_S).json())
                if action == "save":
                    slots.append(change_slot(server, "save", headers))
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(WAIT_S) == 0
    first, again, other = replies
    assert first["choices"] == again["choices"] == other["choices"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == cached[2] == 0 and cached[1] >= 0.8 * again["usage"]["prompt_tokens"]
    saved, restored, refused = slots
    assert saved["n_saved"] == restored["n_restored"] >= cached[1] and saved["n_saved"] % 16 == 0
    assert refused["error"]["message"] == "nothing is saved as 'talk'"


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
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
        refused = ask(server.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "shutting_down",
        ) and refused.headers["Retry-After"]
        assert server.wait(WAIT_S) == 0
        reader.join(WAIT_S)
        assert "Traceback" not in "".join(server.read_log())
    assert log_text[-2] == "data: [DONE]" and '"code":"shutting_down"' in log_text[-4]


@pytest.mark.full
def test_drain_delay_takes_requests_while_ready_says_no(tiny: Path) -> None:
    with ServerProcess(Config(model=str(tiny)), ["--drain-delay", "3600"]) as server:
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 20)
        assert httpx.get(f"{server.url}/health").status_code == ask(server.url).status_code == 200
        os.kill(server.pid, signal.SIGTERM)  # a second signal ends the wait too
        assert server.wait(30) == 0
        log_text = "\n".join(server.read_log())
    assert "shutting down in 3600 s" in log_text and "Traceback" not in log_text


@pytest.mark.full
def test_second_signal_does_not_wait(long_context_model: Config) -> None:
    log_text: list[str] = []
    with ServerProcess(long_context_model, ["--drain-timeout", "3600"]) as server:
        reader = start_long_answer(server.url, log_text)
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(WAIT_S) == 0
        reader.join(WAIT_S)
    assert '"code":"shutting_down"' in log_text[-4]


# A server whose threads for requests hang in native code: one tokenizes without end, the others sleep.
HUNG_SERVER = """
import ctypes, itertools, sys
from foreword.cli.main import main
from foreword.tokenizer.chat_processor import ChatInputProcessor
calls = itertools.count()
def hang(processor, *args):
    is_first = next(calls) < 1
    while True:
        processor._tokenizer.encode("a b " * 500_000) if is_first else ctypes.CDLL(None).sleep(3600)
ChatInputProcessor.render = hang
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_hung_threads_of_requests_hold_up_neither_keys_nor_usage_nor_the_end(
    tiny: Path, tmp_path: Path
) -> None:
    keys, usage = tmp_path / "keys.yaml", tmp_path / "usage.db"
    write_keys(keys, key_of("alice"), key_of("mallory"))
    config = Config(model=str(tiny), speculate="off")
    flags = [f"--api-key-file={keys}", f"--usage-db={usage}", "--drain-timeout=1"]
    server = ServerProcess(config, flags)
    server._command[1:3] = ["-c", HUNG_SERVER]
    with server, ThreadPoolExecutor(10) as clients:

        def call(path: str, key: str, **fields: object) -> int:
            body = {"model": "tiny", "max_tokens": 1, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            try:
                return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60).status_code
            except httpx.TransportError:
                return 0

        before = len(os.listdir(f"/proc/{server.pid}/task"))  # and two: one thread is kept for other keys
        for _ in range(10):
            clients.submit(call, "/v1/chat/completions", "mallory", messages=ASK["messages"])
        wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/task")) >= before + 2)
        write_keys(keys, key_of("alice"))
        wait_until(lambda: call("/v1/completions", "mallory", prompt="a") == 401)
        assert call("/v1/completions", "alice", prompt="a") == 200
        assert "alice" in [row[0][1] for row in read_usage(usage)]
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(WAIT_S) == 0


# A server whose event loop hangs in a request.
BLOCKED_SERVER = """
import sys
from foreword.cli import serve
from foreword.cli.main import main
from foreword.server.routes import tokenize
serve.LATE_GRACE_S = 0.0
def block_loop(*args, **kwargs):
    print("blocks now", file=sys.stderr, flush=True)
    while True:
        pass
tokenize.Response = block_loop
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_sigterm_ends_a_server_whose_event_loop_hangs(tiny: Path) -> None:
    server = ServerProcess(Config(model=str(tiny), speculate="off"), ["--drain-timeout=1"])
    server._command[1:3] = ["-c", BLOCKED_SERVER]
    with server:
        engine = engine_pid(server)
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{server.url}/detokenize", json={"tokens": [1]}, timeout=0.5)
        wait_until(lambda: any("blocks now" in line for line in server.read_log()))
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(WAIT_S) == 1
        assert any("in block_loop" in line for line in server.read_log())
    wait_until(lambda: not Path(f"/proc/{engine}").exists())


# Start


@pytest.mark.full
def test_server_listens_while_loading(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foreword", "serve", str(tiny), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    seen: list[tuple[str, int]] = []
    try:
        while not seen or seen[-1][0] != "ok":
            assert process.poll() is None
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
        _, log_text = process.communicate(timeout=WAIT_S)
    assert seen[0][0] == "loading" and seen[0][1] in (200, 503), seen[:3]
    assert seen[-1] == ("ok", 200) and "address: " in log_text and process.returncode == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["nowhere/at/all"], "there is no directory or file nowhere/at/all"),
        (["text.gguf"], "this is no GGUF file"),
        (["--api-key-file", "text.txt"], "key file text.txt"),
        (["--kv-cache-memory", "90000GiB"], "needs 90000.00 GiB and the weights"),
    ],
)
def test_start_errors_are_one_line(tmp_path: Path, flags: list[str], reason: str) -> None:
    for name in ("text.txt", "text.gguf"):
        (tmp_path / name).write_text("hello")
    command = [sys.executable, "-m", "foreword", "serve", "--port", "0", *flags]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2 and done.stdout == ""
    *waiting, line = without_log(done.stderr.splitlines())
    assert line.startswith("foreword serve: ") and reason in line
    assert all(text.startswith(f"foreword {__version__}: loading ") for text in waiting)
    if not (tmp_path / flags[0]).is_file() and not flags[0].startswith("--"):
        assert not waiting  # a model's name is checked before the start-up line


# Unix sockets


def test_unix_socket_answers_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with run_server(Config(uds=str(path))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        reply = server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert reply.status_code == 200 and server.http.get("/ready").status_code == 200
    assert not path.exists()


def test_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    with bind_unix(path):
        for _ in range(3):  # also while the other one loads its model, and answers nothing
            with pytest.raises(ConfigError, match="in use by another server"), bind_unix(path):
                pass
    assert not path.exists()


def test_socket_of_a_busy_server_is_not_taken(tmp_path: Path) -> None:
    """A server whose queue of connections is full is neither waited for nor replaced."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(str(path))
        busy.listen(0)
        client.connect(str(path))
        with pytest.raises(ConfigError, match="in use by another server"), bind_unix(path):
            pass
    assert path.exists()


def test_socket_that_another_server_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bind_unix(path):
        path.rename(tmp_path / "old")
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_other_file_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("keep")
    with pytest.raises(ConfigError, match="is no socket"), bind_unix(tmp_path / "notes"):
        pass
    with (
        pytest.raises(ConfigError, match=r"cannot listen on uds .*too long"),
        bind_unix(tmp_path / ("x" * 200)),
    ):
        pass
    with pytest.raises(ConfigError, match="No such file"), bind_unix(tmp_path / "none" / "socket"):
        pass
    assert (tmp_path / "notes").read_text() == "keep"


@pytest.mark.full
def test_banner_of_a_unix_socket_has_a_curl_line_that_works(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    command = [
        sys.executable,
        "-m",
        "foreword",
        "serve",
        str(tiny),
        "--uds",
        str(path),
        "--log-format",
        "json",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        wait_until(lambda: '"try: ' in (tmp_path / "log").read_text() or process.poll() is not None, 60)
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        (curl,) = [line["message"] for line in lines if line["message"].startswith("try: ")]
        words = shlex.split(curl.removeprefix("try: curl --unix-socket "))
        assert words[:2] == [str(path), "http://localhost/v1/chat/completions"]
        with httpx.Client(transport=httpx.HTTPTransport(uds=words[0])) as http:
            body = words[words.index("-d") + 1]
            got = http.post(words[1], content=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert got.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    (answered,) = [line for line in lines if line["message"].startswith("request chatcmpl-")]
    assert answered["prompt_tokens"] > 0 and answered["generated_tokens"] > 0 and answered["total_ms"] > 0


@pytest.mark.full
def test_unsupported_model_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ForewordError, match="the server did not start: foreword serve: "),
        ServerProcess(Config(model=str(tmp_path))),
    ):
        pass
