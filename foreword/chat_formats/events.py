"""Events of a parsed answer: one stream, which every API writes in its own form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer that the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool. Calls are numbered from 0 in order; they never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the JSON text of an object in all, or the input of a custom tool."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. A call that the end of the answer cuts off has no end."""

    index: int


ChatEvent = ReasoningText | ContentText | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class HeldSpace:
    """More whitespace that the next text of the content begins with, for the search of stop strings.

    Empty: a marker follows, and all whitespace since the last text is dropped.
    """

    text: str


ParserEvent = ChatEvent | HeldSpace


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str  # JSON of an object, cut off if the answer ended within it; or the input of a custom tool


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """The texts and calls of an answer, joined from its events."""

    text: str = ""  # the content, which the user reads
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_complete: bool = True  # no call is cut off

    @classmethod
    def from_events(cls, events: Iterable[ChatEvent]) -> AnswerContent:
        texts: dict[type[ChatEvent], list[str]] = {ContentText: [], ReasoningText: []}
        calls: list[tuple[CallStart, list[str]]] = []
        num_ends = 0
        for event in events:
            match event:
                case CallStart():
                    calls.append((event, []))
                case CallArguments(index, text):
                    calls[index][1].append(text)
                case CallEnd():
                    num_ends += 1
                case _:
                    texts[type(event)].append(event.text)
        return cls(
            "".join(texts[ContentText]),
            "".join(texts[ReasoningText]),
            tuple(ToolCall(call.id, call.name, "".join(parts)) for call, parts in calls),
            num_ends == len(calls),
        )


def merge_events(events: Iterable[ParserEvent]) -> tuple[ChatEvent, ...]:
    """Events with neighbouring texts of one kind joined. Linear in the length of the texts."""
    runs: list[list[ChatEvent]] = []
    for event in events:
        if isinstance(event, HeldSpace):
            continue
        if runs and type(runs[-1][0]) is type(event) and not isinstance(event, CallStart | CallEnd):
            runs[-1].append(event)
        else:
            runs.append([event])
    return tuple(map(_join_texts, runs))


def _join_texts(run: list[ChatEvent]) -> ChatEvent:
    first = run[0]
    if len(run) == 1:
        return first
    assert not isinstance(first, CallStart | CallEnd), "only texts are joined"
    return replace(
        first, text="".join(event.text for event in run if not isinstance(event, CallStart | CallEnd))
    )
