"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from foreword.config import Config
from foreword.conversation import Conversations, Prompt, source_of
from foreword.core.params import SamplingParams, Speculation
from foreword.core.pictures import Picture
from foreword.core.request import Request as EngineRequest
from foreword.encoders.client import EncoderClient
from foreword.encoders.recipe import DECODER_RECIPE, Recipe
from foreword.engine.client import EngineClient
from foreword.errors import EngineDead, Forbidden, ForewordError, InvalidRequest, ModelNotFound, Unsupported
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import Recorder
from foreword.resolve import EngineInfo
from foreword.serve.access import Access, Caller
from foreword.serve.admission import Admission
from foreword.serve.auth import Keyring
from foreword.serve.disconnect import unless_disconnected
from foreword.serve.heap import Heap
from foreword.serve.looking import Looking
from foreword.serve.middleware import forget_body
from foreword.text.prepare import Defaults, make_requests, resolve_seed
from foreword.text.tokenizer import Tokenizer

__all__ = ["Caller", "Server", "ServerDep", "away_from_loop"]

T = TypeVar("T")

MAX_TIMEOUT_S = 86_400.0
BIG_BODY = 16 * 1024  # bytes of a request above which its text is prepared in a thread
MAX_RENDERING = 2  # threads that a slow template may take from the others


class Abortable(Protocol):
    """The choices of one HTTP request."""

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error, of which its caller is told."""


@dataclass(frozen=True, slots=True)
class Server:
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
    conversations: Conversations
    recorder: Recorder
    admission: Admission
    keys: Keyring
    model_name: str
    created: int
    grammars: GrammarChecker
    encoder: EncoderClient | None = None
    recipe: Recipe = DECODER_RECIPE
    looking: Looking | None = None
    generating: dict[str, Abortable] = field(default_factory=dict)
    heap: Heap = field(default_factory=Heap)
    renderers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RENDERING))

    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises EngineDead while there is none."""
        info = self.client.info
        if info is None or not self.client.alive:
            raise EngineDead("the engine is still loading" if info is None else "the engine is not running")
        return info

    def probe(self, request_id: str) -> EngineRequest:
        """A request for one token, which asks nothing of anybody."""
        info, limits = self.info(), SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculation=Speculation("off"))
        prompt_ids = self.tokenizer.encode("a", add_special_tokens=False)[:1]
        limit, size = info.resolved.max_model_len, info.vocab_size
        return make_requests(prompt_ids, limits, self.tokenizer, request_id, limit, tenant="probe", vocab_size=size)[0]

    def check_model(self, name: str | None, access: Access) -> None:
        """Raises unless it is the generating model, and one that the caller may use; None is the generating model."""
        self.check_access(self.model_name if name is None else name, access)
        if name not in (None, self.model_name):
            raise Unsupported(f"{name} is an encoder; what generates here is {self.model_name!r}", "model")

    def check_access(self, name: str, access: Access) -> None:
        """Raises ModelNotFound for a model that is not served, and Forbidden for one that the caller may not use."""
        if name not in self.model_names:
            known = " and ".join(map(repr, access.allowed(self.model_names))) or "nothing to this key"
            raise ModelNotFound(f"the model {name!r:.200} does not exist; this server serves {known}", "model")
        with self._counting():
            access.check_model(name)

    def check_admin(self, access: Access) -> None:
        """Raises Forbidden for all but operators."""
        with self._counting():
            access.check_admin()

    def caller(self, access: Access, priority: int | None, timeout_s: float | None = None) -> Caller:
        """Of one request, with what its body asks for. Raises Forbidden, InvalidRequest."""
        limit = self.config.request_timeout
        if timeout_s is not None and not 0 < timeout_s <= (limit or MAX_TIMEOUT_S):
            raise InvalidRequest(
                f"timeout must be above 0 and at most {limit or MAX_TIMEOUT_S:g} seconds, got {timeout_s}", "timeout"
            )
        with self._counting():
            return access.caller(priority, timeout_s or limit or None)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except Forbidden:
            self.recorder.rejected("forbidden")
            raise

    @property
    def model_names(self) -> tuple[str, ...]:
        """The generating model first."""
        encoder = self.encoder.info if self.encoder is not None else None
        return (self.model_name,) if encoder is None else (self.model_name, encoder.name)

    def settle(self, params: SamplingParams) -> SamplingParams:
        """The parameters with their seed. A drafter that is asked for must be one that runs."""
        self.info().resolved.check_method(params.speculation.method)
        return replace(params, seed=resolve_seed(params.seed, self.config.seed))

    async def check_structured(self, params: SamplingParams) -> None:
        """Try a constraint out, away from everybody else. Raises InvalidRequest for one that cannot be served."""
        if params.structured is not None:
            await self.grammars.check(params.structured)

    async def while_rendering(self, request: Request, work: Callable[[], T]) -> T:
        """Do `work`, which renders the template; in a thread if that is slow or has much to render."""
        if not self.conversations.template.slow:
            return await away_from_loop(request, work)
        async with self.renderers:
            return await asyncio.to_thread(work)

    async def prompt(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
        add_special_tokens: bool,
        account: str,
        held: ExitStack,
    ) -> Prompt:
        """Of a conversation; what its pictures take is given back with `held`. The body of the request is forgotten with them.

        Raises InvalidRequest, PayloadTooLarge, Overloaded; ClientDisconnect as soon as nobody waits for its pictures any more.
        """
        conversations = self.conversations
        bare, parts = conversations.read(messages)
        ids = await self.while_rendering(request, lambda: conversations.ids(bare, rendering, len(parts), add_special_tokens))
        if not parts:
            return conversations.prompt(ids)
        assert self.looking is not None, "pictures for a model that takes none"
        hold = self.looking.memory.hold()
        held.callback(hold.release)
        sources = [source_of(part) for part in parts]
        pictures = await unless_disconnected(request.receive, self.looking.look(sources, account, hold))
        if pictures is None:
            raise ClientDisconnect
        forget_body(request)
        return conversations.prompt(ids, pictures)

    def requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        caller: Caller,
        pictures: Sequence[Picture] = (),
    ) -> list[EngineRequest]:
        """One for each choice of one prompt; all see the same pictures. Raises InvalidRequest."""
        info = self.info()
        requests = make_requests(
            prompt_ids,
            params,
            self.tokenizer,
            request_id,
            info.resolved.max_model_len,
            Defaults(self.config.seed, self.config.default_max_tokens, self.config.on_runaway),
            tenant=caller.tenant,
            priority=caller.priority,
            vocab_size=info.vocab_size,
            pictures=pictures,
            placeholder=self.conversations.placeholder,
        )
        return [self.accounted(request, caller) for request in requests]

    def accounted(self, request: EngineRequest, caller: Caller) -> EngineRequest:
        """The request with whose share it takes, and until when it may wait and last."""
        return replace(
            request,
            account=caller.account,
            start_by_s=_after(request.arrival_s, self.config.queue_timeout),
            deadline_s=_after(request.arrival_s, caller.timeout_s),
        )


def _after(start_s: float, seconds: float | None) -> float | None:
    return start_s + seconds if seconds else None


async def away_from_loop(request: Request, work: Callable[[], T]) -> T:
    """Do `work` in a thread if the request is big enough to hold up the others."""
    if request.state.body_bytes > BIG_BODY:
        return await asyncio.to_thread(work)
    return work()


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


ServerDep = Annotated[Server, Depends(_server)]
