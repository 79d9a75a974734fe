"""Anthropic's messages, whole and streamed: chat events become content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)
from foreword.errors import ForewordError
from foreword.server.answering.generation import Generation
from foreword.server.apis.messages.body import hide_thinking
from foreword.server.http.errors import error_body
from foreword.server.http.responses import sse_event
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.output_processor import OutputDelta

Event = dict[str, Any]


class BlockEvents:
    """The events of content blocks, in Anthropic's form. One block is open at a time."""

    def __init__(self, message_id: str, omit_thinking: bool) -> None:
        self._message_id = message_id
        self._omit_thinking = omit_thinking
        self._index = -1  # of the last block
        self._kind = ""  # of the open block; "" without one
        self._held = ""  # whitespace that is a block only with more text: Anthropic's API refuses blank ones
        self._thinking: list[str] = []  # of the open block, if it is hidden

    def feed(self, events: Iterable[ChatEvent]) -> Iterator[Event]:
        for event in events:
            match event:
                case ContentText(text):
                    yield from self._add_text(text)
                case ReasoningText(text):
                    if self._kind != "thinking":
                        yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
                    if self._omit_thinking:
                        self._thinking.append(text)
                    else:
                        yield self._delta(type="thinking_delta", thinking=text)
                case CallStart(_, call_id, name):
                    yield from self._start({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                    yield self._delta(type="input_json_delta", partial_json="")
                case CallArguments(_, text):
                    yield self._delta(type="input_json_delta", partial_json=text)
                case CallEnd():
                    yield from self._stop()

    def finish(self) -> Iterator[Event]:
        """End the last block; as of Anthropic, a call that the end of the answer cuts off has no end."""
        if self._kind != "tool_use":
            yield from self._stop()

    def _stop(self) -> Iterator[Event]:
        """End the open block."""
        self._held = ""
        if not self._kind:
            return
        if self._kind == "thinking":
            text, self._thinking = "".join(self._thinking), []
            signature = hide_thinking(text) if text else f"{self._message_id}:{self._index}"
            yield self._delta(type="signature_delta", signature=signature)
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._kind != "text":
            held = self._held + text
            if held.isspace() or not held:
                yield from self._stop()
                self._held = held
                return
            yield from self._start({"type": "text", "text": ""})
            text = held
        yield self._delta(type="text_delta", text=text)

    def _start(self, block: Event) -> Iterator[Event]:
        yield from self._stop()
        self._index, self._kind = self._index + 1, block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def join_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content blocks of a whole message, from its events."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            del delta["type"]
            ((name, text),) = delta.items()
            blocks[-1][name] = blocks[-1].get(name, "") + text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _read_input(block.pop("partial_json"))
    return blocks


def _read_input(text: str) -> Any:
    """The input of a call; {} if the end of the answer cut it off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


class MessagesWriter:
    """Writes the only choice of a generation as a message: see ResponseWriter."""

    num_returned = 1

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        message_id: str,
        model: str,  # name in the answer
        scope: Mapping[str, Any],  # of the request
        omit_thinking: bool,
        metrics: bool,  # the request asks for `seed` and `metrics`
        prompt_only: bool,  # the answer is left out
    ) -> None:
        self._server = server
        self._output = generation.outputs[0]
        resolved, num_input = server.info().resolved, len(self._output.request.prompt_ids)
        self._num_cacheable = num_input - num_input % resolved.block_size if resolved.prefix_caching else 0
        self._id = message_id
        self._model = model
        self._scope = scope
        self._has_metrics = metrics
        self._prompt_only = prompt_only
        self._omit_thinking = omit_thinking
        self._blocks = BlockEvents(message_id, omit_thinking)

    def first_events(self) -> Iterable[bytes]:
        # One token at least has come, so that the cached tokens are known.
        message = self._message([], None, None, self._usage(0))
        yield _sse({"type": "message_start", "message": message})
        yield _sse({"type": "ping"})

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        events = () if self._prompt_only else delta.events
        return b"".join(map(_sse, self._blocks.feed(events))) or None

    def last_events(self) -> Iterable[bytes]:
        yield b"".join(map(_sse, self._blocks.finish()))
        reason, sequence = self._stop_reason()
        yield _sse(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": self._usage(self._output.num_tokens),
                **self._extras(),
            }
        )
        yield _sse({"type": "message_stop"})

    def error_event(self, error: ForewordError) -> bytes:
        return _sse(error_body(error, self._scope))

    def full(self) -> dict[str, Any]:
        blocks = BlockEvents(self._id, self._omit_thinking)
        events: Sequence[ChatEvent] = () if self._prompt_only else self._output.events
        content = join_blocks([*blocks.feed(events), *blocks.finish()])
        usage = self._usage(self._output.num_tokens)
        return {**self._message(content, *self._stop_reason(), usage), **self._extras()}

    def record_returned(self, num_choices: int) -> None:
        """Count choices that were sent completely."""
        self._server.recorder.on_response(num_choices)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        """Anthropic's (stop_reason, stop_sequence)."""
        output = self._output
        if self._prompt_only:
            return "max_tokens", None
        if output.finish_reason == "tool_calls":
            return "tool_use", None
        if output.finish_reason == "length":
            limit = output.request.params.max_tokens
            hit_limit = limit is not None and output.num_tokens >= limit
            return ("max_tokens" if hit_limit else "model_context_window_exceeded"), None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "end_turn", None

    def _usage(self, num_output: int) -> dict[str, Any]:
        """Tokens so far; input read from the prefix cache, and input added to it, are counted apart.

        The prompt's other whole blocks are added.
        """
        output = self._output
        num_added = max(self._num_cacheable - output.num_cached, 0)
        usage: dict[str, Any] = {
            "input_tokens": len(output.request.prompt_ids) - output.num_cached - num_added,
            "cache_creation_input_tokens": num_added,
            "cache_read_input_tokens": output.num_cached,
            "output_tokens": 0 if self._prompt_only else num_output,
        }
        if output.num_reasoning_tokens:
            usage["output_tokens_details"] = {"thinking_tokens": output.num_reasoning_tokens}
        return usage

    def _extras(self) -> dict[str, Any]:
        if not self._has_metrics:
            return {}
        request = self._output.request
        metrics = self._server.recorder.answer_metrics(request.id)
        return {"seed": request.seed} | ({} if metrics is None else {"metrics": metrics.as_dict()})


def _sse(event: Event) -> bytes:
    """Anthropic's SDKs dispatch on the line `event:`."""
    return f"event: {event['type']}\n".encode() + sse_event(event)
