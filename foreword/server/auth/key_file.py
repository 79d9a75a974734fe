"""The YAML file of API keys: salted hashes, permissions and limits.

    keys:
      - name: alice
        hash: sha256:SALT:DIGEST
        requests_per_minute: 60

SHA-256 is enough for a key of 32 random bytes: a slow hash (bcrypt, argon2) would only help a flood of keys.
New entries share one salt, so that the key of a request is hashed once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from foreword.config.option_parsing import BoundedLoader
from foreword.errors import ConfigError, did_you_mean, shown

KEY_PREFIX = "fw-"  # lets secret scanners find keys in code
SALT_BYTES, DIGEST_BYTES = 16, 32
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
HASH_PATTERN = re.compile(rf"sha256:([0-9a-f]{{{2 * SALT_BYTES}}}):([0-9a-f]{{{2 * DIGEST_BYTES}}})")
MAX_FILE_BYTES = 16 << 20
MAX_LIMIT = 1 << 53
MAX_SHOWN_CHARS = 60  # characters of an invalid value in a message
FILE_HEADER = "# Written by `foreword keys`, which drops comments. docs/serving.md describes the fields.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """One entry. Limits of None mean no limit."""

    name: str  # unique; requests are accounted to it
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)  # SHA-256 of salt and key
    admin: bool = False  # may use /admin
    models: tuple[str, ...] | None = None  # served names; None: all
    expires: float | None = None  # Unix time; None: never
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompts and answers
    tokens_per_day: int | None = None  # day of UTC; the usage database counts them
    max_concurrency: int | None = None  # open choices and texts
    priority: int | None = 0  # best allowed (lower is better), and the default if worse than 0; None: any


def new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def choose_salt(keys: Sequence[Key]) -> bytes:
    """Salt for one more entry."""
    return keys[-1].salt if keys else secrets.token_bytes(SALT_BYTES)


def stored_salt(folder: Path) -> bytes:
    """The salt in a directory of blocks that outlive this process: their owner's namespace depends on it.

    A random one is written if there is none. Raises ConfigError.
    """
    path = folder / "salt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(path):
            with tempfile.NamedTemporaryFile(dir=folder) as file, suppress(FileExistsError):
                file.write(secrets.token_bytes(SALT_BYTES))
                file.flush()
                os.link(file.name, path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            salt = file.read(SALT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"kv_cache_dir: {folder}: {error.strerror or error}", "kv_cache_dir") from None
    if len(salt) != SALT_BYTES:
        raise ConfigError(f"kv_cache_dir: {path} must have {SALT_BYTES} bytes; remove it", "kv_cache_dir")
    return salt


def hash_key(secret: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()


def read_key_file(path: Path) -> tuple[Key, ...]:
    """Raises ConfigError, which names the entry and the field."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _key_file_error(path, f"cannot be read: {error.strerror or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise _key_file_error(path, f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    return parse_keys(text, path)


def check_quotas(keys: Sequence[Key], path: Path, has_usage_db: bool) -> None:
    """Raises ConfigError for a limit that needs the usage database, without one: a restart would reset it."""
    for key in keys:
        if key.tokens_per_day is not None and not has_usage_db:
            raise _key_file_error(path, f"gives {key.name} tokens_per_day, which needs --usage-db FILE")


def parse_keys(text: bytes, path: Path) -> tuple[Key, ...]:
    """The entries of a file's text; `path` is for errors. Raises ConfigError."""
    try:
        data = yaml.load(text, Loader=_StringLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _key_file_error(path, f"is not YAML: {_describe_yaml_error(error)}") from None
    if not isinstance(data, dict) or list(data) != ["keys"] or not isinstance(data["keys"], list):
        raise _key_file_error(
            path, "must hold a list called `keys` and nothing else; `keys: []` refuses every key"
        )
    keys = tuple(_parse_entry(path, index, entry) for index, entry in enumerate(data["keys"]))
    _check_unique(path, "name", [key.name for key in keys], keys)
    _check_unique(path, "hash", [key.digest for key in keys], keys)
    return keys


class _StringLoader(BoundedLoader):
    """Loads every value as text, so that a name may be 123 or `no`; refuses repeated fields."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a field is given twice", node.start_mark)
        return mapping


def _describe_yaml_error(error: Exception) -> str:
    """The problem without the surrounding lines, which may hold a key."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or type(error).__name__)
    return problem if mark is None else f"{problem} in line {mark.line + 1}"


def _parse_entry(path: Path, index: int, entry: object) -> Key:
    where = f"entry {index + 1}"
    if not isinstance(entry, dict):
        raise _key_file_error(path, f"{where} must hold `field: value` lines")
    name = entry.get("name")
    if isinstance(name, str) and NAME_PATTERN.fullmatch(name):
        where = f"{where} ({name})"
    for required in ("name", "hash"):
        if required not in entry:
            raise _key_file_error(path, f"{where}: {required} is missing")
    values: dict[str, Any] = {}
    for field_name, value in entry.items():
        values |= _parse_field(path, where, field_name, value)
    return Key(**values)


def _parse_field(path: Path, where: str, name: object, value: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in PARSERS:
        hint = did_you_mean(str(name), PARSERS) or f"; known: {', '.join(PARSERS)}"
        raise _key_file_error(path, f"{where}: unknown field {shown(str(name), MAX_SHOWN_CHARS)}{hint}")
    try:
        parsed = PARSERS[name](value)
    except ValueError as error:
        # An invalid hash is not shown: it may be the key itself.
        got = "" if name == "hash" else f", got {shown(value, MAX_SHOWN_CHARS)}"
        raise _key_file_error(path, f"{where}: {name} must be {error}{got}") from None
    return parsed if isinstance(parsed, dict) else {name: parsed}


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise ValueError("1 to 64 letters, digits, dots, dashes, underscores or @")
    return value


def _parse_hash(value: object) -> dict[str, bytes]:
    match = HASH_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"sha256:SALT:DIGEST, {2 * SALT_BYTES} and {2 * DIGEST_BYTES} hexadecimal digits")
    return {"salt": bytes.fromhex(match[1]), "digest": bytes.fromhex(match[2])}


def _parse_bool(value: object) -> bool:
    if value not in ("true", "false"):
        raise ValueError("true or false")
    return value == "true"


def _parse_models(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError("a list of names of served models")
    return tuple(value)


def parse_time(value: object) -> float:
    """Unix time of an ISO date or time, in UTC by default. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("a date such as 2030-01-31, or a time such as 2030-01-31T12:00:00Z") from None


def _parse_limit(value: object) -> int:
    number = _parse_int(value)
    if not 1 <= number <= MAX_LIMIT:
        raise ValueError("a whole number, at least 1")
    return number


def _parse_int(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"[+-]?[0-9]{1,16}", value):
        raise ValueError("a whole number")
    return int(value)


PARSERS: Mapping[str, Callable[[object], Any]] = MappingProxyType(
    {
        "name": _parse_name,
        "hash": _parse_hash,
        "admin": _parse_bool,
        "models": _parse_models,
        "expires": parse_time,
        "requests_per_minute": _parse_limit,
        "tokens_per_minute": _parse_limit,
        "tokens_per_day": _parse_limit,
        "max_concurrency": _parse_limit,
        "priority": _parse_int,
    }
)


def _check_unique(path: Path, name: str, values: Sequence[object], keys: Sequence[Key]) -> None:
    seen: set[object] = set()
    for value, key in zip(values, keys, strict=True):
        if value in seen:
            raise _key_file_error(path, f"two entries have the same {name}, the second is {key.name}")
        seen.add(value)


def _key_file_error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"key file {path} {message}", "api_key_file")


def dump_keys(keys: Sequence[Key]) -> str:
    """The text of a file with these entries."""
    entries = [dict(_entry_fields(key)) for key in keys]
    return FILE_HEADER + yaml.safe_dump({"keys": entries}, sort_keys=False, width=200)


def _entry_fields(key: Key) -> Iterator[tuple[str, Any]]:
    """Name, hash, and the fields that differ from their defaults."""
    yield "name", key.name
    yield "hash", f"sha256:{key.salt.hex()}:{key.digest.hex()}"
    for item in fields(Key):
        value = getattr(key, item.name)
        if item.default is MISSING or value == item.default:
            continue
        if item.name == "expires":
            value = datetime.fromtimestamp(value, UTC).isoformat()
        yield item.name, list(value) if isinstance(value, tuple) else value


def change_key_file(path: Path, change: Callable[[tuple[Key, ...]], Sequence[Key]]) -> None:
    """Replace the entries by `change(entries)`, atomically and under a lock. A new file has mode 0600.

    Raises ConfigError.
    """
    path = path.resolve()
    try:
        with _lock_directory(path.parent):
            keys = change(read_key_file(path) if path.exists() else ())
            _replace_file(path, dump_keys(keys))
    except OSError as error:
        raise _key_file_error(path, f"cannot be written: {error.strerror or error}") from None


@contextmanager
def _lock_directory(folder: Path) -> Iterator[None]:
    """Locks the folder: a lock on the file would be lost when the file is replaced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace_file(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            _keep_owner(file.fileno(), path)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _keep_owner(handle: int, path: Path) -> None:
    """Keep owner and mode of the replaced file, so that the server can read it after root changes it."""
    if not path.exists():
        return
    before = path.stat()
    if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, before.st_mode & 0o660)
