"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from foreword.config import Config
from foreword.core.params import SamplingParams
from foreword.core.request import Request as EngineRequest
from foreword.encoders.client import EncoderClient
from foreword.encoders.recipe import DECODER_RECIPE, Recipe
from foreword.engine.client import EngineClient
from foreword.errors import EngineDead, InvalidRequest, ModelNotFound, Overloaded, Unsupported
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import Recorder
from foreword.resolve import EngineInfo
from foreword.text.prepare import Defaults, make_requests, resolve_seed
from foreword.text.template import ChatTemplate
from foreword.text.tokenizer import Tokenizer

__all__ = ["Admission", "Caller", "Server", "ServerDep", "away_from_loop"]

T = TypeVar("T")

BIG_BODY = 16 * 1024  # bytes of a request above which its text is prepared in a thread


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the namespace of the prefix cache, and the priority (lower is served first)."""

    tenant: str
    priority: int


class Admission:
    """Counts open engine requests, one per choice, against a limit."""

    __slots__ = ("_limit", "open")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open = 0

    def check(self, count: int) -> None:
        """Raises InvalidRequest for more choices than could ever be open, Overloaded for more than can be now."""
        if count > self._limit:
            raise InvalidRequest(f"prompts times n is {count}; this server takes at most {self._limit} at once", "n")
        if self.open + count > self._limit:
            raise Overloaded(f"{self.open} requests are open of at most {self._limit}; try again later")

    def take(self, count: int) -> None:
        self.check(count)
        self.open += count

    def release(self, count: int) -> None:
        self.open -= count
        assert self.open >= 0


@dataclass(frozen=True, slots=True)
class Server:
    """One served model, and perhaps an encoder beside it.

    created  Unix time at which it began
    recipe   how the generating model makes vectors of texts
    """

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    recorder: Recorder
    admission: Admission
    model_name: str
    created: int
    grammars: GrammarChecker
    encoder: EncoderClient | None = None
    recipe: Recipe = DECODER_RECIPE

    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises EngineDead while there is none."""
        info = self.client.info
        if info is None or not self.client.alive:
            raise EngineDead("the engine is still loading" if info is None else "the engine is not running")
        return info

    def check_model(self, name: str | None) -> None:
        """Raises unless it is the generating model; None is."""
        if name in (None, self.model_name):
            return
        if name in self.model_names:
            raise Unsupported(f"{name} is an encoder; what generates here is {self.model_name!r}", "model")
        raise ModelNotFound(
            f"the model {name!r:.200} does not exist; this server serves {' and '.join(map(repr, self.model_names))}", "model"
        )

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

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], rendering: Mapping[str, Any], add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a conversation; `rendering` goes to the template, which writes special tokens itself."""
        return self.tokenizer.encode(self.template.render(messages, **rendering), add_special_tokens)

    def requests(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str, caller: Caller) -> list[EngineRequest]:
        """One for each choice of one prompt. Raises InvalidRequest."""
        info = self.info()
        return make_requests(
            prompt_ids,
            params,
            self.tokenizer,
            request_id,
            info.resolved.max_model_len,
            Defaults(self.config.seed, self.config.default_max_tokens, self.config.on_runaway),
            tenant=caller.tenant,
            priority=caller.priority,
            vocab_size=info.vocab_size,
        )


async def away_from_loop(request: Request, work: Callable[[], T]) -> T:
    """Do `work` in a thread if the request is big enough to hold up the others."""
    if request.state.body_bytes > BIG_BODY:
        return await asyncio.to_thread(work)
    return work()


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


ServerDep = Annotated[Server, Depends(_server)]
