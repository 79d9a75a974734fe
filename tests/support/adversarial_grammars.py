"""Hostile constraints. Each is rejected soon, or accepted and then harmless."""

from __future__ import annotations

import json
from typing import Any

from foreword.core.structured_output import StructuredOutput


def _schema(value: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", value if isinstance(value, str) else json.dumps(value))


def _nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def _all_of_product(width: int, depth: int) -> dict[str, Any]:
    """A schema with width ** depth combinations."""
    any_of = {"anyOf": [{"properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(width)]}
    return {"type": "object", "allOf": [any_of] * depth}


def _doubling_refs(depth: int) -> dict[str, Any]:
    """A schema with 2 ** depth leaves."""
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "array",
            "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
            "items": False,
            "minItems": 2,
        }
        for i in range(depth)
    }
    return {"$defs": {**defs, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _doubling_gbnf(depth: int) -> str:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(depth)]
    return "\n".join(["root ::= r0", *rules, f'r{depth} ::= "a"'])


def _doubling_lark(depth: int) -> str:
    terminals = [f"T{i}: T{i + 1} T{i + 1}" for i in range(depth)]
    return "\n".join(["start: T0", *terminals, f'T{depth}: "a"'])


# Must be rejected.
REJECTED: dict[str, StructuredOutput] = {
    "schema: depth 10,000": _schema(_nested(10_000)),
    "schema: depth 150": _schema(_nested(150)),
    "schema: no JSON": _schema('{"type": "object"'),
    "schema: an array": _schema("[1]"),
    "schema: 90k enum values": _schema({"enum": [f"v{i}" for i in range(90_000)]}),
    "schema: $ref to itself": _schema({"$ref": "#"}),
    "schema: circle of $ref": _schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "schema: $ref to nowhere": _schema({"$ref": "#/$defs/nobody"}),
    "schema: remote $ref": _schema({"$ref": "https://example.com/schema.json"}),
    "schema: product of allOf": _schema(_all_of_product(12, 12)),
    "schema: contradiction": _schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "schema: false": _schema("false"),
    "schema: type that is none": _schema({"type": "whatever"}),
    "schema: lone surrogate": _schema('{"const": "\\ud800"}'),
    "schema: number too large": _schema('{"minimum": 1e999}'),
    "schema: NaN": _schema('{"minimum": NaN}'),
    "schema: number of 10,000 digits": _schema('{"const": ' + "9" * 10_000 + "}"),
    "schema: maxLength of a billion": _schema({"type": "string", "maxLength": 10**9}),
    "schema: minItems of a billion": _schema({"type": "array", "minItems": 10**9}),
    "schema: pattern with lookahead": _schema({"type": "string", "pattern": "(?=a)b"}),
    "schema: 20k properties": _schema({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    "regex: unbalanced": StructuredOutput("regex", "(a"),
    "regex: back reference": StructuredOutput("regex", r"(a)\1"),
    "regex: huge repetition": StructuredOutput("regex", "a{1,1000000}"),
    "regex: repetition beyond integers": StructuredOutput("regex", "a{1,99999999999999999999999}"),
    "regex: exponential": StructuredOutput("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "regex: depth 10,000": StructuredOutput("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "regex: nothing matches": StructuredOutput("regex", "[^\\x00-\\U0010FFFF]"),
    "choice: no list": StructuredOutput("choice", '{"a": 1}'),
    "choice: empty": StructuredOutput("choice", "[]"),
    "choice: an empty text": StructuredOutput("choice", '["a", ""]'),
    "choice: 90k texts": StructuredOutput("choice", json.dumps([str(i) for i in range(90_000)])),
    "lark: syntax": StructuredOutput("lark", "start: ((("),
    "lark: undefined rule": StructuredOutput("lark", "start: nobody"),
    "lark: no start": StructuredOutput("lark", 'begin: "a"'),
    "lark: recursive terminal": StructuredOutput("lark", 'start: A\nA: "a" A | "b"'),
    "lark: nothing but itself": StructuredOutput("lark", "start: start"),
    "lark: depth 10,000": StructuredOutput("lark", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "lark: a chain of 20,000 terminals": StructuredOutput(
        "lark", "\n".join(["start: T0", *(f"T{i}: T{i + 1}" for i in range(20_000)), 'T20000: "a"'])
    ),
    "lark: cannot go back": StructuredOutput("lark", "start: a\na[max_tokens=3]: /.*/"),
    "lark: hides tokens": StructuredOutput("lark", 'start: a "x"\na[stop="x"]: /.*/'),
    "gbnf: undefined rule": StructuredOutput("gbnf", "root ::= nobody"),
    "gbnf: no root": StructuredOutput("gbnf", 'rot ::= "a"'),
    "gbnf: syntax": StructuredOutput("gbnf", 'root ::= "a'),
    "gbnf: nothing but itself": StructuredOutput("gbnf", "root ::= root"),
    "gbnf: depth 10,000": StructuredOutput("gbnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "gbnf: repetition": StructuredOutput("gbnf", 'root ::= "a"{1,1000000}'),
    "structural tag: trigger without a tag": StructuredOutput(
        "structural_tag",
        json.dumps({"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]}),
    ),
    "structural tag: unknown format": StructuredOutput(
        "structural_tag", json.dumps({"format": {"type": "magic"}})
    ),
}

# May be rejected or accepted, but must not harm the server.
ADVERSARIAL: dict[str, StructuredOutput] = {
    **REJECTED,
    "schema: no end to what is required": _schema(
        {
            "type": "object",
            "properties": {"child": {"$ref": "#"}},
            "required": ["child"],
            "additionalProperties": False,
        }
    ),
    "schema: huge pattern": _schema({"type": "string", "pattern": "(a{1,1000}){1,1000}b{1,100000}"}),
    "schema: left recursion by $ref": _schema({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}),
    "schema: tree": _schema(
        {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    ),
    "schema: refs that double, 30 deep": _schema(_doubling_refs(30)),
    "schema: allOf of 5,000": _schema({"allOf": [{"minLength": i} for i in range(5_000)]}),
    "schema: anyOf of 5,000": _schema({"anyOf": [{"const": i} for i in range(4_900)]}),
    "schema: oneOf of 500": _schema(
        {"oneOf": [{"properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(500)]}
    ),
    "schema: 9,000 enum values": _schema({"enum": [f"value {i}" for i in range(9_000)]}),
    "schema: 2,000 properties, none required": _schema(
        {"properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
    ),
    "schema: patterns that overlap": _schema(
        {"patternProperties": {"a+": {}, "a*b": {}, "(a|b)+": {"type": "integer"}}}
    ),
    "schema: maxLength 10,000 of a pattern": _schema(
        {"type": "string", "maxLength": 10_000, "pattern": "^(a|b)*c"}
    ),
    "schema: maxItems 10,000": _schema(
        {"type": "array", "maxItems": 10_000, "items": {"type": "array", "maxItems": 10_000}}
    ),
    "schema: unicode keys": _schema(
        {
            "properties": {"\u202e\u200b\x00\x7f\U0010ffff": {"const": "\x00\ufeff\u2028"}},
            "required": ["\u202e\u200b\x00\x7f\U0010ffff"],
        }
    ),
    "schema: x-guidance of the caller": _schema(
        {"x-guidance": {"whitespace_pattern": "[ \\n]+"}, "type": "object"}
    ),
    "regex: the classic": StructuredOutput("regex", "(a+)+b"),
    "regex: blow-up of the automaton": StructuredOutput("regex", "(a|b)*a(a|b){20}"),
    "regex: larger blow-up": StructuredOutput("regex", "(.|x)*a.{200}"),
    "regex: any text": StructuredOutput("regex", "(?s:.*)"),
    "regex: many words": StructuredOutput("regex", "(" + "|".join(f"w{i}x*" for i in range(3_000)) + ")*"),
    "regex: unicode classes": StructuredOutput("regex", r"(\p{L}|\p{N}|\w|\s){1,500}\p{Greek}"),
    "choice: 9,000 long texts": StructuredOutput(
        "choice", json.dumps([f"{i:05d}" + "x" * 90 for i in range(9_000)])
    ),
    "lark: left recursion": StructuredOutput("lark", 'start: start "a" | "a"'),
    "lark: right recursion": StructuredOutput("lark", 'start: "a" start | "a"'),
    "lark: ambiguous": StructuredOutput("lark", 'start: start start | "a" | "aa" | "aaa"'),
    "lark: highly ambiguous": StructuredOutput("lark", 'start: s\ns: s s s | s s | "a"?'),
    "lark: terminals that double": StructuredOutput("lark", _doubling_lark(30)),
    "lark: intersection": StructuredOutput(
        "lark", "start: T\nT: " + " & ".join(f"/(a{{{n}}})+/" for n in (2, 3, 5, 7, 11, 13))
    ),
    "lark: complement": StructuredOutput("lark", "start: T\nT: ~/(a|b)*a(a|b){20}/"),
    "lark: ignores everything": StructuredOutput("lark", '%ignore /.*/\nstart: "a"'),
    "lark: empty": StructuredOutput("lark", 'start: ""'),
    "gbnf: left recursion": StructuredOutput("gbnf", 'root ::= root "a" | "a"'),
    "gbnf: indirect left recursion": StructuredOutput("gbnf", 'root ::= x "a"\nx ::= root "b" | "c"'),
    "gbnf: rules that double": StructuredOutput("gbnf", _doubling_gbnf(30)),
    "gbnf: nullable loops": StructuredOutput("gbnf", 'root ::= (("a"?)*)*\n'),
    "gbnf: empty": StructuredOutput("gbnf", 'root ::= ""'),
    "structural tag: any text": StructuredOutput(
        "structural_tag", json.dumps({"format": {"type": "any_text"}})
    ),
}

# Regexes whose lexer needs new states all along an answer. Which of them it already has depends on drafts,
# other requests and restarts.
COSTLY_REGEXES = (
    r"([a-zA-Z' ]{1,30}[ -]){5,80}\.",
    r"([a-z ]{1,60}[ ,]){1,60}!",
    r"(([a-z]{1,20}[ a-c]){1,20}[a-f]){1,20}!",
    r"(\w{1,50}[\s\w]){1,200}!",
    r"(.|x)*a.{40}",
    r"[a-z]{1,40}[0-9]{1,40}#",
    r"([a-m ]*[n-z ]{1,9}){2,30}\.",
    r"(a|b)*a(a|b){20}c",
    r"((a|an|the|[a-z]+) [a-z' ]{2,9}[,;. ]){3,40}",
    r"[^a]*([a-z ]{3,20}a){2,20}",
    r"(.{1,20},.{1,20};){1,9}",
    r"([A-Z][a-z ]{1,25}[.?! ]){1,40}",
)
