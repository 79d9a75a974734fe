"""Conversations and prompts become generations, the same way for every API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.requests import ClientDisconnect

from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request as EngineRequest
from foreword.server.answering.generation import Generation
from foreword.server.auth.keys import RequestContext
from foreword.server.http.errors import rename_field
from foreword.server.http.middleware import release_body
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.loaded_model import LoadedModel, offload_if_large
from foreword.tokenizer.chat_processor import ChatPlan, ChatTask, Prompt
from foreword.tokenizer.input_processor import SamplingDefaults, make_requests

logger = logging.getLogger("foreword.serve")


async def start_chat(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask, request_id: str
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
        prompt = await build_prompt(server, request, context, task, resources)
        plan = await _plan(server, task, prompt)
        await server.check_structured(plan.params)
        requests = await offload_if_large(
            request,
            lambda: build_requests(server, prompt.token_ids, plan.params, request_id, context, prompt.images),
        )
        make_parser = partial(server.chat_processor.make_parser, plan.parsing)
        return Generation(server, requests, context, task.prompt_only, resources.pop_all(), make_parser)


async def count_prompt_tokens(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask
) -> int:
    """Tokens of the task's prompt, with those of its images. Raises as start_chat()."""
    with rename_field({"prompt": "messages"}), ExitStack() as resources:
        return len((await build_prompt(server, request, context, task, resources)).token_ids)


async def build_prompt(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask, resources: ExitStack
) -> Prompt:
    """Prompt of a task; `resources` releases its images' memory, and images release the body.

    Raises InvalidRequest, Unsupported, PayloadTooLarge, Overloaded, ClientDisconnect.
    """
    processor = server.chat_processor
    async with server.render_semaphore:  # a thread, because it waits for the worker process of templates
        ids, sources = await asyncio.to_thread(processor.render, task, context.cache_salt, context.is_seeded)
    if not sources:
        return processor.insert_images(ids)
    assert server.image_intake is not None, "images for a model that takes none"
    reservation = server.image_intake.memory.start_reservation()
    resources.callback(reservation.release)
    images = await cancel_on_disconnect(
        request.receive, server.image_intake.load(sources, context.fairness_key, reservation)
    )
    if images is None:
        raise ClientDisconnect
    release_body(request)
    return processor.insert_images(ids, images)


async def _plan(server: LoadedModel, task: ChatTask, prompt: Prompt) -> ChatPlan:
    plan = partial(server.chat_processor.plan, task, prompt.token_ids)
    made = await asyncio.to_thread(plan) if task.has_schemas else plan()
    _record_dropped(server, made.dropped)
    return made


def build_requests(
    server: LoadedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    request_id: str,
    context: RequestContext,
    images: Sequence[PromptImage] = (),
) -> list[EngineRequest]:
    """One request per choice of one prompt; all share the images. Raises InvalidRequest."""
    requests = make_requests(
        prompt_ids,
        params,
        server.tokenizer,
        request_id,
        server.max_model_len,
        SamplingDefaults.from_config(server.config, server.tokenizer),
        cache_salt=context.cache_salt,
        priority=context.priority,
        vocab_size=server.info().vocab_size,
        images=images,
        image_token_id=server.chat_processor.placeholder_id,
        adapter=context.adapter,
    )
    return [
        replace(
            request,
            adapter_name=context.model if context.adapter else "",
            fairness_key=context.fairness_key,
            queue_deadline_s=_deadline_s(request.arrival_s, server.config.queue_timeout),
            deadline_s=_deadline_s(request.arrival_s, context.timeout_s),
        )
        for request in requests
    ]


def _deadline_s(start_s: float, seconds: float | None) -> float | None:
    return start_s + seconds if seconds else None


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
