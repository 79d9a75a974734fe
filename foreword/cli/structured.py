"""Flags that say what an answer must look like."""

from __future__ import annotations

import argparse
from pathlib import Path

from foreword.core.structured import StructuredOutput
from foreword.errors import ConfigError

__all__ = ["add_structured_options", "read_structured", "read_text"]


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the answer is a JSON document that conforms to this schema")
    group.add_argument("--regex", metavar="TEXT", help="the whole answer matches this expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="the answer is this, or another --choice")
    group.add_argument("--grammar", metavar="FILE", help="the answer follows this grammar: GBNF (with ::=) or Lark")


def read_structured(args: argparse.Namespace) -> StructuredOutput | None:
    """What was asked for, or None. Raises ConfigError for a file that cannot be read, InvalidRequest for what is none."""
    if args.json_schema is not None:
        return StructuredOutput.json_schema(read_text("json-schema", args.json_schema), field="--json-schema")
    if args.grammar is not None:
        return StructuredOutput.grammar(read_text("grammar", args.grammar), field="--grammar")
    if args.regex is not None:
        return StructuredOutput.regex(args.regex, field="--regex")
    return StructuredOutput.choice(args.choice, field="--choice") if args.choice else None


def read_text(flag: str, path: str) -> str:
    """The text of the file that a flag names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{flag} {path}: {error}", flag) from None
