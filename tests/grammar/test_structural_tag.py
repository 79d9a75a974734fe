"""Structural tags: free text with constrained parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreword.core.structured_output import StructuredOutput
from foreword.grammar.json_schema import GrammarError
from foreword.grammar.manager import GrammarManager
from foreword.grammar.structural_tag import structural_tag_to_lark
from tests.support.grammar_walks import begin_request, encode, is_legal

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
OLDER = {
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {
            "begin": "<function=time>",
            "schema": {"type": "object", "properties": {}, "additionalProperties": False},
            "end": "</function>",
        },
    ],
    "triggers": ["<function="],
}
WEATHER = '<function=weather>{"city": "Rome"}</function>'


def _tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _format(**part: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": part}


ANY = {"type": "any_text"}
NUMBER = {"type": "regex", "pattern": "^[0-9]+$"}
CALL = _tag("<call>", {"type": "json_schema", "json_schema": CITY}, "</call>")
THINK = _format(
    type="sequence",
    elements=[_tag("<think>", ANY, "</think>"), {"type": "const_string", "value": "A: "}, NUMBER],
)
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL]}
SEPARATED = {"type": "tags_with_separator", "tags": [_tag("<n>", NUMBER, "</n>")], "separator": ", "}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLDER,
        [
            "no call at all",
            f"Let me see <b> {WEATHER} and <function=time>{{}}</function> done",
            WEATHER,
            "",
            "a < b",
        ],
        [
            "<function=other>{}</function>",
            '<function=weather>{"city": 3}</function>',
            '<function=weather>{"city": "Rome"}',
        ],
    ),
    (
        THINK,
        ["<think>well, <i>so</i>\n</think>A: 42"],
        ["<think>well</think>A: x", "A: 42", "<think>well A: 42"],
    ),
    (
        _format(type="or", elements=[NUMBER, {"type": "const_string", "value": "none"}]),
        ["12", "none"],
        ["nine"],
    ),
    (_format(type="grammar", grammar='root ::= "(" root ")" | "x"'), ["((x))"], ["((x)"]),
    (
        _format(**TRIGGERED),
        ["text", 'a <call>{"city": "B"}</call> b <call>{"city": "C"}</call>'],
        ["<call>5</call>", "<calling"],
    ),
    (_format(**TRIGGERED, at_least_one=True), ['a <call>{"city": "B"}</call> b'], ["text"]),
    (
        _format(**TRIGGERED, at_least_one=True, stop_after_first=True),
        ['a <call>{"city": "B"}</call>'],
        ['a <call>{"city": "B"}</call> b', "text"],
    ),
    (
        _format(**TRIGGERED, stop_after_first=True),
        ['a <call>{"city": "B"}</call>', "text"],
        ['a <call>{"city": "B"}</call> b'],
    ),
    (_format(**SEPARATED), ["<n>1</n>, <n>2</n>", "<n>1</n>", ""], ["<n>1</n> <n>2</n>", "x", "<n>1</n>, "]),
    (
        _format(**SEPARATED, at_least_one=True, stop_after_first=True),
        ["<n>1</n>"],
        ["<n>1</n>, <n>2</n>", ""],
    ),
    (
        _format(type="sequence", elements=[ANY, CALL, {"type": "any_text", "excludes": ["<call>"]}]),
        ['so <call>{"city": "B"}</call> there', '<call>{"city": "B"}</call>'],
        ['so <call>{"city": "B"}</call> <call>', "so"],
    ),
    (_format(**_tag("<a>", NUMBER, ["</a>", "</b>"])), ["<a>1</a>", "<a>1</b>"], ["<a>1</c>"]),
    (_format(**_tag("<a>", NUMBER, "")), ["<a>1"], ["<a>x"]),
    (_format(type="optional", content=CALL), ['<call>{"city": "B"}</call>', ""], ["x"]),
    (_format(type="plus", content=CALL), ['<call>{"city": "B"}</call>' * 2], [""]),
    (_format(type="star", content=CALL), ['<call>{"city": "B"}</call>' * 2, ""], ["x"]),
    (
        _format(type="repeat", min=1, max=2, content=CALL),
        ['<call>{"city": "B"}</call>'] * 2,
        ["", '<call>{"city": "B"}</call>' * 3],
    ),
    (
        {"structures": [{"begin": "<a>", "schema": json.dumps(CITY), "end": ""}], "triggers": ["<a>"]},
        ['see <a>{"city": "B"}'],
        ["see <a>3"],
    ),
]


@pytest.mark.parametrize(("tag", "good", "bad"), CASES)
def test_tag_accepts_good_and_rejects_bad_texts(
    grammars: GrammarManager, tag: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    structured = StructuredOutput("structural_tag", json.dumps(tag))
    assert [text for text in good if not is_legal(grammars, structured, text)] == []
    assert [text for text in bad if is_legal(grammars, structured, text)] == []


def test_text_after_a_trigger_is_forced(grammars: GrammarManager) -> None:
    grammar = begin_request(grammars, StructuredOutput("structural_tag", json.dumps(_format(**TRIGGERED))))
    grammar.accept(encode("So "))
    assert grammar.forced(9) == ()
    grammar.accept(encode("<call"))
    assert grammar.forced(9)[:1] == encode(">")[:1]


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ([], "must be an object"),
        ({}, "`structures` must be a non-empty list"),
        ({"structures": OLDER["structures"], "triggers": []}, "`triggers` must be a list of non-empty texts"),
        ({"structures": OLDER["structures"], "triggers": ["<tool"]}, "no tag begins with the trigger"),
        (
            _format(type="qwen_xml_parameter"),
            "qwen_xml_parameter.* is not supported; supported: any_text, const_string",
        ),
        (_format(type="json_schema", json_schema={"not": {}}), "'not' of JSON schema is not supported"),
        (_format(type="json_schema", json_schema={}, style="xml"), 'the style "xml"'),
        (_format(type="sequence", elements=[ANY, NUMBER]), "any_text must be the last element"),
        (_format(type="sequence", elements=[TRIGGERED, NUMBER]), "triggered_tags must be the last"),
        (_format(type="tag", begin="<a>", content=ANY, end=3), "the end of a tag must be"),
        (_format(type="tags_with_separator", tags=[CALL] * 300), "at most 256 tags"),
        (_format(type="regex", pattern="a{1,99999}"), "more than 10000"),
        (
            _format(type="any_text", max_tokens=5),
            "the field 'max_tokens' of the format 'any_text' is not supported",
        ),
        (_format(type="repeat", min=3, max=2, content=ANY), "`min` and `max` must be"),
        (_format(type="or", elements=[3]), "`elements` must be a non-empty list of objects"),
    ],
)
def test_error_names_the_defect(tag: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        structural_tag_to_lark(json.dumps(tag), True)
