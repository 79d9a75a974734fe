"""Conversations and prompts become generations, the same way for every API.

A Generation has the choices of one HTTP request: it submits them, queues their deltas, and frees everything
at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import Request
from starlette.requests import ClientDisconnect

from foreword.chat_formats.events import merge_events
from foreword.chat_formats.parser import ChatParser
from foreword.core.images import PromptImage
from foreword.core.outputs import ErrorEvent, Event, TokenEvent, merge, truncate
from foreword.core.params import SamplingParams
from foreword.core.request import Request as EngineRequest
from foreword.errors import ForewordError, Overloaded, RequestFailed
from foreword.metrics.request_stats import SpecDecodeStats
from foreword.server.admission import LOGPROB_TOKENS, AdmissionTicket
from foreword.server.auth.keys import RequestContext
from foreword.server.http.errors import rename_field
from foreword.server.http.middleware import release_body
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.chat_processor import ChatPlan, ChatTask, Prompt
from foreword.tokenizer.input_processor import EncodedParams, SamplingDefaults, make_requests
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta
from foreword.tokenizer.tokenizer import MAX_TEXT_TOKENS

logger = logging.getLogger("foreword.serve")
DRY_BYTES = 1 << 20
MERGE_AFTER = 64  # queued deltas of one choice that are then merged into one


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
        max_tokens = longest_prompt(server, task.params)
        prompt = await build_prompt(server, request, context, task, resources, max_tokens)
        plan = await _plan(server, request, task, prompt)
        requests = await server.intake.offload_if_large(
            request,
            lambda: build_requests(server, prompt.token_ids, plan.params, request_id, context, prompt.images),
            request.state.body_bytes + encoding_bytes(plan.params),
        )
        make_parser = partial(server.chat_processor.make_parser, plan.parsing)
        return Generation(server, requests, context, task.prompt_only, resources.pop_all(), make_parser)


async def count_prompt_tokens(
    server: LoadedModel, request: Request, context: RequestContext, task: ChatTask
) -> int:
    """Tokens of the task's prompt, with those of its images. Raises as start_chat()."""
    with rename_field({"prompt": "messages"}), ExitStack() as resources:
        return len((await build_prompt(server, request, context, task, resources)).token_ids)


def longest_prompt(server: LoadedModel, params: SamplingParams) -> int:
    """Most tokens of a prompt's text, for Tokenizer.encode(); a prompt that is cut may have more."""
    return MAX_TEXT_TOKENS if params.truncate_prompt_tokens is not None else server.max_model_len


async def build_prompt(
    server: LoadedModel,
    request: Request,
    context: RequestContext,
    task: ChatTask,
    resources: ExitStack,
    max_tokens: int = MAX_TEXT_TOKENS,
) -> Prompt:
    """Prompt of a task; `resources` releases its images' memory, and images release the body.

    max_tokens  see Tokenizer.encode()
    Raises InvalidRequest, Unsupported, PayloadTooLarge, Overloaded, ClientDisconnect.
    """
    processor = server.chat_processor
    render = partial(processor.render, task, context.cache_salt, context.is_seeded, max_tokens=max_tokens)
    ids, sources = await server.intake.render(request, render)
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


async def _plan(server: LoadedModel, request: Request, task: ChatTask, prompt: Prompt) -> ChatPlan:
    """The task's plan, whose constraint the engine can serve."""
    plan = partial(server.chat_processor.plan, task, prompt.token_ids, server.grammar_checker)
    made = await server.intake.compile(request, plan) if task.is_constrained else plan()
    _record_dropped(server, made.dropped)
    return made


def build_requests(
    server: LoadedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    request_id: str,
    context: RequestContext,
    images: Sequence[PromptImage] = (),
    encoded: EncodedParams | None = None,
) -> list[EngineRequest]:
    """One request per choice of one prompt; all share the images. Raises InvalidRequest.

    encoded  of the parameters, if several prompts share them
    """
    requests = make_requests(
        prompt_ids,
        params,
        server.tokenizer,
        request_id,
        server.max_model_len,
        SamplingDefaults.from_config(server.config, server.tokenizer),
        vocab_size=server.info().vocab_size,
        images=images,
        image_token_id=server.chat_processor.placeholder_id,
        encoded=encoded,
    )
    return [
        replace(
            request,
            cache_salt=context.cache_salt,
            priority=context.priority,
            adapter=context.adapter,
            adapter_name=context.model if context.adapter else "",
            fairness_key=context.fairness_key,
            queue_deadline_s=_deadline_s(request.arrival_s, server.config.queue_timeout),
            deadline_s=_deadline_s(request.arrival_s, context.timeout_s),
        )
        for request in requests
    ]


def encoding_bytes(params: SamplingParams) -> int:
    """Bytes of text that take as long to tokenize as these to encode: DRY searches the vocabulary."""
    return DRY_BYTES if params.uses_dry else 0


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


class Generation:
    """Submits one engine request per choice, merges their events, and frees everything on close()."""

    def __init__(
        self,
        server: LoadedModel,
        requests: Sequence[EngineRequest],
        context: RequestContext,
        prompt_only: bool = False,  # score the prompt and return no token
        resources: ExitStack | None = None,  # released on close()
        make_parser: Callable[[], ChatParser | None] = lambda: None,  # for each choice; None: all is content
    ) -> None:
        # Only the first choice may time out in the queue: once it runs, the others wait for it alone.
        waiting = [requests[0], *(replace(request, queue_deadline_s=None) for request in requests[1:])]
        self.outputs = [ChoiceOutput(server.tokenizer, request, make_parser()) for request in waiting]
        self.prediction_stats = SpecDecodeStats()  # drafts from the caller's prediction, over all choices
        self._server = server
        self._prompt_only = prompt_only
        self._delta_queue = DeltaQueue()
        self._unread = set(range(len(self.outputs)))  # choices whose end is not yet read
        self._failed: set[str] = set()
        self._index_of = {request.id: index for index, request in enumerate(waiting)}
        self.error: ForewordError | None = None  # has ended the whole answer
        self._can_end = True  # the answer is not yet complete for its caller
        self._drop_logprobs: Callable[[], object] = lambda: None  # set by the writer
        self._meter = context.meter
        self._slot = context.slot
        self._usage = server.usage.counter(context.fairness_key, context.model)
        # The choices "X-0" and "X-1" share the prompt "X", which counts once, with its first choice.
        firsts = {_prompt_id(request): request.id for request in reversed(waiting)}
        self._first_ids = frozenset(firsts.values())
        self._is_counted = False
        self._ticket: AdmissionTicket | None = None
        self._resources = resources or ExitStack()

    def start(self) -> None:
        """Submit every choice. Raises Overloaded or EngineDead, with nothing left open."""
        try:
            self._server.info()
            self._ticket = self._admit()
            if self._slot is not None:
                self._server.slots.start(self._slot)
            for index, output in enumerate(self.outputs):
                self._server.client.listen(output.request, partial(self._on_event, index, output))
                self._server.recorder.on_submit(output.request)
                self._server.generations[output.request.id] = self
        except BaseException:
            self.close()
            raise

    def _admit(self) -> AdmissionTicket:
        requests = [output.request for output in self.outputs]
        charged = {_prompt_id(request): len(request.prompt_ids) for request in requests}
        # Choices share their parameters, and each has a copy of them in the engine.
        params = requests[0].params
        scored = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
        tokens = sum(len(request.prompt_ids) for request in requests) * (1 + LOGPROB_TOKENS * scored)
        tokens += len(requests) * requests[0].num_param_tokens
        field = "prompt_logprobs" if scored else "prompt"
        return self._server.admission.admit(len(requests), tokens, self._meter, sum(charged.values()), field)

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta | ForewordError]]:
        """(choice index, delta) until each choice has a finish reason or an error."""
        running = len(self.outputs)
        while running:
            index, item = await self._delta_queue.get()
            if isinstance(item, ForewordError) or item.finish_reason is not None:
                running -= 1
                self._unread.discard(index)
            yield index, item

    async def collect(self) -> None:
        """Wait for all choices. Raises the first error: an incomplete set of choices is never returned."""
        async for _, item in self.deltas():
            if isinstance(item, ForewordError):
                raise item
        self._can_end = False  # its log-probabilities are freed as soon as it is written

    async def commit_usage(self) -> None:
        """Write the usage of all choices, before the last byte of the answer: no kill loses it."""
        self._count_request()
        await self._server.usage.commit(self._usage)

    def _count_request(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._usage.requests += 1
            self._usage.errors += bool(self._failed)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call it once when the generation ends in any way."""
        self._resources.callback(callback)

    def close(self) -> None:
        """Abort running choices and free everything; may be called twice."""
        self._resources.close()
        self.free_logprobs()
        if self._ticket is None:
            return
        self._ticket.release()
        self._ticket = None
        self._count_request()
        self._end_slot()
        running = [output for index, output in enumerate(self.outputs) if self._is_running(index)]
        for output in self.outputs:
            self._server.generations.pop(output.request.id, None)
        for output in running:
            self._server.client.abort(output.request.id)
            self._server.recorder.on_parsed(output.parser)
        self._server.recorder.on_abort([output.request for output in running])

    def _end_slot(self) -> None:
        """Before the last delta is sent: a client may save its slot at once."""
        slot, self._slot = self._slot, None
        if slot is not None:
            output = self.outputs[0]
            has_answer = output.finished or bool(output.token_ids)
            self._server.slots.end(slot, output.request, output.token_ids if has_answer else None)

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error for its caller; a finished choice stays as it is."""
        index = self._index_of[request_id]
        if self._is_running(index):
            self._fail([index], error)
            self._server.client.abort(request_id)

    def end(self, error: ForewordError) -> bool:
        """End the answer with an error, also one that is not read, and drop all log-probabilities.

        False if it has ended, or is complete for its caller.
        """
        if not self._can_end:
            return False
        self._can_end = False
        self.error = error
        running = [index for index in self._unread if self._is_running(index)]
        self._delta_queue.clear()
        self._fail(sorted(self._unread), error)
        for index in running:
            self._server.client.abort(self.outputs[index].request.id)
        for output in self.outputs:
            output.logprobs.clear()
        self._drop_logprobs()
        return True

    def on_end(self, drop_logprobs: Callable[[], object]) -> None:
        """Call it where end() drops log-probabilities: the writer keeps them until its last events."""
        self._drop_logprobs = drop_logprobs

    def free_logprobs(self) -> None:
        """The answer is written: end() has nothing to free any more."""
        self._can_end = False
        self._server.admission.held_logprobs.free(self)

    def _is_running(self, index: int) -> bool:
        output = self.outputs[index]
        return not output.finished and output.request.id not in self._failed

    def drop_logprobs(self, index: int, delta: OutputDelta, is_kept: bool = False) -> None:
        """A stream has sent them; `is_kept`: its writer needs them again, and they count until it is done."""
        self.outputs[index].logprobs.clear()
        if not is_kept:
            self._server.admission.held_logprobs.free(self, _num_logprobs(delta))

    def _on_event(self, index: int, output: ChoiceOutput, event: Event | None) -> None:
        """Queue the delta of an event; the last item of a choice always ends it."""
        request = output.request
        if self._ticket is None or output.finished or request.id in self._failed:
            return  # it has ended, and the engine knows
        try:
            if isinstance(event, TokenEvent):
                delta = self._process_event(output, event)
                self._delta_queue.put(index, delta)
                self._server.admission.held_logprobs.add(self, _num_logprobs(delta))
            elif isinstance(event, ErrorEvent):
                raise event.error
            else:
                raise RequestFailed("the engine ended the request without an answer")
        except Overloaded as error:
            self._on_queue_timeout(index, error)
        except ForewordError as error:
            self._fail([index], error)
        except Exception:
            logger.exception("request %s failed", request.id)
            self._fail([index], RequestFailed("the server failed on this request"))
            self._server.client.abort(request.id)

    def _process_event(self, output: ChoiceOutput, event: TokenEvent) -> OutputDelta:
        if self._prompt_only:
            event = truncate(event, 0, "length")
        num_cached = output.num_cached
        delta = output.feed(event)
        if delta.hit_stop_string or self._prompt_only:
            self._server.client.finish(output.request.id, output.num_tokens)
        self._server.recorder.on_tokens(output.request, delta.event, time.monotonic())
        if output.finished:
            self._server.recorder.on_parsed(output.parser)
            self._server.chat_processor.remember(output)
            if output is self.outputs[0]:
                self._end_slot()
        num_tokens = len(delta.event.token_ids)
        if self._ticket is not None:
            self._ticket.charge_generated(num_tokens)
        if output.request.id in self._first_ids:
            self._usage.prompt_tokens += len(output.request.prompt_ids) if event.index == 0 else 0
            self._usage.cached_tokens += output.num_cached - num_cached
        draft = delta.event.draft
        self._usage.count_tokens(num_tokens, draft)
        if draft is not None and draft.drafter == "prediction":
            self.prediction_stats.add(draft.num_drafted, draft.num_accepted, num_tokens)
        return delta

    def _on_queue_timeout(self, index: int, error: Overloaded) -> None:
        """Fail every choice that has no token yet: they all waited in the same queue."""
        self._server.recorder.on_reject("queue_timeout")
        others = [
            other
            for other, output in enumerate(self.outputs)
            if other != index and not output.token_ids and self._is_running(other)
        ]
        self._fail([index, *others], error)
        for other in others:
            self._server.client.abort(self.outputs[other].request.id)

    def _fail(self, indices: Sequence[int], error: ForewordError) -> None:
        """The choices have the error instead of an end."""
        outputs = [self.outputs[index] for index in indices]
        for index, output in zip(indices, outputs, strict=True):
            if self._is_running(index):
                self._server.recorder.on_parsed(output.parser)
            self._failed.add(output.request.id)
            self._delta_queue.put(index, error)
        self._server.recorder.on_error([output.request for output in outputs], error)


def _num_logprobs(delta: OutputDelta) -> int:
    return sum(1 + len(token.logprob.top) + len(token.logprob.requested) for token in delta.logprobs)


def _prompt_id(request: EngineRequest) -> str:
    return request.id.rpartition("-")[0]


class DeltaQueue:
    """Round-robin queue of deltas by choice.

    Old deltas are merged: unmerged they take about 1 KB a token, which a slow reader would accumulate.
    """

    __slots__ = ("_queues", "_reader")

    def __init__(self) -> None:
        self._queues: dict[int, _ChoiceQueue] = {}  # non-empty queues by choice; the first is served next
        self._reader: asyncio.Future[None] | None = None  # waits in get()

    def __len__(self) -> int:
        return sum(len(queue.items) for queue in self._queues.values())

    def put(self, index: int, item: OutputDelta | ForewordError) -> None:
        """Append to choice `index`; an error is its last item."""
        queue = self._queues.get(index)
        if queue is None:
            queue = self._queues[index] = _ChoiceQueue()
        queue.put(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def clear(self) -> None:
        self._queues.clear()

    async def get(self) -> tuple[int, OutputDelta | ForewordError]:
        """Wait for the next (choice index, item); one reader at a time."""
        if not self._queues:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        index = next(iter(self._queues))
        queue = self._queues.pop(index)
        item = queue.items.popleft()
        queue.num_unmerged = min(queue.num_unmerged, len(queue.items))
        if queue.items:
            self._queues[index] = queue
        return index, item


@dataclass(slots=True, eq=False)
class _ChoiceQueue:
    """Queued deltas of one choice; each is merged at most once, so that merging stays cheap."""

    items: deque[OutputDelta | ForewordError] = field(default_factory=deque)
    num_unmerged: int = 0  # items at the end that were never merged

    def put(self, item: OutputDelta | ForewordError) -> None:
        self.items.append(item)
        self.num_unmerged += 1
        if self.num_unmerged == MERGE_AFTER and isinstance(item, OutputDelta):
            tail = [self.items.pop() for _ in range(MERGE_AFTER)][::-1]
            self.items.append(_merge_deltas([delta for delta in tail if isinstance(delta, OutputDelta)]))
            self.num_unmerged = 0


def _merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one choice as one delta."""
    last = deltas[-1]
    return OutputDelta(
        "".join(delta.text for delta in deltas),
        merge([delta.event for delta in deltas]),
        last.finish_reason,
        last.stop_reason,
        last.hit_stop_string,
        tuple(token for delta in deltas for token in delta.logprobs),
        tuple(piece for delta in deltas for piece in delta.pieces),
        merge_events(event for delta in deltas for event in delta.events),
        tuple(token for delta in deltas for token in delta.content_logprobs),
    )
