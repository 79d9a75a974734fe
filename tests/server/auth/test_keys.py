"""API keys over HTTP with real clients: permissions, limits, and reloads under load."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from hmac import compare_digest
from pathlib import Path
from typing import Any

import openai
import pytest

from foreword.config.options import Config
from foreword.errors import ConfigError, ExpiredKey, Unauthorized
from foreword.server.auth.key_file import Key, dump_keys, hash_key, read_key_file, stored_salt
from foreword.server.auth.keys import Keyring, key_from_headers
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SLOW = FakeOutput("abcdefgh" * 16, delay_s=0.02)


def key_of(name: str, **fields: Any) -> Key:
    """An entry whose key is its name."""
    return Key(name, name.encode().ljust(16), hash_key(name.encode(), name.encode().ljust(16)), **fields)


def write(path: Path, *keys: Key) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(dump_keys(keys))
    draft.replace(path)


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


KEYS = (
    key_of("alice"),
    key_of("slow", requests_per_minute=2),
    key_of("poor", tokens_per_minute=1000),
    key_of("few", max_concurrency=2),
    key_of("other", models=("another-model",)),
    key_of("late", expires=1.0),
    key_of("vip", priority=-5),
    key_of("last", priority=7),
    key_of("root", admin=True),
)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write(path, *KEYS)
    return path


@pytest.fixture
def server(keys_file: Path) -> Iterator[RunningServer]:
    with run_server(
        Config(api_key="plain", api_key_file=str(keys_file)), FakeEngineClient(FakeOutput("ok")), key="alice"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for tests that change no keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, *KEYS)
    with run_server(Config(api_key_file=str(path)), FakeEngineClient(FakeOutput("ok"))) as server:
        yield server


def ask(server: RunningServer, key: str, **fields: Any) -> Any:
    return server.http.post(CHAT, json={"messages": USER, **fields}, headers=keyed(key))


# Authentication


def test_keys_of_both_kinds(server: RunningServer) -> None:
    assert server.chat().choices[0].message.content == "ok"
    for key in ("alice", "plain"):
        assert ask(server, key).status_code == 200
    accounts = [request.fairness_key for request in server.client.submitted]
    assert accounts == ["alice", "alice", "#1"]
    alice, _, plain = (request.cache_salt for request in server.client.submitted)
    assert alice and plain and alice != plain


def test_openai_client_raises_the_right_errors(server: RunningServer) -> None:
    def client(key: str) -> openai.OpenAI:
        return server.openai.with_options(api_key=key)

    with pytest.raises(openai.AuthenticationError, match="not known") as unknown:
        client("nobody").models.list()
    assert (
        unknown.value.code == "invalid_api_key"
        and unknown.value.response.headers["WWW-Authenticate"] == "Bearer"
    )
    with pytest.raises(openai.AuthenticationError, match="has expired") as expired:
        client("late").models.list()
    assert expired.value.code == "expired_api_key"
    with pytest.raises(openai.PermissionDeniedError, match="may not use the model 'fake-model'") as forbidden:
        client("other").completions.create(model=MODEL, prompt="Hi")
    assert (forbidden.value.code, forbidden.value.type, forbidden.value.param) == (
        "forbidden",
        "permission_error",
        "model",
    )


def test_forbidden_models_are_not_listed(server: RunningServer) -> None:
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert list(server.openai.with_options(api_key="other").models.list()) == []
    headers = keyed("other")
    assert server.http.get(f"/v1/models/{MODEL}", headers=headers).status_code == 403
    missing = server.http.get("/v1/models/none", headers=headers)
    assert missing.status_code == 404 and MODEL not in missing.text
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        for model in ({}, {"model": MODEL}):
            reply = server.http.post(path, json={**body, **model}, headers=headers)
            assert (reply.status_code, reply.json()["error"]["param"]) == (403, "model"), path
    assert server.client.submitted == []
    assert (
        'foreword_requests_rejected_total{model="fake-model",reason="forbidden"} 13.0'
        in server.http.get("/metrics").text
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Bearer alice")], 200),
        ([("authorization", "bEaReR   alice")], 200),
        ([("x-api-key", "alice")], 200),
        ([("X-API-Key", "nobody")], 401),
        ([("Authorization", "Bearer nobody"), ("x-api-key", "alice")], 401),
        ([("Authorization", "Bearer alice"), ("Authorization", "Bearer alice")], 401),
        ([("x-api-key", "alice"), ("x-api-key", "nobody")], 401),
        ([("Authorization", "alice")], 401),
        ([("Authorization", "Basic YWxpY2U6")], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer alice alice")], 401),
        ([("Authorization", "Bearer " + "alice" * 1000)], 401),
        ([("Authorization", b"Bearer \xff\xfe\x80")], 401),
        ([("Cookie", "key=alice")], 401),
        ([], 401),
    ],
)
def test_key_headers(shared: RunningServer, headers: list[tuple[str, Any]], status: int) -> None:
    assert shared.http.get("/v1/models", headers=headers).status_code == status


def test_key_in_the_url_is_ignored(shared: RunningServer) -> None:
    for query in ("api_key=alice", "key=alice", "Authorization=Bearer%20alice"):
        assert shared.http.get(f"/v1/models?{query}").status_code == 401


def test_key_with_other_characters() -> None:
    ring = Keyring("schlüssel, ключ", None, False)
    for key in ("schlüssel", "ключ"):
        assert ring.identify(key_from_headers([(b"authorization", b"Bearer " + key.encode())])).fairness_key
    with pytest.raises(Unauthorized):
        ring.identify(b"schlussel")


def test_too_long_key_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, hashed = Keyring("a", None, False), list[bytes]()

    def noting(given: bytes, salt: bytes) -> bytes:
        hashed.append(given)
        return bytes(32)

    monkeypatch.setattr("foreword.server.auth.keys.hash_key", noting)
    for given in (b"x" * 512, b"x" * 513):
        with pytest.raises(Unauthorized):
            ring.identify(given)
    assert hashed == [b"x" * 512]


def test_key_for_one_name_of_a_model_may_use_all_its_names(keys_file: Path) -> None:
    write(keys_file, key_of("a", models=("second",)), key_of("b", models=("another",)), key_of("c"))
    with run_server(
        Config(api_key_file=str(keys_file)), FakeEngineClient(FakeOutput("ok")), aliases=("second", "third")
    ) as server:
        for name in (None, MODEL, "second", "third"):
            body = {"messages": USER, **({} if name is None else {"model": name})}
            replies = {key: server.http.post(CHAT, json=body, headers=keyed(key)) for key in "abc"}
            assert {key: reply.status_code for key, reply in replies.items()} == {
                "a": 200,
                "b": 403,
                "c": 200,
            }
            assert replies["a"].json()["model"] == MODEL  # as vLLM: the first name, whatever was asked for
        listed = server.http.get("/v1/models", headers=keyed("a")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            (name, MODEL) for name in (MODEL, "second", "third")
        ]
        assert {card["max_model_len"] for card in listed} == {listed[0]["max_model_len"]}
        assert server.http.get("/v1/models", headers=keyed("b")).json()["data"] == []
        assert server.http.get("/v1/models/third", headers=keyed("a")).json()["id"] == "third"
        reply = server.http.post(CHAT, json={"messages": USER, "model": "x"}, headers=keyed("a"))
        assert (
            reply.status_code == 404
            and f"'{MODEL}' and 'second' and 'third'" in reply.json()["error"]["message"]
        )
        assert server.http.post(
            "/v1/embeddings", json={"input": "a", "model": "third"}, headers=keyed("a")
        ).is_success


def test_every_entry_is_compared(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, compared = Keyring("plain", keys_file, False), list[bytes]()

    def noting(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare_digest(given, known)

    monkeypatch.setattr("foreword.server.auth.keys.compare_digest", noting)
    assert ring.identify(b"alice").fairness_key == "alice"
    assert compared == [meter.key.digest for meter in ring.meters] and len(compared) == 1 + len(KEYS)


def test_key_expires(tmp_path: Path) -> None:
    now = [1000.0]
    write(tmp_path / "keys", key_of("a", expires=1060.0))
    ring = Keyring(None, tmp_path / "keys", False, now=lambda: now[0])
    now[0] = 1059.9
    assert ring.identify(b"a").fairness_key == "a"
    now[0] = 1060.0
    with pytest.raises(ExpiredKey):
        ring.identify(b"a")
    with pytest.raises(Unauthorized) as unknown:
        ring.identify(b"b")
    assert unknown.value.code == "invalid_api_key", "only the key's holder learns that it has expired"


def test_server_without_keys_is_open() -> None:
    access = Keyring(None, None, False).identify(None)
    assert (access.fairness_key, access.cache_salt, access.admin) == ("", "", False)
    access.check_model("any", ("any",))
    assert access.request_context(-3).priority == -3


def test_empty_file_refuses_every_key(tmp_path: Path) -> None:
    write(tmp_path / "keys")
    ring = Keyring(None, tmp_path / "keys", False)
    with pytest.raises(Unauthorized):
        ring.identify(None)


def test_replaced_key_has_its_own_prefix_cache(tmp_path: Path) -> None:
    path, tenants = tmp_path / "keys", []
    for secret in ("one", "two"):
        write(path, Key("a", b"s" * 16, hash_key(secret.encode(), b"s" * 16)))
        tenants.append(Keyring(None, path, False).identify(secret.encode()).cache_salt)
    assert tenants[0] != tenants[1]
    assert Keyring(None, path, True).identify(b"two").cache_salt == ""


@pytest.mark.parametrize("share_prefix_cache", [False, True])
def test_saved_names_belong_to_the_key_and_not_to_its_position(share_prefix_cache: bool) -> None:
    first, second = (Keyring(keys, None, share_prefix_cache, salt=b"s" * 16) for keys in ("a,b", "b,a,c"))
    owners = {key: first.identify(key).slot_owner for key in (b"a", b"b")}
    assert owners == {key: second.identify(key).slot_owner for key in owners}
    assert len({*owners.values(), second.identify(b"c").slot_owner, ""}) == 4


def test_keys_of_the_command_line_find_blocks_on_disk_again(tmp_path: Path) -> None:
    """Their namespace depends on a salt that is stored with the blocks, not on the process."""
    folders = [tmp_path / "a" / "kv", tmp_path / "a" / "kv", tmp_path / "b"]
    tenants = [
        Keyring("x", None, False, salt=stored_salt(each)).identify(b"x").cache_salt for each in folders
    ]
    assert tenants[0] == tenants[1] != tenants[2]
    assert (folders[0] / "salt").stat().st_mode & 0o777 == 0o600
    assert (
        Keyring("x", None, False).identify(b"x").cache_salt
        != Keyring("x", None, False).identify(b"x").cache_salt
    )
    (tmp_path / "b" / "salt").write_bytes(b"")
    with pytest.raises(ConfigError, match="must have 16 bytes"):
        stored_salt(tmp_path / "b")
    (tmp_path / "b" / "salt").unlink()
    (tmp_path / "b" / "salt").symlink_to(folders[0] / "salt")
    with pytest.raises(ConfigError, match="symbolic links"):
        stored_salt(tmp_path / "b")


def test_priorities(server: RunningServer) -> None:
    for key, wanted, chosen in [
        ("alice", None, 0),
        ("alice", 3, 3),
        ("vip", -5, -5),
        ("vip", None, 0),
        ("last", None, 7),
        ("last", 9, 9),
        ("plain", -99, -99),
    ]:
        assert ask(server, key, priority=wanted).status_code == 200
        assert server.client.submitted[-1].priority == chosen
    for key, wanted in (("alice", -1), ("vip", -6), ("last", 0)):
        reply = ask(server, key, priority=wanted)
        assert (reply.status_code, reply.json()["error"]["param"]) == (403, "priority")


# Limits


def test_requests_per_minute(server: RunningServer) -> None:
    client = server.openai.with_options(api_key="slow")
    reply = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert reply.headers["x-ratelimit-limit-requests"] == "2"
    assert reply.headers["x-ratelimit-remaining-requests"] == "1"
    assert re.fullmatch(r"(29|30)s|[0-9]+ms", reply.headers["x-ratelimit-reset-requests"])
    client.completions.create(model=MODEL, prompt="Hi")
    with pytest.raises(openai.RateLimitError, match="2 requests a minute") as caught:
        client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 30
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert client.models.list(), "GET requests are not charged"
    assert len(server.client.submitted) == 2
    assert (
        'foreword_requests_rejected_total{model="fake-model",reason="rate_requests"} 1.0'
        in server.http.get("/metrics").text
    )


def test_failed_requests_count(server: RunningServer) -> None:
    headers = keyed("slow")
    for path, body in ((CHAT, {}), ("/tokenize", {"prompt": "a"})):
        reply = server.http.post(path, json=body, headers=headers)
        assert reply.status_code in (200, 400) and "x-ratelimit-remaining-requests" in reply.headers
    for path in (
        CHAT,
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
    ):
        assert server.http.post(path, json={}, headers=headers).status_code == 429


def test_tokens_per_minute(server: RunningServer) -> None:
    headers = keyed("poor")
    first = ask(server, "poor")
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) in (1000 - used, 1000 - used + 1)
    second = server.http.post(
        "/v1/completions", json={"prompt": "x" * 1200, "n": 3, "max_tokens": 2}, headers=headers
    )
    assert second.json()["usage"]["total_tokens"] == 1206, "the prompt is charged once"
    with pytest.raises(openai.RateLimitError, match="1000 tokens a minute") as caught:
        server.openai.with_options(api_key="poor").completions.create(model=MODEL, prompt="Hi")
    owed = used + 1206 - 1000
    assert owed * 0.06 - 10 <= int(caught.value.response.headers["Retry-After"]) <= owed * 0.06 + 2
    assert server.http.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 429
    meter = next(each for each in server.app.state.models.keyring.meters if each.key.name == "poor")
    assert (meter.prompt_tokens + meter.generated_tokens, meter.open) == (used + 1206, 0)


def test_embedded_texts_are_charged(server: RunningServer) -> None:
    headers = keyed("poor")
    reply = server.http.post("/v1/embeddings", json={"input": ["aaaa"] * 10}, headers=headers)
    used = reply.json()["usage"]["prompt_tokens"]
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 1000 - used
    assert all(request.fairness_key == "poor" for request in server.client.submitted)


def test_concurrency_of_a_key(server: RunningServer) -> None:
    server.set_output(SLOW)
    body = {"messages": USER, "stream": True, "n": 2}
    with server.http.stream("POST", CHAT, json=body, headers=keyed("few")) as stream:
        lines = stream.iter_lines()
        next(lines)
        reply = ask(server, "few")
        assert reply.status_code == 429 and "2 requests open" in reply.json()["error"]["message"]
        assert int(reply.headers["Retry-After"]) >= 1
        server.set_output(FakeOutput("ok"))
        assert ask(server, "alice").status_code == 200, "other keys are not limited"
    server.wait_until_idle()
    wait_until(lambda: ask(server, "few", n=2).status_code == 200)


# Reloads


@pytest.mark.full
def test_changed_file_is_reloaded(server: RunningServer, keys_file: Path) -> None:
    assert ask(server, "slow").status_code == 200
    server.set_output(SLOW)
    with server.http.stream(
        "POST", CHAT, json={"messages": USER, "stream": True}, headers=keyed("alice")
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        write(keys_file, key_of("slow", requests_per_minute=2), key_of("new"))
        wait_until(lambda: server.http.get("/v1/models", headers=keyed("new")).status_code == 200)
        assert server.http.get("/v1/models", headers=keyed("alice")).status_code == 401
        server.set_output(FakeOutput("ok"))
        assert ask(server, "slow").status_code == 200
        assert ask(server, "slow").status_code == 429, "a reload keeps the usage"
        assert [line for line in lines if line][-1] == "data: [DONE]", "open requests finish"
    assert ask(server, "plain").status_code == 200


async def test_invalid_file_keeps_the_keys_and_is_logged_once(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Keyring(None, keys_file, False)
    keys_file.write_text("keys: [{name: alice}]")
    for _ in range(3):
        await ring.refresh()
    assert ring.identify(b"alice").fairness_key == "alice"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "entry 1 (alice): hash is missing; the keys stay as they were" in record.getMessage()
    keys_file.unlink()
    for _ in range(3):
        await ring.refresh()
    assert len(caplog.records) == 2 and "cannot be read" in caplog.records[1].getMessage()
    assert len(ring.meters) == len(KEYS)
    write(keys_file, key_of("bob"))
    await ring.refresh()
    assert [meter.key.name for meter in ring.meters] == ["bob"]


def test_invalid_file_at_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("keys: 3")
    with pytest.raises(ConfigError, match="must hold a list"):
        Keyring(None, tmp_path / "keys", False)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring(None, tmp_path / "none", False)


async def test_unchanged_file_is_not_read(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, reads = Keyring(None, keys_file, False), list[Path]()

    def reading(path: Path) -> tuple[Key, ...]:
        reads.append(path)
        return read_key_file(path)

    monkeypatch.setattr("foreword.server.auth.keys.read_key_file", reading)
    for _ in range(3):
        await ring.refresh()
    assert reads == []
    os.utime(keys_file, ns=(1, 1))
    await ring.refresh()
    await ring.refresh()
    assert reads == [keys_file]


@pytest.mark.full
def test_reload_under_load(server: RunningServer, keys_file: Path) -> None:
    """A key that stays in the file is never refused while the file is rewritten."""
    stop, wrong = threading.Event(), list[int]()

    def load() -> None:
        while not stop.is_set():
            try:
                server.openai.completions.create(model=MODEL, prompt="Hi")
            except openai.APIStatusError as error:
                wrong.append(error.status_code)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for index in range(30):
            write(keys_file, *KEYS, key_of(f"new{index}"))
            reply = server.http.post("/admin/keys/reload", headers=keyed("root"))
            assert reply.json() == {"keys": len(KEYS) + 2}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    meter = next(each for each in server.app.state.models.keyring.meters if each.key.name == "alice")
    assert (meter.requests, meter.open) == (len(server.client.submitted), 0)


@pytest.mark.full
def test_log_has_no_key_or_hash(
    server: RunningServer, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "foreword")
    secrets = ["sesame-right", "sesame-wrong"]
    write(keys_file, key_of("sesame-right", requests_per_minute=1))
    wait_until(lambda: server.http.get("/v1/models", headers=keyed("sesame-right")).status_code == 200)
    for key in (*secrets, "sesame-right"):
        ask(server, key)
        server.http.post(f"{CHAT}?key={key}", content=b"{", headers={"x-api-key": key})
    keys_file.write_text("keys: [{name: a, hash: sesame-wrong}]")
    wait_until(lambda: "stay as they were" in caplog.text)
    key = key_of("sesame-right")
    for hidden in ("sesame-wrong", key.digest.hex(), key.salt.hex(), "Bearer"):
        assert hidden not in caplog.text
