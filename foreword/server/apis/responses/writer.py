"""Responses of OpenAI's Responses API, whole and streamed: chat events become output items."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from foreword.chat_formats.events import ChatEvent, ContentText
from foreword.chat_formats.tools import ToolUse
from foreword.errors import ForewordError, Overloaded
from foreword.server.answering.generation import Generation
from foreword.server.answering.streaming import INLINE_LOGPROBS, ResponseWriter, is_large
from foreword.server.apis.answer_parts import AnswerParts
from foreword.server.apis.choices_writer import TokenNames, chat_logprob
from foreword.server.apis.responses.items import encode_reasoning, new_id
from foreword.server.http.responses import json_bytes, json_pieces, sse_event
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.output_processor import OutputDelta, TokenLogprobText

# Event of a part of the text, by type of the item, and the field of the whole text in the event that ends it.
TEXT_EVENTS: Mapping[str, tuple[str, str]] = {
    "reasoning": ("response.reasoning_text", "text"),
    "message": ("response.output_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
Item = dict[str, Any]
Logprob = tuple[int, dict[str, Any]]  # offset of the token in the answer's text, and its entry


@dataclass(slots=True)
class _OpenItem:
    """The output item that is being written, which is the last one."""

    item: Item
    head: bytes  # start of its delta events, up to the text
    place: dict[str, Any]  # fields of its events
    content_group: int | None = None  # group of its tokens, as in TokenLogprobText
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class ResponseItems(AnswerParts[bytes]):
    """Output items, and the stream's events about them."""

    text_kind = "message"

    def __init__(
        self,
        tools: ToolUse,
        namespaces: Mapping[str, tuple[str, str]],  # (namespace, name) by the name that the model calls
        includes_reasoning: bool,  # encrypted_content
        names: TokenNames | None,  # how logprobs name tokens; None: no logprobs
    ) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.sequence_number = 0  # next event's
        self._tools = tools
        self._namespaces = namespaces
        self._includes_reasoning = includes_reasoning
        self._names = names
        self._open: _OpenItem | None = None
        self._logprobs: deque[TokenLogprobText] = deque()  # tokens whose text is not written yet

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the last events write log-probabilities again."""
        return self._names is not None

    @property
    def num_open_logprobs(self) -> int:
        """Tokens of the open message with log-probabilities, which its last events write again."""
        return 0 if self._open is None else len(self._open.logprobs)

    def drop_logprobs(self) -> None:
        """Free them where the answer ends with an error; a thread may be writing them."""
        self._logprobs = deque()
        if self._open is not None:
            self._open.logprobs = []
        for item in self.items:
            for part in item.get("content", ()):
                if "logprobs" in part:
                    part["logprobs"] = []

    def make_event(self, event_type: str, in_pieces: bool = False, **fields: Any) -> bytes:
        """One event with the next sequence number; `in_pieces` as in sse_event()."""
        event = {"type": event_type, **fields, "sequence_number": self.sequence_number}
        self.sequence_number += 1
        return b"event: " + event_type.encode() + b"\n" + sse_event(event, in_pieces)

    def feed(self, events: Iterable[ChatEvent], logprobs: Iterable[TokenLogprobText]) -> Iterable[bytes]:
        """logprobs  of the tokens of these events, and of tokens whose text is held back"""
        self._logprobs += (token for token in logprobs if token.content_group is not None)
        return self.write(events)

    def finish(self, is_complete: bool) -> Iterable[bytes]:
        """End the open item. A complete answer without any text or call gets an empty message."""
        held = self.held
        # A call that the end cuts off is never complete.
        yield from self.close(is_complete and self.kind in ("", "message", "reasoning"))
        if not any(item["type"] != "reasoning" for item in self.items) and (is_complete or held):
            yield from self._start_text(held)
            if held:
                yield from self._delta(held)
            yield from self.close(is_complete)

    def _end(self, is_complete: bool) -> Iterable[bytes]:
        done, self._open = self._open, None
        assert done is not None, "no item is open"
        self._take_logprobs(done)
        item, text = done.item, "".join(done.texts)
        logprobs = _trim(done.logprobs, text)
        in_pieces = len(logprobs) > INLINE_LOGPROBS
        name, key = TEXT_EVENTS[item["type"]]
        fields: dict[str, Any] = {key: text}
        if item["type"] == "message":
            fields["logprobs"] = logprobs
        elif item["type"] == "function_call":
            fields["name"] = item["name"]
        yield self.make_event(f"{name}.done", in_pieces, **done.place, **fields)
        if item["type"] in ("message", "reasoning"):
            part = _part(item["type"], text, logprobs)
            item["content"] = [part]
            yield self.make_event("response.content_part.done", in_pieces, **done.place, part=part)
        else:
            item[key] = text
        if item["type"] == "reasoning" and self._includes_reasoning:
            item["encrypted_content"] = encode_reasoning(text)
        if "status" in item:
            item["status"] = "completed" if is_complete else "incomplete"
        index = done.place["output_index"]
        yield self.make_event("response.output_item.done", in_pieces, output_index=index, item=item)

    def _start_text(self, text: str) -> Iterable[bytes]:
        yield from self._start("message", role="assistant", content=[])
        assert self._open is not None
        self._open.content_group = self._find_group(text)

    def _start_reasoning(self) -> Iterable[bytes]:
        return self._start("reasoning", summary=[], content=[])

    def _start_call(self, call_id: str, name: str) -> Iterable[bytes]:
        namespace, own_name = self._namespaces.get(name, ("", name))
        fields = {"call_id": call_id, "name": own_name} | ({"namespace": namespace} if namespace else {})
        tool = self._tools.get(name)
        if tool is not None and tool.is_custom:
            return self._start("custom_tool_call", **fields, input="")
        return self._start("function_call", **fields, arguments="")

    def _start(self, item_type: str, **fields: Any) -> Iterable[bytes]:
        self.kind = item_type
        item: Item = {"id": new_id(item_type), "type": item_type, **fields}
        if item_type != "custom_tool_call":  # it has no status in OpenAI's API
            item["status"] = "in_progress"
        index = len(self.items)
        self.items.append(item)
        yield self.make_event("response.output_item.added", output_index=index, item=item)
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item_type in ("message", "reasoning"):
            place["content_index"] = 0
            part = _part(item_type, "", [])
            yield self.make_event("response.content_part.added", **place, part=part)
        name = f"{TEXT_EVENTS[item_type][0]}.delta"
        head = b"event: %b\ndata: " % name.encode() + json_bytes({"type": name, **place})[:-1]
        self._open = _OpenItem(item, head + b',"delta":', place)

    def _delta(self, text: str) -> Iterable[bytes]:
        """The event of more text. All but the text and the number is written once for each item."""
        done = self._open
        assert done is not None, "text outside of an item"
        done.texts.append(text)
        logprobs = b""
        if done.item["type"] == "message":
            logprobs = b',"logprobs":' + json_bytes(self._take_logprobs(done))
        tail = b',"sequence_number":%d}\n\n' % self.sequence_number
        self.sequence_number += 1
        return (done.head + json_bytes(text) + logprobs + tail,)

    def _find_group(self, text: str) -> int | None:
        """Group of the next tokens that spell this text. Whitespace before it may be the chat format's."""
        start = text.lstrip()
        groups: list[tuple[int | None, str]] = [
            (group, b"".join(token.raw for token in tokens).decode("utf-8", "replace").lstrip())
            for group, tokens in groupby(self._logprobs, key=lambda token: token.content_group)
        ]
        for group, spelled in groups:
            known = spelled.rstrip("\ufffd")  # an unfinished character is dropped
            if known and (start.startswith(known) or spelled.startswith(start)):
                return group
        return groups[0][0] if len(groups) == 1 else None

    def _take_logprobs(self, item: _OpenItem) -> list[dict[str, Any]]:
        """Logprobs of the next tokens of this message."""
        taken: list[Logprob] = []
        waiting = self._logprobs
        while self._names is not None and waiting and item.item["type"] == "message":
            group = waiting[0].content_group
            if item.content_group is None or (group is not None and group > item.content_group):
                break
            token = waiting.popleft()
            if group == item.content_group:
                taken.append((token.offset, chat_logprob(token, self._names)))
        item.logprobs += taken
        return [entry for _, entry in taken]


def _part(item_type: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The only content part of a message or of reasoning."""
    if item_type == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _trim(logprobs: Sequence[Logprob], text: str) -> list[dict[str, Any]]:
    """Without the last tokens that the text lacks: the end of the answer, and markers of several tokens."""
    if not logprobs:
        return []
    spelled = b"".join(bytes(entry["bytes"]) for _, entry in logprobs).decode("utf-8", "replace")
    # Whitespace before the text may be the chat format's.
    end = logprobs[0][0] + len(spelled) - len(spelled.lstrip()) + len(text.lstrip())
    return [entry for offset, entry in logprobs if offset < end]


class ResponsesWriter(ResponseWriter):
    """Writes the only choice of a generation as a response: see ResponseWriter."""

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        fields: Mapping[str, Any],  # fields of the response that are known before the answer
        items: ResponseItems,
        metrics: bool,
        on_complete: Callable[[Mapping[str, Any], bytes], None],  # called with the response, also as JSON
    ) -> None:
        super().__init__(server, generation, metrics)
        self._generation = generation
        self._output = generation.outputs[0]
        self._fields = fields
        self._items = items
        self._on_complete = on_complete
        self._written: tuple[Mapping[str, Any], bytes] | None = None  # the whole response, also as JSON
        self.keeps_logprobs = items.keeps_logprobs
        generation.on_end(items.drop_logprobs)

    def first_events(self) -> Iterable[bytes]:
        for name in ("created", "in_progress"):
            yield self._items.make_event(f"response.{name}", response=self._response("in_progress"))

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        return b"".join(self._items.feed(delta.events, delta.content_logprobs)) or None

    def is_slow(self, delta: OutputDelta | None) -> bool:
        if delta is None:
            num_logprobs = self._output.num_tokens if self.keeps_logprobs else 0
            return num_logprobs > INLINE_LOGPROBS or is_large([self._output])
        ends_message = not all(isinstance(event, ContentText) for event in delta.events)
        return ends_message and self._items.num_open_logprobs > INLINE_LOGPROBS

    def last_events(self) -> Iterable[bytes]:
        in_pieces = self.is_slow(None)
        events = self._items.finish(self._is_complete)
        if in_pieces:
            yield from events
        else:
            yield b"".join(events)
        response = self._finished()
        encoded = self._encode(response)
        event = self._items.make_event(f"response.{response['status']}", response=None)
        yield event.replace(b'"response":null', b'"response":' + encoded)

    def _encode(self, response: Mapping[str, Any]) -> bytes:
        """JSON of the whole response, also for on_written()."""
        encoded = b"".join(json_pieces(response, 5)) if self.is_slow(None) else json_bytes(response)
        self._written = response, encoded
        return encoded

    def on_written(self) -> None:
        written, self._written = self._written, None
        if written is not None:  # its bytes alone are kept until they are sent
            self._on_complete(*written)
            self._items.drop_logprobs()
            self._generation.free_logprobs()

    def error_event(self, error: ForewordError) -> bytes:
        self._items.drop_logprobs()
        # Codex reads from the code whether a retry may help, and from the message when.
        is_limit = isinstance(error, Overloaded)
        message = f"{error}; try again in {error.retry_after_s:g}s" if error.retry_after_s else str(error)
        failed = {"code": "rate_limit_exceeded" if is_limit else "server_error", "message": message}
        return self._items.make_event("response.failed", response=self._response("failed", error=failed))

    def full(self) -> dict[str, Any]:
        for _ in self._items.feed(self._output.events, self._output.logprobs):
            pass
        for _ in self._items.finish(self._is_complete):
            pass
        response = self._finished()
        if self._fields["store"]:
            self._encode(response)
        return response

    @property
    def _is_complete(self) -> bool:
        return self._output.finish_reason in ("stop", "tool_calls")

    def _finished(self) -> dict[str, Any]:
        if self._is_complete:
            return self._response("completed", completed_at=int(time.time()))
        # OpenAI's name of a length; "repetition" is Foreword's own.
        reason = self._output.finish_reason
        details = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self._response("incomplete", incomplete_details=details)

    def _response(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response so far; usage and metrics once the answer has ended."""
        response = {**self._fields, "status": status, "output": self._items.items, **changes}
        if status == "in_progress":
            return response
        output = self._output
        response["usage"] = {
            "input_tokens": len(output.request.prompt_ids),
            "input_tokens_details": {"cached_tokens": output.num_cached, "cache_write_tokens": 0},
            "output_tokens": output.num_tokens,
            "output_tokens_details": {"reasoning_tokens": output.num_reasoning_tokens},
            "total_tokens": len(output.request.prompt_ids) + output.num_tokens,
        }
        return {**response, **self.metrics(output)}
