"""Chat templates: messages to prompt text, as `transformers` renders them.

A template is foreign code. It runs in a worker process (tokenizer/template_worker.py) with limits of CPU time
and memory, so it cannot stall or crash the server.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

from foreword.errors import CheckpointError, InvalidRequest
from foreword.tokenizer.messages import (
    IMAGE_PART,
    check_no_placeholder,
    to_content_lists,
    to_plain_tool_messages,
    to_text_messages,
)
from foreword.tokenizer.template_worker import NOT_COMPILED, RENDERED
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool

__all__ = ["ChatTemplate"]

WORKER: Final = "foreword.tokenizer.template_worker"
NUM_WORKERS: Final = 2
LIMITS: Final = JobLimits(cpu_s=2.0, wall_s=20.0, num_bytes=1 << 30, queue_timeout_s=30.0)
MAX_SOURCE_CHARACTERS: Final = 131_072
MAX_INPUT_BYTES: Final = 64 << 20  # of messages and options, pickled
MAX_REPLY_BYTES: Final = 256 << 20
END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims
PROBE_TEXT: Final = "Foreword asks"
RESERVED_VARIABLES: Final = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

# One pool for all templates of this process; workers start with the first rendering.
_pool = WorkerPool(WORKER, "render", lambda: None, LIMITS, NUM_WORKERS)
atexit.register(_pool.close)


@dataclass(frozen=True, slots=True)
class _ToolUse:
    """What a conversation does with tools, as far as templates differ in what they keep of it."""

    says_and_calls: bool  # a message has a text and calls
    several_calls: bool  # a message has several calls
    text_arguments: bool  # of a call, which are no object

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> _ToolUse | None:
        """None without calls and results."""
        callers = [message for message in messages if message.get("tool_calls")]
        if not callers and not any(message.get("role") == "tool" for message in messages):
            return None
        calls = [call for message in callers for call in message["tool_calls"]]
        return cls(
            any(message.get("content") for message in callers),
            any(len(message["tool_calls"]) > 1 for message in callers),
            any(not isinstance(call.get("function", call).get("arguments", {}), Mapping) for call in calls),
        )

    def probe(self) -> tuple[list[dict[str, Any]], list[str]]:
        """A conversation like it, and the texts that a rendering must keep."""
        text, calls, results = "Foreword tells" if self.says_and_calls else "", [], []
        kept = [text]
        for i in range(1 + self.several_calls):
            name, argument, result = f"foreword_call_{i}", f"Foreword calls {i}", f"Foreword answers {i}"
            arguments = argument if self.text_arguments else {"text": argument}
            call_id = f"foreword{i}"  # Mistral's templates want 9 characters
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
            results.append({"role": "tool", "content": result, "name": name, "tool_call_id": call_id})
            kept += [name, argument, result]
        caller = {"role": "assistant", "content": text, "tool_calls": calls}
        return [{"role": "user", "content": PROBE_TEXT}, caller, *results], kept


class ChatTemplate:
    """The chat template of one model."""

    __slots__ = ("_keeps_tools", "_placeholder", "_source", "_takes_content_lists", "_variables")

    def __init__(
        self, source: str | None, variables: Mapping[str, str], placeholder: str | None = None
    ) -> None:
        """Raises CheckpointError for a template that does not compile.

        source       Jinja source; None: the model has no template, and every chat is refused
        variables    constants such as `bos_token`
        placeholder  text of an image in prompts; None: the model takes no images
        """
        self._source = source
        self._variables = dict(variables)
        self._placeholder = placeholder
        self._takes_content_lists = False
        self._keeps_tools: dict[_ToolUse, bool] = {}  # as probed
        if source is not None:
            if len(source) > MAX_SOURCE_CHARACTERS:
                raise CheckpointError(
                    f"the chat template has {len(source)} characters, of at most {MAX_SOURCE_CHARACTERS}",
                    "chat_template",
                )
            self._takes_content_lists = self._probe()

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, placeholder: str | None = None) -> ChatTemplate:
        return cls(tokenizer.chat_template, tokenizer.special_tokens, placeholder)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, with one placeholder for each image.

        messages                content is a text, or a list of texts and IMAGE_PART. Tool calls and results
                                become plain text if the template does not render all of them
        add_generation_prompt   end with the header of the assistant's turn
        continue_final_message  leave the last message open: the answer continues it
        options                 further variables of the template, such as `enable_thinking`

        Waits for a worker process, so event loops call it in a thread. Raises InvalidRequest if the template
        refuses the messages or exceeds a limit, or a text contains the placeholder; Overloaded.
        """
        if self._source is None:
            raise InvalidRequest(
                "this model has no chat template: give one with --chat-template FILE, "
                "or use /v1/completions, on the command line --raw",
                "messages",
            )
        _check_options(options or {}, add_generation_prompt and continue_final_message)
        converted = self._convert_messages(messages)
        if not self._can_render_tools(self._source, messages):
            converted = to_plain_tool_messages(converted)
        if continue_final_message:
            _mark_end(converted[-1])
        text = self._render(self._source, converted, add_generation_prompt, options or {})
        return _cut_at_mark(text) if continue_final_message else text

    def _convert_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in the form that the template expects."""
        if self._placeholder is None:
            return to_text_messages(messages)
        lists = to_content_lists(messages)
        check_no_placeholder(lists, self._placeholder)
        return lists if self._takes_content_lists else to_text_messages(messages, self._placeholder)

    def _render(
        self,
        source: str,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables |= {**self._variables, "tools": None, "documents": None, **options}
        try:
            job = _pickle_plain((source, variables))
        except Exception as error:
            raise InvalidRequest(
                f"messages and chat_template_kwargs must be plain values: {error}", "messages"
            ) from None
        if len(job) > MAX_INPUT_BYTES:
            raise InvalidRequest(
                f"messages have {len(job)} bytes; the chat template takes at most {MAX_INPUT_BYTES}",
                "messages",
            )
        try:
            with _pool.worker("messages") as worker:
                worker.send(job)
                reply = worker.receive(MAX_REPLY_BYTES)
        except JobFailed as error:
            raise _refusal(str(error)) from None
        kind, text = reply[: len(RENDERED)], reply[len(RENDERED) :].decode("utf-8", "surrogatepass")
        if kind == RENDERED:
            return text
        if kind == NOT_COMPILED:
            raise CheckpointError(f"the chat template {text}", "chat_template")
        raise _refusal(text)

    def _can_render_tools(self, source: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a rendering keeps all texts of messages that use tools like these; probed on first use.

        Llama's template drops a text beside a call and refuses several calls, and others drop all but one.
        """
        use = _ToolUse.of(messages)
        if use is None:
            return True
        if any(message.get("tool_calls") and message.get("role") != "assistant" for message in messages):
            return False
        if use not in self._keeps_tools:
            probe, kept = use.probe()
            try:
                text = self._render(source, self._convert_messages(probe), True, {})
            except InvalidRequest:
                text = ""
            self._keeps_tools[use] = bool(text) and all(part in text for part in kept)
        return self._keeps_tools[use]

    def _probe(self) -> bool:
        """Compile the template; whether it iterates over content lists, which only a rendering shows."""
        assert self._source is not None
        parts = [dict(IMAGE_PART), {"type": "text", "text": PROBE_TEXT}]
        content = PROBE_TEXT if self._placeholder is None else parts
        try:
            text = self._render(self._source, [{"role": "user", "content": content}], True, {})
        except InvalidRequest:
            return False
        if self._placeholder is None:
            return False
        is_repr = "'type'" in text or '"type"' in text
        return text.count(self._placeholder) == 1 and PROBE_TEXT in text and not is_repr


class _PlainPickler(pickle.Pickler):
    """Reduces subclasses of texts and mappings, such as StrEnum, whose module the worker may lack."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, str):
            return str, (str.__str__(value),)
        return (dict, (dict(value),)) if isinstance(value, Mapping) else NotImplemented


def _pickle_plain(value: object) -> bytes:
    file = BytesIO()
    _PlainPickler(file).dump(value)
    return file.getvalue()


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages")


def _check_options(options: Mapping[str, Any], conflicting: bool) -> None:
    if conflicting:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; set one to false",
            "continue_final_message",
        )
    for name in options:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")


def _mark_end(message: dict[str, Any]) -> None:
    """Append END_MARK to the message's text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + END_MARK
    elif content and "text" in content[-1]:
        message["content"] = [*content[:-1], {"type": "text", "text": content[-1]["text"] + END_MARK}]
    else:
        message["content"] = [*content, {"type": "text", "text": END_MARK}]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(END_MARK.strip())
    if end < 0:
        raise InvalidRequest(
            "the chat template drops the final message, which continue_final_message needs", "messages"
        )
    kept = text[:end]
    return kept if text.startswith(END_MARK, end) else kept.rstrip()
