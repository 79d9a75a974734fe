"""Texts become vectors and scores: in the served decoder, or in the encoder beside it.

Vectors out of the generating engine, a few requests at a time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request as HTTPRequest

from foreword.config.resolve import ResolvedConfig
from foreword.core.outputs import EmbeddingEvent, ErrorEvent
from foreword.core.request import Request
from foreword.embedding.client import EncoderClient, EncoderInfo, EncoderTokenizer
from foreword.embedding.vectors import cosine, normalize_embedding
from foreword.engine_client.client import EngineClient
from foreword.errors import DeadlineExceeded, EngineDead, Overloaded, RequestFailed, Unsupported
from foreword.server.auth.keys import KeyPermissions, RequestContext
from foreword.server.context import ServerContext, offload_if_large
from foreword.server.disconnect import cancel_on_disconnect
from foreword.server.errors import rename_field
from foreword.server.protocol.embeddings import EmbeddingInput
from foreword.server.protocol.ranking import RankingBody
from foreword.tokenizer.input_processor import check_input, make_embedding_requests

__all__ = [
    "Embedder",
    "EngineEmbedder",
    "Scorer",
    "TokenizeOptions",
    "get_embedder",
    "get_scorer",
    "score_pairs",
    "tokenize_inputs",
    "with_metrics",
]

PREFETCH_STEPS = 2


class EngineEmbedder:
    """Feeds one caller's prompts to the engine: enough to keep it busy, and no more.

    queue_timeout_s  that each may wait for its first step; 0 for no limit

    Whoever comes next waits for what the engine has by then, be it a batch of thousands that it came behind.
    """

    def __init__(self, client: EngineClient, resolved: ResolvedConfig, queue_timeout_s: float) -> None:
        self._client = client
        self._queue_timeout_s = queue_timeout_s
        self._max_tokens = PREFETCH_STEPS * resolved.max_num_batched_tokens
        self._max_requests = max(resolved.max_num_seqs // 2, 1)
        self._inflight: dict[asyncio.Task[bytes], int] = {}

    async def embed(self, requests: Sequence[Request]) -> list[bytes]:
        """One for each, in order. Raises the first error; then, or cancelled, nothing is left with the engine."""
        tasks: list[asyncio.Task[bytes]] = []
        try:
            for request in requests:
                await self._wait_room(len(request.prompt_ids))
                tasks.append(asyncio.create_task(self._embed_one(request)))
                self._inflight[tasks[-1]] = len(request.prompt_ids)
            while self._inflight:
                await self._wait_any()
            return [task.result() for task in tasks]
        finally:
            for task in self._inflight:
                task.cancel()
            await asyncio.gather(*self._inflight, return_exceptions=True)

    async def _wait_room(self, num_tokens: int) -> None:
        while self._inflight and (
            len(self._inflight) >= self._max_requests
            or sum(self._inflight.values()) + num_tokens > self._max_tokens
        ):
            await self._wait_any()

    async def _wait_any(self) -> None:
        """Wait until one is done. Raises its error."""
        done, _ = await asyncio.wait(self._inflight, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._inflight[task]
        for task in done:
            task.result()

    async def _embed_one(self, request: Request) -> bytes:
        if self._queue_timeout_s:  # from now: until here it waited for others of its own
            request = replace(request, queue_deadline_s=time.monotonic() + self._queue_timeout_s)
        async for event in self._client.submit(request):
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, EmbeddingEvent)
            return event.vector
        raise RequestFailed("the engine ended the request without a vector")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How texts become token ids.

    max_tokens   longer ones are cut, -1: to what the model takes; None: they are refused
    prompt_name  purpose whose text stands in front, where the checkpoint knows any
    """

    max_tokens: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Embedder(Protocol):
    """A model that turns texts into vectors.

    name        in the API
    max_tokens  longest input
    vocab_size  ids are below
    """

    name: str
    max_tokens: int
    vocab_size: int

    def tokenize(self, text: str, options: TokenizeOptions) -> list[int]:
        """Token ids. Raises InvalidRequest."""

    async def embed(
        self, inputs: Sequence[Sequence[int]], pooling: str | None, context: RequestContext
    ) -> list[bytes]:
        """float32 [H] of each, not normalized; a caller that is cancelled leaves nothing behind."""


def get_embedder(server: ServerContext, name: str | None, permissions: KeyPermissions) -> Embedder:
    """The model that `name` means: of None the encoder, if it embeds, or else the decoder.

    Raises ModelNotFound, Forbidden, or Unsupported where it does not embed.
    """
    encoder = server.encoder
    if (
        encoder is None
        or name not in (None, _get_info(encoder).name)
        or (name is None and _get_info(encoder).task == "rank")
    ):
        server.check_model(name, permissions)
        return DecoderEmbedder(server)
    if _get_info(encoder).task == "rank":
        raise Unsupported(f"{name} ranks pairs of texts; it has no embeddings", "model")
    server.check_access(_get_info(encoder).name, permissions)
    return EncoderEmbedder(encoder)


class DecoderEmbedder:
    """The generating model."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._resolved = server.info().resolved
        self._pooling_config = server.pooling_config
        self.name = server.model_name
        self.max_tokens = min(
            self._resolved.max_model_len, self._pooling_config.max_tokens or self._resolved.max_model_len
        )
        self.vocab_size = min(server.info().vocab_size, server.tokenizer.vocab_size)

    def tokenize(self, text: str, options: TokenizeOptions) -> list[int]:
        text = self._pooling_config.find_prompt(options.prompt_name, self.name) + text
        limit = self.max_tokens if options.max_tokens == -1 else options.max_tokens
        return self._server.tokenizer.encode_truncated(text, None, limit, options.add_special_tokens)[0]

    async def embed(
        self, inputs: Sequence[Sequence[int]], pooling: str | None, context: RequestContext
    ) -> list[bytes]:
        requests = make_embedding_requests(
            inputs,
            pooling or self._pooling_config.pooling,
            f"embd-{uuid.uuid4().hex}",
            context.cache_salt,
            context.priority,
            self._server.chat_processor.placeholder_id,
        )
        accounted = [replace(request, fairness_key=context.fairness_key) for request in requests]
        try:
            return await EngineEmbedder(
                self._server.client, self._resolved, self._server.config.queue_timeout
            ).embed(accounted)
        except Overloaded:
            self._server.recorder.on_reject("queue_timeout")
            raise


class EncoderEmbedder:
    """The encoder in its own process."""

    def __init__(self, encoder: EncoderClient) -> None:
        info = _get_info(encoder)
        self._encoder = encoder
        self._tokenizer = _get_tokenizer(encoder)
        self.name, self.max_tokens, self.vocab_size = info.name, info.max_tokens, info.vocab_size

    def tokenize(self, text: str, options: TokenizeOptions) -> list[int]:
        return self._tokenizer.encode(
            text,
            prompt=options.prompt_name,
            max_tokens=options.max_tokens,
            add_special_tokens=options.add_special_tokens,
        )

    async def embed(
        self, inputs: Sequence[Sequence[int]], pooling: str | None, context: RequestContext
    ) -> list[bytes]:
        return await self._encoder.encode(inputs, pooling)


def tokenize_inputs(
    embedder: Embedder, texts: Mapping[str, EmbeddingInput], options: TokenizeOptions
) -> list[list[int]]:
    """Token ids of each, by the name that errors call it. Raises InvalidRequest."""
    found: list[list[int]] = []
    for name, text in texts.items():
        if isinstance(text, str):
            with rename_field({"prompt": name}):
                ids = embedder.tokenize(text, options)
        else:
            ids = list(text[: embedder.max_tokens if options.max_tokens == -1 else options.max_tokens])
        check_input(name, ids, embedder.max_tokens, embedder.vocab_size)
        found.append(ids)
    return found


# Scores


class Scorer(Protocol):
    """Scores pairs of texts by one model: read() them first, which takes time, and then score().

    num_tokens  that were read
    """

    name: str
    num_tokens: int

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        """Raises InvalidRequest, which calls a text by its name."""

    async def score(self, context: RequestContext) -> list[float]:
        """Of each pair."""


def get_scorer(server: ServerContext, name: str | None, permissions: KeyPermissions) -> Scorer:
    """The ranker, or an embedder, whose vectors are compared: of None the encoder, if there is one, or else the decoder.

    Raises ModelNotFound, Forbidden.
    """
    encoder = server.encoder
    if encoder is not None and _get_info(encoder).task == "rank" and name in (None, _get_info(encoder).name):
        server.check_access(_get_info(encoder).name, permissions)
        return CrossEncoderScorer(encoder)
    return CosineScorer(get_embedder(server, name, permissions))


class CrossEncoderScorer:
    """A ranker reads both texts of a pair at once."""

    def __init__(self, encoder: EncoderClient) -> None:
        self._encoder = encoder
        self._info = _get_info(encoder)
        self._pairs: list[tuple[list[int], list[int]]] = []
        self.name = self._info.name
        self.num_tokens = 0

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        texts = _get_tokenizer(self._encoder)
        for (first, second), (_, name) in zip(pairs, names, strict=True):
            with rename_field({"prompt": name}):
                ids, types = texts.encode_pair(first, second, max_tokens=max_tokens)
            check_input(name, ids, self._info.max_tokens, self._info.vocab_size)
            self._pairs.append((ids, types))
        self.num_tokens = sum(len(ids) for ids, _ in self._pairs)

    async def score(self, context: RequestContext) -> list[float]:
        return await self._encoder.score(self._pairs)


class CosineScorer:
    """An embedder reads each text once."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._pair_indices: list[tuple[int, int]] = []
        self._inputs: list[list[int]] = []
        self.name = embedder.name
        self.num_tokens = 0

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        named = {
            text: name
            for pair, both in zip(pairs, names, strict=True)
            for text, name in zip(pair, both, strict=True)
        }
        place = {text: index for index, text in enumerate(named)}
        self._inputs = tokenize_inputs(
            self._embedder, {name: text for text, name in named.items()}, TokenizeOptions(max_tokens)
        )
        self._pair_indices = [(place[first], place[second]) for first, second in pairs]
        self.num_tokens = sum(map(len, self._inputs))

    async def score(self, context: RequestContext) -> list[float]:
        vectors = await self._embedder.embed(self._inputs, None, context)
        return await asyncio.to_thread(self._cosine_scores, vectors)

    def _cosine_scores(self, vectors: Sequence[bytes]) -> list[float]:
        units: list[array[float]] = [normalize_embedding(vector) for vector in vectors]
        return [cosine(units[first], units[second]) for first, second in self._pair_indices]


# What surrounds all of it


async def with_metrics(
    server: ServerContext,
    request: HTTPRequest,
    context: RequestContext,
    task: str,
    num_inputs: int,
    num_tokens: int,
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T | None:
    """What `work` yields; None, and everything freed, if the client went away. Raises Overloaded, DeadlineExceeded."""
    ticket = server.admission.admit(num_inputs, num_tokens, context.meter)
    server.recorder.on_embedding_start()
    reason, started = "error", time.monotonic()
    try:
        async with asyncio.timeout(context.timeout_s):
            result = await cancel_on_disconnect(request.receive, work())
        reason = "abort" if result is None else "done"
        return result
    except asyncio.CancelledError:
        reason = "abort"
        raise
    except TimeoutError:
        raise DeadlineExceeded(f"the request took longer than {context.timeout_s:g} seconds") from None
    finally:
        ticket.release()
        server.recorder.on_embedding_finish(task, reason, num_inputs, num_tokens, time.monotonic() - started)


async def score_pairs(
    server: ServerContext,
    request: HTTPRequest,
    permissions: KeyPermissions,
    scorer: Scorer,
    pairs: Sequence[tuple[str, str]],
    names: Sequence[tuple[str, str]],
    body: RankingBody,
) -> list[float] | None:
    """Of each pair, whose texts are called `names`; None if the client went away. Raises InvalidRequest, Overloaded."""
    caller = server.request_context(permissions, body.priority)
    server.admission.check(len(pairs), caller.meter)
    await offload_if_large(request, lambda: scorer.tokenize(pairs, names, body.truncate_prompt_tokens))
    return await with_metrics(
        server, request, caller, "rank", len(pairs), scorer.num_tokens, lambda: scorer.score(caller)
    )


def _get_info(encoder: EncoderClient) -> EncoderInfo:
    if encoder.info is None:
        raise EngineDead("the encoder is still loading")
    return encoder.info


def _get_tokenizer(encoder: EncoderClient) -> EncoderTokenizer:
    assert encoder.tokenizer is not None, "an encoder that has facts and no tokenizer"
    return encoder.tokenizer
