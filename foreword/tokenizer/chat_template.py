"""Chat templates: messages to prompt text, as `transformers` renders them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from foreword.errors import CheckpointError, InvalidRequest
from foreword.tokenizer.messages import IMAGE_PART, check_no_placeholder, to_content_lists, to_text_messages
from foreword.tokenizer.template_sandbox import GuardedEnvironment, TemplateBudget
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims
PROBE_TEXT = "Foreword asks"
MAX_SOURCE_CHARACTERS = 131_072  # characters
MAX_REASON_CHARACTERS = 500  # characters of what a template says against messages
MAX_DATE_CHARACTERS = 1_000  # characters of a pattern, whose fields may be wide
SLOW_S = 0.005  # of processor time: more than others should wait for one rendering
WORST_TIME_DECAY = (
    0.99  # of the longest rendering so far, after each one: a second counts for some five hundred
)
WIDE_FIELD = re.compile(r"\d{3}")
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """One model's chat template, compiled once. Templates are foreign code: they run in a sandbox, within a budget.

    source       Jinja source; None: the model has none, and every chat is refused
    variables    what every template may ask for: `bos_token`, `eos_token`, ...
    placeholder  what stands for a picture in prompts; None: the model takes no pictures
    """

    __slots__ = (
        "_environment",
        "_placeholder",
        "_takes_content_lists",
        "_template",
        "_variables",
        "_worst_s",
    )

    def __init__(
        self, source: str | None, variables: Mapping[str, str], placeholder: str | None = None
    ) -> None:
        self._environment = _make_environment()
        self._template = None if source is None else _compile_template(self._environment, source)
        self._variables = dict(variables)
        self._placeholder = placeholder
        self._takes_content_lists = placeholder is not None and self._detect_content_lists(placeholder)
        self._worst_s = math.inf  # what it takes is not known yet

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, placeholder: str | None = None) -> ChatTemplate:
        """The template that came with the tokenizer."""
        return cls(tokenizer.chat_template, tokenizer.special_tokens, placeholder)

    @property
    def is_slow(self) -> bool:
        """It has lately taken long, or was never tried: where others wait, it should be rendered in a thread."""
        return self._worst_s > SLOW_S

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, with one placeholder for each picture.

        messages                content is a text, or a list of texts and of IMAGE
        add_generation_prompt   end with the beginning of the assistant's turn
        continue_final_message  leave the last message open, so that the answer continues it
        options                 further variables for the template, such as `enable_thinking`

        Raises InvalidRequest where the template refuses the messages, or a text has the placeholder in it.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or --raw on the command line",
                "messages",
            )
        _check_options(options or {}, add_generation_prompt and continue_final_message)
        given = self._convert_messages(messages)
        if continue_final_message:
            _mark_end(given[-1])
        try:
            with self._measure_time():
                text = self._render(given, add_generation_prompt, options or {})
        except Exception as error:  # a template may fail in any way on messages that it did not expect
            reason = str(error)[:MAX_REASON_CHARACTERS] or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from None
        return _cut_at_mark(text) if continue_final_message else text

    def _convert_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As the template knows them."""
        if self._placeholder is None:
            return to_text_messages(messages)
        listed = to_content_lists(messages)
        check_no_placeholder(listed, self._placeholder)
        return listed if self._takes_content_lists else to_text_messages(messages, self._placeholder)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        assert self._template is not None
        given = {**self._variables, "tools": None, "documents": None, **options}
        with self._environment.use_budget(TemplateBudget.from_input((messages, given))):
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )

    def _detect_content_lists(self, placeholder: str) -> bool:
        """Whether the template walks through lists of parts, or knows texts only: some do not say, so one is tried."""
        probe = {"role": "user", "content": [IMAGE_PART, {"type": "text", "text": PROBE_TEXT}]}
        try:
            text = "" if self._template is None else self._render([probe], True, {})
        except Exception:  # as in render()
            return False
        written_out = "'type'" in text or '"type"' in text
        return text.count(placeholder) == 1 and PROBE_TEXT in text and not written_out

    @contextmanager
    def _measure_time(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            before_s = self._worst_s if math.isfinite(self._worst_s) else 0.0
            self._worst_s = max(time.thread_time() - began_s, before_s * WORST_TIME_DECAY)


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
    """Mark the end of its text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + END_MARK
    elif content and "text" in content[-1]:
        message["content"] = [*content[:-1], {"type": "text", "text": content[-1]["text"] + END_MARK}]
    else:
        message["content"] = [*content, {"type": "text", "text": END_MARK}]


def _cut_at_mark(text: str) -> str:
    place = text.rfind(END_MARK.strip())
    if place < 0:
        raise InvalidRequest(
            "the chat template drops the final message, which continue_final_message needs", "messages"
        )
    kept = text[:place]
    return kept if text.startswith(END_MARK, place) else kept.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.set_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile_template(environment: GuardedEnvironment, source: str) -> jinja2.Template:
    """Raises CheckpointError."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise CheckpointError(
            f"the chat template has {len(source)} characters, of at most {MAX_SOURCE_CHARACTERS}",
            "chat_template",
        )
    try:
        with environment.use_budget(TemplateBudget.from_input(source)):
            return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template has a syntax error in line {error.lineno}: {error}", "chat_template"
        ) from None
    except (
        Exception
    ) as error:  # what is nested too deeply fails in Jinja's code, or in Python's for what Jinja made of it
        raise CheckpointError(
            f"the chat template cannot be compiled ({type(error).__name__})", "chat_template"
        ) from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARACTERS or WIDE_FIELD.search(pattern):
        raise jinja2.TemplateError("strftime_now writes a date")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it leaves `<` and `&` alone: the text is no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
