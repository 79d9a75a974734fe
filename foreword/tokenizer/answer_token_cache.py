"""Replays the model's own tokens of earlier answers, so that the prefix cache keeps a conversation.

A chat template writes an answer of the history anew: arguments in other spacing or key order, reasoning that
the client dropped, text in other tokens. The prefix cache then ends at that answer. Here the answer's parts
are replaced by placeholders before the template runs, and what the template writes for them by the tokens
that the model wrote, if the history still holds the same answer and the template keeps it in its place.
Whatever does not fit is rendered plainly: a replay is never needed for correctness.

So the tokens of a prompt, not its text, depend on what this process remembers. Requests with a seed are
rendered plainly: their prompts are functions of the request alone. An answer is found by the conversation
before it, so that the same words of another conversation do not take its place.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.chat_formats.chat_format import BoundFormat
from foreword.chat_formats.events import AnswerContent, ChatEvent
from foreword.chat_formats.parser import parse_message
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.tokenizer.messages import read_tool_history
from foreword.tokenizer.tokenizer import MAX_TEXT_TOKENS, Tokenizer

MAX_BYTES: Final = 64 << 20  # all remembered answers together
MAX_PROMPTS: Final = 1 << 14  # last prompts whose answers can be remembered
MAX_PROMPT_END: Final = 16  # tokens of the prompt, after its last end of a turn, that identify the place
MAX_ATTEMPTS: Final = 3  # renderings until one is plain
DIGESTED_FIELDS: Final = ("role", "content", "tool_calls", "tool_call_id")  # fields of a message
OVERHEAD_BYTES: Final = 512  # Python objects of an answer
REASONING: Final = "reasoning_content"
NAME: Final = re.compile("fwname[0-9]+x[0-9]+x")  # as of _Placeholders
PLACEHOLDER: Final = re.compile("fwarguments[0-9]+x[0-9]+x|fw(?:content|reasoning)[0-9]+x")

Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer's tokens and its conversation."""

    content: AnswerContent
    token_ids: array[int]  # tokens up to the one that ended the answer
    prompt_digest: bytes
    header: str  # text of the prompt behind its last end of a turn, without `prefill`
    prefill: str  # reasoning that the prompt opens or leaves empty
    prefill_ids: array[int]

    @property
    def num_bytes(self) -> int:
        said = self.content
        calls = (part for call in said.calls for part in (call.id, call.name, call.arguments))
        num_chars = sum(map(len, (said.text, said.reasoning, *calls)))
        num_tokens = len(self.token_ids) + len(self.prefill_ids)
        return num_tokens * self.token_ids.itemsize + num_chars + OVERHEAD_BYTES


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
        calls = range(len(answer.content.calls))
        return cls(
            answer,
            tuple(f"fwname{index}x{i}x" for i in calls),
            tuple(f"fwarguments{index}x{i}x" for i in calls),
            f"fwcontent{index}x" if answer.content.text.strip() else "",
            f"fwreasoning{index}x" if answer.content.reasoning.strip() else "",
        )

    @property
    def once(self) -> list[str]:
        """Placeholders that occur once. Names may also occur in results."""
        return [text for text in (*self.arguments, self.content, self.reasoning) if text]

    @property
    def texts(self) -> list[str]:
        return [*self.names, *self.once]

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


class _Misfit(Exception):
    """The template does not keep an answer in its place."""

    def __init__(self, index: int, is_elsewhere: bool = False) -> None:
        super().__init__()
        self.index = index  # place of the message
        self.is_elsewhere = is_elsewhere  # the prompt before it is another, and so are those of later answers


class AnswerTokenCache:
    """The answers that this process gave, within a limit of bytes. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, bound: BoundFormat, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._max_bytes = max_bytes
        end_texts = filter(None, map(tokenizer.token_text, tokenizer.eos_token_ids))
        self._end_of_turn = re.compile("|".join(map(re.escape, end_texts)) or "(?!)")
        # By tenant, digest of the conversation before the answer, and key; oldest first.
        self._answers: OrderedDict[tuple[str, bytes, str], _Answer] = OrderedDict()
        # Digests of conversations by tenant and digest of the prompt; oldest first.
        self._conversations: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def remember(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        events: Iterable[ChatEvent],
        tenant: str = "",
    ) -> None:
        """Keep a whole answer to a prompt of encode(): the last of `token_ids` ended it."""
        eos = self._tokenizer.eos_token_ids
        if not token_ids or token_ids[-1] not in eos:
            return
        content = AnswerContent.from_events(events)
        if not _can_return(content):
            return
        answer = self._make_answer(content, prompt_ids, token_ids[:-1])
        if answer.num_bytes > self._max_bytes:
            return
        with self._lock:
            conversation = self._conversations.get((tenant, answer.prompt_digest))
            if conversation is None:
                return
            key = tenant, conversation, _key(content)
            self._pop(key)
            self._answers[key] = answer
            self._num_bytes += answer.num_bytes
            while self._num_bytes > self._max_bytes:
                self._pop(next(iter(self._answers)))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        tenant: str,
        render: Render,
        add_special_tokens: bool = False,
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> list[int]:
        """Token ids of a rendered conversation with replayed answers.

        max_tokens  see Tokenizer.encode()
        """
        history = read_tool_history(messages)
        digests = _conversation_digests(history, tools)
        found = self._find(history, digests, tenant)
        ids = self._encode_replayed(history, found, render, add_special_tokens)
        if ids is None:
            ids = self._tokenizer.encode(render(messages), add_special_tokens, max_tokens)
        prompt = tenant, _hash(ids).digest()
        with self._lock:
            self._conversations[prompt] = digests[-1]
            self._conversations.move_to_end(prompt)
            if len(self._conversations) > MAX_PROMPTS:
                self._conversations.popitem(last=False)
        return ids

    def _encode_replayed(
        self,
        history: Sequence[Mapping[str, Any]],
        found: Mapping[int, _Answer],
        render: Render,
        add_special_tokens: bool,
    ) -> list[int] | None:
        """Token ids with the answers that keep their places; None if there are none."""
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

    def _find(
        self, history: Sequence[Mapping[str, Any]], digests: Sequence[bytes], tenant: str
    ) -> dict[int, _Answer]:
        """Remembered answers by the index of their message; they become the last to be dropped."""
        found: dict[int, _Answer] = {}
        with self._lock:
            for index, message in enumerate(history):
                calls = message.get("tool_calls") or ()
                content = f"\n{message.get('content')}"
                key = tenant, digests[index], calls[0]["id"] if calls else content
                answer = self._answers.get(key)
                if answer is not None and _is_in(answer.content, message):
                    self._answers.move_to_end(key)
                    found[index] = answer
        return found

    def _splice(self, text: str, marked: Mapping[int, _Placeholders], add_special_tokens: bool) -> list[int]:
        """Raises _Misfit."""
        ids: list[int] = []
        position = 0
        prompt_hash = _hash(())
        # Templates write the called names beside results too.
        called_names = {
            placeholder: call.name
            for placeholders in marked.values()
            for placeholder, call in zip(placeholders.names, placeholders.answer.content.calls, strict=True)
        }
        num_written = Counter(PLACEHOLDER.findall(text))
        for index, placeholders in marked.items():
            answer = placeholders.answer
            if any(num_written[part] != 1 for part in placeholders.once):
                raise _Misfit(index)
            start, end, prefill_ids = self._find_place(text, position, placeholders, index)
            segment = self._encode_segment(
                text[position:start], called_names, index, position, add_special_tokens
            )
            segment += prefill_ids
            prompt_hash.update(_to_bytes(segment))
            if prompt_hash.digest() != answer.prompt_digest:
                raise _Misfit(index, is_elsewhere=True)
            prompt_hash.update(answer.token_ids.tobytes())
            ids += segment
            ids += answer.token_ids
            position = end
        return ids + self._encode_segment(text[position:], called_names, max(marked), position, False)

    def _encode_segment(
        self,
        text: str,
        called_names: Mapping[str, str],  # by placeholder
        index: int,
        position: int,
        add_special_tokens: bool,
    ) -> list[int]:
        """Tokens of text between answers; behind an answer it begins with a token that ends a turn."""
        text = NAME.sub(lambda name: called_names.get(name[0], name[0]), text)
        ids = self._tokenizer.encode(text, add_special_tokens and position == 0)
        if position and (not ids or ids[0] not in self._tokenizer.eos_token_ids):
            raise _Misfit(index)
        return ids

    def _find_place(
        self, text: str, position: int, placeholders: _Placeholders, index: int
    ) -> tuple[int, int, Sequence[int]]:
        """Where the template writes the answer: [start, end) of the text, and the prefill that it omits."""
        answer = placeholders.answer
        places = [text.find(part, position) for part in placeholders.texts]
        first, last = min(places), max(places)
        end_of_turn = self._end_of_turn.search(text, max(last, 0))
        if first < 0 or end_of_turn is None:
            raise _Misfit(index)  # the template drops a part, such as reasoning before the last question
        end = end_of_turn.start()
        for prefill, prefill_ids in ((answer.prefill, ()), ("", answer.prefill_ids)):
            before = answer.header + prefill
            start = text.rfind(before, position, first) + len(before)
            if start >= len(before) > 0 and self._is_whole(text[start:end], placeholders, prefill):
                return start, end, prefill_ids
        raise _Misfit(index)

    def _is_whole(self, turn: str, placeholders: _Placeholders, prefill: str) -> bool:
        """Whether a text behind `prefill` is this answer and nothing else."""
        reasoning = self._bound.format.reasoning
        is_open = bool(prefill) and reasoning is not None and reasoning.end not in prefill
        use = ToolUse(tuple(map(Tool, placeholders.names)))
        written = AnswerContent.from_events(parse_message(self._bound, use, turn, is_open))
        return (
            _can_return(written)
            and [call.name for call in written.calls] == [*placeholders.names]
            and all(
                _are_equal({"text": text}, call.arguments)
                for text, call in zip(placeholders.arguments, written.calls, strict=True)
            )
            and written.text.strip() == placeholders.content
            and written.reasoning.strip() == placeholders.reasoning
        )

    def _make_answer(
        self, content: AnswerContent, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> _Answer:
        """The answer to a prompt; the tokens behind the prompt's last end of a turn identify its place."""
        tail = list(prompt_ids[-MAX_PROMPT_END:])
        ends = [i + 1 for i, token_id in enumerate(tail) if token_id in self._tokenizer.eos_token_ids]
        tail = tail[max(ends, default=0) :]
        num_prefilled = self._num_prefilled(tail)
        header, prefill = tail[: len(tail) - num_prefilled], tail[len(tail) - num_prefilled :]
        return _Answer(
            content,
            array("I", token_ids),
            _hash(prompt_ids).digest(),
            self._text(header),
            self._text(prefill),
            array("I", prefill),
        )

    def _num_prefilled(self, prompt_end: Sequence[int]) -> int:
        """Tokens at the end of a prompt that open the reasoning, or leave it empty."""
        reasoning = self._bound.format.reasoning
        begin_id = None if reasoning is None else self._bound.token_ids.get(reasoning.begin)
        if reasoning is None or begin_id not in prompt_end:
            return 0
        start = max(i for i, token_id in enumerate(prompt_end) if token_id == begin_id)
        rest = self._text(prompt_end[start:]).removeprefix(reasoning.begin).strip()
        return len(prompt_end) - start if rest in ("", reasoning.end) else 0

    def _text(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", "ignore")

    def _pop(self, key: tuple[str, bytes, str]) -> None:
        answer = self._answers.pop(key, None)
        self._num_bytes -= 0 if answer is None else answer.num_bytes


def _can_return(content: AnswerContent) -> bool:
    """Whether a client can send the answer back: it says something, and no call is cut off."""
    return content.is_complete and bool(content.calls or content.text.strip())


def _key(content: AnswerContent) -> str:
    """The first call's id, or the content."""
    return content.calls[0].id if content.calls else f"\n{content.text}"


def _is_in(content: AnswerContent, message: Mapping[str, Any]) -> bool:
    """Whether a message of read_tool_history() says the same, as far as clients send it back."""
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    reasoning = message.get(REASONING) or message.get("reasoning") or ""
    text = message.get("content") or ""
    return (
        message.get("role") == "assistant"
        and len(calls) == len(content.calls)
        and all(
            (call_id, function["name"]) == (written.id, written.name)
            and _are_equal(function["arguments"], written.arguments)
            for (call_id, function), written in zip(calls, content.calls, strict=True)
        )
        and isinstance(text, str)
        and text.strip() == content.text.strip()
        and reasoning.strip() in ("", content.reasoning.strip())
    )


def _are_equal(arguments: Mapping[str, Any], written: str) -> bool:
    """Whether arguments of a history are those that the model wrote; a custom tool's are a text."""
    try:
        value = json.loads(written or "{}")
    except ValueError:
        value = None
    known = json.dumps(arguments, sort_keys=True)
    return known in (json.dumps(value, sort_keys=True), json.dumps({"input": written}))


def _conversation_digests(history: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[bytes]:
    """Digests of the tools and the first 0, 1, ... messages, without reasoning, which clients may drop."""
    running = hashlib.blake2b(repr(tools).encode("utf-8", "surrogatepass"), digest_size=16)
    digests = [running.digest()]
    for message in history:
        _add_to_digest(running, [message.get(name) or "" for name in DIGESTED_FIELDS])
        digests.append(running.digest())
    return digests


def _add_to_digest(digest: hashlib.blake2b, value: object) -> None:
    """Add a value of JSON, step by step: json.dumps() would hold the interpreter's lock for all of it."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            text = item.encode("utf-8", "surrogatepass")
            digest.update(b"s%d:" % len(text))
            digest.update(text)
        elif isinstance(item, Mapping):
            digest.update(b"{%d:" % len(item))
            for name in sorted(item):
                pending += [item[name], name]
        elif isinstance(item, (list, tuple)):
            digest.update(b"[%d:" % len(item))
            pending += item
        else:
            digest.update(f"{item!r},".encode())


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _hash(token_ids: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(_to_bytes(token_ids), digest_size=16)
