"""Events of a parsed answer in short: reasoning, content, and calls as name and arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)


class ParsedAnswer(NamedTuple):
    """Texts of an answer; calls are complete."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # name and arguments, as the model wrote them

    @property
    def json_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def collect(events: Iterable[ChatEvent]) -> ParsedAnswer:
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    num_ends = 0
    for event in events:
        match event:
            case ReasoningText():
                reasoning += event.text
            case ContentText():
                content += event.text
            case CallStart():
                calls.append((event.name, ""))
            case CallArguments():
                calls[event.index] = calls[event.index][0], calls[event.index][1] + event.text
            case CallEnd():
                num_ends += 1
    assert num_ends == len(calls), "a call has no end"
    return ParsedAnswer(reasoning, content, calls)
