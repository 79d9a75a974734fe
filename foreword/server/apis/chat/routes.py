"""POST /v1/chat/completions, and the bodies of its answers"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from foreword.chat_formats.events import (
    AnswerContent,
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)
from foreword.chat_formats.tools import NO_TOOLS, ToolUse
from foreword.core.params import SamplingParams
from foreword.server.answering.generation import Generation, start_chat
from foreword.server.answering.streaming import respond
from foreword.server.apis.chat.body import ChatBody, to_template_messages
from foreword.server.apis.choices_writer import (
    TEXT_MARK,
    ChoicesWriter,
    ResponseHeader,
    ResponseOptions,
    chat_logprobs,
    response_header,
    response_options,
)
from foreword.server.auth.keys import PermissionsDep
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep
from foreword.tokenizer.chat_processor import ChatTask
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta

_ARGUMENTS: Mapping[str, str] = {"function": "arguments", "custom": "input"}  # field, by type of a call
router = APIRouter(route_class=IntakeRoute)


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Answer a conversation."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    options, header = response_options(body, params), response_header(server, "chatcmpl", params)
    context = server.request_context(permissions, body, body.timeout)
    body.check_num_parts(server.max_model_len)
    task = await server.intake.offload_if_large(request, lambda: _read_task(body, params))
    generation = await start_chat(server, request, context, task, header.id)
    writer = ChatWriter(server, generation, params.n, header, options, task.tools, body.wants_function_call)
    return respond(generation, writer, bool(body.stream))


def _read_task(body: ChatBody, params: SamplingParams) -> ChatTask:
    return ChatTask(
        to_template_messages(body.messages),
        params,
        tools=body.tool_use(),
        reasoning=body.reasoning(),
        template_kwargs=body.template_kwargs(),
        add_special_tokens=bool(body.add_special_tokens),
        separate_reasoning=body.wants_separate_reasoning,
    )


class ChatWriter(ChoicesWriter):
    """A chunk holds one event: reasoning, content, the start of a call or a part of its arguments."""

    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        choices_per_prompt: int,
        header: ResponseHeader,
        options: ResponseOptions,
        tools: ToolUse = NO_TOOLS,
        wants_function_call: bool = False,  # OpenAI's older form of a call
    ) -> None:
        super().__init__(server, generation, choices_per_prompt, header, options)
        self._wants_function_call = wants_function_call
        self._custom_tools = {tool.name for tool in tools.tools if tool.is_custom}
        self._custom_calls: set[tuple[int, int]] = set()  # (choice, call)

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.outputs)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self.make_chunk(choice), **(self.prompt_ids(self.outputs[0]) if index == 0 else {})}

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        write = super().event
        if len(delta.events) <= 1 and all(map(self._is_shown, delta.events)):
            return write(index, delta)
        return b"".join(filter(None, (write(index, part) for part in self._split(delta)))) or None

    def _split(self, delta: OutputDelta) -> Iterable[OutputDelta]:
        """Deltas of one shown event each; the tokens and the end are in the last one."""
        shown = [event for event in delta.events if self._is_shown(event)]
        pieces = {id(event): texts for event, texts in delta.pieces_by_event()}
        last = shown.pop() if shown else None
        for event in shown:
            yield replace(
                delta,
                text=event.text if isinstance(event, ContentText) else "",
                event=delta.event._replace(token_ids=(), draft=None),
                finish_reason=None,
                stop_reason=None,
                logprobs=(),
                pieces=pieces.get(id(event), ()),
                events=(event,),
            )
        yield replace(
            delta,
            text=last.text if isinstance(last, ContentText) else "",
            pieces=pieces.get(id(last), ()),
            events=() if last is None else (last,),
        )

    def _is_shown(self, event: ChatEvent) -> bool:
        return not isinstance(event, CallEnd) and (
            self.options.reasoning or not isinstance(event, ReasoningText)
        )

    def repeated_text(self, delta: OutputDelta) -> tuple[Hashable, str] | None:
        event = delta.events[0] if len(delta.events) == 1 else None
        if event is None or isinstance(event, CallStart | CallEnd):
            return None
        return (type(event), event.index if isinstance(event, CallArguments) else None), event.text

    def mark_text(self, delta: OutputDelta) -> OutputDelta:
        (event,) = delta.events
        assert not isinstance(event, CallStart | CallEnd), "only texts are marked"
        return replace(delta, text=TEXT_MARK, events=(replace(event, text=TEXT_MARK),))

    def is_empty(self, delta: OutputDelta) -> bool:
        return not any(map(self._is_shown, delta.events))

    def finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._wants_function_call else reason

    def prompt_fields(self) -> dict[str, Any]:
        return {**self.prompt_ids(self.outputs[0]), **self.prompt_logprobs(self.outputs[0])}

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(output.logprobs, self.names) if self.options.logprobs else None
        return {"message": self._message(output.events), "logprobs": logprobs}

    def _message(self, events: Sequence[ChatEvent]) -> dict[str, Any]:
        answer = AnswerContent.from_events(events)
        content = answer.text or (None if answer.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self.options.reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        calls = [self._call(call.id, call.name, call.arguments) for call in answer.calls]
        if calls and self._wants_function_call:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message

    def _call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        kind = "custom" if name in self._custom_tools else "function"
        return {"id": call_id, "type": kind, kind: {"name": name, _ARGUMENTS[kind]: arguments}}

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        logprobs = chat_logprobs(delta.logprobs, self.names) if self.options.logprobs else None
        fields: dict[str, Any] = {}
        for event in filter(self._is_shown, delta.events):
            fields |= self._delta_fields(index, event)
        return {"delta": fields, "logprobs": logprobs}

    def _delta_fields(self, index: int, event: ChatEvent) -> dict[str, Any]:
        """`delta` of one event. Reasoning has both names that clients read."""
        if isinstance(event, ContentText):
            return {"content": event.text}
        if isinstance(event, ReasoningText):
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, CallStart):
            call = self._call(event.id, event.name, "")
            if call["type"] == "custom":
                self._custom_calls.add((index, event.index))
        else:
            kind = "custom" if (index, event.index) in self._custom_calls else "function"
            arguments = event.text if isinstance(event, CallArguments) else ""
            call = {kind: {_ARGUMENTS[kind]: arguments}}
        if self._wants_function_call:
            return {"function_call": call["function"]}
        return {"tool_calls": [{"index": event.index, **call}]}
