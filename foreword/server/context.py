"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from foreword.config.options import Config
from foreword.config.resolve import EngineInfo
from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request as EngineRequest
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.client import EngineClient
from foreword.errors import EngineDead, Forbidden, ForewordError, InvalidRequest, ModelNotFound, Unsupported
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.server.admission import Admission
from foreword.server.auth.keys import KeyPermissions, Keyring, RequestContext
from foreword.server.disconnect import cancel_on_disconnect
from foreword.server.image_intake import ImageIntake
from foreword.server.malloc_trim import MallocTrimmer
from foreword.server.middleware import release_body
from foreword.tokenizer.input_processor import (
    ChatInputProcessor,
    Prompt,
    SamplingDefaults,
    image_source,
    make_requests,
    resolve_seed,
)
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["RequestContext", "ServerContext", "ServerDep", "offload_if_large"]

T = TypeVar("T")

MAX_TIMEOUT_S = 86_400.0
LARGE_BODY_BYTES = 16 * 1024  # bytes of a request above which its text is prepared in a thread
MAX_RENDER_THREADS = 2  # threads that a slow template may take from the others


class Abortable(Protocol):
    """The choices of one HTTP request."""

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error, of which its caller is told."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One served model, and perhaps an encoder beside it.

    created  Unix time at which it began
    generating  what generates, by the id of each of its choices
    recipe   how the generating model makes vectors of texts
    looking  reads the pictures of conversations; None: the model takes none
    renderers  how many more may render a slow template
    """

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    chat_processor: ChatInputProcessor
    recorder: MetricsRecorder
    admission: Admission
    keyring: Keyring
    model_name: str
    created: int
    grammar_checker: GrammarChecker
    encoder: EncoderClient | None = None
    pooling_config: PoolingConfig = DECODER_POOLING
    image_intake: ImageIntake | None = None
    generations: dict[str, Abortable] = field(default_factory=dict)
    trimmer: MallocTrimmer = field(default_factory=MallocTrimmer)
    render_semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RENDER_THREADS))

    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises EngineDead while there is none."""
        info = self.client.info
        if info is None or not self.client.alive:
            raise EngineDead("the engine is still loading" if info is None else "the engine is not running")
        return info

    def probe_request(self, request_id: str) -> EngineRequest:
        """A request for one token, which asks nothing of anybody."""
        info, limits = (
            self.info(),
            SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculation=Speculation("off")),
        )
        prompt_ids = self.tokenizer.encode("a", add_special_tokens=False)[:1]
        limit, size = info.resolved.max_model_len, info.vocab_size
        return make_requests(
            prompt_ids, limits, self.tokenizer, request_id, limit, cache_salt="probe", vocab_size=size
        )[0]

    def check_model(self, name: str | None, permissions: KeyPermissions) -> None:
        """Raises unless it is the generating model, and one that the caller may use; None is the generating model."""
        self.check_access(self.model_name if name is None else name, permissions)
        if name not in (None, self.model_name):
            raise Unsupported(f"{name} is an encoder; what generates here is {self.model_name!r}", "model")

    def check_access(self, name: str, permissions: KeyPermissions) -> None:
        """Raises ModelNotFound for a model that is not served, and Forbidden for one that the caller may not use."""
        if name not in self.model_names:
            known = (
                " and ".join(map(repr, permissions.allowed_models(self.model_names))) or "nothing to this key"
            )
            raise ModelNotFound(
                f"the model {name!r:.200} does not exist; this server serves {known}", "model"
            )
        with self._count_forbidden():
            permissions.check_model(name)

    def check_admin(self, permissions: KeyPermissions) -> None:
        """Raises Forbidden for all but operators."""
        with self._count_forbidden():
            permissions.check_admin()

    def request_context(
        self, permissions: KeyPermissions, priority: int | None, timeout_s: float | None = None
    ) -> RequestContext:
        """Of one request, with what its body asks for. Raises Forbidden, InvalidRequest."""
        limit = self.config.request_timeout
        if timeout_s is not None and not 0 < timeout_s <= (limit or MAX_TIMEOUT_S):
            raise InvalidRequest(
                f"timeout must be above 0 and at most {limit or MAX_TIMEOUT_S:g} seconds, got {timeout_s}",
                "timeout",
            )
        with self._count_forbidden():
            return permissions.request_context(priority, timeout_s or limit or None)

    @contextmanager
    def _count_forbidden(self) -> Iterator[None]:
        try:
            yield
        except Forbidden:
            self.recorder.on_reject("forbidden")
            raise

    @property
    def model_names(self) -> tuple[str, ...]:
        """The generating model first."""
        encoder = self.encoder.info if self.encoder is not None else None
        return (self.model_name,) if encoder is None else (self.model_name, encoder.name)

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with their seed. A drafter that is asked for must be one that runs."""
        self.info().resolved.check_method(params.speculation.method)
        return replace(params, seed=resolve_seed(params.seed, self.config.seed))

    async def check_structured(self, params: SamplingParams) -> None:
        """Try a constraint out, away from everybody else. Raises InvalidRequest for one that cannot be served."""
        if params.structured is not None:
            await self.grammar_checker.check(params.structured)

    async def render_offloaded(self, request: Request, work: Callable[[], T]) -> T:
        """Do `work`, which renders the template; in a thread if that is slow or has much to render."""
        if not self.chat_processor.template.is_slow:
            return await offload_if_large(request, work)
        async with self.render_semaphore:
            return await asyncio.to_thread(work)

    async def build_prompt(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        add_special_tokens: bool,
        fairness_key: str,
        resources: ExitStack,
    ) -> Prompt:
        """Of a conversation; what its pictures take is given back with `held`. The body of the request is forgotten with them.

        Raises InvalidRequest, PayloadTooLarge, Overloaded; ClientDisconnect as soon as nobody waits for its pictures any more.
        """
        conversations = self.chat_processor
        bare, parts = conversations.split_images(messages)
        ids = await self.render_offloaded(
            request, lambda: conversations.render_ids(bare, template_kwargs, len(parts), add_special_tokens)
        )
        if not parts:
            return conversations.insert_images(ids)
        assert self.image_intake is not None, "pictures for a model that takes none"
        hold = self.image_intake.memory.start_reservation()
        resources.callback(hold.release)
        sources = [image_source(part) for part in parts]
        pictures = await cancel_on_disconnect(
            request.receive, self.image_intake.load(sources, fairness_key, hold)
        )
        if pictures is None:
            raise ClientDisconnect
        release_body(request)
        return conversations.insert_images(ids, pictures)

    def build_requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        images: Sequence[PromptImage] = (),
    ) -> list[EngineRequest]:
        """One for each choice of one prompt; all see the same pictures. Raises InvalidRequest."""
        info = self.info()
        requests = make_requests(
            prompt_ids,
            params,
            self.tokenizer,
            request_id,
            info.resolved.max_model_len,
            SamplingDefaults(self.config.seed, self.config.default_max_tokens, self.config.on_runaway),
            cache_salt=context.cache_salt,
            priority=context.priority,
            vocab_size=info.vocab_size,
            images=images,
            image_token_id=self.chat_processor.placeholder_id,
        )
        return [self.with_deadlines(request, context) for request in requests]

    def with_deadlines(self, request: EngineRequest, context: RequestContext) -> EngineRequest:
        """The request with whose share it takes, and until when it may wait and last."""
        return replace(
            request,
            fairness_key=context.fairness_key,
            queue_deadline_s=_deadline_s(request.arrival_s, self.config.queue_timeout),
            deadline_s=_deadline_s(request.arrival_s, context.timeout_s),
        )


def _deadline_s(start_s: float, seconds: float | None) -> float | None:
    return start_s + seconds if seconds else None


async def offload_if_large(request: Request, work: Callable[[], T]) -> T:
    """Do `work` in a thread if the request is big enough to hold up the others."""
    if request.state.body_bytes > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work)
    return work()


def _get_server(request: Request) -> ServerContext:
    server: ServerContext = request.app.state.server
    return server


ServerDep = Annotated[ServerContext, Depends(_get_server)]
