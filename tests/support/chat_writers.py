"""What models of each family write, by hand and not from the records, with marker tokens told from text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Token = tuple[int, str]
Call = tuple[str, Mapping[str, Any]]


def _token(text: str) -> str:
    """A marker token in a written answer, between characters that no text holds."""
    return f"\x00{text}\x01"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _python(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _bare(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{_bare(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(_bare(item, quote) for item in value) + "]"
    return _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    begin, end = _token("<tool_call>"), _token("</tool_call>")
    return "\n".join(f'{begin}\n{{"name": "{name}", "arguments": {_json(a)}}}\n{end}' for name, a in calls)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    text = []
    for name, arguments in calls:
        inner = "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in arguments.items())
        text.append(
            f"{_token('<tool_call>')}\n<function={name}>\n{inner}</function>\n{_token('</tool_call>')}"
        )
    return "\n".join(text)


def _llama_json(calls: Sequence[Call]) -> str:
    return "\n".join(f'{{"name": "{name}", "parameters": {_json(a)}}}' for name, a in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(f"{name}({_python(a)})" for name, a in calls) + "]"


def _olmo3(calls: Sequence[Call]) -> str:
    return "<function_calls>" + "\n".join(f"{n}({_python(a)})" for n, a in calls) + "</function_calls>"


def _array(calls: Sequence[Call]) -> str:
    return _json([{"name": name, "arguments": a} for name, a in calls])


def _mistral_v3(calls: Sequence[Call]) -> str:
    array = [{"name": n, "arguments": a, "id": f"abcdefgh{i}"} for i, (n, a) in enumerate(calls)]
    return _token("[TOOL_CALLS]") + _json(array)


def _mistral_call_id(calls: Sequence[Call]) -> str:
    begin, call_id, args = map(_token, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    return "".join(f"{begin}{n}{call_id}abcdefgh{i}{args}{_json(a)}" for i, (n, a) in enumerate(calls))


def _mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"{_token('[TOOL_CALLS]')}{n}{_token('[ARGS]')}{_json(a)}" for n, a in calls)


def _functiongemma(calls: Sequence[Call]) -> str:
    begin, end = _token("<start_function_call>"), _token("<end_function_call>")
    return "".join(f"{begin}call:{name}{_bare(dict(a), _token('<escape>'))}{end}" for name, a in calls)


def _gemma4(calls: Sequence[Call]) -> str:
    begin, end, quote = map(_token, ("<|tool_call>", "<tool_call|>", '<|"|>'))
    return "".join(f"{begin}call:{name}{_bare(dict(a), quote)}{end}" for name, a in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    begin, end, sep = map(_token, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"))
    text = "\n".join(f"{begin}function{sep}{n}\n```json\n{_json(a)}\n```{end}" for n, a in calls)
    return _token("<｜tool▁calls▁begin｜>") + text + _token("<｜tool▁calls▁end｜>")


def _deepseek_v31(calls: Sequence[Call]) -> str:
    begin, end, sep = map(_token, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"))
    text = "".join(f"{begin}{n}{sep}{_json(a)}{end}" for n, a in calls)
    return _token("<｜tool▁calls▁begin｜>") + text + _token("<｜tool▁calls▁end｜>")


def _deepseek_v32(calls: Sequence[Call]) -> str:
    dsml = _token("｜DSML｜")
    text = f"<{dsml}function_calls>\n"
    for name, arguments in calls:
        text += f'<{dsml}invoke name="{name}">\n'
        for key, value in arguments.items():
            is_string = "true" if isinstance(value, str) else "false"
            text += f'<{dsml}parameter name="{key}" string="{is_string}">{_raw(value)}</{dsml}parameter>\n'
        text += f"</{dsml}invoke>\n"
    return f"{text}</{dsml}function_calls>"


def _glm(newline: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        text = ""
        for name, arguments in calls:
            text += newline + _token("<tool_call>") + name + newline
            for key, value in arguments.items():
                text += _token("<arg_key>") + key + _token("</arg_key>") + newline
                text += _token("<arg_value>") + _raw(value) + _token("</arg_value>") + newline
            text += _token("</tool_call>")
        return text

    return write


def _kimi_k2(calls: Sequence[Call]) -> str:
    begin, args, end = map(
        _token, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    )
    text = "".join(f"{begin}functions.{n}:{i}{args}{_json(a)}{end}" for i, (n, a) in enumerate(calls))
    return _token("<|tool_calls_section_begin|>") + text + _token("<|tool_calls_section_end|>")


def _command_r7b(calls: Sequence[Call]) -> str:
    array = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return (
        _token("<|START_ACTION|>")
        + json.dumps(array, ensure_ascii=False, indent=4)
        + _token("<|END_ACTION|>")
    )


def _minimax_m2(calls: Sequence[Call]) -> str:
    text = _token("<minimax:tool_call>") + "\n"
    for name, arguments in calls:
        text += f'<invoke name="{name}">\n'
        text += "".join(f'<parameter name="{k}">{_raw(v)}</parameter>\n' for k, v in arguments.items())
        text += "</invoke>\n"
    return text + _token("</minimax:tool_call>")


def _gpt_oss(calls: Sequence[Call]) -> str:
    channel, constrain, message, call = map(
        _token, ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
    )
    return (_token("<|start|>") + "assistant").join(
        f"{channel}commentary to=functions.{n} {constrain}json{message}{_json(a)}{call}" for n, a in calls
    )


@dataclass(frozen=True)
class Family:
    """How models of one family write."""

    name: str  # of its record
    write_calls: Callable[[Sequence[Call]], str]
    reasoning: tuple[str, str] | None = None  # before and after it
    content: tuple[str, str] = ("", "")  # around it
    value_end: str = ""  # what a raw value cannot hold
    passes_json: bool = True  # arguments keep the bytes that the model wrote
    calls_alone: bool = False  # no text beside calls
    keeps_ids: bool = False


THINK = (_token("<think>") + "\n", "\n" + _token("</think>") + "\n\n")
CHANNEL, MESSAGE, END = map(_token, ("<|channel|>", "<|message|>", "<|end|>"))
ASSISTANT = _token("<|start|>") + "assistant"

FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", _hermes, THINK),
        Family("qwen3-coder", _qwen3_coder, THINK, value_end="</parameter>", passes_json=False),
        Family("llama-json", _llama_json, calls_alone=True),
        Family("pythonic", _pythonic, passes_json=False, calls_alone=True),
        Family("olmo3", _olmo3, THINK, passes_json=False),
        Family("mistral-v3", _mistral_v3),
        Family("mistral-call-id", _mistral_call_id, keeps_ids=True),
        Family("mistral-args", _mistral_args, (_token("[THINK]"), _token("[/THINK]"))),
        Family("phi4-mini", lambda calls: _token("<|tool_call|>") + _array(calls) + _token("<|/tool_call|>")),
        Family("functiongemma", _functiongemma, value_end="<escape>", passes_json=False),
        Family(
            "gemma4",
            _gemma4,
            (_token("<|channel>") + "thought\n", _token("<channel|>")),
            value_end='<|"|>',
            passes_json=False,
        ),
        Family("deepseek-v3", _deepseek_v3, THINK),
        Family("deepseek-v3.1", _deepseek_v31, (_token("<think>"), _token("</think>"))),
        Family("deepseek-v3.2", _deepseek_v32, THINK, value_end="</｜DSML｜parameter>", passes_json=False),
        Family("glm-4.5", _glm("\n"), THINK, value_end="</arg_value>", passes_json=False),
        Family("glm-4.7", _glm(""), THINK, value_end="</arg_value>", passes_json=False),
        Family("kimi-k2", _kimi_k2, (_token("<think>"), _token("</think>")), keeps_ids=True),
        Family(
            "lfm2",
            lambda calls: _token("<|tool_call_start|>") + _pythonic(calls) + _token("<|tool_call_end|>"),
            THINK,
            passes_json=False,
        ),
        Family(
            "granite",
            lambda calls: _token("<|tool_call|>") + _array(calls),
            ("<think>", "</think>\n"),
            ("<response>", "</response>"),
        ),
        Family(
            "command-r7b",
            _command_r7b,
            (_token("<|START_THINKING|>"), _token("<|END_THINKING|>")),
            (_token("<|START_RESPONSE|>"), _token("<|END_RESPONSE|>")),
        ),
        Family("minimax-m2", _minimax_m2, THINK, value_end="</parameter>", passes_json=False),
        Family("nemotron", lambda calls: f"<TOOLCALL>{_array(calls)}</TOOLCALL>", THINK),
        Family(
            "gpt-oss",
            _gpt_oss,
            (CHANNEL + "analysis" + MESSAGE, END + ASSISTANT),
            (CHANNEL + "final" + MESSAGE, END + ASSISTANT),
        ),
        Family("generic", _hermes, THINK),
    )
}


def write_answer(family: Family, reasoning: str, content: str, calls: Sequence[Call]) -> str:
    """An answer, with marker tokens between \\x00 and \\x01."""
    text = ""
    if reasoning:
        assert family.reasoning is not None
        text += reasoning.join(family.reasoning)
    if content:
        text += content.join(family.content)
    return text + (family.write_calls(calls) if calls else "")


def tokens_of(answer: str, cut: Callable[[str], list[str]]) -> tuple[list[Token], dict[str, int]]:
    """(id, text) of each token, and the ids of the marker tokens. `cut` divides the texts between them."""
    ids: dict[str, int] = {}
    tokens = []
    for i, part in enumerate(re.split("\x00(.*?)\x01", answer)):
        if i % 2:
            tokens.append((ids.setdefault(part, 1000 + len(ids)), part))
        else:
            tokens += [(len(piece), piece) for piece in cut(part)]
    return tokens, ids
