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


def merge_events(events: Iterable[ChatEvent]) -> tuple[ChatEvent, ...]:
    """Events with neighbouring texts of one kind joined. Linear in the length of the texts."""
    runs: list[list[ChatEvent]] = []
    for event in events:
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
