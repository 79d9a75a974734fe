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
from foreword.text.budget import Budget
from foreword.text.messages import IMAGE, check_texts, listed_messages, plain_messages
from foreword.text.sandbox import GuardedEnvironment
from foreword.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims
PROBE = "Foreword asks"
MAX_SOURCE = 131_072  # characters
MAX_REASON = 500  # characters of what a template says against messages
MAX_DATE = 1_000  # characters of a pattern, whose fields may be wide
SLOW_S = 0.005  # of processor time: more than others should wait for one rendering
REMEMBERED = 0.99  # of the longest rendering so far, after each one: a second counts for some five hundred
WIDE = re.compile(r"\d{3}")
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """One model's chat template, compiled once. Templates are foreign code: they run in a sandbox, within a budget.

    source       Jinja source; None: the model has none, and every chat is refused
    variables    what every template may ask for: `bos_token`, `eos_token`, ...
    placeholder  what stands for a picture in prompts; None: the model takes no pictures
    """

    __slots__ = ("_environment", "_placeholder", "_template", "_variables", "_walks_parts", "_worst_s")

    def __init__(self, source: str | None, variables: Mapping[str, str], placeholder: str | None = None) -> None:
        self._environment = _environment()
        self._template = None if source is None else _compile(self._environment, source)
        self._variables = dict(variables)
        self._placeholder = placeholder
        self._walks_parts = placeholder is not None and self._finds_pictures(placeholder)
        self._worst_s = math.inf  # what it takes is not known yet

    @classmethod
    def of(cls, tokenizer: Tokenizer, placeholder: str | None = None) -> ChatTemplate:
        """The template that came with the tokenizer."""
        return cls(tokenizer.chat_template, tokenizer.special_tokens, placeholder)

    @property
    def slow(self) -> bool:
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
            raise InvalidRequest("this model has no chat template; use /v1/completions, or --raw on the command line", "messages")
        _check_options(options or {}, add_generation_prompt and continue_final_message)
        given = self._messages(messages)
        if continue_final_message:
            _leave_open(given[-1])
        try:
            with self._timed():
                text = self._rendered(given, add_generation_prompt, options or {})
        except Exception as error:  # a template may fail in any way on messages that it did not expect
            reason = str(error)[:MAX_REASON] or type(error).__name__
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from None
        return _cut_at_mark(text) if continue_final_message else text

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As the template knows them."""
        if self._placeholder is None:
            return plain_messages(messages)
        listed = listed_messages(messages)
        check_texts(listed, self._placeholder)
        return listed if self._walks_parts else plain_messages(messages, self._placeholder)

    def _rendered(self, messages: list[dict[str, Any]], add_generation_prompt: bool, options: Mapping[str, Any]) -> str:
        assert self._template is not None
        given = {**self._variables, "tools": None, "documents": None, **options}
        with self._environment.within(Budget.of((messages, given))):
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)

    def _finds_pictures(self, placeholder: str) -> bool:
        """Whether the template walks through lists of parts, or knows texts only: some do not say, so one is tried."""
        probe = {"role": "user", "content": [IMAGE, {"type": "text", "text": PROBE}]}
        try:
            text = "" if self._template is None else self._rendered([probe], True, {})
        except Exception:  # as in render()
            return False
        written_out = "'type'" in text or '"type"' in text
        return text.count(placeholder) == 1 and PROBE in text and not written_out

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            before_s = self._worst_s if math.isfinite(self._worst_s) else 0.0
            self._worst_s = max(time.thread_time() - began_s, before_s * REMEMBERED)


def _check_options(options: Mapping[str, Any], both_ends: bool) -> None:
    if both_ends:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; set one to false", "continue_final_message"
        )
    for name in options:
        if name in RESERVED:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")


def _leave_open(message: dict[str, Any]) -> None:
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
        raise InvalidRequest("the chat template drops the final message, which continue_final_message needs", "messages")
    kept = text[:place]
    return kept if text.startswith(END_MARK, place) else kept.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.set_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(environment: GuardedEnvironment, source: str) -> jinja2.Template:
    """Raises CheckpointError."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template has {len(source)} characters, of at most {MAX_SOURCE}", "chat_template")
    try:
        with environment.within(Budget.of(source)):
            return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template has a syntax error in line {error.lineno}: {error}", "chat_template") from None
    except Exception as error:  # what is nested too deeply fails in Jinja's code, or in Python's for what Jinja made of it
        raise CheckpointError(f"the chat template cannot be compiled ({type(error).__name__})", "chat_template") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE or WIDE.search(pattern):
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
