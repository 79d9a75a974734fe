"""`foreword keys`: a new key is shown once, and a server accepts it."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.cli.main import main
from foreword.server.auth.key_file import hash_key, read_key_file
from tests.support.waiting import WAIT_S


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


def test_keys_imports_no_torch(path: Path) -> None:
    code = (
        "import sys; from foreword.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, "keys", "new", "a", "--file", str(path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("fw-")


def test_invalid_key_file_fails_before_loading(path: Path) -> None:
    path.write_text("keys: [{name: alice}]")
    command = [sys.executable, "-m", "foreword", "serve", "--port", "0", "--api-key-file", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (completed.returncode, completed.stdout) == (2, "")
    reason = f"foreword serve: key file {path} entry 1 (alice): hash is missing"
    assert completed.stderr.splitlines()[-1] == reason
