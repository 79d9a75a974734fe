"""Arguments that are entries of their own, in any order: what elements and keywords share of a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from foreword.chat_formats.call_grammar import BLANK, GrammarWriter, ToolSchema, rule_suffix

KEY: Final = "[a-zA-Z_][a-zA-Z0-9_.-]*"
MAX_ANY_ORDER: Final = 64  # bits of llguidance's parameter; more arguments come in the schema's order
OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties")
MAX_PATH_CHARS: Final = 1000  # longer paths in a schema are hashed


def any_order(
    writer: GrammarWriter,
    tool: ToolSchema,
    path: str,
    entries: Mapping[str, str],
    required: Sequence[str],
    separator: str,
) -> str:
    """Each entry at most once, in any order, the required ones present. Returns a part of a rule.

    A bit of the rule's parameter says that an entry is present.
    """
    if not entries:
        return ""
    name = f"object_{tool.rule}_{rule_suffix(path)}"
    keys = [*required, *(key for key in entries if key not in required)]
    rules = {key: writer.rule(f"{name}_{index}", entries[key]) for index, key in enumerate(keys)}
    between = f"/{separator}{BLANK}?/ " if separator else ""
    if len(keys) > MAX_ANY_ORDER:
        for key in required:
            writer.drop(tool, f"{path}/properties/{key}: required")
        entry = writer.rule(f"{name}_any", " | ".join(rules.values()))
        return f"({entry} ({between}{entry})*)?"
    may_end = f'""{f" %if is_ones([0:{len(required)}])" if required else ""}'
    options = [
        f"{rules[key]} {name}_rest::set_bit({bit}) %if bit_clear({bit})" for bit, key in enumerate(keys)
    ]
    if separator:
        writer.rule(f"{name}::_", " | ".join([may_end, *options]))
    writer.rule(f"{name}_rest::_", " | ".join([may_end, *(between + option for option in options)]))
    return f"{name if separator else f'{name}_rest'}::0x0"


def read_properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], Any]:
    """The properties of an object's schema, the required ones, and the schema of others; None: no others."""
    others = schema.get("additionalProperties", True)
    names = schema.get("required")
    required = [
        name for name in dict.fromkeys(names if isinstance(names, list) else ()) if isinstance(name, str)
    ]
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    may_have_others = others is not False and "properties" not in schema and not required
    if others is not False:
        properties |= {name: others for name in required if name not in properties}
    others = others if isinstance(others, Mapping) else {}
    return properties, [name for name in required if name in properties], others if may_have_others else None


def join_path(path: str, place: str) -> str:
    """The path of a part of a schema, a text of bounded length."""
    joined = f"{path}/{place}"
    return (
        joined
        if len(joined) <= MAX_PATH_CHARS
        else f"/{blake2b(joined.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )
