"""Chat events become the parts of one API's answer: content blocks of Messages, output items of Responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)

T = TypeVar("T")  # an event of the API's stream


class AnswerParts(ABC, Generic[T]):
    """Writes parts in the order of their first event; one is open at a time.

    Whitespace is a part only with more text: between reasoning and calls it is the chat format's, and
    Anthropic's API refuses blank texts.
    """

    text_kind = "text"
    reasoning_kind = "reasoning"

    def __init__(self) -> None:
        self.kind = ""  # kind of the open part; "" without one
        self.held = ""  # whitespace that may become a text

    @abstractmethod
    def _start_text(self, text: str) -> Iterable[T]:
        """text  the first one of the part, which a delta repeats"""

    @abstractmethod
    def _start_reasoning(self) -> Iterable[T]: ...

    @abstractmethod
    def _start_call(self, call_id: str, name: str) -> Iterable[T]: ...

    @abstractmethod
    def _delta(self, text: str) -> Iterable[T]:
        """More text of the open part."""

    @abstractmethod
    def _end(self, is_complete: bool) -> Iterable[T]:
        """The open part ends."""

    def write(self, events: Iterable[ChatEvent]) -> Iterator[T]:
        for event in events:
            match event:
                case ContentText(text):
                    yield from self._add_text(text)
                case ReasoningText(text):
                    if self.kind != self.reasoning_kind:
                        yield from self.close()
                        yield from self._start_reasoning()
                    yield from self._delta(text)
                case CallStart(_, call_id, name):
                    yield from self.close()
                    yield from self._start_call(call_id, name)
                case CallArguments(_, text):
                    yield from self._delta(text)
                case CallEnd():
                    yield from self.close()

    def close(self, is_complete: bool = True) -> Iterator[T]:
        """End the open part, and drop held whitespace."""
        self.held = ""
        if self.kind:
            yield from self._end(is_complete)
            self.kind = ""

    def _add_text(self, text: str) -> Iterator[T]:
        if self.kind != self.text_kind:
            text = self.held + text
            if not text or text.isspace():
                yield from self.close()
                self.held = text
                return
            yield from self.close()
            yield from self._start_text(text)
        yield from self._delta(text)
