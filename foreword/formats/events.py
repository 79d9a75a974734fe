"""What a parser reads from a model's answer: one stream of events, which every API writes in its own form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatEvent",
    "ContentText",
    "ReasoningText",
    "merge_events",
]


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


def merge_events(events: Iterable[ChatEvent]) -> tuple[ChatEvent, ...]:
    """Events with neighbouring texts of one kind joined."""
    merged: list[ChatEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, CallStart | CallEnd) or type(last) is not type(event):
            merged.append(event)
        else:
            assert isinstance(last, ReasoningText | ContentText | CallArguments)
            merged[-1] = replace(last, text=last.text + event.text)
    return tuple(merged)
