"""POST /v1/messages and /v1/messages/count_tokens, and the bodies of their answers"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.chat_formats.events import ChatEvent
from foreword.core.params import SamplingParams
from foreword.errors import ForewordError
from foreword.server.answering.generation import Generation, count_prompt_tokens, start_chat
from foreword.server.answering.streaming import ResponseWriter, respond
from foreword.server.apis.answer_parts import AnswerParts
from foreword.server.apis.messages.body import CountTokensBody, MessagesBody
from foreword.server.apis.messages.conversation import MessagesConversation, omit_text
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.errors import error_body
from foreword.server.http.responses import JSONResponse, sse_event
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep, ServedModels
from foreword.tokenizer.chat_processor import ChatTask
from foreword.tokenizer.output_processor import OutputDelta

# Type of a delta, and the field of its text, by type of the block.
DELTAS: Mapping[str, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
Event = dict[str, Any]
router = APIRouter(route_class=IntakeRoute)


@router.post("/v1/messages")
async def messages(
    body: MessagesBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Answer a conversation, with Anthropic's bodies."""
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    context = server.request_context(permissions, body, body.timeout)
    conversation, task = await _read_task(body, request, models, server, params)
    message_id = f"msg_{uuid.uuid4().hex}"
    with conversation.rename_fields():
        generation = await start_chat(server, request, context, task, message_id)
    writer = MessagesWriter(
        server,
        generation,
        message_id,
        context.model,
        request.scope,
        body.omit_thinking,
        bool(body.metrics),
        body.prompt_only,
    )
    return respond(generation, writer, bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: CountTokensBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Tokens of the prompt that /v1/messages would render."""
    server = await models.acquire(body.model, permissions, request)
    context = server.request_context(permissions, body)
    conversation, task = await _read_task(body, request, models, server, SamplingParams())
    with conversation.rename_fields():
        count = await count_prompt_tokens(server, request, context, task)
    return JSONResponse({"input_tokens": count})


async def _read_task(
    body: MessagesBody | CountTokensBody,
    request: Request,
    models: ServedModels,
    server: LoadedModel,
    params: SamplingParams,
) -> tuple[MessagesConversation, ChatTask]:
    body.check_num_parts(server.max_model_len)
    takes_images = server.chat_processor.placeholder_id is not None
    conversation = await server.intake.offload_if_large(request, lambda: body.conversation(takes_images))
    tools, skipped = await server.intake.offload_if_large(
        request, lambda: body.tool_use(conversation.referenced)
    )
    await models.check_fields(body, request, ignored=skipped)
    task = ChatTask(
        conversation.messages,
        params,
        tools,
        body.reasoning(),
        {
            "add_generation_prompt": not conversation.continues,
            "continue_final_message": conversation.continues,
            "options": body.chat_template_kwargs,
        },
        prompt_only=isinstance(body, MessagesBody) and body.prompt_only,
        call_id_prefix="toolu_",
    )
    return conversation, task


class BlockEvents(AnswerParts[Event]):
    """The events of content blocks, in Anthropic's form."""

    reasoning_kind = "thinking"

    def __init__(self, message_id: str, omit_thinking: bool) -> None:
        super().__init__()
        self._message_id = message_id
        self._omit_thinking = omit_thinking
        self._index = -1  # last block
        self._thinking: list[str] = []  # omitted text of the open block

    def finish(self) -> Iterator[Event]:
        """End the last block; as of Anthropic, a call that the end of the answer cuts off has no end."""
        if self.kind != "tool_use":
            yield from self.close()

    def _start_text(self, text: str) -> Iterable[Event]:
        return self._start({"type": "text", "text": ""})

    def _start_reasoning(self) -> Iterable[Event]:
        return self._start({"type": "thinking", "thinking": "", "signature": ""})

    def _start_call(self, call_id: str, name: str) -> Iterable[Event]:
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return *self._start(block), *self._delta("")

    def _start(self, block: Event) -> Sequence[Event]:
        self._index, self.kind = self._index + 1, block["type"]
        return ({"type": "content_block_start", "index": self._index, "content_block": block},)

    def _delta(self, text: str) -> Iterable[Event]:
        if self.kind == "thinking" and self._omit_thinking:
            self._thinking.append(text)
            return ()
        delta_type, key = DELTAS[self.kind]
        return (self._make_delta(type=delta_type, **{key: text}),)

    def _end(self, is_complete: bool) -> Iterable[Event]:
        if self.kind == "thinking":
            text, self._thinking = "".join(self._thinking), []
            signature = omit_text(text) if text else f"{self._message_id}:{self._index}"
            yield self._make_delta(type="signature_delta", signature=signature)
        yield {"type": "content_block_stop", "index": self._index}

    def _make_delta(self, **delta: Any) -> Event:
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


class MessagesWriter(ResponseWriter):
    """Writes the only choice of a generation as a message: see ResponseWriter."""

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        message_id: str,
        model: str,  # name in the answer
        scope: Mapping[str, Any],  # request's ASGI scope
        omit_thinking: bool,
        metrics: bool,  # the request asks for `seed` and `metrics`
        prompt_only: bool,  # the answer is left out
    ) -> None:
        super().__init__(server, generation, metrics)
        self._output = generation.outputs[0]
        resolved, num_input = server.info().resolved, len(self._output.request.prompt_ids)
        self._num_cacheable = num_input - num_input % resolved.block_size if resolved.prefix_caching else 0
        self._id = message_id
        self._model = model
        self._scope = scope
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
        return b"".join(map(_sse, self._blocks.write(events))) or None

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
        content = join_blocks([*blocks.write(events), *blocks.finish()])
        usage = self._usage(self._output.num_tokens)
        return {**self._message(content, *self._stop_reason(), usage), **self._extras()}

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
        if output.finish_reason == "repetition":  # cut like at a limit: the turn is not complete
            return "max_tokens", None
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
        seed = {"seed": self._output.request.seed} if self.wants_metrics else {}
        return {**seed, **self.metrics(self._output)}


def _sse(event: Event) -> bytes:
    """Anthropic's SDKs dispatch on the line `event:`."""
    return f"event: {event['type']}\n".encode() + sse_event(event)
