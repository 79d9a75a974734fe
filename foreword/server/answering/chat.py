"""A conversation becomes a generation: the same way for chat, Responses and Messages."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import DEFAULT_REASONING, NO_TOOLS, ReasoningOptions, ToolUse
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest, Unsupported
from foreword.grammar.tool_calls import may_follow_space, tool_constraint
from foreword.server.answering.generation import Generation
from foreword.server.auth.keys import RequestContext
from foreword.server.http.errors import rename_field
from foreword.server.loaded_model import LoadedModel, offload_if_large
from foreword.tokenizer.input_processor import Prompt

logger = logging.getLogger("foreword.serve")


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to continue, the same for every API."""

    messages: Sequence[Mapping[str, Any]]  # of chat templates: OpenAI's chat form
    params: SamplingParams  # of LoadedModel.resolve_params(); `structured` is of the content
    tools: ToolUse = NO_TOOLS
    reasoning: ReasoningOptions = DEFAULT_REASONING
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of ChatTemplate.render()
    add_special_tokens: bool = False
    no_max_tokens: bool = False  # the end of the context is the only limit of the answer's length
    separate_reasoning: bool = True  # reasoning and calls are separated from content
    call_id_prefix: str = "call_"  # before 24 hexadecimal digits, unless the model writes ids
    prompt_only: bool = False  # compute the prompt and return no token


async def start_chat(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask, request_id: str
) -> Generation:
    """The choices of a task, not yet submitted: respond() submits them.

    Errors name fields of chat's body; other APIs rename them by rename_field().
    Raises InvalidRequest, Unsupported, PayloadTooLarge, Overloaded, ClientDisconnect.
    """
    _check_task(task)
    with (
        rename_field({"prompt": "messages"}),
        ExitStack() as resources,
        server.admission.reserve(task.params.n, context.meter),
    ):
        prompt = await _build_prompt(server, request, context, task, resources)
        starts_in_reasoning = server.chat_processor.starts_in_reasoning(prompt.token_ids)
        params = await _constrain(server, task, starts_in_reasoning)
        await server.check_structured(params)
        requests = await offload_if_large(
            request,
            lambda: server.build_requests(
                prompt.token_ids, params, request_id, context, prompt.images, task.no_max_tokens
            ),
        )
        bound = server.chat_processor.format
        make_parser = None
        if bound is not None and task.separate_reasoning:
            new_call_id = partial(_new_call_id, task.call_id_prefix)
            drops_space = may_follow_space(task.params.structured)
            make_parser = partial(
                ChatParser, bound, task.tools, starts_in_reasoning, new_call_id, drops_space
            )
        return Generation(server, requests, context, task.prompt_only, resources.pop_all(), make_parser)


async def count_prompt_tokens(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask
) -> int:
    """Tokens of the task's prompt, with those of its images. Raises as start_chat()."""
    with rename_field({"prompt": "messages"}), ExitStack() as resources:
        return len((await _build_prompt(server, request, context, task, resources)).token_ids)


def _check_task(task: ChatTask) -> None:
    """Raises InvalidRequest, Unsupported for fields that exclude each other."""
    if not task.tools.callable_tools:
        return
    if not task.separate_reasoning:
        raise Unsupported(
            "separate_reasoning: false and reasoning_format: none cannot be used with tools that may be "
            'called: calls are parsed together with the reasoning. Send tool_choice: "none"',
            "tools",
        )
    structured = task.params.structured
    if structured is not None and structured.after is not None:
        name = f"{structured.field}.after"
        raise InvalidRequest(f"{name} cannot be used with tools that may be called", name)


async def _build_prompt(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask, resources: ExitStack
) -> Prompt:
    return await server.build_prompt(
        request,
        task.messages,
        task.template_kwargs,
        task.add_special_tokens,
        context.fairness_key,
        resources,
        server.chat_processor.described_tools(task.tools),
        task.reasoning,
        context.cache_salt,
        is_seeded=context.is_seeded,
    )


async def _constrain(server: LoadedModel, task: ChatTask, starts_in_reasoning: bool) -> SamplingParams:
    """The parameters with the constraint on calls, content and the length of the reasoning."""
    params, bound = task.params, server.chat_processor.format
    if bound is None or (params.structured is not None and params.structured.after is not None):
        return params
    described = partial(
        tool_constraint, bound, task.tools, task.reasoning, starts_in_reasoning, params.structured
    )
    # Schemas of 1 MiB take a second.
    has_schemas = bool(task.tools.callable_tools) or params.structured is not None
    constraint = await asyncio.to_thread(described) if has_schemas else described()
    _record_dropped(server, constraint.dropped)
    return replace(params, structured=constraint.structured)


def _record_dropped(server: LoadedModel, dropped: Sequence[str]) -> None:
    """Count keywords that are not enforced, and log each of them once; where they stand may be private."""
    if not dropped:
        return
    server.recorder.on_dropped_keywords(len(dropped))
    logger.debug("keywords of tools that are not enforced: %s", "; ".join(dropped))
    new = {text.rpartition(": ")[2] for text in dropped} - server.logged_keywords
    if new:
        server.logged_keywords.update(new)
        logger.info("keywords of tools' schemas that are not enforced: %s", ", ".join(sorted(new)))


def _new_call_id(prefix: str, index: int) -> str:
    return f"{prefix}{uuid.uuid4().hex[:24]}"
