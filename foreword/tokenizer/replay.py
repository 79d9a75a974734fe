"""Replays the model's own tokens of earlier answers, so that the prefix cache keeps a conversation.

A chat template writes an answer of the history anew: arguments in other spacing or key order, reasoning that
the client dropped, text in other tokens. The prefix cache then ends at that answer. Here the answer's parts
are replaced by placeholders before the template runs, and what the template writes for them by the tokens
that the model wrote, if the history still holds the same answer and the template keeps it in its place.
Whatever does not fit is rendered plainly: a replay is never needed for correctness.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.formats.events import CallArguments, CallEnd, CallStart, ChatEvent, ContentText, ReasoningText
from foreword.formats.parser import parse_message
from foreword.formats.record import BoundFormat
from foreword.formats.tools import Tool, ToolUse
from foreword.tokenizer.messages import read_tool_history
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["AnswerReplay"]

MAX_BYTES: Final = 64 << 20  # of all remembered answers
MAX_PROMPT_END: Final = 16  # tokens of the prompt, after its last end of a turn, that identify the place
MAX_ATTEMPTS: Final = 3  # renderings until one is plain
OVERHEAD_BYTES: Final = 512  # of an answer's objects
REASONING: Final = "reasoning_content"

Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a model wrote, and where."""

    token_ids: array[int]  # without the token that ended the answer
    prompt_end: str  # text of the prompt behind its last end of a turn
    prompt_digest: bytes
    calls: tuple[tuple[str, str, str], ...]  # id, name, arguments
    content: str
    reasoning: str

    @property
    def key(self) -> str:
        """The first call's id, or the content."""
        return self.calls[0][0] if self.calls else f"\n{self.content}"

    @property
    def num_bytes(self) -> int:
        texts = (
            self.prompt_end,
            self.content,
            self.reasoning,
            *(part for call in self.calls for part in call),
        )
        return len(self.token_ids) * self.token_ids.itemsize + sum(map(len, texts)) + OVERHEAD_BYTES

    def is_said_by(self, message: Mapping[str, Any]) -> bool:
        """Whether a message of read_tool_history() is this answer, as far as clients send it back."""
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        reasoning = message.get(REASONING) or message.get("reasoning") or ""
        content = message.get("content") or ""
        return (
            message.get("role") == "assistant"
            and [(call_id, function["name"]) for call_id, function in calls]
            == [call[:2] for call in self.calls]
            and all(
                _are_equal(function["arguments"], written)
                for (_, function), (_, _, written) in zip(calls, self.calls, strict=True)
            )
            and isinstance(content, str)
            and content.strip() == self.content.strip()
            and reasoning.strip() in ("", self.reasoning.strip())
        )


@dataclass(frozen=True, slots=True)
class _Placeholders:
    """Texts that stand for the parts of one answer."""

    answer: _Answer
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    content: str  # empty without content
    reasoning: str

    @classmethod
    def of(cls, index: int, answer: _Answer) -> _Placeholders:
        calls = range(len(answer.calls))
        return cls(
            answer,
            tuple(f"fwname{index}x{i}x" for i in calls),
            tuple(f"fwarguments{index}x{i}x" for i in calls),
            f"fwcontent{index}x" if answer.content.strip() else "",
            f"fwreasoning{index}x" if answer.reasoning.strip() else "",
        )

    @property
    def texts(self) -> list[str]:
        return [text for text in (*self.names, *self.arguments, self.content, self.reasoning) if text]

    def put_into(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with placeholders."""
        bare = {name: value for name, value in message.items() if name not in ("reasoning", "thinking")}
        calls = [
            {**call, "function": {"name": name, "arguments": {"text": arguments}}}
            for call, name, arguments in zip(
                message.get("tool_calls") or (), self.names, self.arguments, strict=True
            )
        ]
        return (
            bare
            | ({"tool_calls": calls} if calls else {})
            | {"content": self.content}
            | ({REASONING: self.reasoning} if self.reasoning else {})
        )

    def restore_names(self, text: str) -> str:
        """The text with the called names, which templates write beside results too."""
        for placeholder, (_, name, _) in zip(self.names, self.answer.calls, strict=True):
            text = text.replace(placeholder, name)
        return text


class _Misfit(Exception):
    """The template does not keep an answer in its place."""

    def __init__(self, index: int, is_elsewhere: bool = False) -> None:
        super().__init__()
        self.index = index  # of the message
        self.is_elsewhere = is_elsewhere  # the prompt before it is another, and so are those of later answers


class AnswerReplay:
    """The answers that this process gave, within a limit of bytes. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, bound: BoundFormat, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._max_bytes = max_bytes
        self._end_texts = tuple(filter(None, map(tokenizer.token_text, tokenizer.eos_token_ids)))
        self._answers: OrderedDict[tuple[str, str], _Answer] = (
            OrderedDict()
        )  # by tenant and key; oldest first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def remember(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        events: Iterable[ChatEvent],
        tenant: str = "",
    ) -> None:
        """Keep a whole answer: the last of `token_ids` ended it; others are not kept."""
        eos = self._tokenizer.eos_token_ids
        if not token_ids or token_ids[-1] not in eos:
            return
        digest = _hash(prompt_ids).digest()
        answer = _read_answer(events, token_ids[:-1], self._prompt_end(prompt_ids), digest)
        if answer is None or answer.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._pop((tenant, answer.key))
            self._answers[tenant, answer.key] = answer
            self._num_bytes += answer.num_bytes
            while self._num_bytes > self._max_bytes:
                self._pop(next(iter(self._answers)))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tenant: str,
        render: Render,
        add_special_tokens: bool = False,
    ) -> list[int] | None:
        """Token ids of a rendered conversation with replayed answers; None if there are none to replay."""
        history = read_tool_history(messages)
        found = self._find(history, tenant)
        for _ in range(MAX_ATTEMPTS):
            if not found:
                return None
            marked = {index: _Placeholders.of(index, answer) for index, answer in found.items()}
            text = render([
                marked[index].put_into(message) if index in marked else message
                for index, message in enumerate(history)
            ])  # fmt: skip
            try:
                return self._splice(text, marked, add_special_tokens)
            except _Misfit as misfit:
                found = {
                    index: answer
                    for index, answer in found.items()
                    if index != misfit.index and (index < misfit.index or not misfit.is_elsewhere)
                }
        return None

    def _find(self, history: Sequence[Mapping[str, Any]], tenant: str) -> dict[int, _Answer]:
        """Remembered answers by the index of their message; they become the last to be dropped."""
        found: dict[int, _Answer] = {}
        with self._lock:
            for index, message in enumerate(history):
                calls = message.get("tool_calls") or ()
                key = (tenant, calls[0]["id"] if calls else f"\n{message.get('content')}")
                answer = self._answers.get(key)
                if answer is not None and answer.is_said_by(message):
                    self._answers.move_to_end(key)
                    found[index] = answer
        return found

    def _splice(self, text: str, marked: Mapping[int, _Placeholders], add_special_tokens: bool) -> list[int]:
        """Raises _Misfit."""
        ids: list[int] = []
        position = 0
        prompt_hash = _hash(())
        for index, placeholders in marked.items():
            answer = placeholders.answer
            start, end = self._find_place(text, position, placeholders, index)
            segment = self._encode_segment(text[position:start], marked, index, position, add_special_tokens)
            prompt_hash.update(_to_bytes(segment))
            if prompt_hash.digest() != answer.prompt_digest:
                raise _Misfit(index, is_elsewhere=True)
            prompt_hash.update(answer.token_ids.tobytes())
            ids += segment
            ids += answer.token_ids
            position = end
        return ids + self._encode_segment(text[position:], marked, max(marked), position, False)

    def _encode_segment(
        self,
        text: str,
        marked: Mapping[int, _Placeholders],
        index: int,
        position: int,
        add_special_tokens: bool,
    ) -> list[int]:
        """Tokens of text between answers; behind an answer it begins with a token that ends a turn."""
        for placeholders in marked.values():
            text = placeholders.restore_names(text)
        ids = self._tokenizer.encode(text, add_special_tokens and position == 0)
        if position and (not ids or ids[0] not in self._tokenizer.eos_token_ids):
            raise _Misfit(index)
        return ids

    def _find_place(
        self, text: str, position: int, placeholders: _Placeholders, index: int
    ) -> tuple[int, int]:
        """Where the template writes the answer: [start, end) of the text."""
        prompt_end = placeholders.answer.prompt_end
        places = [text.find(part, position) for part in placeholders.texts]
        first, last = min(places), max(places)
        ends = [at for end in self._end_texts if (at := text.find(end, last)) >= 0]
        start = text.rfind(prompt_end, position, first) if prompt_end and first >= 0 else -1
        if start < 0 or not ends:
            raise _Misfit(index)  # the template drops a part, such as reasoning before the last question
        start, end = start + len(prompt_end), min(ends)
        if not self._is_whole(text[start:end], placeholders):
            raise _Misfit(index)
        return start, end

    def _is_whole(self, turn: str, placeholders: _Placeholders) -> bool:
        """Whether a text is this answer and nothing else."""
        reasoning, answer = self._bound.format.reasoning, placeholders.answer
        opened = reasoning is not None and _is_open(answer.prompt_end, reasoning.begin, reasoning.end)
        use = ToolUse(tuple(map(Tool, placeholders.names)))
        written = _read_answer(parse_message(self._bound, use, turn, opened), (), "", b"")
        return written is not None and (
            [name for _, name, _ in written.calls] == [*placeholders.names]
            and all(
                _are_equal({"text": text}, arguments)
                for text, (_, _, arguments) in zip(placeholders.arguments, written.calls, strict=True)
            )
            and written.content.strip() == placeholders.content
            and written.reasoning.strip() == placeholders.reasoning
        )

    def _prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Text of the prompt's last tokens, behind the end of the last turn."""
        tail = list(prompt_ids[-MAX_PROMPT_END:])
        eos = self._tokenizer.eos_token_ids
        start = max((i + 1 for i, token_id in enumerate(tail) if token_id in eos), default=0)
        return b"".join(map(self._tokenizer.token_bytes, tail[start:])).decode("utf-8", "ignore")

    def _pop(self, key: tuple[str, str]) -> None:
        answer = self._answers.pop(key, None)
        self._num_bytes -= 0 if answer is None else answer.num_bytes


def _is_open(text: str, begin: str, end: str) -> bool:
    _, found, after = text.rpartition(begin)
    return bool(found) and end not in after


def _are_equal(arguments: Mapping[str, Any], written: str) -> bool:
    """Whether arguments of a history are those that the model wrote; a custom tool's are a text."""
    try:
        value = json.loads(written or "{}")
    except ValueError:
        value = None
    known = json.dumps(arguments, sort_keys=True)
    return known in (json.dumps(value, sort_keys=True), json.dumps({"input": written}))


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _hash(token_ids: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(_to_bytes(token_ids), digest_size=16)


def _read_answer(
    events: Iterable[ChatEvent], token_ids: Sequence[int], prompt_end: str, prompt_digest: bytes
) -> _Answer | None:
    """The answer of some events; None if a call is incomplete."""
    texts = {ContentText: "", ReasoningText: ""}
    calls: list[CallStart] = []
    arguments: dict[int, str] = {}
    num_ends = 0
    for event in events:
        if isinstance(event, CallStart):
            calls.append(event)
        elif isinstance(event, CallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
        elif isinstance(event, CallEnd):
            num_ends += 1
        else:
            texts[type(event)] += event.text
    if num_ends < len(calls) or not (calls or texts[ContentText].strip()):
        return None
    return _Answer(
        array("I", token_ids),
        prompt_end,
        prompt_digest,
        tuple((call.id, call.name, arguments.get(call.index, "")) for call in calls),
        texts[ContentText],
        texts[ReasoningText],
    )
