"""The file of API keys: who may come in, and how much each may take. It holds hashes, never keys.

    keys:
      - name: alice
        hash: sha256:SALT:DIGEST
        requests_per_minute: 60

A key is 32 random bytes. A slow hash (bcrypt, argon2) is for secrets that can be guessed: nobody tries out 2^256 keys, however
fast the hash, while a slow one would let everybody keep the server busy by sending wrong keys. The entries of a file share a
salt, so that a key that comes is hashed once, however many there are; entries that came from elsewhere may have their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from foreword.errors import ConfigError

__all__ = [
    "Key",
    "change_key_file",
    "choose_salt",
    "dump_keys",
    "hash_key",
    "new_secret",
    "parse_keys",
    "read_key_file",
]

KEY_PREFIX = "fw-"  # so that whoever searches code for secrets finds them
SALT_BYTES, DIGEST_BYTES = 16, 32
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
HASH_PATTERN = re.compile(rf"sha256:([0-9a-f]{{{2 * SALT_BYTES}}}):([0-9a-f]{{{2 * DIGEST_BYTES}}})")
MAX_FILE_BYTES = 16 << 20
MAX_LIMIT = 1 << 53
MAX_SHOWN_CHARS = 60  # characters of a wrong value
FILE_HEADER = "# Written by `foreword keys`; comments are lost when it writes again. docs/serving.md tells what each field means.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """One entry.

    name      whom requests are accounted to; unique
    salt, digest  digest is SHA-256 of salt and key
    admin     may use the routes below /admin
    models    served names that it may use; None: all
    expires   Unix time from which it is refused; None: never
    requests_per_minute, tokens_per_minute, max_concurrency  limits; None: without. Tokens are those of prompts and answers,
              concurrency counts open choices and texts
    priority  the best that it may ask for (lower is better), and what it has by default if that is worse than 0; None: any
    """

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    admin: bool = False
    models: tuple[str, ...] | None = None
    expires: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    priority: int | None = 0


def new_secret() -> str:
    """A key that nobody has seen."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def choose_salt(keys: Sequence[Key]) -> bytes:
    """For one more entry of a file with these."""
    return keys[-1].salt if keys else secrets.token_bytes(SALT_BYTES)


def hash_key(secret: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()


# Reading


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


def parse_keys(text: bytes, path: Path) -> tuple[Key, ...]:
    """The entries of a file's text; `path` is for errors. Raises ConfigError."""
    try:
        given = yaml.load(text, Loader=_StringLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _key_file_error(path, f"is not YAML: {_describe_yaml_error(error)}") from None
    if not isinstance(given, dict) or list(given) != ["keys"] or not isinstance(given["keys"], list):
        raise _key_file_error(
            path, "must hold a list called `keys`, and nothing else; `keys: []` lets nobody in"
        )
    keys = tuple(_parse_entry(path, index, entry) for index, entry in enumerate(given["keys"]))
    _check_unique(path, "name", [key.name for key in keys], keys)
    _check_unique(path, "hash", [key.digest for key in keys], keys)
    return keys


class _StringLoader(yaml.BaseLoader):
    """Takes every value as text, so that a name may be 123 or `no`, and no field twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a field is given twice", node.start_mark)
        return mapping


def _describe_yaml_error(error: Exception) -> str:
    """What is wrong, without the lines around it: they may hold a key."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or type(error).__name__
    return f"{what} in line {mark.line + 1}" if mark is not None else str(what)


def _parse_entry(path: Path, index: int, given: object) -> Key:
    where = f"entry {index + 1}"
    if not isinstance(given, dict):
        raise _key_file_error(path, f"{where} must hold `field: value` lines")
    name = given.get("name")
    if isinstance(name, str) and NAME_PATTERN.fullmatch(name):
        where = f"{where} ({name})"
    for required in ("name", "hash"):
        if required not in given:
            raise _key_file_error(path, f"{where}: {required} is missing")
    values: dict[str, Any] = {}
    for field_name, value in given.items():
        values |= _parse_field(path, where, field_name, value)
    return Key(**values)


def _parse_field(path: Path, where: str, name: object, value: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in PARSERS:
        raise _key_file_error(
            path, f"{where}: unknown field {str(name)!r:.{MAX_SHOWN_CHARS}}; known: {', '.join(PARSERS)}"
        )
    try:
        parsed = PARSERS[name](value)
    except ValueError as error:
        got = (
            "" if name == "hash" else f", got {value!r:.{MAX_SHOWN_CHARS}}"
        )  # somebody may have put the key there
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
    """Unix time of a date or of a date and time, in UTC unless it says otherwise. Raises ValueError."""
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


# Writing


def dump_keys(keys: Sequence[Key]) -> str:
    """The text of a file with these entries."""
    entries = [dict(_non_default_fields(key)) for key in keys]
    return FILE_HEADER + yaml.safe_dump({"keys": entries}, sort_keys=False, width=200)


def _non_default_fields(key: Key) -> Iterator[tuple[str, Any]]:
    """Fields that say more than their default."""
    yield "name", key.name
    yield "hash", f"sha256:{key.salt.hex()}:{key.digest.hex()}"
    for item in fields(Key):
        value = getattr(key, item.name)
        if item.default is not MISSING and value != item.default:
            yield item.name, _to_yaml(item.name, value)


def _to_yaml(name: str, value: Any) -> Any:
    if name == "expires":
        return datetime.fromtimestamp(value, UTC).isoformat()
    return list(value) if isinstance(value, tuple) else value


def change_key_file(path: Path, change: Callable[[tuple[Key, ...]], Sequence[Key]]) -> None:
    """Put the entries that `change` makes of the present ones in their place, all at once; a new file is its owner's alone.

    Two who change it at the same time come one after the other. Raises ConfigError.
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
    """The folder's lock leaves nothing behind, as that of a file that is replaced would."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _replace_file(path: Path, text: str) -> None:
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            _keep_owner(file.fileno(), path)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _keep_owner(handle: int, path: Path) -> None:
    """A file that the server's user or group could read stays so when somebody else, as root, changes it."""
    if not path.exists():
        return
    before = path.stat()
    if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, before.st_mode & 0o660)
