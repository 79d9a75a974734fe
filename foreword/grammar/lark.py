"""Literals and regular expressions in llguidance's Lark dialect, checked against the limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from llguidance import regex_to_lark

from foreword.chat_formats.call_grammar import escape_char
from foreword.errors import shown
from foreword.grammar import limits
from foreword.grammar.json_schema import GrammarError, nesting_depth

LARK_STRING: Final = re.compile(r"[\t\n\r -\x7e\xa0-\U0010ffff]*")  # characters of a JSON-escaped Lark string
REPEAT: Final = re.compile(r"\{[ \t]*(\d*)[ \t]*,?[ \t]*(\d*)[ \t]*\}|~[ \t]*(\d+)(?:[ \t]*\.\.[ \t]*(\d+))?")

# Lark, for `embed_lark`.
STRING_OR_REGEX: Final = r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/'
COMMENT: Final = re.compile(rf"({STRING_OR_REGEX})|(?://|#)[^\n]*")
IMPORT: Final = re.compile(r"%import\s+common\.([A-Z_]+)(?:\s*->\s*([A-Z_]+))?")
RULE: Final = re.compile(r"\s*([?!]?[A-Za-z_][A-Za-z0-9_]*)\s*:(.*)")
LARK_PART: Final = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")(?P<insensitive>i?)|(?P<regex>/(?:[^/\\]|\\.)+/)(?P<flags>[a-z]*)'
    r"|(?P<alias>->\s*\w+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<other>.)"
)
REGEX_ATOM: Final = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|\{[0-9]*,?[0-9]*\}|."
)
REGEX_OPERATORS: Final = ("(", "(?:", ")", "|", "*", "+", "?")
JSON_ESCAPED_CHARS: Final = (*map(chr, range(32)), '"', "\\")
COMMON_TERMINALS: Final[Mapping[str, str]] = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
}


def lark_literal(text: str) -> str:
    """A non-empty text as a Lark terminal."""
    if LARK_STRING.fullmatch(text):
        return json.dumps(text, ensure_ascii=False)
    return f"/{''.join(map(escape_char, text))}/"


def lark_regex(text: str) -> str:
    r"""A regular expression as a Lark terminal; `\d` is 0 to 9.

    The whole text must match, so anchors around the expression are dropped.
    """
    check_brackets(text, "the expression")
    body = text.removeprefix("^")
    if body.endswith("$") and not _is_escaped(body, len(body) - 1):
        body = body[:-1]
    return f"/{regex_to_lark(body, 'd')}/"


def check_brackets(text: str, what: str) -> None:
    """Raises GrammarError for deep nesting and for long repetitions, which cost memory for each token."""
    if nesting_depth(iter(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    counts = (count for match in REPEAT.findall(text) for count in match if count)
    if any(len(count) > 9 or int(count) > limits.MAX_REPEAT for count in counts):
        raise GrammarError(f"{what} has a repetition of more than {limits.MAX_REPEAT}")


def _is_escaped(text: str, index: int) -> bool:
    before = text[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def embed_lark(text: str, prefix: str, in_json: bool) -> tuple[str, dict[str, str]]:
    """A grammar's start rule and all its rules, renamed to become a part of another one.

    in_json  its texts are written as in a JSON string, in the way of json.dumps

    Raises GrammarError for directives other than imports of common terminals, and for attributes of rules.
    """
    check_brackets(text, "the grammar")
    rules: dict[str, list[str]] = {}
    head, body = "", ""

    def rename(name: str) -> str:
        bare = name.lstrip("?!")
        if bare.upper() != bare:
            return f"{prefix}_{bare}"
        return f"{prefix}_terminal_{bare.lower()}" if in_json else f"{prefix.upper()}_{bare}"

    for line in COMMENT.sub(lambda match: match[1] or "", text).split("\n"):
        imported = IMPORT.fullmatch(line.strip())
        if imported is not None and imported[1] in COMMON_TERMINALS:
            name = rename(imported[2] or imported[1])
            rules[name] = [_embed_regex(COMMON_TERMINALS[imported[1]], in_json)]
            continue
        if line.lstrip().startswith("%"):
            raise GrammarError(f"the directive {shown(line.strip())} is not supported here")
        rule = RULE.fullmatch(line)
        if rule is not None:
            head, body = rename(rule[1]), rule[2]
            rules[head] = []
        else:
            body = line
        if head:
            rules[head].append(LARK_PART.sub(lambda part: _embed_part(part, rename, in_json), body))
        elif body.strip():
            raise GrammarError(f"expected a rule, got {shown(line.strip())}")
    if rename("start") not in rules:
        raise GrammarError("the grammar has no rule `start`")
    return rename("start"), {head: " ".join(parts) for head, parts in rules.items()}


def _embed_part(part: re.Match[str], rename: Callable[[str], str], in_json: bool) -> str:
    string, regex, name, other = part["string"], part["regex"], part["name"], part["other"]
    if name:
        return rename(name)
    if regex:
        if part["flags"]:
            raise GrammarError(f"flags of the expression {shown(regex)} are not supported here")
        return _embed_regex(regex[1:-1], in_json)
    if string:
        try:
            value = json.loads(string)
        except ValueError:
            raise GrammarError(f"the text {string:.80} has an unknown escape") from None
        if not value:
            return '""'
        if part["insensitive"] and json.dumps(value)[1:-1] != value:
            raise GrammarError(f"the text {string:.80} cannot ignore case here")
        return (
            lark_literal(json.dumps(value, ensure_ascii=False)[1:-1] if in_json else value)
            + part["insensitive"]
        )
    if part["alias"]:
        return ""
    if other in "<@%&~":
        raise GrammarError(f"{shown(other)} is not supported here")
    return other


def _embed_regex(regex: str, in_json: bool) -> str:
    r"""With characters that JSON escapes, a part of a rule instead of a terminal.

    The lexer takes the longest terminal: the backslash of a `\n` after /.*/ would begin another escape of it.
    """
    atoms = REGEX_ATOM.findall(regex)
    if not in_json or not any(map(_escaped_chars, atoms)):
        return f"/{regex}/"
    return f"({' '.join(map(_embed_atom, atoms))})"


def _escaped_chars(atom: str) -> list[str]:
    """Characters of an atom that JSON escapes."""
    if atom in REGEX_OPERATORS or atom[0] == "{":
        return []
    if atom[:2] == "(?" or atom in ("^", "$") or atom[:2] in ("\\b", "\\B", "\\p", "\\P", "\\A", "\\z"):
        raise GrammarError(f"{shown(atom)} in a regular expression is not supported here")
    try:
        return [char for char in JSON_ESCAPED_CHARS if re.fullmatch(atom, char)]
    except re.error as error:
        raise GrammarError(f"{shown(atom)} in a regular expression: {error}") from None


def _embed_atom(atom: str) -> str:
    if atom in REGEX_OPERATORS or atom[0] == "{":
        return "(" if atom == "(?:" else atom
    escapes = [lark_literal(json.dumps(char)[1:-1]) for char in _escaped_chars(atom)]
    if not escapes:
        return f"/{atom}/"
    if atom == ".":
        escapes.insert(0, r'/[^"\\\x00-\x1f]/')
    elif atom[0] == "[" or atom in (r"\s", r"\S", r"\D", r"\W"):
        escapes.insert(0, rf'/[{atom}&&[^"\\\x00-\x1f]]/')
    return f"({' | '.join(escapes)})"
