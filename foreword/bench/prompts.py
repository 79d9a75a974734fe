"""The prompts of all benchmarks: those of the demo, or those of a file (--prompts)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foreword.bench.workloads import Conversation
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError

DEFAULT_FIELDS = ("prompt", "messages", "turns")
CATEGORY_FIELDS = ("category", "kind")
DEFAULT_CATEGORY = "all"
ROLES = ("system", "developer", "user", "assistant")
MAX_NAMED_LINES = 5  # bad lines in one error


def add_prompt_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --prompts and --prompt-field; `default` says what is asked without them."""
    help_ = f"a prompt per line: text, or JSON with a prompt, messages or turns (default: {default})"
    parser.add_argument("--prompts", metavar="FILE", help=help_)
    help_ = "field of the JSON lines that holds the prompt, such as question or body.messages"
    parser.add_argument("--prompt-field", metavar="NAME", help=help_)


def read_examples(args: argparse.Namespace) -> tuple[Conversation, ...]:
    """The prompts of --prompts, else those of the bundled demo. Raises ConfigError."""
    if args.prompts:
        return read_file(args.prompts, args.prompt_field)
    if args.prompt_field:
        raise ConfigError(f"--prompt-field {args.prompt_field} needs --prompts FILE", "prompt_field")
    return tuple(Conversation((prompt,), category=category) for category, prompt in EXAMPLES)


def read_file(path: str, name: str | None = None) -> tuple[Conversation, ...]:
    """The prompts of a file; `name` is the JSON field that holds them. Raises ConfigError with line numbers.

    Lines are JSON objects if the first one starts with a brace or `name` is given, else each is a prompt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}", "prompts") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path}: byte {error.start} is not UTF-8", "prompts") from None
    # Not splitlines(): JSON may hold U+2028 and the like within a string.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path}: the file has no prompts", "prompts")
    if name is None and not lines[0][1].startswith("{"):
        return tuple(Conversation((line,), category=DEFAULT_CATEGORY, line=number) for number, line in lines)
    examples, problems = [], []
    for number, line in lines:
        try:
            examples.append(_parse_line(line, name, number))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f"; {len(problems) - MAX_NAMED_LINES} more lines" if len(problems) > MAX_NAMED_LINES else ""
        raise ConfigError(f"--prompts {path}: {'; '.join(problems[:MAX_NAMED_LINES])}{more}", "prompts")
    return tuple(examples)


def _parse_line(line: str, name: str | None, number: int) -> Conversation:
    """Raises ValueError with the reason."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {_kind(record)}")
    value = _find_prompt(record, name)
    category = next((record[key] for key in CATEGORY_FIELDS if record.get(key) not in (None, "")), None)
    category = DEFAULT_CATEGORY if category is None else str(category)
    if isinstance(value, str):
        return Conversation((_checked(value),), category=category, line=number)
    if not isinstance(value, list) or not value:
        raise ValueError(f"a prompt is a text, a list of texts or a list of messages, got {_kind(value)}")
    if all(isinstance(turn, str) for turn in value):
        return Conversation(tuple(map(_checked, value)), category=category, line=number)
    *history, (_, last) = _up_to_last_question(value)
    return Conversation((last,), tuple(history), category=category, line=number)


def _find_prompt(record: Mapping[str, Any], name: str | None) -> Any:
    """The value of a field, where dots lead into objects. Raises ValueError."""
    if name is None:
        for key in DEFAULT_FIELDS:
            if key in record:
                return record[key]
        fields = ", ".join(record) or "none"
        raise ValueError(
            f"none of {', '.join(DEFAULT_FIELDS)}; name one of its fields ({fields}) by --prompt-field"
        )
    value: Any = record
    for key in name.split(".") if name not in record else (name,):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"no field {name!r}; it has {', '.join(record) or 'none'}")
        value = value[key]
    return value


def _up_to_last_question(messages: list[Any]) -> list[tuple[str, str]]:
    """Roles and texts up to the last user message; recorded answers after it are left out."""
    pairs = list(_roles_and_texts(messages))
    last = max((index for index, (role, _) in enumerate(pairs) if role == "user"), default=None)
    if last is None:
        raise ValueError("no message of the user")
    return pairs[: last + 1]


def _roles_and_texts(messages: list[Any]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"a message has a role of {', '.join(ROLES)}, and content")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") if _is_text(part) else _refuse(part) for part in content)
        if not isinstance(content, str):
            raise ValueError(f"the content of a message is text, got {_kind(content)}")
        yield message["role"], _checked(content) if message["role"] == "user" else content


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _refuse(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    raise ValueError(f"only text parts are understood, got {kind!r}")


def _checked(text: str) -> str:
    """Raises ValueError for a prompt that cannot be sent."""
    if not text.strip():
        raise ValueError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the prompt has half a surrogate pair") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
