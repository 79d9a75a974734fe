"""`foreword keys`: a new key is shown once, and a server accepts it."""

import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.cli.main import main
from foreword.server.auth.key_file import hash_key, read_key_file
from foreword.server.auth.usage_db import Usage, UsageDatabase, UsageId


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FOREWORD_API_KEY_FILE", raising=False)
    return tmp_path / "keys.yaml"


def test_new_key_is_printed_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = "--admin --models a,b --expires 2030-01-31"
    limits += " --requests-per-minute 60 --tokens-per-minute 1000 --max-concurrency 4"
    assert main(["keys", "new", "alice", "--file", str(path), *limits.split(), "--priority", "-1"]) == 0
    output = capsys.readouterr()
    secret = output.out.removesuffix("\n")
    (key,) = read_key_file(path)
    assert (
        secret.startswith("fw-") and "\n" not in secret and key.digest == hash_key(secret.encode(), key.salt)
    )
    assert (key.name, key.admin, key.models, key.expires, key.priority) == (
        "alice",
        True,
        ("a", "b"),
        1896048000.0,
        -1,
    )
    assert (key.requests_per_minute, key.tokens_per_minute, key.max_concurrency) == (60, 1000, 4)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in output.err and secret not in path.read_text()


def test_list_and_revoke(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_API_KEY_FILE", str(path))
    for name in ("alice", "bob"):
        assert main(["keys", "new", name, "--expires", "90d"]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["name", "admin", "models", "expires"]
    assert [row.split()[:3] for row in rows] == [["alice", "no", "all"], ["bob", "no", "all"]]
    assert len({key.salt for key in read_key_file(path)}) == 1, "entries share a salt"
    assert not any(key.digest.hex() in row for key in read_key_file(path) for row in rows)
    monkeypatch.delenv("FOREWORD_API_KEY_FILE")
    assert main(["keys", "revoke", "alice", "--api-key-file", str(path)]) == 0
    assert [key.name for key in read_key_file(path)] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "alice"], "key alice exists; revoke it first"),
        (["new", "a b"], "name must be 1 to 64 letters"),
        (
            ["new", "bob", "--expires", "soon"],
            "expires must be a date .* or from now, such as 90d or 12h, got 'soon'",
        ),
        (
            ["new", "bob", "--requests-per-minute", "0"],
            "requests_per_minute must be a whole number, at least 1",
        ),
        (["new", "bob", "--models", "a,,b"], "models must be a list of names"),
        (["revoke", "bob"], "has no key 'bob'"),
    ],
)
def test_errors_change_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    main(["keys", "new", "alice", "--file", str(path)])
    before = path.read_text()
    capsys.readouterr()
    assert main(["keys", *arguments, "--file", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.search(message, output.err)
    assert path.read_text() == before


def test_missing_file_option_is_an_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 2
    assert "--file or FOREWORD_API_KEY_FILE" in capsys.readouterr().err
    assert main(["keys", "list", "--file", str(path)]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_invalid_key_file_starts_no_server(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("keys: [{name: alice}]")
    assert main(["serve", "--port", "0", "--api-key-file", str(path)]) == 2
    reason = f"foreword serve: key file {path} entry 1 (alice): hash is missing\n"
    assert capsys.readouterr() == ("", reason)


def test_limit_changes_only_what_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(path)]
    assert main(["keys", "new", "bob", *file]) == 0
    assert main(["keys", "new", "alice", *file, "--tokens-per-minute", "9", "--models", "a"]) == 0
    (bob, before) = read_key_file(path)
    changes = "--tokens-per-day 500 --tokens-per-minute none --models a,b --expires 2030-01-31"
    assert main(["keys", "limit", "alice", *file, *changes.split()]) == 0
    (same, after) = read_key_file(path)
    assert same == bob
    assert after == replace(
        before, tokens_per_day=500, tokens_per_minute=None, models=("a", "b"), expires=1896048000.0
    )
    assert main(["keys", "limit", "alice", *file, "--models", "none", "--expires", "none"]) == 0
    (_, after) = read_key_file(path)
    assert (after.models, after.expires, after.tokens_per_day, after.digest) == (
        None,
        None,
        500,
        before.digest,
    )
    for words, message in (
        ([], "nothing to change; name at least one of --models, --expires, --requests-per-minute"),
        (["--tokens-per-day", "0"], "tokens_per_day must be a whole number, at least 1, got '0'"),
        (["--tokens-per-day", "1k"], "tokens_per_day must be a whole number, or none, got '1k'"),
    ):
        assert main(["keys", "limit", "alice", *file, *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["keys", "limit", "carol", *file, "--priority", "1"]) == 2
    assert "has no key 'carol'" in capsys.readouterr().err
    assert read_key_file(path) == (bob, after)


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the file of a server that runs."""
    monkeypatch.delenv("FOREWORD_USAGE_DB", raising=False)
    path = tmp_path / "usage.db"
    database = UsageDatabase(path)
    database.add(
        {
            UsageId("2030-01-01", "alice", "big"): Usage(1, 10, 0, 1000),
            UsageId("2030-01-02", "alice", "big"): Usage(2, 20, 5, 30, 9, 8, 1),
            UsageId("2030-01-02", "", "small"): Usage(1, 5, 0, 6),
        }
    )
    assert main(["keys", "usage", "--usage-db", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "key    model  requests  prompt  cached  generated  drafted  accepted  errors",
        "-      small         1       5       0          6        0         0       0",
        "alice  big           3      30       5       1030        9         8       1",
        "total                4      35       5       1036        9         8       1",
    ]
    monkeypatch.setenv("FOREWORD_USAGE_DB", str(path))
    words = "--since 2030-01-02 --by key,day --key alice --csv"
    assert main(["keys", "usage", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "day,key,requests,prompt_tokens,cached_tokens,generated_tokens,drafted_tokens,accepted_tokens,errors",
        "2030-01-02,alice,2,20,5,30,9,8,1",
    ]
    assert main(["keys", "usage", "--since", "2031-01-01"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["total", *"0000000"]
    for words, message in (
        (
            "--by kye",
            "by must be day, key, model, or several of them joined by commas, got 'kye'; did you mean key",
        ),
        ("--since today", "since must be a day such as 2030-01-31, got 'today'"),
        (f"--usage-db {tmp_path}/none.db", "none.db does not exist"),
    ):
        assert main(["keys", "usage", *words.split()]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.delenv("FOREWORD_USAGE_DB")
    assert main(["keys", "usage"]) == 2
    assert "name it with --usage-db or FOREWORD_USAGE_DB" in capsys.readouterr().err
    database.close()
