"""Values that an OpenAPI document leaves open: histories, parts, JSON schemas, grammars, tags."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping

from benchmarks.growth_places import Key, Make, Place, alike, grow, list_of, nested, repeat, text_of
from tests.support.images import png

Forms = Mapping[str, Make]

STORED_ITEM = "msg_stored"  # of a response that was stored before
IMAGE_DATA = base64.b64encode(png()).decode()
IMAGE_URL = f"data:image/png;base64,{IMAGE_DATA}"


def _forms(*tables: Mapping[str, str]) -> dict[str, Make]:
    return {name: grow(text) for table in tables for name, text in table.items()}


def _text(make: Make) -> Make:
    """A JSON text of what it makes."""
    return lambda count: json.dumps(make(count))


def _lines(make: Make) -> Make:
    """The same, with lines in place of commas between elements."""
    return lambda count: json.dumps(make(count).replace(";,", "\n"))


def _value(text: str) -> Make:
    """The text with the count itself in place of "{n}", and letters in place of "{letters}"."""
    return lambda count: text.replace("{n}", str(count)).replace("{letters}", "a" * 16 * count)


def _chain(text: str, last: str) -> Make:
    """A schema whose definitions refer to the next by "{next}"; the last is `last`."""

    def make(count: int) -> str:
        links = [f'"d{i}":' + text.replace("{next}", f"#/$defs/d{i + 1}") for i in range(count)]
        definitions = ",".join([*links, f'"d{count}":{last}'])
        return '{"type":"object","properties":{"a":{"$ref":"#/$defs/d0"}},"$defs":{' + definitions + "}}"

    return make


def _rules(first: str, rule: str, last: str) -> Make:
    """A grammar whose rules refer to the next by "{next}"."""

    def make(count: int) -> str:
        rules = [f"r{i}{rule}".replace("{next}", f"r{i + 1}").replace("{i}", str(i)) for i in range(count)]
        return json.dumps("\n".join([first, *rules, f"r{count}{last}"]))

    return make


def _property(text: str) -> str:
    """A schema of an object with one property of this schema."""
    return '{"type":"object","properties":{"a":{' + text + '}},"required":["a"]}'


def _beside(text: str) -> str:
    """A schema of an object, with keywords beside its type."""
    return '{"type":"object",' + text + "}"


SELF = '{"$ref":"#/properties/a"}'
SCHEMAS: Forms = {
    **_forms(
        {
            "properties": _beside('"properties":{<<"p{i}":{"type":"string"}>>}'),
            "required": _beside('"properties":{<<"p{i}":{"type":"integer"}>>},"required":[<<"p{i}">>]'),
            "required alone": _beside('"required":[<<"p{i}">>]'),
            "enum": _property('"enum":[<<"v{i}">>]'),
            "enum of numbers": _property('"enum":[<<{i}>>]'),
            "enum alike": _property('"enum":[<<"v">>]'),
            "const": _property('"const":[<<"v{i}">>]'),
            "types": _property('"type":[<<"string">>]'),
            "anyOf": _property('"anyOf":[<<{"const":"v{i}"}>>]'),
            "anyOf of objects": _property('"anyOf":[<<{"type":"object","properties":{"p{i}":{}}}>>]'),
            "anyOf of itself": _property(f'"anyOf":[<<{SELF}>>]'),
            "anyOf of a number and itself": _property(f'"anyOf":[{{"type":"integer"}},<<{SELF}>>]'),
            "oneOf": _property('"oneOf":[<<{"const":"v{i}"}>>]'),
            "allOf": _property('"allOf":[<<{"maxLength":9}>>]'),
            "allOf of objects": _beside('"allOf":[<<{"properties":{"p{i}":{"type":"string"}}}>>]'),
            "prefixItems": _property('"type":"array","prefixItems":[<<{"type":"integer"}>>]'),
            "patternProperties": _beside('"patternProperties":{<<"^p{i}":{}>>}'),
            "dependentRequired": _beside('"dependentRequired":{<<"p{i}":["q{i}"]>>}'),
            "examples": _property('"type":"string","examples":[<<"v{i}">>]'),
            "unknown keywords": _beside('<<"x-{i}":1>>'),
            "definitions": _beside('"$defs":{<<"d{i}":{"type":"string"}>>}'),
            "refs to one": _beside(
                '"$defs":{"d":{"enum":[1]}},"properties":{<<"p{i}":{"$ref":"#/$defs/d"}>>}'
            ),
            "refs to a definition each": _beside(
                '"$defs":{<<"d{i}":{"type":"string"}>>},"properties":{<<"p{i}":{"$ref":"#/$defs/d{i}"}>>}'
            ),
            "refs to others": _beside('"properties":{<<"p{i}":{"$ref":"x{i}"}>>},"examples":[<<0>>]'),
            "ids": _beside('"properties":{<<"p{i}":{"$id":"x{i}","$ref":"#"}>>}'),
        }
    ),
    "chain of refs": _chain('{"$ref":"{next}"}', "{}"),
    "chain of objects": _chain(_property('"$ref":"{next}"'), "{}"),
    "chain of two refs each": _chain('{"anyOf":[{"$ref":"{next}"},{"$ref":"{next}"}]}', "{}"),
    "nested objects": nested('{"type":"object","properties":{"a":', "{}", "}}"),
    "nested lists": nested('{"type":"object","items":', "{}", "}"),
    "nested anyOf": nested('{"type":"object","anyOf":[', "{}", "]}"),
    "not": nested('{"type":"object","not":', "{}", "}"),
    "pattern": _value(_property('"type":"string","pattern":"{letters}"')),
    "pattern of choices": lambda count: _property(
        f'"type":"string","pattern":"{repeat(count, "b{i}", "|")}"'
    ),
    "minLength": _value(_property('"type":"string","minLength":{n}')),
    "maxLength": _value(_property('"type":"string","maxLength":{n}')),
    "minItems": _value(_property('"type":"array","minItems":{n}')),
    "maximum": lambda count: _property(f'"type":"integer","minimum":0,"maximum":{"9" * count}'),
    "multipleOf": lambda count: _property(f'"type":"number","multipleOf":0.{"0" * count}1'),
    "description": _value(_beside('"description":"{letters}"')),
    "name of a property": _value(_beside('"properties":{"{letters}":{}}')),
}
REGEXES: Forms = {
    "letters": text_of("a"),
    "choices": lambda count: json.dumps(repeat(count, "b{i}", "|")),
    "optional letters": lambda count: json.dumps("a?" * count + "a" * count),
    "dots": text_of(".*a"),
    "class": lambda count: json.dumps("[" + "".join(chr(0x4E00 + i % 20_000) for i in range(count)) + "]"),
    "properties of characters": text_of(r"\p{L}"),
    "groups": _text(nested("(", "a", ")")),
    "stars": _text(nested("(", "a", "*)*")),
    "repetition": lambda count: f'"(ab){{{count}}}"',
    "repetition up to": lambda count: f'"(ab?){{0,{count}}}"',
    "repetition of a repetition": lambda count: f'"((ab){{{count}}}){{{count}}}"',
    "repetitions": text_of("a{1,9}"),
    "lookaheads": text_of("(?=a)"),
}
GRAMMARS: Forms = {
    "choices": lambda count: json.dumps("root ::= " + repeat(count, '"v{i}"', " | ")),
    "rules": lambda count: json.dumps('root ::= "a"\n' + repeat(count, 'r{i} ::= "b"', "\n")),
    "chain": _rules("root ::= r0", ' ::= "a" {next}', ' ::= "b"'),
    "two of the next": _rules("root ::= r0", " ::= {next} {next}", ' ::= "b"'),
    "left recursions": lambda count: json.dumps("root ::= " + repeat(count, 'root "v{i}"', " | ") + ' | "a"'),
    "groups": lambda count: json.dumps("root ::= " + nested("(", '"a"', ")")(count)),
    "optional groups": lambda count: json.dumps("root ::= " + nested('("a"', '"b"', ")?")(count)),
    "class": lambda count: f'"root ::= [{"ab" * count}]"',
    "repetition": lambda count: json.dumps(f'root ::= ("a" | "b"){{{count}}}'),
    "letters": lambda count: json.dumps(f'root ::= "{"a" * count}"'),
    "comments": lambda count: json.dumps('root ::= "a"\n' + repeat(count, "# comment {i}", "\n")),
    "Lark rules": lambda count: json.dumps("start: r0\n" + repeat(count, 'r{i}: "b"', "\n")),
    "Lark chain": _rules("start: r0", ': "a" {next}', ': "b"'),
    "Lark terminals": lambda count: json.dumps("start: T0\n" + repeat(count, "T{i}: /a{i}/", "\n")),
}
TAG = '{"begin":"<t{i}>","content":{"type":"json_schema","json_schema":{"type":"object"}},"end":"</t>"}'
STRING = '{"type":"const_string","value":"v{i}"}'
TAG_FORMATS: Forms = {
    **_forms(
        {
            "tags": f'{{"type":"triggered_tags","triggers":["<t"],"tags":[<<{TAG}>>]}}',
            "triggers": f'{{"type":"triggered_tags","triggers":[<<"<t{{i}}">>],"tags":[{TAG}]}}',
            "sequence": f'{{"type":"sequence","elements":[<<{STRING}>>]}}',
            "choices": f'{{"type":"or","elements":[<<{STRING}>>]}}',
        }
    ),
    "nested sequences": nested('{"type":"sequence","elements":[', STRING, "]}"),
}
INPUT_FORMATS: Forms = {
    "regex": lambda count: f'{{"type":"grammar","syntax":"regex","definition":{REGEXES["choices"](count)}}}',
    "Lark": lambda count: (
        f'{{"type":"grammar","syntax":"lark","definition":{GRAMMARS["Lark rules"](count)}}}'
    ),
}
PROMPTS: Forms = {
    "spaces": text_of(" " * 16),
    "lines": text_of("\n" * 16),
    "digits": text_of("1" * 16),
    "emoji": text_of("\U0001f600" * 4),
    "combining marks": text_of("e\u0301\u0302\u0303" * 4),
    "Chinese": text_of("\u4e2d\u6587" * 8),
    "special tokens": text_of("<|im_start|>"),
    "starts of special tokens": text_of("<|im_" * 3),
    "control characters": text_of("\u0001\u0000" * 4),
}
ARGUMENTS: Forms = {
    "keys": _text(grow('{<<"k{i}":1>>}')),
    "list": _text(grow('{"a":[<<1>>]}')),
    "nested objects": _text(nested('{"a":', "{}", "}")),
    "digits": lambda count: json.dumps('{"a":' + "1" * count + "}"),
    "text": _text(_value('{"a":"{letters}"}')),
    "damaged": text_of("{"),
}
TOOL_CHOICES = _forms(
    {
        "tools alike": '{"type":"allowed_tools","mode":"auto","tools":[<<{"type":"function","name":"f0"}>>]}',
        "tools": '{"type":"allowed_tools","mode":"auto","tools":[<<{"type":"function","name":"f{i}"}>>]}',
    }
)

USER, ANSWER = '{"role":"user","content":"u{i}"}', '{"role":"assistant","content":"a{i}"}'
SYSTEM = '{"role":"system","content":"s{i}"}'
TURNS = {
    "turns": f"[<<{USER},{ANSWER}>>]",
    "users": f"[<<{USER}>>]",
    "answers": f"[<<{ANSWER}>>]",
    "systems": f"[<<{SYSTEM}>>]",
    "systems and turns": f"[<<{SYSTEM},{USER},{ANSWER}>>]",
}
CALL = '{"id":"c{i}","type":"function","function":{"name":"f","arguments":"{}"}}'
RESULT = '{"role":"tool","tool_call_id":"c{i}","content":"r{i}"}'
CHATS = _forms(
    TURNS,
    {
        "turns with calls": f'[<<{USER},{{"role":"assistant","tool_calls":[{CALL}]}},{RESULT}>>]',
        "calls, then results": f'[<<{{"role":"assistant","tool_calls":[{CALL}]}}>>,<<{RESULT}>>]',
        "calls of one answer": f'[{{"role":"assistant","tool_calls":[<<{CALL}>>]}},<<{RESULT}>>]',
        "results backwards": f'[{{"role":"assistant","tool_calls":[<<{CALL}>>]}},<<{RESULT}<<]',
        "calls of one id": f'[{{"role":"assistant","tool_calls":[<<{CALL}>>]}},<<{RESULT}>>]'.replace(
            "{i}", ""
        ),
        "results without calls": f"[<<{RESULT}>>]",
        "calls without results": f'[<<{{"role":"assistant","tool_calls":[{CALL}]}}>>]',
        "reasoning": f'[<<{USER},{{"role":"assistant","content":"a","reasoning_content":"r{{i}}"}}>>]',
        "parts": '[<<{"role":"user","content":[{"type":"text","text":"u{i}"}]}>>]',
    },
)
TEXT_PARTS = {
    "texts": '[<<{"type":"text","text":"t{i}"}>>]',
    "empty texts": '[<<{"type":"text","text":""}>>]',
    "fields of a part": '[{"type":"text","text":"t",<<"x{i}":1>>}]',
    "fields of parts": '[<<{"type":"text","text":"t","x{i}":1}>>]',
    "unknown types": '[<<{"type":"t{i}"}>>]',
}
CHAT_PARTS = _forms(
    TEXT_PARTS, {"images": f'[<<{{"type":"image_url","image_url":{{"url":"{IMAGE_URL}"}}}}>>]'}
)
USE = '{"type":"tool_use","id":"c{i}","name":"f","input":{}}'
USE_RESULT = '{"type":"tool_result","tool_use_id":"c{i}","content":"r{i}"}'
IMAGE_BLOCK = (
    f'{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{IMAGE_DATA}"}}}}'
)


def in_result(parts: str) -> str:
    """Turns of the Messages API with one call and the parts of its result."""
    return (
        f'[{USER},{{"role":"assistant","content":[{USE}]}},'
        f'{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"c{{i}}","content":[{parts}]}}]}}]'
    )


REFERENCES = in_result('<<{"type":"tool_reference","tool_name":"t{i}"}>>')
REMINDER = '{"type":"text","text":"<system-reminder>{i}"}'
BLOCK_TURNS = _forms(
    TURNS,
    {
        "turns with calls": (
            f'[<<{{"role":"assistant","content":[{USE}]}},{{"role":"user","content":[{USE_RESULT}]}}>>]'
        ),
        "calls, then results": (
            f'[<<{{"role":"assistant","content":[{USE}]}}>>,<<{{"role":"user","content":[{USE_RESULT}]}}>>]'
        ),
        "calls of one answer": (
            f'[{USER},{{"role":"assistant","content":[<<{USE}>>]}},{{"role":"user","content":[<<{USE_RESULT}>>]}}]'
        ),
        "results without calls": f'[<<{{"role":"user","content":[{USE_RESULT}]}}>>]',
        "reasoning": '[<<{"role":"assistant","content":[{"type":"thinking","thinking":"t{i}"}]}>>]',
        "answers of blocks": '[<<{"role":"assistant","content":[{"type":"text","text":"a{i}"}]}>>]',
        "reminders": (
            f'[{{"role":"assistant","content":[{USE}]}},'
            f'{{"role":"user","content":[{USE_RESULT},<<{REMINDER}>>]}}]'
        ),
        "parts of a result": in_result('<<{"type":"text","text":"r{i}"}>>'),
        "images of a result": in_result(f"<<{IMAGE_BLOCK}>>"),
        "references to unknown tools": REFERENCES,
    },
)
BLOCKS = _forms(
    TEXT_PARTS,
    {
        "images": f"[<<{IMAGE_BLOCK}>>]",
        "documents": '[<<{"type":"document","title":"t","source":{"type":"text","data":"d{i}"}}>>]',
        "parts of a document": (
            '[{"type":"document","source":{"type":"content","content":[<<{"type":"text","text":"t{i}"}>>]}}]'
        ),
        "search results": (
            '[<<{"type":"search_result","title":"t","content":[{"type":"text","text":"x{i}"}]}>>]'
        ),
        "results": f"[<<{USE_RESULT}>>]",
    },
)
ITEM_CALL = '{"type":"function_call","call_id":"c{i}","name":"f","arguments":"{}"}'
ITEM_RESULT = '{"type":"function_call_output","call_id":"c{i}","output":"r{i}"}'
ITEM_REASONING = '{"type":"reasoning","summary":[{"type":"summary_text","text":"t{i}"}]}'
ITEMS = _forms(
    TURNS,
    {
        "turns with calls": f"[<<{USER},{ITEM_CALL},{ITEM_RESULT}>>]",
        "calls, then results": f"[<<{ITEM_CALL}>>,<<{ITEM_RESULT}>>]",
        "results backwards": f"[<<{ITEM_CALL}>>,<<{ITEM_RESULT}<<]",
        "calls without results": f"[<<{ITEM_CALL}>>]",
        "results without calls": f"[<<{ITEM_RESULT}>>]",
        "answers and calls": f"[<<{ANSWER},{ITEM_CALL}>>]",
        "reasoning": f"[<<{ITEM_REASONING}>>]",
        "reasoning and answers": f"[<<{ITEM_REASONING},{ANSWER}>>]",
        "parts of a result": (
            f'[{ITEM_CALL},{{"type":"function_call_output","call_id":"c{{i}}",'
            '"output":[<<{"type":"input_text","text":"r{i}"}>>]}]'
        ),
        "references": '[<<{"type":"item_reference","id":"msg_{i}"}>>]',
        "references to a stored item": f'[<<{{"type":"item_reference","id":"{STORED_ITEM}"}}>>]',
        "items of other servers": '[<<{"type":"web_search_call","id":"ws_{i}"}>>]',
        "ids alike": '[<<{"role":"user","content":"u","id":"msg_0"}>>]',
    },
)
INPUT_PARTS = _forms(TEXT_PARTS, {"images": f'[<<{{"type":"input_image","image_url":"{IMAGE_URL}"}}>>]'})
SUMMARIES = _forms({"texts": '[<<{"type":"summary_text","text":"t{i}"}>>]'})
FORMS: Mapping[Key, Forms] = {
    ("NamedSchema", "schema"): SCHEMAS,
    ("FunctionBody", "parameters"): SCHEMAS,
    ("FlatTool", "parameters"): SCHEMAS,
    ("ToolBody", "input_schema"): SCHEMAS,
    ("StructuredOutputsBody", "regex"): REGEXES,
    ("StructuredOutputsBody", "grammar"): GRAMMARS,
    ("ResponseFormat", "format"): TAG_FORMATS,
    ("CustomBody", "format"): INPUT_FORMATS,
    ("CalledFunction", "arguments"): ARGUMENTS,
    ("InputItem", "arguments"): ARGUMENTS,
    ("ChatBody", "tool_choice"): TOOL_CHOICES,
    ("ResponsesBody", "tool_choice"): TOOL_CHOICES,
    ("TokenizeBody", "prompt"): PROMPTS,
    ("CompletionBody", "prompt"): PROMPTS,
    ("EmbeddingBody", "input"): PROMPTS,
    ("Message", "content"): CHAT_PARTS,
    ("MessageBody", "content"): BLOCKS,
    ("InputItem", "content"): INPUT_PARTS,
    ("InputItem", "output"): INPUT_PARTS,
    ("InputItem", "summary"): SUMMARIES,
    ("ChatBody", "logit_bias"): _forms({"ids": '{<<"{i}":1>>}'}),
    ("ChatBody", "messages"): CHATS,
    ("TokenizeBody", "messages"): CHATS,
    ("MessagesBody", "messages"): BLOCK_TURNS,
    ("CountTokensBody", "messages"): BLOCK_TURNS,
    ("ResponsesBody", "input"): ITEMS,
    ("InputTokensBody", "input"): ITEMS,
}
DEFERRED = '{"name":"t{i}","description":"LETTERS","input_schema":{"type":"object"},"defer_loading":true}'


def together(bodies: Mapping[str, Mapping[str, object]]) -> Iterator[Place]:
    """Places of which several fields grow in step, or which another field makes costly.

    bodies  the smallest body of each route
    """

    def place(route: str, name: str, fields: Mapping[str, Make], **fixed: object) -> Place:
        marks = {field: f"@{field}@" for field in fields}
        parts = tuple((marks[field], make) for field, make in fields.items())
        return Place(route, name, next(iter(fields)), {**bodies[route], **marks, **fixed}, parts)

    for route in sorted(bodies.keys() & {"/v1/messages", "/v1/messages/count_tokens"}):
        large = DEFERRED.replace("LETTERS", "d" * 10_000)
        for name, tool in (("deferred tools", DEFERRED), ("large tools", large)):
            yield place(route, f"references x {name}", {"messages": grow(REFERENCES), "tools": list_of(tool)})
        one = REFERENCES.replace('"t{i}"', '"t0"')
        yield place(route, "references to a large tool", {"messages": grow(one)}, tools=[json.loads(large)])
    for route in sorted(bodies.keys() & {"/v1/responses", "/v1/responses/input_tokens"}):
        for name in ("turns", "turns with calls", "users", "calls, then results"):
            yield place(route, f"truncated {name}", {"input": ITEMS[name]}, truncation="auto")
    if "/v1/completions" not in bodies:
        return
    num_choices: Make = lambda count: str(min(count, 128))  # noqa: E731
    for name, make in {
        "stop": lambda count: list_of('"{i}abababab"')(min(count, 64)),
        "allowed_token_ids": alike("5"),
        "bad_words": list_of('"w{i}"'),
        "logit_bias": lambda count: "{" + repeat(min(count, 1500), '"{i}":1') + "}",
        "stop_token_ids": alike("5"),
        "structured_outputs": lambda count: '{"choice":["' + "a" * 64 * count + '"]}',
    }.items():
        fields = {"n": num_choices, name: make, "prompt": list_of('"Hi {i}"')}
        yield place("/v1/completions", f"prompts x n x {name}", fields)
        yield place("/v1/completions", f"n x {name}", {"n": num_choices, name: make})
