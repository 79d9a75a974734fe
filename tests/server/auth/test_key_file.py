"""The key file: errors name entry and field, and written keys are read back."""

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.server.auth.key_file import (
    MAX_FILE_BYTES,
    Key,
    change_key_file,
    dump_keys,
    hash_key,
    new_secret,
    parse_keys,
    parse_time,
    read_key_file,
)

PATH = Path("keys.yaml")
HASH = f"sha256:{'a' * 32}:{'0' * 64}"
ALICE = f"keys:\n- name: alice\n  hash: {HASH}\n"


def key_of(name: str, **fields: object) -> Key:
    return Key(name, name.encode().ljust(16), hash_key(name.encode(), name.encode().ljust(16)), **fields)  # type: ignore[arg-type]


def test_every_field() -> None:
    text = ALICE + (
        "  admin: true\n  models: [a, b]\n  expires: 2030-01-31\n  requests_per_minute: 60\n"
        "  tokens_per_minute: 1000\n  tokens_per_day: 50000\n  max_concurrency: 4\n  priority: -2\n"
    )
    (key,) = parse_keys(text.encode(), PATH)
    expected = Key("alice", b"\xaa" * 16, bytes(32), True, ("a", "b"), 1896048000.0, 60, 1000, 50000, 4, -2)
    assert key == expected


def test_omitted_fields_take_defaults() -> None:
    (key,) = parse_keys(ALICE.encode(), PATH)
    assert key == Key("alice", b"\xaa" * 16, bytes(32), False, None, None, None, None, None, None, 0)
    assert parse_keys(b"keys: []", PATH) == ()


@pytest.mark.parametrize("name", ["123", "no", "a@b.example", "2030-01-01"])
def test_yaml_literals_are_valid_names(name: str) -> None:
    (key,) = parse_keys(f"keys: [{{name: {name}, hash: '{HASH}'}}]".encode(), PATH)
    assert key.name == name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("admin: yes", r"entry 1 \(alice\): admin must be true or false, got 'yes'"),
        ("models: a", "models must be a list of names of served models, got 'a'"),
        ("models: []", "models must be a list"),
        ("models: [[a]]", "models must be a list"),
        ("expires: soon", "expires must be a date such as 2030-01-31, .* got 'soon'"),
        ("expires: 2030-13-01", "expires must be a date"),
        ("expires: [1]", "expires must be a date"),
        ("requests_per_minute: 0", "requests_per_minute must be a whole number, at least 1, got '0'"),
        ("max_concurrency: " + "9" * 5000, "max_concurrency must be a whole number, got '9{59}$"),
        ("priority: high", "priority must be a whole number, got 'high'"),
        ("tokens_per_dya: 5", "unknown field 'tokens_per_dya'; did you mean tokens_per_day"),
        ("weight: 2", "unknown field 'weight'; known: name, hash, admin"),
        ("name: bob", "is not YAML: a field is given twice in line 2"),
        ("<<: {admin: true}", "unknown field '<<'"),
    ],
)
def test_invalid_field_is_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(f"{ALICE}  {line}\n".encode(), PATH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a list called `keys`"),
        ("keys:", "must hold a list called `keys`"),
        ("keys: []\nmore: 1", "and nothing else"),
        ("keys: [a]", "entry 1 must hold `field: value` lines"),
        ("keys: [{name: a}]", r"entry 1 \(a\): hash is missing"),
        (f"keys: [{{hash: '{HASH}'}}]", "entry 1: name is missing"),
        (f"keys: [{{name: a b, hash: '{HASH}'}}]", "entry 1: name must be 1 to 64 letters"),
        ("keys:\n\t- a", "is not YAML: found character"),
        ("keys: [", "is not YAML: .* in line 1"),
        ("[" * 5000, "is not YAML: it nests more than 50 lists"),
        ("keys: &a [*a]", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_invalid_structure_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(text.encode(), PATH)


def test_binary_file_is_refused() -> None:
    for text in (b"\xff\xfe\xfd", b"keys: [\xc3", bytes(range(256))):
        with pytest.raises(ConfigError, match=r"key file keys\.yaml"):
            parse_keys(text, PATH)


def test_key_in_place_of_its_hash_is_not_shown() -> None:
    secret = new_secret()
    for text in (
        f"keys: [{{name: a, hash: {secret}}}]",
        f"keys: [{{name: a, hash: [{secret}]}}]",
        f"keys: {{{secret}: [}}",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_keys(text.encode(), PATH)
        assert secret not in str(caught.value)
    assert "digest" not in repr(key_of("a")) and "salt" not in repr(key_of("a"))


def test_duplicate_entries_are_refused() -> None:
    twice = dump_keys([key_of("a"), key_of("b"), key_of("a")])
    with pytest.raises(ConfigError, match="same name, the second is a"):
        parse_keys(twice.encode(), PATH)
    copied = dump_keys([key_of("a"), Key("b", key_of("a").salt, key_of("a").digest)])
    with pytest.raises(ConfigError, match="same hash, the second is b"):
        parse_keys(copied.encode(), PATH)


def test_parse_time() -> None:
    assert (
        parse_time("1970-01-02")
        == parse_time("1970-01-02T00:00:00Z")
        == parse_time("1970-01-02T01:00:00+01:00")
        == 86400
    )


def test_hash_depends_on_key_and_salt() -> None:
    secret, other = new_secret(), new_secret()
    assert secret != other and len(secret) > 40
    hashed = hash_key(secret.encode(), b"salt")
    assert hashed not in (
        hash_key(other.encode(), b"salt"),
        hash_key(secret.encode(), b"pepper"),
        hash_key(b"", b"salt"),
    )


def test_missing_or_large_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_key_file(tmp_path)
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        read_key_file(large)


# Writing

PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1)
KEYS = st.builds(
    Key,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
    salt=st.binary(min_size=16, max_size=16),
    digest=st.binary(min_size=32, max_size=32),
    admin=st.booleans(),
    models=st.none() | st.lists(PLAIN_TEXT, min_size=1).map(tuple),
    expires=st.none() | st.integers(0, 4_000_000_000).map(float),
    requests_per_minute=st.none() | st.integers(1, 1 << 53),
    tokens_per_minute=st.none() | st.integers(1, 1 << 53),
    max_concurrency=st.none() | st.integers(1, 1 << 53),
    priority=st.integers(-(10**15), 10**15),
)


@given(st.lists(KEYS, unique_by=(lambda key: key.name, lambda key: key.digest), max_size=5))
def test_written_keys_are_read_back(keys: list[Key]) -> None:
    assert parse_keys(dump_keys(keys).encode(), PATH) == tuple(keys)


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: ("keys: " + text).encode("utf-8", "replace"))
)
def test_any_bytes_give_keys_or_an_error(text: bytes) -> None:
    try:
        parse_keys(text, PATH)
    except ConfigError as error:
        assert str(error).startswith("key file")


def test_new_file_has_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    change_key_file(path, lambda present: (*present, key_of("a")))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    change_key_file(path, lambda present: (*present, key_of("b")))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "the file's group can still read it"
    assert [key.name for key in read_key_file(path)] == ["a", "b"]
    assert os.listdir(tmp_path) == ["keys.yaml"]


def test_failed_change_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    change_key_file(path, lambda present: [key_of("a")])
    before = path.read_bytes()

    def broken(present: object) -> list[Key]:
        raise ConfigError("no", "name")

    with pytest.raises(ConfigError):
        change_key_file(path, broken)
    path.write_text("keys: [")
    with pytest.raises(ConfigError, match="not YAML"):
        change_key_file(path, lambda present: [])
    assert path.read_text() == "keys: [" and before and os.listdir(tmp_path) == ["keys.yaml"]


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "keys.yaml", tmp_path / "real" / "keys.yaml"
    change_key_file(real, lambda present: [key_of("a")])
    link.symlink_to(real)
    change_key_file(link, lambda present: (*present, key_of("b")))
    assert link.is_symlink() and len(read_key_file(real)) == 2


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        change_key_file(tmp_path / "none" / "keys.yaml", lambda present: [])


def test_concurrent_changes_are_serialized(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def add(name: str) -> None:
        change_key_file(path, lambda present: (*present, key_of(name)))

    threads = [threading.Thread(target=add, args=(f"k{index}",)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_key_file(path)} == {f"k{index}" for index in range(16)}
