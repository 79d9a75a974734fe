"""Chat templates: messages to prompt text, as `transformers` renders them.

A template is foreign code. It runs in a worker process (tokenizer/template_worker.py) with limits of CPU time
and memory, so it cannot stall or crash the server.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import product
from types import EllipsisType
from typing import Any, Final

from foreword.chat_formats.chat_format import ToolFormat, describe_tools, write_calls
from foreword.chat_formats.parts.json import JsonCall
from foreword.chat_formats.tools import ReasoningOptions, Tool
from foreword.errors import CheckpointError, InvalidRequest, OverBudget
from foreword.tokenizer.messages import (
    IMAGE_PART,
    check_no_placeholder,
    join_content,
    one_call_per_turn,
    read_tool_history,
    to_content_lists,
    to_plain_tool_messages,
    to_text_messages,
)
from foreword.tokenizer.template_worker import NOT_COMPILED, RENDERED
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool

WORKER: Final = "foreword.tokenizer.template_worker"
NUM_WORKERS: Final = 3
LIMITS: Final = JobLimits(cpu_s=2.0, wall_s=20.0, num_bytes=1 << 30, queue_timeout_s=30.0)
MAX_SOURCE_CHARACTERS: Final = 131_072
MAX_INPUT_BYTES: Final = 64 << 20  # pickled messages and options
MAX_REPLY_BYTES: Final = 256 << 20
REFUSES: Final = "the model's chat template refuses these messages: "
END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims
PROBE_TEXT: Final = "Foreword asks"
PROBE_TOOL: Final = Tool("foreword_tool", "Foreword tells.")
RESERVED_VARIABLES: Final = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
JSON_CALLS: Final = ToolFormat((JsonCall(),))
REASONING: Final = "reasoning_content"
REASONING_FIELDS: Final = ("reasoning", REASONING, "thinking")  # names of clients and templates
REASONING_PART: Final = re.compile(
    r"type['\"]?\]? *== *['\"]thinking['\"]"
)  # a template that reads parts of it

SOFT_SWITCH: Final = "/no_think"
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_Fit = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

# One pool for all templates of this process; workers start with the first rendering.
_pool = WorkerPool(WORKER, "render", lambda: None, LIMITS, NUM_WORKERS)
atexit.register(_pool.close)


@dataclass(frozen=True, slots=True)
class _CallStyle:
    """How a template wants calls in messages."""

    text_arguments: bool  # JSON text, not a mapping
    no_content: str | None  # content of a message with calls and no text
    short_ids: bool  # ids have 9 letters and digits, as Mistral's

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of read_tool_history() in this style."""
        return [self._apply(message) for message in messages]

    def _apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        styled = dict(message)
        if "tool_call_id" in styled:
            styled["tool_call_id"] = self._call_id(styled["tool_call_id"])
        if "tool_calls" in styled:
            styled["content"] = styled["content"] if _has_text(styled["content"]) else self.no_content
            styled["tool_calls"] = [
                {**call, "id": self._call_id(call["id"]), "function": self._function(call["function"])}
                for call in styled["tool_calls"]
            ]
        return styled

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        return {
            **function,
            "arguments": json.dumps(arguments, ensure_ascii=False) if self.text_arguments else arguments,
        }

    def _call_id(self, call_id: str) -> str:
        if not self.short_ids or SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


@dataclass(frozen=True, slots=True)
class _ToolShape:
    """Tool features of a conversation that some templates drop."""

    says_and_calls: bool = False  # a message has a text and calls
    several_calls: bool = False  # a message has several calls
    reasons: bool = False  # a message has reasoning and calls

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> _ToolShape | None:
        """None without calls and results."""
        callers = [message for message in messages if message.get("tool_calls")]
        if not callers and not any(message.get("role") == "tool" for message in messages):
            return None
        return cls(
            any(_has_text(message.get("content")) for message in callers),
            any(len(message["tool_calls"]) > 1 for message in callers),
            any(message.get(REASONING) for message in callers),
        )

    def probe(self) -> tuple[list[dict[str, Any]], list[str]]:
        """A conversation like it, and the texts that a rendering must keep."""
        text, calls, results = "Foreword tells" if self.says_and_calls else "", [], []
        kept = [text]
        for i in range(1 + self.several_calls):
            name, argument, result = f"foreword_call_{i}", f"Foreword calls {i}", f"Foreword answers {i}"
            call_id = f"call_0123456789_{i}"
            function = {"name": name, "arguments": {"text": argument}}
            calls.append({"id": call_id, "type": "function", "function": function})
            results.append({"role": "tool", "content": result, "name": name, "tool_call_id": call_id})
            kept += [name, argument, result]
        caller = {"role": "assistant", "content": text, "tool_calls": calls}
        if self.reasons:
            caller[REASONING] = "Foreword thinks"
        return [{"role": "user", "content": PROBE_TEXT}, caller, *results], kept


class ChatTemplate:
    """The chat template of one model."""

    def __init__(
        self, source: str | None, variables: Mapping[str, str], placeholder: str | None = None
    ) -> None:
        """Raises CheckpointError for a template that does not compile.

        source       Jinja source; None: the model has no template, and every chat is refused
        variables    constants such as `bos_token`
        placeholder  text of an image in prompts; None: the model takes no images
        """
        self.source = source
        self._variables = dict(variables)
        self._placeholder = placeholder
        self._takes_content_lists = False
        self._no_tools: list[Any] | None = (
            None  # value of `tools`: None as in transformers; [] where the template fails with None
        )
        self._call_format = JSON_CALLS  # format of calls that the template does not render
        self._describes_tools = True  # the template does, not this class
        # As probed on first use:
        self._fits: dict[_ToolShape, _Fit] = {}
        self._call_style: _CallStyle | EllipsisType | None = ...
        self._keeps: dict[str, bool] = {}
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

    def reasoning_variables(self, reasoning: ReasoningOptions) -> dict[str, Any]:
        """Variables of this template that ask for such a reasoning."""
        enabled, effort = reasoning.is_enabled, reasoning.effort
        known = [name for name in EFFORTS if re.search(rf"['\"]{name}['\"]", self.source or "")]
        variables: dict[str, Any] = {"enable_thinking": enabled, "thinking": enabled}
        variables["thinking_budget"] = 0 if enabled is False else reasoning.budget_tokens
        if enabled is False:
            variables["reasoning_effort"] = "none" if "none" in known else None
        elif effort in EFFORTS:
            choices = [name for name in known if name != "none"]
            choices = choices if len(choices) > 1 else ["low", "medium", "high"]
            wanted = EFFORTS.index(effort)
            variables["reasoning_effort"] = min(
                choices, key=lambda name: (abs(EFFORTS.index(name) - wanted), -EFFORTS.index(name))
            )
        return {name: value for name, value in variables.items() if value is not None and self._reads(name)}

    def _reads(self, variable: str) -> bool:
        """Whether the source has the name of a variable, not of a field or a part of a text."""
        return re.search(rf"(?<![\w.'\"<\[|]){variable}(?![\w'\">\]])", self.source or "") is not None

    def set_call_format(self, call_format: ToolFormat, describes_tools: bool) -> None:
        """Set the format of calls that the template does not render.

        describes_tools  the template describes tools; False: a text of this class does
        """
        self._call_format, self._describes_tools = call_format, describes_tools

    def renders_tools(self) -> bool:
        """Whether the template describes tools."""
        if "tools" not in (self.source or ""):
            return False
        if "tools" not in self._keeps:
            probe = self._convert_messages([{"role": "user", "content": PROBE_TEXT}])
            self._keeps["tools"] = PROBE_TOOL.name in self._try_render(probe, [PROBE_TOOL])
        return self._keeps["tools"]

    def renders_calls(self) -> bool:
        """Whether the template renders calls of the assistant, and their results."""
        return self._probe_call_style() is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        reasoning: ReasoningOptions | None = None,
    ) -> str:
        """The prompt text of a conversation, with one placeholder for each image.

        messages                content is a text, or a list of texts and IMAGE_PART; calls and results as
                                OpenAI's, whose arguments may be a mapping; `reasoning_content`, `reasoning`
                                or `thinking` of the assistant
        tools                   described by the template, or by a text in the system message if it cannot
        add_generation_prompt   end with the header of the assistant's turn
        continue_final_message  leave the last message open: the answer continues it
        options                 further variables of the template, such as `enable_thinking`
        reasoning               sets those variables that the template reads and `options` lacks

        Calls and results have the form that the template wants; what it does not render becomes plain text.
        Waits for a worker process, so event loops call it in a thread. Raises InvalidRequest if the template
        refuses the messages or exceeds a limit, or a text contains the placeholder; Overloaded.
        """
        if self.source is None:
            raise InvalidRequest(
                "this model has no chat template: give one with --chat-template FILE, "
                "or use /v1/completions, on the command line --raw",
                "messages",
            )
        options = options or {}
        _check_options(options, add_generation_prompt and continue_final_message)
        if reasoning is not None:
            options = self.reasoning_variables(reasoning) | dict(options)
            if reasoning.is_enabled is False and not (
                self._reads("enable_thinking") or self._reads("thinking")
            ):
                messages = _add_soft_switch(messages, self.source)
        converted = self._convert_messages(read_tool_history(messages))
        if tools and not self._describes_tools:
            converted = self._add_tool_text(converted, describe_tools(self._call_format, tools))
            tools = ()
        converted = self._fit_calls(converted)
        if continue_final_message:
            _mark_end(converted[-1])
        text = self._render(self.source, converted, add_generation_prompt, options, tools)
        return _cut_at_mark(text) if continue_final_message else text

    def _convert_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with contents as the template expects, and reasoning under the key REASONING."""
        messages = [_read_reasoning(message) for message in messages]
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
        tools: Sequence[Tool] = (),
    ) -> str:
        described = [tool.to_template() for tool in tools] or self._no_tools
        messages = [_write_reasoning(message, source) for message in messages]
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables |= {**self._variables, "tools": described, "documents": None, **options}
        file = BytesIO()
        try:
            _PlainPickler(file).dump((source, variables))
        except Exception as error:
            raise InvalidRequest(
                f"messages and chat_template_kwargs must be plain values: {error}", "messages"
            ) from None
        job = file.getvalue()
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
            raise OverBudget(REFUSES + str(error), "messages") from None
        kind, text = reply[: len(RENDERED)], reply[len(RENDERED) :].decode("utf-8", "surrogatepass")
        if kind == RENDERED:
            return text
        if kind == NOT_COMPILED:
            raise CheckpointError(f"the chat template {text}", "chat_template")
        raise InvalidRequest(REFUSES + text, "messages")

    def _probe_tools(self) -> list[Tool]:
        """Tools for a probe with calls: some templates fail without."""
        return [PROBE_TOOL] if self.renders_tools() else []

    def _try_render(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = ()) -> str:
        """The text of converted messages; empty if the template refuses them."""
        assert self.source is not None
        try:
            return self._render(self.source, messages, True, {}, tools)
        except InvalidRequest:
            return ""

    def _fit_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Converted messages with calls and results in a form that the template keeps whole.

        Llama's templates drop a text beside a call and refuse several calls, and others drop all but one.
        """
        shape = _ToolShape.of(messages)
        if shape is None:
            return messages
        if any(message.get("tool_calls") and message.get("role") != "assistant" for message in messages):
            return self._write_calls(messages)
        if shape not in self._fits:
            self._fits[shape] = self._probe_fit(shape)
        return self._fits[shape](messages)

    def _probe_fit(self, shape: _ToolShape) -> _Fit:
        style = self._probe_call_style()
        if style is None:
            return self._write_calls
        fits: list[_Fit] = [style.apply]
        if shape.reasons and shape.says_and_calls:
            fits.append(lambda messages: style.apply(_join_reasoning(messages)))
        if shape.several_calls or shape.says_and_calls:
            fits.append(lambda messages: style.apply(one_call_per_turn(messages)))
        probe, kept = shape.probe()
        for fit in fits:
            text = self._try_render(fit(self._convert_messages(probe)), self._probe_tools())
            if all(part in text for part in kept):
                return fit
        return self._write_calls

    def _probe_call_style(self) -> _CallStyle | None:
        """The style in which the template keeps name, arguments and result of a call."""
        if not isinstance(self._call_style, EllipsisType):
            return self._call_style
        probe, kept = _ToolShape().probe()
        converted = self._convert_messages(probe)
        styles = (_CallStyle(*choice) for choice in product((False, True), ("", None), (False, True)))
        self._call_style = None
        for style in styles if "tool_calls" in (self.source or "") else ():
            text = self._try_render(style.apply(converted), self._probe_tools())
            if all(part in text for part in kept) and "{'text'" not in text:  # Python's form of a mapping
                self._call_style = style
                break
        return self._call_style

    def _write_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Calls as text, and results as messages of the user unless the template takes them."""
        write = partial(write_calls, self._call_format)
        return to_plain_tool_messages(messages, write, self._keeps_results())

    def _keeps_results(self) -> bool:
        """Whether a template that describes tools, but renders no calls, renders messages of results."""
        if not self.renders_tools() or not self._describes_tools:
            return False
        if "results" not in self._keeps:
            (user, _, result), kept = _ToolShape().probe()
            probe = [user, {"role": "assistant", "content": kept[1]}, result]
            text = self._try_render(self._convert_messages(probe), self._probe_tools())
            self._keeps["results"] = kept[1] in text and kept[-1] in text
        return self._keeps["results"]

    def _add_tool_text(self, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        """The messages with a text in the system message, or in the first one if there can be none."""
        if messages[0].get("role") != "system":
            if "system" not in self._keeps:
                probe = [{"role": "system", "content": "Foreword rules"}]
                probe.append({"role": "user", "content": PROBE_TEXT})
                self._keeps["system"] = "Foreword rules" in self._try_render(self._convert_messages(probe))
            if self._keeps["system"]:
                return [{"role": "system", "content": text}, *messages]
            return [{**messages[0], "content": join_content(text, messages[0]["content"])}, *messages[1:]]
        return [{**messages[0], "content": join_content(messages[0]["content"], text)}, *messages[1:]]

    def _probe(self) -> bool:
        """Compile the template; whether it iterates over content lists, which only a rendering shows."""
        assert self.source is not None
        parts = [dict(IMAGE_PART), {"type": "text", "text": PROBE_TEXT}]
        content = PROBE_TEXT if self._placeholder is None else parts
        messages = [{"role": "user", "content": content}]
        text = self._try_render(messages)
        if not text and "tools" in self.source:
            self._no_tools = []
            text = self._try_render(messages)
            self._no_tools = [] if text else None
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


def _has_text(content: object) -> bool:
    """Whether a content is more than an empty text or parts without one."""
    if isinstance(content, list):
        return any(part.get("text", part) for part in content)
    return bool(content)


def _read_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, under whichever name, as REASONING."""
    given = [text for name in REASONING_FIELDS if isinstance(text := message.get(name), str) and text]
    bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return bare | {REASONING: given[0]} if given else bare


def _write_reasoning(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The message with its reasoning under the names, or in the parts of content, that the template reads."""
    text = message.get(REASONING)
    bare = {name: value for name, value in message.items() if name != REASONING}
    if text is None:
        return bare
    if REASONING_PART.search(source):
        parts = join_content(bare["content"] or "", [])
        return bare | {"content": [{"type": "thinking", "thinking": text}, *parts]}
    return bare | {name: text for name in REASONING_FIELDS if re.search(rf"\b{name}\b", source)}


def _add_soft_switch(messages: Sequence[Mapping[str, Any]], source: str) -> Sequence[Mapping[str, Any]]:
    """The messages with /no_think behind the user's last text, if the template knows that switch."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if SOFT_SWITCH not in source or last < 0:
        return messages
    message = {**messages[last], "content": join_content(messages[last]["content"], SOFT_SWITCH)}
    return [*messages[:last], message, *messages[last + 1 :]]


def _join_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Texts beside calls moved to the end of the reasoning, for templates that take only one of them."""
    joined = []
    for message in messages:
        text, content = message.get(REASONING), message.get("content")
        moves = message.get("tool_calls") and text and isinstance(content, str) and content
        joined.append({**message, **({REASONING: f"{text}\n\n{content}", "content": ""} if moves else {})})
    return joined


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
