"""A loaded model, as routes use it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from foreword.chat_formats.tools import ReasoningOptions, Tool
from foreword.config.models_file import ModelVariant
from foreword.config.options import Config
from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request as EngineRequest
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.base import EngineClient
from foreword.errors import (
    ContextLengthExceeded,
    EngineDead,
    Forbidden,
    ForewordError,
    InvalidRequest,
    ModelLoading,
)
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder, ServerCounters
from foreword.metrics.tracing import current_span
from foreword.planning.resolve import EngineInfo
from foreword.server.admission import Admission
from foreword.server.answering.image_intake import ImageIntake
from foreword.server.apis.body import RequestBody
from foreword.server.auth.keys import KeyPermissions, RequestContext
from foreword.server.auth.usage_log import UsageLog
from foreword.server.health import EngineProbe
from foreword.server.http.middleware import release_body
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.model_names import ModelNames, ServedName
from foreword.tokenizer.input_processor import (
    ChatInputProcessor,
    Prompt,
    SamplingDefaults,
    has_seed,
    image_source,
    make_requests,
    resolve_seed,
)
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.utils.threads import run_in_own_thread

T = TypeVar("T")

MAX_TIMEOUT_S = 86_400.0  # largest `timeout` of a request, where the server sets no limit
LARGE_BODY_BYTES = 16 * 1024  # body size above which its text is tokenized in a thread
MAX_RENDER_THREADS = 4  # threads that wait for templates; asyncio has at least 5, so that other work gets one


class Abortable(Protocol):
    """The choices of one HTTP request."""

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error for its caller."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its encoder, if there is one; with the name that a request has used."""

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    chat_processor: ChatInputProcessor
    recorder: MetricsRecorder
    admission: Admission  # shared by all models of the server
    generations: dict[str, Abortable]  # shared; by the request id of each choice
    usage: UsageLog  # shared
    names: ModelNames
    served: ServedName  # the name of the request
    grammar_checker: GrammarChecker
    probe: EngineProbe
    encoder: EncoderClient | None = None
    pooling_config: PoolingConfig = DECODER_POOLING  # for embeddings from the generating model
    image_intake: ImageIntake | None = None  # None: the model takes no images
    logged_keywords: set[str] = field(default_factory=set)  # keywords in schemas that are not enforced
    render_semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RENDER_THREADS))
    variant: ModelVariant | None = None  # the variant that `served` names

    async def close(self) -> None:
        """End the worker processes; the clients are the caller's."""
        await run_in_own_thread(self.grammar_checker.close)
        if self.image_intake is not None:
            await run_in_own_thread(self.image_intake.close)

    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises ModelLoading before there is one, EngineDead after it."""
        info = self.client.info
        if info is None:
            raise ModelLoading("the model is still loading; see /health")
        if not self.client.alive:
            raise EngineDead("the engine is not running")
        return info

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer. Raises ModelLoading, EngineDead."""
        limit = self.info().resolved.max_model_len
        if self.variant is None or self.variant.max_model_len is None:
            return limit
        return min(limit, self.variant.max_model_len)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of SamplingParams for requests that leave them out; max_tokens is build_requests()'s."""
        defaults: Mapping[str, Any] = self.tokenizer.generation_config.params
        if self.variant is None:
            return defaults
        own = {name: value for name, value in self.variant.sampling.items() if name != "max_tokens"}
        method = self.variant.speculation
        return {**defaults, **own, **({} if method is None else {"speculation": Speculation(method)})}

    @property
    def variant_limits_tokens(self) -> bool:
        """Whether the variant has a max_tokens for requests without one."""
        return self.variant is not None and "max_tokens" in self.variant.sampling

    def check_access(self, name: str, permissions: KeyPermissions) -> None:
        """Raises Forbidden for a name of this model that the key may not use."""
        served = self.names.find(name) or self.names.default
        with count_forbidden(self.recorder):
            permissions.check_model(name, served.names)
        if (span := current_span.get()) is not None:
            span.on_model(name, served.name)

    def request_context(
        self,
        permissions: KeyPermissions,
        body: RequestBody,
        timeout_s: float | None = None,
    ) -> RequestContext:
        """Context of one request, from its key and body.

        Raises Forbidden, InvalidRequest.
        """
        limit = self.config.request_timeout
        if timeout_s is not None and not 0 < timeout_s <= (limit or MAX_TIMEOUT_S):
            raise InvalidRequest(
                f"timeout must be above 0 and at most {limit or MAX_TIMEOUT_S:g} seconds, got {timeout_s}",
                "timeout",
            )
        with count_forbidden(self.recorder):
            context = permissions.request_context(body.priority, timeout_s or limit or None)
        if body.cache_salt:  # a namespace within the key's
            digest = hashlib.sha256(body.cache_salt.encode("utf-8", "surrogatepass")).hexdigest()
            context = replace(context, cache_salt=f"{context.cache_salt}:{digest[:32]}")
        return replace(
            context,
            is_seeded=has_seed(getattr(body, "seed", None), self.config.seed),
            model=self.served.name,
            adapter=self.served.digest,
        )

    @property
    def model_name(self) -> str:
        """The generating model's name in answers."""
        return self.names.model_name

    def check_num_parts(self, count: int, field: str) -> None:
        """Raises ContextLengthExceeded for more parts than tokens, before anything is converted."""
        if count > self.max_model_len:
            raise ContextLengthExceeded(
                f"{field} holds {count} messages, parts, calls or ids, of which each is at least one token; "
                f"the context is {self.max_model_len} tokens long",
                field,
            )

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed. Raises InvalidRequest for a drafter that does not run."""
        self.info().resolved.check_method(params.speculation.method)
        return replace(params, seed=resolve_seed(params.seed, self.config.seed))

    async def check_structured(self, params: SamplingParams) -> None:
        """Compile a constraint in its own process first. Raises InvalidRequest if it cannot be served."""
        if params.structured is not None:
            await self.grammar_checker.check(params.structured)

    async def build_prompt(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        add_special_tokens: bool,
        fairness_key: str,
        resources: ExitStack,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningOptions | None = None,
        cache_salt: str = "",
        is_seeded: bool = False,
    ) -> Prompt:
        """Prompt of a conversation; `resources` releases its images' memory, and images release the body.

        Raises InvalidRequest, PayloadTooLarge, Overloaded, ClientDisconnect.
        """
        processor = self.chat_processor
        text_messages, parts = processor.split_images(messages)

        def render() -> list[int]:
            return processor.render_ids(
                text_messages,
                template_kwargs,
                len(parts),
                add_special_tokens,
                tools,
                reasoning,
                cache_salt,
                is_seeded,
            )

        async with self.render_semaphore:  # a thread, because it waits for the worker process of templates
            ids = await asyncio.to_thread(render)
        if not parts:
            return processor.insert_images(ids)
        assert self.image_intake is not None, "images for a model that takes none"
        reservation = self.image_intake.memory.start_reservation()
        resources.callback(reservation.release)
        sources = [image_source(part) for part in parts]
        images = await cancel_on_disconnect(
            request.receive, self.image_intake.load(sources, fairness_key, reservation)
        )
        if images is None:
            raise ClientDisconnect
        release_body(request)
        return processor.insert_images(ids, images)

    def build_requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        images: Sequence[PromptImage] = (),
        no_max_tokens: bool = False,
    ) -> list[EngineRequest]:
        """One request per choice of one prompt; all share the images. Raises InvalidRequest.

        no_max_tokens  without max_tokens, the end of the context is the limit, not the default max_tokens
        """
        info = self.info()
        defaults = SamplingDefaults.from_config(self.config, self.tokenizer)
        if self.variant is not None and self.variant_limits_tokens:
            defaults = replace(defaults, max_tokens=self.variant.sampling["max_tokens"])
        requests = make_requests(
            prompt_ids,
            params,
            self.tokenizer,
            request_id,
            self.max_model_len,
            replace(defaults, max_tokens=0) if no_max_tokens else defaults,
            cache_salt=context.cache_salt,
            priority=context.priority,
            vocab_size=info.vocab_size,
            images=images,
            image_token_id=self.chat_processor.placeholder_id,
            adapter=context.adapter,
        )
        return [
            replace(
                request,
                adapter_name=context.model if context.adapter else "",
                fairness_key=context.fairness_key,
                queue_deadline_s=_deadline_s(request.arrival_s, self.config.queue_timeout),
                deadline_s=_deadline_s(request.arrival_s, context.timeout_s),
            )
            for request in requests
        ]


def _deadline_s(start_s: float, seconds: float | None) -> float | None:
    return start_s + seconds if seconds else None


@contextmanager
def count_forbidden(recorder: ServerCounters) -> Iterator[None]:
    """Count a refusal by a key's permissions."""
    try:
        yield
    except Forbidden:
        recorder.on_reject("forbidden")
        raise


async def offload_if_large(request: Request, work: Callable[[], T]) -> T:
    """Run `work` in a thread if the body is large, since it would block the event loop."""
    if request.state.body_bytes > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work)
    return work()


def make_probe_request(client: EngineClient, tokenizer: Tokenizer, request_id: str) -> EngineRequest:
    """A greedy request for one token, without speculation."""
    assert client.info is not None, "a loaded model has info"
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculation=Speculation("off"))
    return make_requests(
        tokenizer.encode("a", add_special_tokens=False)[:1],
        params,
        tokenizer,
        request_id,
        client.info.resolved.max_model_len,
        cache_salt="probe",
        vocab_size=client.info.vocab_size,
    )[0]
