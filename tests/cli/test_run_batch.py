"""`foreword run-batch`: files of any content, and interrupted runs."""

import asyncio
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.cli.batch_file import SUPPORTED_URLS, BatchLine, BatchOutput, InvalidLine, read_lines
from foreword.cli.main import main
from foreword.cli.run_batch import BatchClient, BatchSummary, answer_all, lines_by_model
from foreword.config.models_file import ModelEntry, ModelsConfig, ModelVariant
from foreword.config.options import Config
from foreword.errors import ConfigError, EngineDead
from foreword.fleet import model_processes as backends
from tests.server.conftest import run_server
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import WAIT_S, wait_until

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, messages=[{"role": "user", "content": "Hi"}], **body)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def records(path: Path) -> dict[str, dict[str, Any]]:
    """Records by custom_id, each of them unique."""
    parsed = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({record["custom_id"] for record in parsed}) == len(parsed)
    return {record["custom_id"]: record for record in parsed}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "custom_id"),
        ("{}", "custom_id"),
        ('{"custom_id": 5}', "custom_id"),
        (line("a") | {"method": "GET"}, "method must be 'POST'"),
        (line("a", "/v1/models"), "url must be one of"),
        (line("a") | {"url": ["/v1/score"]}, "url must be one of"),
        (line("a") | {"body": "x"}, "body must be an object"),
        (chat("a", stream=True), "stream"),
    ],
)
def test_invalid_lines_become_errors(tmp_path: Path, text: Any, reason: str) -> None:
    (bad,) = read_lines(write(tmp_path / "in", text))
    assert isinstance(bad, InvalidLine) and reason in bad.reason and bad.line_number == 1


def test_lines_are_numbered_and_ids_are_unique(tmp_path: Path) -> None:
    items = list(
        read_lines(
            write(
                tmp_path / "in",
                chat("a"),
                "",
                chat("b"),
                chat("a"),
                *(line(url, url) for url in SUPPORTED_URLS),
            )
        )
    )
    assert items[0] == BatchLine(1, "a", CHAT, chat("a")["body"])
    assert [item.line_number for item in items] == [1, 3, 4, 5, 6, 7, 8, 9]
    assert isinstance(items[2], InvalidLine) and "earlier line" in items[2].reason
    assert [item.custom_id for item in items[3:]] == list(SUPPORTED_URLS)


def test_invalid_utf8_becomes_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'\xff\xfe\n{"custom_id": "a\xff"}\n')
    assert all(isinstance(item, InvalidLine) for item in read_lines(tmp_path / "in"))
    with pytest.raises(ConfigError, match="nowhere"):
        list(read_lines(tmp_path / "nowhere"))


def replies(status: int) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(
        status, json={"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    )


def answer(path: Path, output: Path, handler: Any, patience_s: float = 0.0) -> BatchSummary:
    tally = BatchSummary()

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://box") as http:
            await answer_all(BatchClient(http, patience_s), items, opened, tally, 4)

    with BatchOutput(output) as opened:
        items = (item for item in read_lines(path) if not opened.contains(item))
        asyncio.run(ask())
    return tally


def test_answered_lines_are_not_repeated(tmp_path: Path) -> None:
    source, output = (
        write(tmp_path / "in", *(chat(f"r{i}") for i in range(20)), "{", chat("r1")),
        tmp_path / "out",
    )
    tally = answer(source, output, replies(200))
    assert (tally.ok, tally.failed, tally.prompt_tokens, tally.generated_tokens) == (20, 2, 40, 60)
    before = output.read_bytes()
    assert answer(source, output, replies(500)) == BatchSummary(started_s=pytest.approx(0, abs=1e9))
    assert output.read_bytes() == before
    with BatchOutput(output) as opened:
        assert opened.num_errors == 2


def test_torn_lines_and_server_errors_are_retried(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", chat("a"), chat("b"), chat("c")), tmp_path / "out"
    answer(source, output, lambda request: httpx.Response(400 if b'"n": 2' in request.content else 500))
    assert records(output)["a"]["response"]["status_code"] == 500
    output.write_bytes(output.read_bytes()[:-30])
    answer(source, output, replies(200))
    assert {record["response"]["status_code"] for record in records(output).values()} == {200}
    output.write_bytes(output.read_bytes()[:-1])  # a complete record without a newline may be torn too
    answer(source, output, replies(200))
    assert set(records(output)) == {"a", "b", "c"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_status_400_is_final(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", chat("a")), tmp_path / "out"
    assert answer(source, output, replies(400)).failed == 1
    assert answer(source, output, replies(200)).ok == 0
    assert records(output)["a"]["response"]["status_code"] == 400


def test_missing_choices_are_an_error_and_retried(tmp_path: Path) -> None:
    source, output = (
        write(tmp_path / "in", chat("a", n=3), chat("b", n=1), line("c", "/v1/completions", prompt="x", n=2)),
        tmp_path / "out",
    )

    def choices(count: int) -> Callable[[httpx.Request], httpx.Response]:
        return lambda request: httpx.Response(200, json={"choices": [{}] * count})

    tally = answer(source, output, choices(1))
    assert (tally.ok, tally.failed) == (1, 2)
    found = records(output)
    assert found["a"]["error"] == {
        "code": "missing_choices",
        "message": "line 1: 1 choices were returned, of 3",
        "line": 1,
    }
    assert found["a"]["response"]["body"]["choices"] == [{}] and found["b"]["error"] is None
    again = answer(source, output, choices(3))
    assert (again.ok, again.failed) == (2, 0) and all(
        record["error"] is None for record in records(output).values()
    )


def test_busy_server_is_retried(tmp_path: Path) -> None:
    source, output, asked = write(tmp_path / "in", chat("a")), tmp_path / "out", []

    def busy(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(429 if len(asked) < 3 else 200, json={}, headers={"X-Request-Id": "q"})

    assert answer(source, output, busy).ok == 1
    assert len(asked) == 3
    assert records(output)["a"]["response"] == {"status_code": 200, "request_id": "q", "body": {}}


def ask_once(handler: Any, patience_s: float = 0.0) -> tuple[int, list[float], list[str]]:
    """(status, waits, lines about them) of one request."""
    waits: list[float] = []
    lines: list[str] = []

    async def record(seconds: float) -> None:
        waits.append(seconds)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://box") as http:
            client = BatchClient(http, patience_s, lines.append, record)
            response = await client.ask(BatchLine(1, "a", CHAT, {}))
            assert client.num_retries == len(waits)
            return response.status_code

    return asyncio.run(ask()), waits, lines


@pytest.mark.parametrize(
    ("given", "waited"),
    [("7", 7.0), ("2.5", 2.5), ("0", 0.05), ("-3", 0.05), ("86400", 120.0), ("soon", 0.05), ("nan", 0.05)],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int, given: str, waited: float) -> None:
    replies = iter([httpx.Response(status, headers={"Retry-After": given}), httpx.Response(200)])
    assert ask_once(lambda request: next(replies), patience_s=1.0)[:2] == (200, [waited])


def test_retry_after_may_be_a_date() -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    replies = iter([httpx.Response(429, headers={"Retry-After": when}), httpx.Response(200)])
    _, (waited,), _ = ask_once(lambda request: next(replies))
    assert 0 < waited <= 60


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {}), (429, {"Retry-After": "60"}), (503, {"Retry-After": "60"})]
)
def test_server_that_says_when_is_never_given_up(status: int, headers: dict[str, str]) -> None:
    """An hour of loading or of a full queue costs no row; one line tells of it."""
    replies = iter([httpx.Response(status, headers=headers)] * 1000 + [httpx.Response(200)])
    code, waits, lines = ask_once(lambda request: next(replies))
    assert (code, len(waits)) == (200, 1000)
    assert (
        len(lines) == 1 and f"status {status}" in lines[0] and "1 request will be sent again in" in lines[0]
    )


@pytest.mark.parametrize("status", [502, 503, 504])
def test_server_that_does_not_say_when_is_given_up(status: int) -> None:
    with pytest.raises(EngineDead, match=f"status {status}.*continues the run"):
        ask_once(lambda request: httpx.Response(status), patience_s=30.0)


@pytest.mark.full
def test_overloaded_server_answers_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three times as many requests at once as the server takes: all are answered in the end."""
    source = write(tmp_path / "in", *(chat(f"r{i}") for i in range(12)))
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--concurrency", "12", "--url"]
    with run_server(Config(max_waiting=4), FakeEngineClient(FakeOutput(delay_s=0.01))) as server:
        assert main([*words, server.url]) == 0
        text = server.http.get("/metrics").text
    assert {record["response"]["status_code"] for record in records(tmp_path / "out").values()} == {200}
    refused = int(
        float(re.search(r'requests_total{route="/v1/chat/completions",status="429"} (\S+)', text)[1])
    )  # type: ignore[index]
    said = capsys.readouterr().err
    assert refused >= 8 and f"12 answered, 0 failed, {refused} retries of a busy server" in said
    assert "cannot answer now (status 429)" in said


def test_gone_server_ends_the_run_and_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output, asked = write(tmp_path / "in", *(chat(f"r{i}") for i in range(9))), tmp_path / "out", []

    def fail_later(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) > 5:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={})

    with pytest.raises(EngineDead, match=r"refused.*continues the run"):
        answer(source, output, fail_later, patience_s=0.1)
    assert len(records(output)) == 5
    assert answer(source, output, replies(200)).ok == 4


def test_other_file_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "notes", "not an answer")
    with pytest.raises(ConfigError, match="not a batch result"):
        BatchOutput(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "not an answer\n"
    with BatchOutput(tmp_path / "out"), pytest.raises(ConfigError, match="another run"):
        BatchOutput(tmp_path / "out")
    with pytest.raises(ConfigError, match="directory"):
        BatchOutput(tmp_path)


def test_invalid_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write(tmp_path / "in", chat("a")))
    assert main(["run-batch", "-i", source, "-o", source]) == 2
    assert main(["run-batch", "-i", str(tmp_path / "no"), "-o", str(tmp_path / "out")]) == 2
    assert main(["run-batch", "-i", source, "-o", str(tmp_path / "out"), "--concurrency", "0"]) == 2
    assert "another file" in (said := capsys.readouterr().err) and "--concurrency" in said
    for url in ("box:x", "http://box:x", "file:///x"):
        assert main(["run-batch", "-i", source, "-o", str(tmp_path / "out"), "--url", url]) == 2
        assert f"--url must be like http://127.0.0.1:8000, got {url!r}" in capsys.readouterr().err


def test_server_that_never_answered_is_given_up_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still be starting; a line says that requests wait."""
    monkeypatch.setattr("foreword.cli.run_batch.SERVER_GONE_S", 0.2)
    words = ["-i", str(write(tmp_path / "in", chat("a"))), "-o", str(tmp_path / "out")]
    assert main(["run-batch", *words, "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot answer now" in said and "1 request will be sent again in 0.05 s" in said
    assert "2 retries" in said and "does not answer" in said.splitlines()[-1]


def test_server_that_is_still_starting_is_waited_for() -> None:
    replies = iter([httpx.ConnectError("refused")] * 3)

    def handler(request: httpx.Request) -> httpx.Response:
        if (error := next(replies, None)) is not None:
            raise error
        return httpx.Response(200)

    status, waits, (line,) = ask_once(handler, patience_s=30.0)
    assert (status, waits) == (200, [0.05, 0.1, 0.2]) and "cannot answer now (refused)" in line


def test_full_disk_ends_the_run_with_a_file_to_continue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of a file stands for the disk: a write stores a part, the next one fails."""
    source = write(tmp_path / "in", *(chat(f"r{i}") for i in range(40)))
    output = tmp_path / "out"
    words = ["run-batch", "-i", str(source), "-o", str(output), "--url"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run_server(client=FakeEngineClient(FakeOutput())) as server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            assert main([*words, server.url]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        *_, summary, reason = capfd.readouterr().err.splitlines()
        assert reason.startswith(f"foreword run-batch: {output} cannot be written: File too large; the same")
        answered = output.read_bytes().count(b"\n")
        assert 0 < answered < 40 and f"{answered} answered, 0 failed" in summary
        assert main([*words, server.url]) == 0
    assert set(records(output)) == {f"r{i}" for i in range(40)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.full
def test_run_in_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bundled model, invalid lines and an unused key file; the second run loads nothing."""
    monkeypatch.setenv("FOREWORD_API_KEY_FILE", str(tmp_path / "none.yaml"))
    completion = line("c", "/v1/completions", prompt="Once upon a time", max_tokens=4, n=2)
    endless = line(
        "d", "/v1/completions", prompt="x", allowed_token_ids=[40], ignore_eos=True, max_tokens=400
    )
    source = write(
        tmp_path / "in", chat("a", max_tokens=4), completion, chat("b", temperature=-1), "{", endless
    )
    arguments = [
        "run-batch",
        "demo",
        "-i",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--kv-cache-memory",
        "4000tokens",
    ]
    arguments += ["--on-runaway", "stop"]
    assert main(arguments) == 1
    found = records(tmp_path / "out")
    assert found["a"]["response"]["body"]["object"] == "chat.completion" and found["a"]["error"] is None
    assert len(found["a"]["response"]["request_id"]) == 32
    assert len(found["c"]["response"]["body"]["choices"]) == 2
    assert (
        found["b"]["response"]["status_code"] == 400
        and "temperature" in found["b"]["response"]["body"]["error"]["message"]
    )
    assert found[None]["response"] is None and found[None]["error"]["line"] == 4
    assert found["d"]["response"]["body"]["choices"][0]["finish_reason"] == "repetition"
    assert found["d"]["response"]["body"]["usage"]["completion_tokens"] == 1 + 256
    assert "3 answered, 2 failed" in capsys.readouterr().err
    monkeypatch.setattr("foreword.cli.run_batch.ModelManager", None)  # nothing is loaded
    assert main(arguments) == 1
    assert "0 answered, 0 failed, 5 were before" in capsys.readouterr().err


def test_lines_are_grouped_by_model(tmp_path: Path) -> None:
    entries = [ModelEntry(name, Config(served_model_name=f"{name},{name}2")) for name in "ab"]
    entries[0] = replace(entries[0], variants=(ModelVariant("a:x"),))
    models = ModelsConfig(tuple(entries), None, None, 0.0)
    asked = {"1": "b", "2": "a:x", "3": None, "4": "b2", "5": "nobody's", "6": "a"}
    source = write(tmp_path / "in", *(chat(name, model=model) for name, model in asked.items()), "{")
    order = "".join(item.custom_id or "-" for item in lines_by_model(source, models))
    assert order == "142365-"


def test_model_that_cannot_be_loaded_fails_its_line_only() -> None:
    refusal = {"error": {"code": "model_load_failed", "message": "damaged"}}
    response = httpx.Response(503, json=refusal, headers={"Retry-After": "60"})
    assert ask_once(lambda request: response)[:2] == (503, [])


@pytest.mark.full
def test_run_of_several_models(tmp_path: Path) -> None:
    """Two models of which one is in memory at a time, and one that is damaged."""
    names = ("one", "two", "broken")
    for name in names:
        write_checkpoint(tmp_path / "models" / name)
    weights = tmp_path / "models" / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9000])
    lines = (chat(f"{name}{i}", model=name, max_tokens=4, seed=1) for i in range(3) for name in names)
    output = tmp_path / "out"
    arguments = ["--models", str(tmp_path / "models"), "--max-loaded-models", "1", "--threads", "1"]
    assert main(["run-batch", "-i", str(write(tmp_path / "in", *lines)), "-o", str(output), *arguments]) == 1
    for name, found in records(output).items():
        body = found["response"]["body"]
        if name.startswith("broken"):
            assert body["error"]["code"] == "model_load_failed"
        else:
            assert (body["model"], body["usage"]["completion_tokens"]) == (name[:-1], 4)


def test_dead_engine_leaves_a_file_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeEngineClient()

    class Fake(FakeEngineClient):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return client

    client.script = lambda request: (
        FakeOutput() if len(client.submitted) < 5 else client.kill() or FakeOutput()
    )
    monkeypatch.setattr(backends, "make_engine_client", Fake)
    source = write(tmp_path / "in", *(chat(f"r{i}", max_tokens=3) for i in range(9)))
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--concurrency", "1"]) == 1
    assert len(records(tmp_path / "out")) == 4


def restore_sigint() -> None:
    """Restores SIGINT, which children inherit as ignored when the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.full
def test_ctrl_c_leaves_a_file_to_continue(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(chat(f"r{i}") for i in range(200)))
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--concurrency", "8", "--url"]
    with run_server(client=FakeEngineClient(FakeOutput(delay_s=0.01))) as server:
        command = [sys.executable, "-m", "foreword", *words, server.url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=restore_sigint)
        wait_until(lambda: (tmp_path / "out").exists() and len((tmp_path / "out").read_bytes()) >= 2000)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130 and "Traceback" not in said, said
        answered = records(tmp_path / "out")
        assert 0 < len(answered) < 200 and f"{len(answered)} answered, 0 failed" in said
        server.set_output(FakeOutput())
        assert main([*words, server.url]) == 0
    assert set(records(tmp_path / "out")) == {f"r{i}" for i in range(200)}
