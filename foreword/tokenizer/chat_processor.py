"""Conversations become prompts, and the plan by which their answers are constrained and parsed.

A task, its prompt and its plan are plain data (picklable), the same for LLM, batch files and every API.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.format_detection import ProofTokenizer, detect_format
from foreword.chat_formats.parser import ChatParser, starts_in_reasoning
from foreword.chat_formats.tools import DEFAULT_REASONING, NO_TOOLS, ReasoningOptions, Tool, ToolUse
from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest, Unsupported
from foreword.grammar.check import GrammarChecker
from foreword.grammar.tool_calls import ConstraintTask, may_follow_space
from foreword.multimodal.image_loader import ImageLoader
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.image_source import ImageSource, MediaLimits
from foreword.tokenizer.answer_token_cache import AnswerTokenCache
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.messages import extract_images
from foreword.tokenizer.output_processor import ChoiceOutput
from foreword.tokenizer.tokenizer import MAX_TEXT_TOKENS, Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_PARAMS = SamplingParams()
MAX_MARKER_TOKENS = 64  # length of the prompt's end that is searched for a marker of several tokens


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to continue."""

    messages: Sequence[Mapping[str, Any]]  # OpenAI's chat form, as chat templates read it
    params: SamplingParams = DEFAULT_PARAMS  # `structured` constrains the content
    tools: ToolUse = NO_TOOLS
    reasoning: ReasoningOptions = DEFAULT_REASONING
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of ChatTemplate.render()
    add_special_tokens: bool = False  # templates write special tokens themselves
    separate_reasoning: bool = True  # reasoning and calls are separated from content
    call_id_prefix: str = "call_"  # start of ids that the model does not write, before 24 hexadecimal digits
    prompt_only: bool = False  # compute the prompt and return no token

    @property
    def needs_constraint(self) -> bool:
        """Whether calls, content or a thinking budget constrain the answer."""
        structured = self.params.structured
        is_limited = self.reasoning.budget_tokens is not None
        return bool(self.tools.callable_tools) or (
            is_limited if structured is None else structured.after is None
        )

    @property
    def is_constrained(self) -> bool:
        """Whether a constraint is written or checked."""
        return self.needs_constraint or self.params.structured is not None

    def check(self) -> None:
        """Raises InvalidRequest, Unsupported for fields that exclude each other."""
        if not self.tools.callable_tools:
            return
        if not self.separate_reasoning:
            raise Unsupported(
                "separate_reasoning: false and reasoning_format: none cannot be used with tools that may be "
                'called: calls are parsed together with the reasoning. Send tool_choice: "none"',
                "tools",
            )
        structured = self.params.structured
        if structured is not None and structured.after is not None:
            name = f"{structured.field}.after"
            raise InvalidRequest(f"{name} cannot be used with tools that may be called", name)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the images of their placeholders."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsing:
    """Arguments of an answer's parser."""

    tools: ToolUse
    starts_in_reasoning: bool
    call_id_prefix: str
    drops_space: bool | None  # see ChatParser


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How the answer to a prompt is constrained and parsed."""

    params: SamplingParams
    parsing: Parsing | None = None  # None: all text is content
    dropped: tuple[str, ...] = ()  # keywords of schemas that are not enforced, each with its place


class ChatInputProcessor:
    """Turns conversations into prompts of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: ImageProcessor | None,
        max_images: int,
        tool_format: str = "auto",
    ) -> None:
        """Compile the chat template and detect the format of calls, in a fraction of a second.

        max_images   limits one conversation
        tool_format  as Config.tool_format
        Raises CheckpointError for a broken chat template.
        """
        text = None if processor is None else processor.placeholder_text
        self.template = ChatTemplate.from_tokenizer(tokenizer, text)
        proof_tokenizer = ProofTokenizer(
            tokenizer.token_to_id,
            lambda text: _tokenize(tokenizer, text),
            tokenizer.special_ids,
            tuple(tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids),
        )
        self.detection = detect_format(
            self.template, proof_tokenizer, tool_format, tokenizer.response_template
        )
        logger.info("tool calls: %s", self.detection)
        fmt = self.detection.format  # how the model writes reasoning and calls
        self.format = None if fmt is None else bind_format(fmt, tokenizer.token_to_id, tokenizer.special_ids)
        self._replay = None if self.format is None else AnswerTokenCache(tokenizer, self.format)
        self.placeholder_id = None if processor is None else processor.placeholder_id  # image token
        self.max_images = max_images
        self._placeholder_hint = f"; {text!r} represents an image, also if several parts of a text form it"
        self._tokenizer = tokenizer

    def render(
        self,
        task: ChatTask,
        cache_salt: str = "",
        is_seeded: bool = False,
        allow_local: bool = False,
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> tuple[list[int], list[ImageSource]]:
        """Token ids of the prompt with one placeholder for each image, and the images.

        cache_salt   namespace of the prefix cache, whose answers are replayed
        is_seeded    replay none: the prompt is a function of the task alone
        allow_local  as of extract_images()
        max_tokens   see Tokenizer.encode()
        Waits for a worker process. Raises InvalidRequest, Overloaded.
        """
        task.check()
        tools = self._described_tools(task.tools) if task.tools.tools else ()
        messages: Sequence[Mapping[str, Any]] = task.messages
        sources: list[ImageSource] = []
        if self.placeholder_id is not None:  # else the template refuses images
            messages, sources = extract_images(messages, allow_local)
            self.check_num_images(len(sources), "messages")

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self.template.render(
                messages, tools=tools, reasoning=task.reasoning, **task.template_kwargs
            )

        if self._replay is None or is_seeded or task.template_kwargs.get("continue_final_message"):
            ids = self._tokenizer.encode(render(messages), task.add_special_tokens, max_tokens)
        else:
            ids = self._replay.encode(
                messages, tools, cache_salt, render, task.add_special_tokens, max_tokens
            )
        return self.check_placeholders(ids, len(sources), "messages", "the chat template"), sources

    def _described_tools(self, use: ToolUse) -> Sequence[Tool]:
        """The tools in the prompt: also those of tool_choice "none", so that the cached prefix stays.

        Raises InvalidRequest for tools of a model whose format of calls is not known.
        """
        if self.format is not None and self.format.format.tools is not None:
            return use.listed_tools
        if use.callable_tools:
            reasons = "".join(f"; {problem}" for problem in self.detection.problems)
            raise InvalidRequest(
                "tools: it is not known how this model writes tool calls; "
                f"start the server with --tool-format NAME, such as generic{reasons}",
                "tools",
            )
        return ()

    def plan(self, task: ChatTask, prompt_ids: Sequence[int], checker: GrammarChecker) -> ChatPlan:
        """How the answer to a rendered task is constrained and parsed; waits for `checker`, if constrained.

        Raises InvalidRequest for a schema or a grammar that cannot be enforced, Overloaded.
        """
        plan = self._plan(task, prompt_ids, checker)
        if plan.params.structured is not None:
            checker.check(plan.params.structured)
        return plan

    def _plan(self, task: ChatTask, prompt_ids: Sequence[int], checker: GrammarChecker) -> ChatPlan:
        if self.format is None:
            return ChatPlan(task.params)
        is_open = self.starts_in_reasoning(prompt_ids)
        given, params = task.params.structured, task.params
        dropped: tuple[str, ...] = ()
        if task.needs_constraint:
            for tool in task.tools.callable_tools:
                tool.argument_types(None)  # now: the parser asks on the event loop
            constraint = checker.constrain(
                ConstraintTask(self.format, task.tools, task.reasoning, is_open, given)
            )
            params, dropped = replace(params, structured=constraint.structured), constraint.dropped
        if not task.separate_reasoning:
            return ChatPlan(params, dropped=dropped)
        drops_space = None if given is None else may_follow_space(given)
        return ChatPlan(params, Parsing(task.tools, is_open, task.call_id_prefix, drops_space), dropped)

    def make_parser(self, parsing: Parsing | None) -> ChatParser | None:
        """The parser of one choice; None: all text is content."""
        if parsing is None:
            return None
        assert self.format is not None, "the format of answers is not known"
        new_call_id = partial(_new_call_id, parsing.call_id_prefix)
        return ChatParser(
            self.format, parsing.tools, parsing.starts_in_reasoning, new_call_id, parsing.drops_space
        )

    def starts_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt has opened the reasoning that the answer continues."""
        if self.format is None or self.format.format.reasoning is None:
            return False
        text = ""
        if self.format.format.reasoning.begin not in self.format.token_ids:
            text = self._tokenizer.decode(prompt_ids[-MAX_MARKER_TOKENS:], skip_special_tokens=False)
        return starts_in_reasoning(self.format, prompt_ids, text)

    def remember(self, output: ChoiceOutput) -> None:
        """Keep a finished answer for the conversation's next prompt, if a token of the model ended it."""
        if self._replay is not None and output.parser is not None:
            request = output.request
            self._replay.remember(request.prompt_ids, output.token_ids, output.events, request.cache_salt)

    def check_num_images(self, num_images: int, where: str) -> None:
        """Raises InvalidRequest for too many images."""
        if num_images > self.max_images:
            raise InvalidRequest(
                f"{where} hold {num_images} images, of at most {self.max_images} (--max-images)", where
            )

    def check_placeholders(
        self, ids: list[int], num_images: int, where: str, written_by: str = ""
    ) -> list[int]:
        """Returns `ids` if they have one placeholder for each image. Raises InvalidRequest."""
        if self.placeholder_id is None and num_images:
            raise Unsupported(f"{where}: this model takes no images", where)
        count = 0 if self.placeholder_id is None else ids.count(self.placeholder_id)
        if count != num_images:
            source, hint = (written_by, "") if count < num_images else ("", self._placeholder_hint)
            raise InvalidRequest(
                f"{where}: {source or 'the prompt'} has places for {count} images, got {num_images}{hint}",
                where,
            )
        return ids

    def insert_images(self, ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Prompt:
        """The prompt, with each placeholder expanded to the tokens of its image."""
        if self.placeholder_id is None or not images:
            return Prompt(tuple(ids))
        return Prompt(*expand_placeholders(ids, self.placeholder_id, images))


def open_image_loader(config: Config, processor: ImageProcessor) -> ImageLoader:
    """The image loader with the limits of `config`; the caller closes it. Raises ConfigError."""
    limits = MediaLimits.from_options(
        config.max_image_mb,
        config.max_image_pixels,
        config.allowed_media_domains,
        config.allowed_local_media_path,
        config.media_timeout,
    )
    return ImageLoader(processor, limits)


def _new_call_id(prefix: str, index: int) -> str:
    """Random: calls of other answers stand in the same conversation."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def _tokenize(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Ids of a text, and the characters that each completes."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, at_start=True)
    return [(token_id, detokenizer.feed(token_id)) for token_id in tokenizer.encode(text, False)]
