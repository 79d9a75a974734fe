"""`foreword keys new|list|revoke`: manage the key file of `foreword serve --api-key-file`.

A new key is printed once, alone on stdout; the file holds its hash. A running server reloads a changed file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from foreword.cli.flags import environment_name
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

__all__ = ["add_arguments", "run"]

KEY_FILE_VARIABLE = environment_name("api_key_file")
UNIT_SECONDS = {"h": 3600, "d": 86_400}
LIMITS = {
    "requests_per_minute": "limit on requests per minute",
    "tokens_per_minute": "limit on tokens per minute, of prompts and answers",
    "max_concurrency": "limit on open choices and texts",
    "priority": "best priority it may ask for; lower is served first (default: 0)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="create a key, print it, and add its hash to the file")
    listing = actions.add_parser("list", help="the keys of the file, without their hashes")
    revoke = actions.add_parser("revoke", help="remove a key from the file")
    for sub in (new, listing, revoke):
        sub.add_argument(
            *("--file", "--api-key-file"),
            dest="file",
            metavar="FILE",
            help=f"the key file (default: ${KEY_FILE_VARIABLE})",
        )
    for sub in (new, revoke):
        sub.add_argument("name", metavar="NAME", help="name of the key")
    new.add_argument("--admin", action="store_true", help="allow the routes under /admin")
    new.add_argument("--models", metavar="LIST", help="allowed models, joined by commas (default: all)")
    new.add_argument(
        "--expires", metavar="WHEN", help="a date, a date and time, or from now: 90d, 12h (default: never)"
    )
    for name, help_ in LIMITS.items():
        new.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_)


def run(args: argparse.Namespace) -> int:
    return {"new": _new, "list": _list, "revoke": _revoke}[args.action](args)


def _new(args: argparse.Namespace) -> int:
    path, secret = _path(args), new_secret()
    limits = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    models = tuple(name.strip() for name in args.models.split(",")) if args.models is not None else None
    expires = _parse_expiry(args.expires, time.time()) if args.expires else None
    key = Key(args.name, b"", b"", admin=args.admin, models=models, expires=expires, **limits)

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


def _list(args: argparse.Namespace) -> int:
    rows = [["name", "admin", "models", "expires", *LIMITS], *map(_row, read_key_file(_path(args)))]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    path = _path(args)

    def remove(present: tuple[Key, ...]) -> Sequence[Key]:
        left = [key for key in present if key.name != args.name]
        if len(left) == len(present):
            raise ConfigError(f"key file {path} has no key {args.name!r:.80}", "name")
        return left

    change_key_file(path, remove)
    print(f"revoked {args.name}", file=sys.stderr)
    return 0


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
