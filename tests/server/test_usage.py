"""Usage over HTTP: the database holds the sums of the `usage` objects; quotas, admin routes, metrics."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.server import app
from foreword.server.auth.key_file import dump_keys
from foreword.server.auth.keys import Keyring
from foreword.server.auth.usage_db import Usage, UsageDatabase, UsageId, read_usage, utc_day
from foreword.server.auth.usage_log import UsageLog
from tests.server.auth.test_keys import CHAT, key_of, keyed, write
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import wait_until

NOON_S = 1_893_499_200.0
USER = [{"role": "user", "content": "Hi"}]
DRAFTED = FakeOutput("Hello world", bursts=(1, 4), num_cached=2)
TODAY = utc_day(time.time()), utc_day(time.time() + 86_400)  # a test may begin before midnight
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# Requests of every endpoint that answers with `usage`.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "n": 3, "stop": "wor"}),
    (CHAT, {"messages": USER, "n": 2, **STREAM}),
    ("/v1/completions", {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "abc", "n": 1, "best_of": 3, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}),
    ("/v1/completions", {"prompt": [1, 2, 3], **STREAM}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi", "stream": True}),
    ("/v1/messages", {"messages": USER, "max_tokens": 6}),
    ("/v1/messages", {"messages": USER, "max_tokens": 6, "stream": True}),
    ("/v1/messages", {"messages": USER, "max_tokens": 0}),
    ("/v1/embeddings", {"input": ["abc", "de"]}),
    ("/v1/rerank", {"query": "a", "documents": ["ab", "cd"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["ab", "cd"]}),
)


def answer_usage(response: httpx.Response) -> Usage:
    """The tokens of the last `usage` object of an answer, in the form of any API."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = response.text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        found = [event.get("response", event).get("usage") for event in events]
        started = [event["message"]["usage"] for event in events if event.get("type") == "message_start"]
        usage = {**(started[0] if started else {}), **[each for each in found if each][-1]}
    else:
        usage = response.json()["usage"]
    if "cache_read_input_tokens" in usage:  # Anthropic's: parts of the input
        cached = usage["cache_read_input_tokens"]
        num_input = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        return Usage(1, num_input, cached, usage["output_tokens"])
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    generated = usage.get("completion_tokens", usage.get("output_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Usage(1, prompt, details.get("cached_tokens", 0), generated)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write(
        tmp_path / "keys.yaml",
        key_of("alice"),
        key_of("bob"),
        key_of("poor", tokens_per_day=30),
        key_of("root", admin=True),
    )
    return Config(api_key_file=str(tmp_path / "keys.yaml"), usage_db=str(tmp_path / "usage.db"))


@pytest.fixture
def server(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(app, "TICK_S", 0.05)
    with run_server(config, FakeEngineClient(DRAFTED), key="alice") as server:
        yield server


def stored(config: Config, key: str = "alice") -> Usage:
    assert config.usage_db is not None
    rows = read_usage(Path(config.usage_db), ("key",), key=key)
    return rows[0][1] if rows else Usage()


def without_drafts(usage: Usage) -> Usage:
    return usage._replace(drafted_tokens=0, accepted_tokens=0)


def post(server: RunningServer, path: str, body: Mapping[str, Any], key: str = "alice") -> httpx.Response:
    return server.http.post(path, json={"model": MODEL, **body}, headers=keyed(key))


def admin(server: RunningServer, path: str, **query: str) -> httpx.Response:
    return server.http.get(path, params=query, headers=keyed("root"))


def test_database_holds_the_sums_of_all_answers(server: RunningServer, config: Config) -> None:
    """After each answer, without a wait: usage is written before the answer ends."""
    expected = Usage()
    for path, body in REQUESTS:
        answer = post(server, path, body)
        assert answer.status_code == 200, answer.text
        expected = expected.plus(answer_usage(answer))
        assert without_drafts(stored(config)) == expected, (path, body)
    assert stored(config).drafted_tokens > stored(config).accepted_tokens > 0
    assert [row[0] for row in read_usage(Path(str(config.usage_db)), ("key", "model"))] == [("alice", MODEL)]


def test_draft_tokens_are_those_of_metrics_objects(server: RunningServer, config: Config) -> None:
    metrics = post(server, CHAT, {"messages": USER, "metrics": True, "n": 2}).json()["metrics"]
    usage = stored(config)
    assert usage.drafted_tokens == metrics["draft_tokens"]
    assert usage.accepted_tokens == metrics["draft_tokens"] * metrics["draft_tokens_acceptance"]


def test_delivered_tokens_of_aborted_answers_count(server: RunningServer, config: Config) -> None:
    server.set_output(FakeOutput("Hello world", hang_after=3))
    with server.openai.chat.completions.create(model=MODEL, messages=USER, stream=True) as stream:  # type: ignore[arg-type, call-overload]
        for _ in range(3):
            next(stream)
    wait_until(lambda: stored(config).requests == 1)
    usage = stored(config)
    assert (usage.generated_tokens, usage.errors) == (3, 0) and usage.prompt_tokens > 0


def test_failed_answers_count_as_errors(server: RunningServer, config: Config) -> None:
    """The tokens of a prompt count from the first token of its answer on."""
    server.set_output(FakeOutput(fail_after=0))
    assert post(server, CHAT, {"messages": USER}).status_code == 500
    assert post(server, "/v1/embeddings", {"input": "a"}).status_code == 500
    wait_until(lambda: stored(config).requests == 2)
    assert stored(config) == Usage(requests=2, errors=2)
    server.set_output(FakeOutput("Hello", fail_after=2))
    assert '"error"' in post(server, CHAT, {"messages": USER, "stream": True}).text
    assert (stored(config).errors, stored(config).generated_tokens) == (3, 2)
    server.set_output(DRAFTED)
    assert post(server, CHAT, {"messages": USER, "max_tokens": 0}).status_code == 400
    assert post(server, "/v1/embeddings", {"input": "a", "dimensions": 99}).status_code == 400
    assert post(server, CHAT, {"messages": USER}).status_code == 200
    assert stored(config).requests == 4, "a refused request is none"


def test_quota_is_refused_until_midnight(server: RunningServer, config: Config) -> None:
    """The clients of OpenAI and Anthropic raise at once: neither waits for hours, nor tries again in vain."""
    server.app.state.models.usage._now = lambda: NOON_S
    for _ in range(2):
        assert post(server, "/v1/completions", {"prompt": "abc"}, "poor").status_code == 200
    refused = post(server, CHAT, {"messages": USER}, "poor")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, *["insufficient_quota"] * 2)
    assert error["message"].startswith("this key may use 30 tokens a day")
    assert refused.headers["retry-after"] == "43200"
    assert refused.headers["x-should-retry"] == "false"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="poor")
    with client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert caught.value.code == "insufficient_quota"
    claude = anthropic.Anthropic(base_url=server.url, api_key="poor")
    with claude, pytest.raises(anthropic.RateLimitError):
        claude.messages.create(model=MODEL, messages=USER, max_tokens=5)  # type: ignore[arg-type]
    assert stored(config, "poor").requests == 2
    usage = next(each for each in admin(server, "/admin/keys").json()["keys"] if each["name"] == "poor")
    assert usage["tokens_per_day"] == 30 and usage["usage"]["tokens_today"] == 30
    assert usage["usage"]["refused"] == 3, "each was sent once"
    assert (
        'requests_rejected_total{model="fake-model",reason="quota"} 3.0' in server.http.get("/metrics").text
    )


def test_quota_outlives_the_server(config: Config, tmp_path: Path) -> None:
    used = UsageDatabase(tmp_path / "usage.db")
    used.add({UsageId(utc_day(0), "poor", "m"): Usage(prompt_tokens=99)})
    with run_server(config) as server:
        assert post(server, "/v1/completions", {"prompt": "abc"}, "poor").status_code == 200, "long ago"
    used.add({UsageId(day, "poor", "m"): Usage(prompt_tokens=30) for day in TODAY})
    with run_server(config) as server:
        assert post(server, "/v1/completions", {"prompt": "abc"}, "poor").status_code == 429
    used.close()


def test_quota_needs_a_database(tmp_path: Path) -> None:
    """Also in a key file that is changed while the server runs."""
    path = tmp_path / "keys.yaml"
    write(path, key_of("poor", tokens_per_day=30))
    with pytest.raises(ConfigError, match="gives poor tokens_per_day, which needs --usage-db FILE"):
        Keyring(None, path, False, UsageLog())
    write(path, key_of("root", admin=True))
    with run_server(Config(api_key_file=str(path))) as server:
        path.write_text(dump_keys([key_of("root", admin=True), key_of("poor", tokens_per_day=30)]))
        refused = server.http.post("/admin/keys/reload", headers=keyed("root"))
        assert refused.status_code == 400 and "needs --usage-db" in refused.json()["error"]["message"]
        no_usage = admin(server, "/admin/usage")
        assert no_usage.status_code == 400 and "--usage-db" in no_usage.json()["error"]["message"]


def test_admin_usage(server: RunningServer) -> None:
    for key in ("alice", "alice", "bob"):
        post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 4}, key)
    rows = admin(server, "/admin/usage").json()["usage"]
    counts = {
        "requests": 2,
        "prompt_tokens": 6,
        "cached_tokens": 4,
        "generated_tokens": 8,
        "drafted_tokens": 8,
        "accepted_tokens": 6,
        "errors": 0,
    }
    assert rows[0] == {"day": rows[0]["day"], "key": "alice", "model": MODEL, **counts}
    assert [row["key"] for row in rows] == ["alice", "bob"]
    assert admin(server, "/admin/usage", by="key", key="alice").json()["usage"] == [
        {"key": "alice", **counts}
    ]
    table = admin(server, "/admin/usage", by="model", since=rows[0]["day"], format="csv")
    assert table.headers["content-type"].startswith("text/csv")
    assert list(csv.DictReader(io.StringIO(table.text))) == [
        {"model": MODEL, **{name: str(count * 3 // 2) for name, count in counts.items()}}
    ]
    assert admin(server, "/admin/usage", until="1999-12-31").json()["usage"] == []
    for query, param in (({"by": "name"}, "by"), ({"since": "today"}, "since")):
        refused = admin(server, "/admin/usage", **query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert server.http.get("/admin/usage", headers=keyed("alice")).status_code == 403


def test_without_keys_everybody_sees_the_metrics_of_the_only_one() -> None:
    with run_server(client=FakeEngineClient(DRAFTED)) as server:
        server.complete("abc", max_tokens=4)
        series = f'foreword_key_generation_tokens_total{{key="",model="{MODEL}"}} 4.0'
        wait_until(lambda: series in server.http.get("/metrics").text)


def test_metrics_by_key_are_for_admins(server: RunningServer) -> None:
    """/metrics is public, and names of keys are not."""
    post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 4}, "bob")
    series = f'foreword_key_generation_tokens_total{{key="bob",model="{MODEL}"}} 4.0'
    assert series in admin(server, "/metrics").text
    for headers in ({}, keyed("alice"), keyed("wrong")):
        public = server.http.get("/metrics", headers=headers)
        assert public.status_code == 200 and "bob" not in public.text
        assert "foreword_usage_db_errors_total 0.0" in public.text
