"""/v1/responses: OpenAI's Responses API"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from foreword.core.params import TO_THE_END, SamplingParams
from foreword.errors import ContextLengthExceeded, InvalidRequest, ResponseNotFound, Unsupported, shown
from foreword.server.answering.generation import count_prompt_tokens, start_chat
from foreword.server.answering.streaming import respond
from foreword.server.apis.body import check_num_parts
from foreword.server.apis.choices_writer import TokenNames
from foreword.server.apis.responses.body import InputTokensBody, ResponsesBody
from foreword.server.apis.responses.items import Item, ItemConversation, NamedItem
from foreword.server.apis.responses.store import StoredResponse
from foreword.server.apis.responses.writer import ResponseItems, ResponsesWriter
from foreword.server.auth.keys import PermissionsDep, RequestContext
from foreword.server.http.responses import JSONResponse, json_bytes
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep, ServedModels
from foreword.tokenizer.chat_processor import ChatTask

MB = 1_000_000
DEFAULT_ROOM = 8  # truncation: auto leaves an 8th of the context to an answer without max_output_tokens

router = APIRouter(route_class=IntakeRoute)


@router.post("/v1/responses")
async def create_response(
    body: ResponsesBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Answer a conversation of items."""
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    context = server.request_context(permissions, body, body.timeout)
    task, conversation, items = await _read_task(
        body, request, models, server, permissions.fairness_key, params
    )
    response_id = f"resp_{uuid.uuid4().hex}"
    store, tenant = models.response_store, permissions.fairness_key
    stores = body.store is not False and store.enabled
    encoded = await server.intake.offload_if_large(request, lambda: json_bytes(items)) if stores else b""
    with conversation.rename_fields():
        if body.truncation == "auto":
            task = await _drop_turns(server, request, context, task, conversation)
        generation = await start_chat(server, request, context, task, response_id)
    # From here on respond() must come without a wait: it frees the generation if the client disconnects.
    if stores:
        item_ids = tuple(item["id"] for item in items)
        store.begin(tenant, response_id, StoredResponse(body.previous_response_id, encoded, item_ids))
        generation.on_close(partial(store.discard, tenant, response_id))
    wants_logprobs = params.logprobs is not None
    writer = ResponsesWriter(
        server,
        generation,
        _response_fields(context.model, params, response_id, stores) | body.response_fields(),
        ResponseItems(
            task.tools,
            body.namespaces,
            body.includes("reasoning.encrypted_content"),
            TokenNames(server.tokenizer, bool(body.return_tokens_as_token_ids)) if wants_logprobs else None,
        ),
        bool(body.metrics),
        partial(store.complete, tenant),
    )
    return respond(generation, writer, bool(body.stream))


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> Response:
    """Refused with a sentence: the path would else look like an id with a wrong method."""
    raise ResponseNotFound(
        "/v1/responses/compact is not served: the client compacts its conversation, "
        'or truncation: "auto" drops the oldest turns'
    )


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: InputTokensBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Tokens of the prompt that /v1/responses would render."""
    server = await models.acquire(body.model, permissions, request)
    context = server.request_context(permissions, body)
    task, conversation, _ = await _read_task(
        body, request, models, server, permissions.fairness_key, SamplingParams()
    )
    with conversation.rename_fields():
        count = await count_prompt_tokens(server, request, context, task)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, permissions: PermissionsDep, models: ModelsDep, stream: bool = False
) -> Response:
    """A stored response of this key."""
    if stream:
        raise Unsupported("stream: a stored response cannot be streamed again", "stream")
    entry = models.response_store.get(permissions.fairness_key, response_id)
    return Response(entry.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, permissions: PermissionsDep, models: ModelsDep) -> Response:
    """Delete a stored response of this key. Responses that continue it cannot be continued any more."""
    models.response_store.delete(permissions.fairness_key, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    permissions: PermissionsDep,
    models: ModelsDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The input of a stored response of this key, without the conversation before it."""
    entry = models.response_store.get(permissions.fairness_key, response_id)
    items: list[Item] = await models.intake.offload_if_large(
        request, lambda: json.loads(entry.input), len(entry.input)
    )
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        items = items[ids.index(after) + 1 :] if after in ids else []
    page = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def _read_task(
    body: ResponsesBody | InputTokensBody,
    request: Request,
    models: ServedModels,
    server: LoadedModel,
    tenant: str,
    params: SamplingParams,
) -> tuple[ChatTask, ItemConversation, list[Item]]:
    """The task, its conversation, and the input items. Raises InvalidRequest, ResponseNotFound."""
    body.check_num_parts(server.max_model_len)
    named, skipped = await server.intake.offload_if_large(request, body.items)
    tools, skipped_tools = await server.intake.offload_if_large(request, body.tool_use)
    await models.check_fields(body, request, [*skipped, *skipped_tools])
    named = await _resolve_references(models, request, tenant, named)
    conversation = ItemConversation(takes_images=server.chat_processor.placeholder_id is not None)
    num_bytes: int = request.state.body_bytes
    earlier: list[NamedItem] = []
    if body.instructions:
        conversation.add_instructions(body.instructions)
    if body.previous_response_id is not None:
        field = "previous_response_id"
        chain = models.response_store.conversation(tenant, body.previous_response_id, field)
        if body.truncation != "auto":
            count = sum(len(entry.item_ids) for entry in chain) + len(named)
            check_num_parts(count, field, server.max_model_len)
        _check_stored_bytes(models, sum(entry.num_bytes for entry in chain), field)
        earlier = [(field, item) for item in await _stored_items(models, request, chain)]
        num_bytes += sum(entry.num_bytes for entry in chain)

    def convert() -> None:
        conversation.add([*earlier, *named])
        conversation.finish()

    await server.intake.offload_if_large(request, convert, num_bytes)
    template = {"options": body.chat_template_kwargs}
    task = ChatTask(conversation.messages, params, tools, body.reasoning_options(), template)
    return task, conversation, [item for _, item in named]


async def _resolve_references(
    models: ServedModels, request: Request, tenant: str, items: Sequence[NamedItem]
) -> list[NamedItem]:
    """The stored items in place of references to them. Raises ResponseNotFound."""
    resolved: list[NamedItem] = []
    known: dict[str, Item] = {}  # stored items by id, until they are referred to
    num_bytes, used = 0, set[str]()
    for name, item in items:
        if item["type"] == "item_reference":
            if item["id"] in used:
                raise InvalidRequest(f"{name}.id refers to {shown(item['id'])} once more", f"{name}.id")
            if item["id"] not in known:
                entry = models.response_store.find_item(tenant, item["id"], f"{name}.id")
                num_bytes += entry.num_bytes
                _check_stored_bytes(models, num_bytes, name)
                known |= {stored["id"]: stored for stored in await _stored_items(models, request, [entry])}
            used.add(item["id"])
            item = known[item["id"]]
        resolved.append((name, item))
    return resolved


def _check_stored_bytes(models: ServedModels, num_bytes: int, field: str) -> None:
    """Raises ContextLengthExceeded for stored items that are larger than any body."""
    limit = models.config.max_body_mb * MB
    if num_bytes > limit:
        raise ContextLengthExceeded(
            f"{field}: the stored items have {num_bytes} bytes, of at most {limit} (--max-body-mb)",
            field,
        )


async def _stored_items(
    models: ServedModels, request: Request, entries: Sequence[StoredResponse]
) -> list[Item]:
    """Input and output of each response."""

    def parse() -> list[Item]:
        return [
            item
            for entry in entries
            for item in (*json.loads(entry.input), *json.loads(entry.response)["output"])
        ]

    num_bytes = sum(entry.num_bytes for entry in entries)
    return await models.intake.offload_if_large(request, parse, num_bytes)


async def _drop_turns(
    server: LoadedModel,
    request: Request,
    context: RequestContext,
    task: ChatTask,
    conversation: ItemConversation,
) -> ChatTask:
    """The task without as few of its oldest turns as possible, so that the answer has room.

    A turn begins with a message of the user; the system message and the last turn stay. The conversation's
    origins are those of the messages that are left.
    """
    max_model_len = server.max_model_len
    limit = task.params.max_tokens
    wanted = max_model_len // DEFAULT_ROOM if limit in (None, TO_THE_END) else limit
    room = max(1, min(wanted, max_model_len // 2))
    head = 1 if task.messages[0]["role"] == "system" else 0
    messages, origins = task.messages, conversation.origins
    starts = [head, *(i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user")]

    def cut(start: int) -> ChatTask:
        conversation.origins = [*origins[:head], *origins[start:]]
        return replace(task, messages=[*messages[:head], *messages[start:]])

    # Of the first cut that fits; a message is at least one token. The last one is taken in any case.
    low, high = 0, len(starts) - 1
    while low < high and len(messages) - starts[low] + head > max_model_len:
        low += 1
    while low < high:
        middle = (low + high) // 2
        count = await count_prompt_tokens(server, request, context, cut(starts[middle]))
        low, high = (low, middle) if count + room <= max_model_len else (middle + 1, high)
    return cut(starts[low])


def _response_fields(model: str, params: SamplingParams, response_id: str, stores: bool) -> dict[str, Any]:
    """Fields of a response that the server decides; those of its answer are empty."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "background": False,
        "service_tier": "default",
        "store": stores,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "error": None,
        "incomplete_details": None,
        "usage": None,
    }
