"""Which chat format a checkpoint has, proven by its chat template.

A candidate is proven if a conversation with calls, rendered by the template, parses back to the same calls,
reasoning and content. If none is, a family by its markers may be proven for parsing alone: some templates
write strings of the history without their quotes or escapes, or refuse a part of it. Among the first two
kinds, prefer one that reproduces the template's bytes. Candidates are, in this order: the checkpoint's
`response_template`, the families whose markers the template holds, an analysis of what the template writes,
and for templates without tools the `generic` format, in which a system text describes the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from foreword.chat_formats.chat_format import (
    ChatFormat,
    ReasoningFormat,
    ToolFormat,
    bind_format,
    write_calls,
)
from foreword.chat_formats.events import AnswerContent
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.hf_response_template import from_response_template
from foreword.chat_formats.parser import parse_message, starts_in_reasoning
from foreword.chat_formats.template_analysis import derive_tools, find_markers, num_common
from foreword.chat_formats.tools import Tool, ToolUse, WrittenCall
from foreword.errors import InvalidRequest

ARGUMENTS: Final[Mapping[str, Any]] = {  # every type but null, whose schema makes templates fail
    "text": "a \"b\"\n'c' <d> & é 字 👍",
    "digits": "0213",
    "count": -3,
    "share": 0.5,
    "flag": True,
    "items": [1, "two", None, {"three": 3}],
    "object": {"key": "value", "inner": {"list": []}},
}
TYPES: Final[Mapping[type, str]] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"
}  # fmt: skip
PLAIN_ARGUMENTS: Final = {name: value for name, value in ARGUMENTS.items() if type(value) in (str, int)}
QUESTION: Final = {"role": "user", "content": "Foreword asks"}
CONTENT: Final = "Foreword tells"
REASONING: Final = "Foreword thinks"
FIND, STOP = "foreword_find", "foreword_stop"  # tools
BY_MARKERS: Final = "markers of the chat template"
PROVEN, PARSES, UNPROVEN = "proven", "proven for parsing alone", "not proven"
UNFINISHED_MARKER: Final = re.compile(r"[<\[][^<>\[\]\s]*$")


class TemplateProbe(Protocol):
    """A chat template."""

    source: str | None  # Jinja; None: the model has no template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
    ) -> str: ...

    def renders_tools(self) -> bool: ...

    def renders_calls(self) -> bool: ...

    def set_call_format(self, call_format: ToolFormat, describes_tools: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class ProofTokenizer:
    """The tokenizer functions that a proof needs."""

    token_to_id: Callable[[str], int | None]
    tokenize: Callable[[str], list[tuple[int, str]]]  # ids, and the text that each completes
    special_ids: frozenset[int] = frozenset()
    end_texts: tuple[str, ...] = ()  # texts of tokens that end an answer


@dataclass(frozen=True, slots=True)
class Detection:
    """The format of a checkpoint, and how it was found."""

    format: ChatFormat | None  # `tools` is None if no format of calls is proven; None: nothing is known
    origin: str = ""  # source of the format
    proof: str = UNPROVEN
    problems: tuple[str, ...] = ()  # candidates that are not proven, and what differed

    @property
    def is_proven(self) -> bool:
        return self.proof == PROVEN

    def __str__(self) -> str:
        if self.format is None or self.format.tools is None:
            tools = "none" + "".join(f"; {problem}" for problem in self.problems)
        else:
            problems = "" if self.is_proven else f" ({'; '.join(self.problems)})"
            tools = f"{self.format.name} ({self.origin}), {self.proof}{problems}"
        reasoning = None if self.format is None else self.format.reasoning
        return tools + (
            "" if reasoning is None else f"; reasoning between {reasoning.begin} and {reasoning.end}"
        )


def detect_format(
    template: TemplateProbe,
    tokenizer: ProofTokenizer,
    wanted: str = "auto",
    response_template: Mapping[str, Any] | None = None,
) -> Detection:
    """Find the format, and set it in the template, for calls that it does not render.

    wanted             "auto", "none", or the name of a family, which is taken even if it is not proven
    response_template  of the checkpoint, in the form of transformers
    Costs about twenty renderings.
    """
    if template.source is None:
        return Detection(None)
    source = template.source.replace('\\"', '"').replace("\\'", "'")
    problems: list[str] = []
    first: Detection | None = None
    parsing: Detection | None = None
    for fmt, origin in _candidates(template, tokenizer, source, wanted, response_template):
        if first is not None and origin != BY_MARKERS:
            break
        fmt = _with_text_markers(fmt, source, template, tokenizer)
        _set_call_format(template, fmt)
        problem = _difference(fmt, template, tokenizer)
        proof = PROVEN
        if problem is not None:
            proof = PARSES if _parses(fmt, template, tokenizer) else UNPROVEN
        found = Detection(fmt, origin, proof, () if problem is None else (problem,))
        # Families that differ in whitespace parse each other's calls: take one that also writes them alike.
        if wanted == fmt.name or (problem is None and _writes_alike(fmt, template, tokenizer)):
            return found
        if problem is None:
            first = first or found
        else:
            problems.append(f"{fmt.name}: {problem}")
            if parsing is None and proof == PARSES and origin == BY_MARKERS:
                parsing = found
    first = first or parsing
    if first is not None:
        assert first.format is not None, "a candidate"
        _set_call_format(template, first.format)
        return first
    fmt = _with_text_markers(ChatFormat("text"), source, template, tokenizer)
    is_known = fmt.reasoning is not None or fmt.content is not None
    return Detection(fmt if is_known else None, problems=tuple(problems))


def _set_call_format(template: TemplateProbe, fmt: ChatFormat) -> None:
    assert fmt.tools is not None, "a candidate has a format of calls"
    template.set_call_format(fmt.tools, template.renders_tools() and fmt.name != "generic")


def _writes_alike(fmt: ChatFormat, template: TemplateProbe, tokenizer: ProofTokenizer) -> bool:
    """Whether the format writes a call as the template does, to the byte."""
    assert fmt.tools is not None
    call = _call(0, FIND, PLAIN_ARGUMENTS)
    turn = _turn(template, tokenizer, {"content": "", "tool_calls": [call]})
    return write_calls(fmt.tools, [WrittenCall(FIND, PLAIN_ARGUMENTS, call["id"])]) in turn


def _candidates(
    template: TemplateProbe,
    tokenizer: ProofTokenizer,
    source: str,
    wanted: str,
    response_template: Mapping[str, Any] | None,
) -> Iterator[tuple[ChatFormat, str]]:
    """Formats to prove, and where they come from."""
    if wanted == "none":
        return
    if wanted != "auto":
        yield FORMATS[wanted], "--tool-format"
        return
    if response_template is not None and (fmt := from_response_template(response_template)) is not None:
        yield fmt, "tokenizer_config.json"
    families = [
        fmt
        for fmt in FORMATS.values()
        if fmt.tools is not None
        and fmt.template_markers
        and all(mark in source for mark in fmt.template_markers)
    ]
    for fmt in sorted(families, key=lambda fmt: -sum(map(len, fmt.template_markers))):
        yield fmt, BY_MARKERS
    if template.renders_calls() and (tools := _analyse(template, tokenizer)) is not None:
        yield ChatFormat("derived", tools), "what the chat template writes"
    if template.renders_tools() and not template.renders_calls():
        for fmt in FORMATS.values():
            if fmt.tools is not None and tokenizer.token_to_id(_opener(fmt.tools)) is not None:
                yield fmt, "a token of the vocabulary"
    if not template.renders_tools() and not template.renders_calls():
        yield FORMATS["generic"], "the chat template has no tools"


def _opener(tools: ToolFormat) -> str:
    """The first text of a call; empty if it begins with another part."""
    first = (*tools.begin, *tools.call)[0]
    return first if isinstance(first, str) and len(first) > 2 else ""


def _reasoning_formats(source: str) -> Iterable[ReasoningFormat]:
    """Formats of reasoning whose markers the template holds, each once."""
    known = {fmt.reasoning.begin: fmt.reasoning for fmt in FORMATS.values() if fmt.reasoning is not None}
    return [reasoning for begin, reasoning in known.items() if begin in source and reasoning.end in source]


def _with_text_markers(
    fmt: ChatFormat, source: str, template: TemplateProbe, tokenizer: ProofTokenizer
) -> ChatFormat:
    """The format with the template's own markers of reasoning and content, which differ within a family."""
    formats, own = _reasoning_formats(source), fmt.reasoning
    is_stripped = not formats and own is not None and own.end in source  # from the history, which has none
    if own is None or not (is_stripped or any(own.begin == other.begin for other in formats)):
        fmt = replace(fmt, reasoning=next(iter(formats), None))
    if fmt.content is None or fmt.content[0] not in source:
        turn = _turn(template, tokenizer, {"content": CONTENT, "reasoning_content": REASONING})
        if fmt.reasoning is None and (markers := find_markers(turn, REASONING)) is not None:
            begins_content = turn.partition(CONTENT)[0].rstrip().endswith(markers[0])
            fmt = replace(fmt, reasoning=None if begins_content else ReasoningFormat(*markers))
        markers = find_markers(turn, CONTENT)
        if markers is not None and (fmt.reasoning is None or markers[0] != fmt.reasoning.end):
            fmt = replace(fmt, content=markers[:2])
    return fmt


def _analyse(template: TemplateProbe, tokenizer: ProofTokenizer) -> ToolFormat | None:
    """The format of calls as the template writes them."""
    calls = [
        (name, {"first": f"Foreword {name} once", "second": f"Foreword {name} again"})
        for name in (FIND, STOP)
    ]
    written = [_call(index, *call) for index, call in enumerate(calls)]
    turns = [_turn(template, tokenizer, {"content": "", "tool_calls": written[:number]}) for number in (1, 2)]
    return derive_tools(turns[0], turns[1], calls)


def _turn(template: TemplateProbe, tokenizer: ProofTokenizer, message: Mapping[str, Any]) -> str:
    """The template's text of an assistant message; empty if it refuses it."""
    try:
        tools = _proof_tools(PLAIN_ARGUMENTS)
        return assistant_turn(template, {"role": "assistant", **message}, tokenizer.end_texts, tools)[1]
    except InvalidRequest:
        return ""


def _difference(fmt: ChatFormat, template: TemplateProbe, tokenizer: ProofTokenizer) -> str | None:
    """The first difference after rendering and parsing; None if there is none."""
    if _difference_with(ARGUMENTS, fmt, template, tokenizer) is None:
        return None
    # Some templates write other values as Python does, or fail on schemas with other types.
    return _difference_with(PLAIN_ARGUMENTS, fmt, template, tokenizer)


def _difference_with(
    arguments: Mapping[str, Any], fmt: ChatFormat, template: TemplateProbe, tokenizer: ProofTokenizer
) -> str | None:
    find, stop, tools = _call(0, FIND, arguments), _call(1, STOP, {}), _proof_tools(arguments)
    for label, message in (
        ("a call", {"content": "", "tool_calls": [find]}),
        ("two calls", {"content": "", "tool_calls": [find, stop]}),
        ("text and a call", {"content": CONTENT, "tool_calls": [find]}),
        ("reasoning and a call", {"content": "", "reasoning_content": REASONING, "tool_calls": [find]}),
    ):
        try:
            problem = _round_trip(fmt, template, tokenizer, tools, {"role": "assistant", **message})
        except InvalidRequest as error:
            problem = error.message
        if problem is not None:
            return f"{label}: {problem}"
    return None


def _proof_tools(arguments: Mapping[str, Any]) -> tuple[Tool, ...]:
    """A tool with these arguments, and one without."""
    properties = {
        name: {"type": TYPES[type(value)], "description": "Foreword's."} for name, value in arguments.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return (Tool(FIND, "Foreword finds.", schema), Tool(STOP, "Foreword stops."))


def _call(index: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_0123456789_{index}", "type": "function", "function": function}


def assistant_turn(
    template: TemplateProbe, message: Mapping[str, Any], end_texts: Iterable[str], tools: Sequence[Tool] = ()
) -> tuple[str, str]:
    """The prompt of a turn, and what the template writes for it. Raises InvalidRequest."""
    prompt = template.render([QUESTION], tools=tools)
    text = template.render([QUESTION, message], tools=tools, add_generation_prompt=False)
    start = num_common(prompt, text)
    if start < len(prompt) and (marker := UNFINISHED_MARKER.search(text, 0, start)):
        start = marker.start()  # two markers that begin alike
    ends = [index for end in end_texts if (index := text.find(end, start)) >= 0]
    if not ends:  # a vocabulary that does not tell: what follows a plain content ends a turn
        plain = {"role": "assistant", "content": CONTENT}
        closer = template.render([QUESTION, plain], tools=tools, add_generation_prompt=False)
        ends = [len(text.removesuffix(closer.rpartition(CONTENT)[2]))]
    return text[:start], text[start : min(ends)]


def _round_trip(
    fmt: ChatFormat,
    template: TemplateProbe,
    tokenizer: ProofTokenizer,
    tools: tuple[Tool, ...],
    message: Mapping[str, Any],
) -> str | None:
    """The difference after parsing the rendered message."""
    prompt, turn = assistant_turn(template, message, tokenizer.end_texts, tools)
    answer = _parse(fmt, tokenizer, tools, turn, prompt)
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    expected = [call for call in expected if call[0] in turn]  # others are in a turn of their own
    if not expected and not message["content"]:
        return f"the template drops the call: {turn[-400:]!r}"
    if (names := [call.name for call in answer.calls]) != [name for name, _ in expected]:
        return f"parsed calls {names} from {turn[-400:]!r}"
    for call, (_, arguments) in zip(answer.calls, expected, strict=True):
        if _canonical(call.arguments) != json.dumps(arguments, sort_keys=True):
            return f"arguments of {call.name} parsed as {call.arguments}"
    if fmt.reasoning is None and "reasoning_content" in message:
        return None  # it stays in the content
    return _text_difference(answer, message, turn)


def _parse(
    fmt: ChatFormat, tokenizer: ProofTokenizer, tools: tuple[Tool, ...], turn: str, prompt: str = ""
) -> AnswerContent:
    bound = bind_format(fmt, tokenizer.token_to_id, tokenizer.special_ids)
    prompt_ids = [token_id for token_id, _ in tokenizer.tokenize(prompt)]
    reasons = starts_in_reasoning(bound, prompt_ids, prompt)
    return AnswerContent.from_events(parse_message(bound, ToolUse(tools), tokenizer.tokenize(turn), reasons))


def _parses(fmt: ChatFormat, template: TemplateProbe, tokenizer: ProofTokenizer) -> bool:
    """Whether the format reads its own calls in this vocabulary, and a call in what the template writes."""
    assert fmt.tools is not None
    tools = _proof_tools(PLAIN_ARGUMENTS)
    written = write_calls(fmt.tools, [WrittenCall(FIND, PLAIN_ARGUMENTS, "call01234")])
    own = [(call.name, _canonical(call.arguments)) for call in _parse(fmt, tokenizer, tools, written).calls]
    turn = _turn(template, tokenizer, {"content": "", "tool_calls": [_call(0, FIND, {"text": CONTENT})]})
    names = [call.name for call in _parse(fmt, tokenizer, tools, turn).calls]
    return (own, names) == ([(FIND, json.dumps(PLAIN_ARGUMENTS, sort_keys=True))], [FIND])


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def _text_difference(answer: AnswerContent, message: Mapping[str, Any], turn: str) -> str | None:
    """The difference in reasoning and content, as far as the template renders them."""
    reasoning, content = answer.reasoning, answer.text
    given = [text for text in (message.get("reasoning_content"), message["content"]) if text and text in turn]
    if (reasoning + content).split() != " ".join(given).split():
        return f"parsed reasoning {reasoning!r} and content {content!r}, not {' '.join(given)!r}"
    if REASONING in content:
        return f"parsed reasoning as content {content!r}"
    return None
