"""The three wire APIs of conversations: one question in each body, and each answer in one form.

Streams are read as the clients read them: chat by OpenAI's accumulator, Messages and Responses event by
event, each checked by the SDK's own type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from foreword.server.apis.messages.routes import join_blocks
from tests.support.responses_events import check_response, read_stream

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@dataclass(frozen=True, slots=True)
class Question:
    """A request with one question, in no API's form."""

    text: str = "Weather in Bonn?"
    tools: Sequence[Mapping[str, Any]] = ()  # functions of OpenAI's chat
    choice: str = "auto"  # "auto", "none", "required", or the name of a tool
    parallel: bool = True
    schema: Mapping[str, Any] | None = None  # of the content
    stop: tuple[str, ...] = ()
    max_tokens: int = 999
    thinks: bool | None = None  # None: the default of the API
    budget: int | None = None  # of thinking
    logit_bias: Mapping[int, float] | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [dict(tool["function"]) for tool in self.tools]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, in no API's form; `end` is "stop", "calls", "length" or the stop string."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name, arguments
    end: str = "stop"
    num_tokens: int = -1  # -1: not compared
    num_reasoning_tokens: int = -1


class Wire:
    """Bodies and answers of one API."""

    name: ClassVar[str]
    path: ClassVar[str]

    def body(self, question: Question, **fields: Any) -> dict[str, Any]:
        """fields  sampling fields, which all APIs share"""
        bias = {str(token_id): value for token_id, value in (question.logit_bias or {}).items()}
        return {**({"logit_bias": bias} if bias else {}), **self.fields(question), **fields}

    def fields(self, question: Question) -> dict[str, Any]:
        raise NotImplementedError

    def ask(self, http: httpx.Client, question: Question, **fields: Any) -> Answer:
        reply = http.post(self.path, json=self.body(question, **fields))
        assert reply.status_code == 200, reply.text
        return self.read(reply.json())

    def stream(self, http: httpx.Client, question: Question, **fields: Any) -> Answer:
        raise NotImplementedError

    def read(self, body: Any) -> Answer:
        raise NotImplementedError


class ChatWire(Wire):
    name, path = "chat", "/v1/chat/completions"

    def fields(self, question: Question) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": question.max_tokens,
            "stop": list(question.stop),
            "think": question.thinks,
            "thinking_token_budget": question.budget,
        }
        if question.tools:
            named = {"type": "function", "function": {"name": question.choice}}
            is_name = question.choice not in ("auto", "none", "required")
            fields["tools"] = list(question.tools)
            fields["tool_choice"] = named if is_name else question.choice
            fields["parallel_tool_calls"] = question.parallel
        if question.schema is not None:
            named_schema = {"name": "x", "schema": question.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named_schema}
        return fields

    def stream(self, http: httpx.Client, question: Question, **fields: Any) -> Answer:
        body = {**self.body(question, **fields), "stream": True, "stream_options": {"include_usage": True}}
        state = openai.lib.streaming.chat.ChatCompletionStreamState()
        text = http.post(self.path, json=body).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", text
        stop_reason = None
        for line in lines[:-1]:
            chunk = ChatCompletionChunk.model_validate_json(line)
            for choice in chunk.choices:
                stop_reason = (choice.model_extra or {}).get("stop_reason")  # not accumulated
                shown = choice.delta.model_dump(exclude_none=True, exclude={"role", "reasoning"})
                assert len(shown) <= 1, "a chunk has one kind of text"
            state.handle_chunk(chunk)
        body = state.current_completion_snapshot.model_dump(exclude_none=True)
        body["choices"][0]["stop_reason"] = stop_reason
        return self.read(body)

    def read(self, body: Any) -> Answer:
        (choice,) = body["choices"]
        message, details = choice["message"], body["usage"].get("completion_tokens_details", {})
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert message.get("reasoning") == message.get("reasoning_content")
        reason = {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"])
        return Answer(
            message.get("content") or "",
            message.get("reasoning") or "",
            tuple((call["name"], call["arguments"]) for call in calls),
            choice.get("stop_reason") or reason,
            body["usage"]["completion_tokens"],
            details.get("reasoning_tokens", 0),
        )


class MessagesWire(Wire):
    name, path = "messages", "/v1/messages"

    def fields(self, question: Question) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": question.max_tokens,
            "stop_sequences": list(question.stop),
        }
        if question.budget is not None:
            fields["thinking"] = {"type": "enabled", "budget_tokens": question.budget}
        elif question.thinks:
            fields["thinking"] = {"type": "adaptive"}
        if question.tools:
            kinds = {"auto": "auto", "none": "none", "required": "any"}
            choice = {"type": kinds.get(question.choice, "tool")}
            if choice["type"] == "tool":
                choice["name"] = question.choice
            elif not question.parallel:
                choice["disable_parallel_tool_use"] = True  # type: ignore[assignment]
            fields["tools"] = [
                {"name": given["name"], "input_schema": given.get("parameters", {"type": "object"})}
                for given in question.functions
            ]
            fields["tool_choice"] = choice
        if question.schema is not None:
            fields["output_config"] = {"format": {"type": "json_schema", "schema": question.schema}}
        return fields

    def stream(self, http: httpx.Client, question: Question, **fields: Any) -> Answer:
        events = message_events(http, self.body(question, **fields))
        (end,) = [event for event in events if event["type"] == "message_delta"]
        blocks = join_blocks(event for event in events if event["type"].startswith("content_block"))
        return self.read({**events[0]["message"], **end["delta"], "usage": end["usage"], "content": blocks})

    def read(self, body: Any) -> Answer:
        check_known(Message.model_validate(body))
        ends = {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}
        blocks = body["content"]
        assert all(block["text"].strip() for block in blocks if block["type"] == "text"), "no blank text"
        assert all(block["signature"] for block in blocks if block["type"] == "thinking")
        return Answer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tuple(
                (block["name"], json.dumps(block["input"], ensure_ascii=False))
                for block in blocks
                if block["type"] == "tool_use"
            ),
            body["stop_sequence"] or ends.get(body["stop_reason"], body["stop_reason"]),
            body["usage"]["output_tokens"],
            body["usage"].get("output_tokens_details", {}).get("thinking_tokens", 0),
        )


class ResponsesWire(Wire):
    name, path = "responses", "/v1/responses"

    def fields(self, question: Question) -> dict[str, Any]:
        effort = {True: "medium", False: "none", None: None}[question.thinks]
        fields: dict[str, Any] = {
            "input": question.text,
            "max_output_tokens": question.max_tokens,
            "stop": list(question.stop),
            "reasoning": {"effort": effort, "max_tokens": question.budget},
            "store": False,
        }
        if question.tools:
            is_name = question.choice not in ("auto", "none", "required")
            named = {"type": "function", "name": question.choice}
            fields["tools"] = [{"type": "function", **given} for given in question.functions]
            fields["tool_choice"] = named if is_name else question.choice
            fields["parallel_tool_calls"] = question.parallel
        if question.schema is not None:
            fields["text"] = {"format": {"type": "json_schema", "name": "x", "schema": question.schema}}
        return fields

    def stream(self, http: httpx.Client, question: Question, **fields: Any) -> Answer:
        return self.read(read_stream(http, **self.body(question, **fields))[1])

    def read(self, body: Any) -> Answer:
        check_response(body)
        items: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in body["output"]:
            items[item["type"]].append(item)
        end = "calls" if items["function_call"] else "stop"
        if body["incomplete_details"]:
            end = body["incomplete_details"]["reason"]
        return Answer(
            "".join(item["content"][0]["text"] for item in items["message"]),
            "".join(item["content"][0]["text"] for item in items["reasoning"]),
            tuple((item["name"], item["arguments"]) for item in items["function_call"]),
            {"max_output_tokens": "length"}.get(end, end),
            body["usage"]["output_tokens"],
            body["usage"]["output_tokens_details"]["reasoning_tokens"],
        )


WIRES = {wire.name: wire for wire in (ChatWire(), MessagesWire(), ResponsesWire())}


def message_events(http: httpx.Client, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Events of a streamed message, each of them one of the SDK's types, strictly."""
    events: list[dict[str, Any]] = []
    with http.stream("POST", MessagesWire.path, json={**body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.read()
        lines = list(reply.iter_lines())
    for name, data, blank in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and not blank
        events.append(event)
        if event["type"] != "ping":
            check_known(MESSAGE_EVENT.validate_python(event, strict=True))
    return events


def check_known(value: Any) -> None:
    """All fields are those of the SDK's types."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            check_known(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            check_known(item)
