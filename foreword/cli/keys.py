"""`foreword keys`: manage the key file of `foreword serve --api-key-file`, and read the usage database.

A new key is printed once, alone on stdout; the file holds its hash. A running server reloads a changed file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foreword.cli.configuration import environment_name
from foreword.errors import ConfigError
from foreword.server.auth.key_file import (
    Key,
    change_key_file,
    choose_salt,
    dump_keys,
    hash_key,
    new_secret,
    parse_keys,
    parse_time,
    read_key_file,
)
from foreword.server.auth.usage_db import Usage, parse_day, parse_dimensions, read_usage, write_csv

KEY_FILE_VARIABLE, USAGE_DB_VARIABLE = environment_name("api_key_file"), environment_name("usage_db")
UNIT_SECONDS = {"h": 3600, "d": 86_400}
LIMITS = {
    "requests_per_minute": "limit on requests per minute",
    "tokens_per_minute": "limit on tokens per minute, of prompts and answers",
    "tokens_per_day": "limit on tokens per day (UTC); the server needs --usage-db",
    "max_concurrency": "limit on open choices and texts",
    "priority": "best priority it may ask for; lower is served first (default: 0)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="create a key, print it, and add its hash to the file")
    limit = actions.add_parser("limit", help="change the limits of a key; what is not named stays")
    listing = actions.add_parser("list", help="the keys of the file, without their hashes")
    revoke = actions.add_parser("revoke", help="remove a key from the file")
    for sub in (new, limit, listing, revoke):
        sub.add_argument(
            *("--file", "--api-key-file"),
            dest="file",
            metavar="FILE",
            help=f"the key file (default: ${KEY_FILE_VARIABLE})",
        )
    for sub in (new, limit, revoke):
        sub.add_argument("name", metavar="NAME", help="name of the key")
    new.add_argument("--admin", action="store_true", help="allow the routes under /admin")
    for sub in (new, limit):
        _add_limits(sub)
    _add_usage_arguments(actions.add_parser("usage", help="what keys used, from the usage database"))


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Flags whose values are fields of Key; those that are not given are not in the namespace."""
    unset: Any = argparse.SUPPRESS
    parser.add_argument(
        "--models", default=unset, metavar="LIST", help="allowed models, by commas; none: all (default)"
    )
    parser.add_argument(
        "--expires",
        default=unset,
        metavar="WHEN",
        help="a date, a date and time, or from now: 90d, 12h; none: never (default)",
    )
    for name, help_ in LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=unset, metavar="N", help=f"{help_}; none: the default")


def _add_usage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--usage-db", "--file"),
        dest="usage_db",
        metavar="FILE",
        help=f"the database of the server's --usage-db (default: ${USAGE_DB_VARIABLE})",
    )
    parser.add_argument("--since", metavar="DAY", help="first day (UTC), such as 2030-01-31")
    parser.add_argument("--until", metavar="DAY", help="last day")
    parser.add_argument("--key", metavar="NAME", help="only of this key")
    parser.add_argument("--model", metavar="NAME", help="only of this model")
    parser.add_argument(
        "--by", default="key,model", metavar="LIST", help="sums by key, model, day (default: key,model)"
    )
    parser.add_argument("--csv", action="store_true", help="as CSV")


def run(args: argparse.Namespace) -> int:
    actions = {"new": _new, "limit": _limit, "list": _list, "revoke": _revoke, "usage": _usage}
    return actions[args.action](args)


def _new(args: argparse.Namespace) -> int:
    path, secret = _path(args), new_secret()
    key = Key(args.name, b"", b"", admin=args.admin, **_given_limits(args))

    def add(present: tuple[Key, ...]) -> Sequence[Key]:
        if key.name in {other.name for other in present}:
            raise ConfigError(f"key {key.name} exists; revoke it first, or choose another name", "name")
        salt = choose_salt(present)
        keys = (*present, replace(key, salt=salt, digest=hash_key(secret.encode(), salt)))
        parse_keys(dump_keys(keys).encode(), path)  # refuses a value that could not be read again
        return keys

    change_key_file(path, add)
    print(secret)
    print(f"added {key.name} to {path}; the key is shown only this once", file=sys.stderr)
    return 0


def _limit(args: argparse.Namespace) -> int:
    path, changes = _path(args), _given_limits(args)
    if not changes:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ("models", "expires", *LIMITS))
        raise ConfigError(f"nothing to change; name at least one of {names}", "name")

    def change(present: tuple[Key, ...]) -> Sequence[Key]:
        if args.name not in {key.name for key in present}:
            raise _unknown_key(path, args.name)
        keys = [replace(key, **changes) if key.name == args.name else key for key in present]
        parse_keys(dump_keys(keys).encode(), path)  # refuses a value that could not be read again
        return keys

    change_key_file(path, change)
    print(f"changed {args.name}", file=sys.stderr)
    return 0


def _given_limits(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of Key that are given. `none` stands for the default. Raises ConfigError."""
    defaults = {item.name: item.default for item in fields(Key)}
    names = ("models", "expires", *LIMITS)
    given = {name: value for name, value in vars(args).items() if name in names}
    return {
        name: defaults[name] if value == "none" else _parse_limit(name, value)
        for name, value in given.items()
    }


def _parse_limit(name: str, text: str) -> Any:
    """The value of a field of Key. Raises ConfigError."""
    if name == "models":
        return tuple(model.strip() for model in text.split(","))
    if name == "expires":
        return _parse_expiry(text, time.time())
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, or none, got {text!r:.60}", name) from None


def _usage(args: argparse.Namespace) -> int:
    path = args.usage_db or os.environ.get(USAGE_DB_VARIABLE)
    if not path:
        raise ConfigError(
            f"no usage database is given; name it with --usage-db or {USAGE_DB_VARIABLE}", "usage_db"
        )
    by = parse_dimensions(args.by)
    since, until = (
        None if day is None else parse_day(day, name)
        for name, day in (("since", args.since), ("until", args.until))
    )
    rows = read_usage(Path(path), by, since, until, args.key, args.model)
    if args.csv:
        write_csv(sys.stdout, by, rows)
        return 0
    total = Usage(*map(sum, zip(*(usage for _, usage in rows), strict=True)))
    head = [*by, *(name.removesuffix("_tokens") for name in Usage._fields)]
    cells = [[*(name or "-" for name in group), *map(str, usage)] for group, usage in rows]
    _print_table([head, *cells, ["total", *[""] * (len(by) - 1), *map(str, total)]], num_left=len(by))
    return 0


def _list(args: argparse.Namespace) -> int:
    _print_table([["name", "admin", "models", "expires", *LIMITS], *map(_row, read_key_file(_path(args)))])
    return 0


def _print_table(rows: Sequence[Sequence[str]], num_left: int = sys.maxsize) -> None:
    """Columns from `num_left` on hold numbers, which end at the same place."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _revoke(args: argparse.Namespace) -> int:
    path = _path(args)

    def remove(present: tuple[Key, ...]) -> Sequence[Key]:
        left = [key for key in present if key.name != args.name]
        if len(left) == len(present):
            raise _unknown_key(path, args.name)
        return left

    change_key_file(path, remove)
    print(f"revoked {args.name}", file=sys.stderr)
    return 0


def _unknown_key(path: Path, name: str) -> ConfigError:
    return ConfigError(f"key file {path} has no key {name!r:.80}", "name")


def _path(args: argparse.Namespace) -> Path:
    path = args.file or os.environ.get(KEY_FILE_VARIABLE)
    if not path:
        raise ConfigError(f"no key file is given; name it with --file or {KEY_FILE_VARIABLE}", "file")
    return Path(path)


def _parse_expiry(text: str, now: float) -> float:
    """Unix time of "90d", "12h", a date or a time."""
    span = re.fullmatch(r"([0-9]{1,6})([hd])", text)
    if span is not None:
        return float(int(now) + int(span[1]) * UNIT_SECONDS[span[2]])
    try:
        return parse_time(text)
    except ValueError as error:
        raise ConfigError(
            f"expires must be {error}, or from now, such as 90d or 12h, got {text!r:.60}", "expires"
        ) from None


def _row(key: Key) -> list[str]:
    expires = "never" if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    models = "all" if key.models is None else ",".join(key.models)
    limits = (getattr(key, name) for name in LIMITS)
    shown_limits = ("-" if limit is None else str(limit) for limit in limits)
    return [key.name, "yes" if key.admin else "no", models, expires, *shown_limits]
