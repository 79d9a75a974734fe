"""A conversation becomes a generation: the same way for chat, Responses and Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from foreword.core.params import SamplingParams
from foreword.formats.tools import NO_TOOLS, ReasoningOptions, ToolUse
from foreword.server.context import RequestContext, ServerContext, offload_if_large
from foreword.server.errors import rename_field
from foreword.server.generation import Generation

__all__ = ["ChatTask", "count_prompt_tokens", "start_chat"]


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to continue, the same for every API."""

    messages: Sequence[Mapping[str, Any]]  # of chat templates: OpenAI's chat form
    params: SamplingParams  # of ServerContext.resolve_params(); `structured` is of the content
    tools: ToolUse = NO_TOOLS
    reasoning: ReasoningOptions = ReasoningOptions()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of ChatTemplate.render()
    add_special_tokens: bool = False
    runs_to_end: bool = False  # the end of the context is the only limit of the answer's length
    splits: bool = True  # reasoning and calls are separated from content
    prompt_only: bool = False  # compute the prompt and return no token
    call_id_prefix: str = "call_"  # before 24 hexadecimal digits, where the format has no ids of its own


async def start_chat(
    server: ServerContext, request: Request, context: RequestContext, task: ChatTask, request_id: str
) -> Generation:
    """The choices of a task, not yet submitted: respond() submits them.

    Errors name fields of chat's body; other APIs rename them by rename_field().
    Raises InvalidRequest, Unsupported, PayloadTooLarge, Overloaded, ClientDisconnect.
    """
    with (
        rename_field({"prompt": "messages"}),
        ExitStack() as resources,
        server.admission.reserve(task.params.n, context.meter),
    ):
        prompt = await server.build_prompt(
            request,
            task.messages,
            task.template_kwargs,
            task.add_special_tokens,
            context.fairness_key,
            resources,
        )
        await server.check_structured(task.params)
        requests = await offload_if_large(
            request,
            lambda: server.build_requests(
                prompt.token_ids, task.params, request_id, context, prompt.images, task.runs_to_end
            ),
        )
        return Generation(
            server,
            requests,
            task.prompt_only,
            meter=context.meter,
            resources=resources.pop_all(),
        )


async def count_prompt_tokens(
    server: ServerContext, request: Request, context: RequestContext, task: ChatTask
) -> int:
    """Tokens of the task's prompt, with those of its images. Raises as start_chat()."""
    with rename_field({"prompt": "messages"}), ExitStack() as resources:
        prompt = await server.build_prompt(
            request,
            task.messages,
            task.template_kwargs,
            task.add_special_tokens,
            context.fairness_key,
            resources,
        )
        return len(prompt.token_ids)
