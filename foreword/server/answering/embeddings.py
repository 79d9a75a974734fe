"""Embeddings and scores of texts, by the generating model or by the encoder process."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request as HTTPRequest

from foreword.core.outputs import EmbeddingEvent, ErrorEvent
from foreword.core.request import Request
from foreword.embedding.client import EncoderClient
from foreword.embedding.encoder_messages import EncoderInfo, cosine, normalize_embedding
from foreword.embedding.encoder_tokenizer import EncoderTokenizer
from foreword.engine_client.base import EngineClient
from foreword.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelLoading,
    Overloaded,
    RequestFailed,
    Unsupported,
)
from foreword.planning.resolve import ResolvedConfig
from foreword.server.apis.body import TextOrIds
from foreword.server.auth.keys import KeyPermissions, RequestContext
from foreword.server.http.errors import rename_field
from foreword.server.http.responses import cancel_on_disconnect
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.input_processor import check_input, make_embedding_requests
from foreword.utils.threads import run_in_own_thread

T = TypeVar("T")
PREFETCH_STEPS = 2  # engine steps' worth of tokens submitted at once
MAX_REPEATED_CHARS = 16_000_000  # characters of the query times documents: about 10 s of a thread


async def _embed_ahead(
    client: EngineClient, requests: Sequence[Request], resolved: ResolvedConfig, queue_timeout_s: float
) -> list[bytes]:
    """Vectors in order. Texts are submitted a few steps ahead: a large batch hardly delays other requests.

    queue_timeout_s  limit until the first step of each text; 0: none
    After an error, which it raises, or a cancel, the engine holds none of them.
    """
    max_tokens = PREFETCH_STEPS * resolved.max_num_batched_tokens
    max_requests = max(resolved.max_num_seqs // 2, 1)
    tasks: list[asyncio.Task[bytes]] = []
    inflight: dict[asyncio.Task[bytes], int] = {}  # tokens by task
    try:
        for request in requests:
            num_tokens = len(request.prompt_ids)
            while inflight and (
                len(inflight) >= max_requests or sum(inflight.values()) + num_tokens > max_tokens
            ):
                await _wait_any(inflight)
            tasks.append(asyncio.create_task(_embed_one(client, request, queue_timeout_s)))
            inflight[tasks[-1]] = num_tokens
        while inflight:
            await _wait_any(inflight)
        return [task.result() for task in tasks]
    finally:
        for task in inflight:
            task.cancel()
        await asyncio.gather(*inflight, return_exceptions=True)


async def _wait_any(inflight: dict[asyncio.Task[bytes], int]) -> None:
    """Wait until a text is done. Raises its error."""
    done, _ = await asyncio.wait(inflight, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del inflight[task]
    for task in done:
        task.result()


async def _embed_one(client: EngineClient, request: Request, queue_timeout_s: float) -> bytes:
    if queue_timeout_s:  # from now: until here it waited for texts of its own batch
        request = replace(request, queue_deadline_s=time.monotonic() + queue_timeout_s)
    async for event in client.submit(request):
        if isinstance(event, ErrorEvent):
            raise event.error
        assert isinstance(event, EmbeddingEvent)
        return event.vector
    raise RequestFailed("the engine ended the request without a vector")


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    max_tokens: int | None = None  # truncate to this, -1: to the model's limit; None: refuse longer texts
    add_special_tokens: bool = True
    prompt_name: str | None = None  # one of the checkpoint's named prefixes


class Embedder(Protocol):
    """A model that embeds texts."""

    name: str  # name in the API
    max_tokens: int  # limit of one input
    vocab_size: int
    hidden_size: int  # numbers of a vector

    def tokenize(self, text: str, options: TokenizeOptions) -> list[int]:
        """Token ids. Raises InvalidRequest."""

    async def embed(
        self, inputs: Sequence[Sequence[int]], pooling: str | None, context: RequestContext
    ) -> list[bytes]:
        """float32 [H] per input, not normalized; a cancel frees everything."""


def get_embedder(server: LoadedModel, name: str | None, permissions: KeyPermissions) -> Embedder:
    """The embedder called `name`; of None the encoder, or the generating model if no encoder embeds.

    Raises Forbidden, and Unsupported for a ranker.
    """
    encoder = None if server.encoder is None else _get_info(server.encoder)
    uses_encoder = server.served.is_encoder
    if name is None:
        uses_encoder = encoder is not None and encoder.task != "rank"
        server.check_access(encoder.name if encoder and uses_encoder else server.model_name, permissions)
    if not uses_encoder:
        return DecoderEmbedder(server)
    assert encoder is not None and server.encoder is not None
    if encoder.task == "rank":
        raise Unsupported(f"{name} ranks pairs of texts; it has no embeddings", "model")
    return EncoderEmbedder(server.encoder)


class DecoderEmbedder:
    """Embeddings of the generating model."""

    def __init__(self, server: LoadedModel) -> None:
        self._server = server
        self._adapter = server.served.digest
        self._pooling_config = server.pooling_config
        self.name = server.served.name
        max_model_len = server.max_model_len
        self.max_tokens = min(max_model_len, self._pooling_config.max_tokens or max_model_len)
        self.vocab_size = min(server.info().vocab_size, server.tokenizer.vocab_size)
        self.hidden_size = server.info().hidden_size

    def tokenize(self, text: str, options: TokenizeOptions) -> list[int]:
        text = self._pooling_config.find_prompt(options.prompt_name, self.name) + text
        limit = self.max_tokens if options.max_tokens == -1 else options.max_tokens
        ids, _ = self._server.tokenizer.encode_truncated(
            text, None, limit, options.add_special_tokens, self.max_tokens
        )
        return ids

    async def embed(
        self, inputs: Sequence[Sequence[int]], pooling: str | None, context: RequestContext
    ) -> list[bytes]:
        server = self._server
        requests = make_embedding_requests(
            inputs,
            pooling or self._pooling_config.pooling,
            f"embd-{uuid.uuid4().hex}",
            server.chat_processor.placeholder_id,
        )
        requests = [
            replace(
                request,
                cache_salt=context.cache_salt,
                priority=context.priority,
                fairness_key=context.fairness_key,
                adapter=self._adapter,
            )
            for request in requests
        ]
        try:
            timeout_s = server.config.queue_timeout
            return await _embed_ahead(server.client, requests, server.info().resolved, timeout_s)
        except Overloaded:
            server.recorder.on_reject("queue_timeout")
            raise


class EncoderEmbedder:
    """Embeddings of the encoder process."""

    def __init__(self, encoder: EncoderClient) -> None:
        info = _get_info(encoder)
        self._encoder = encoder
        self._tokenizer = _get_tokenizer(encoder)
        self.name, self.max_tokens, self.vocab_size = info.name, info.max_tokens, info.vocab_size
        self.hidden_size = info.hidden_size

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
    embedder: Embedder, texts: Mapping[str, TextOrIds], options: TokenizeOptions
) -> list[list[int]]:
    """Token ids per input; the keys are field names for errors. Raises InvalidRequest."""
    inputs: list[list[int]] = []
    for name, text in texts.items():
        if isinstance(text, str):
            with rename_field({"prompt": name}):
                ids = embedder.tokenize(text, options)
        else:
            ids = list(text[: embedder.max_tokens if options.max_tokens == -1 else options.max_tokens])
        check_input(name, ids, embedder.max_tokens, embedder.vocab_size)
        inputs.append(ids)
    return inputs


class Scorer(Protocol):
    """Scores pairs of texts: tokenize() first, which may be slow, then score()."""

    name: str  # name in the API
    num_tokens: int  # sum over all texts

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        """`names` are the texts' fields, for errors. Raises InvalidRequest."""

    async def score(self, context: RequestContext) -> list[float]:
        """One score per pair."""


def get_scorer(server: LoadedModel, name: str | None, permissions: KeyPermissions) -> Scorer:
    """The ranker called `name`, or an embedder with cosine similarity; of None the encoder, if there is one.

    Raises Forbidden.
    """
    encoder = server.encoder
    if (
        encoder is not None
        and _get_info(encoder).task == "rank"
        and (name is None or server.served.is_encoder)
    ):
        if name is None:
            server.check_access(_get_info(encoder).name, permissions)
        return CrossEncoderScorer(encoder)
    return CosineScorer(get_embedder(server, name, permissions))


class CrossEncoderScorer:
    """A ranker that reads both texts of a pair at once."""

    def __init__(self, encoder: EncoderClient) -> None:
        self._encoder = encoder
        self._info = _get_info(encoder)
        self._pairs: list[tuple[list[int], list[int]]] = []  # token ids and token types
        self.name = self._info.name
        self.num_tokens = 0

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        _check_repeated(pairs, names)
        tokenizer = _get_tokenizer(self._encoder)
        for (first, second), (_, name) in zip(pairs, names, strict=True):
            with rename_field({"prompt": name}):
                ids, types = tokenizer.encode_pair(first, second, max_tokens=max_tokens)
            check_input(name, ids, self._info.max_tokens, self._info.vocab_size)
            self._pairs.append((ids, types))
        self.num_tokens = sum(len(ids) for ids, _ in self._pairs)

    async def score(self, context: RequestContext) -> list[float]:
        return await self._encoder.score(self._pairs)


def _check_repeated(pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]]) -> None:
    """A query is tokenized with each document, before it is truncated."""
    num_repeated = sum(len(first) for first, _ in pairs) - sum(map(len, {first for first, _ in pairs}))
    if num_repeated > MAX_REPEATED_CHARS:
        field = names[0][0]
        raise InvalidRequest(
            f"{field} has {len(pairs[0][0])} characters, read with each of {len(pairs)} texts: "
            f"{num_repeated} in all, the limit is {MAX_REPEATED_CHARS}",
            field,
        )


class CosineScorer:
    """Cosine similarity of embeddings; each distinct text is embedded once."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._pair_indices: list[tuple[int, int]] = []
        self._inputs: list[list[int]] = []
        self.name = embedder.name
        self.num_tokens = 0

    def tokenize(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> None:
        name_of: dict[str, str] = {}
        for pair, pair_names in zip(pairs, names, strict=True):
            name_of.update(zip(pair, pair_names, strict=True))
        index_of = {text: index for index, text in enumerate(name_of)}
        texts = {name: text for text, name in name_of.items()}
        self._inputs = tokenize_inputs(self._embedder, texts, TokenizeOptions(max_tokens))
        self._pair_indices = [(index_of[first], index_of[second]) for first, second in pairs]
        self.num_tokens = sum(map(len, self._inputs))

    async def score(self, context: RequestContext) -> list[float]:
        vectors = await self._embedder.embed(self._inputs, None, context)

        def cosines() -> list[float]:
            units: list[array[float]] = [normalize_embedding(vector) for vector in vectors]
            return [cosine(units[first], units[second]) for first, second in self._pair_indices]

        return await run_in_own_thread(cosines)


async def with_metrics(
    server: LoadedModel,
    request: HTTPRequest,
    context: RequestContext,
    model: str,
    task: str,
    num_inputs: int,
    num_tokens: int,
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T | None:
    """The result of `work`, admitted and recorded; None, with everything freed, after a disconnect.

    model  its name in answers
    Raises Overloaded, DeadlineExceeded.
    """
    ticket = server.admission.admit(num_inputs, num_tokens, context.meter)
    usage = server.usage.counter(context.fairness_key, model)
    server.recorder.on_embedding_start()
    reason, started_s = "error", time.monotonic()
    try:
        async with asyncio.timeout(context.timeout_s):
            result = await cancel_on_disconnect(request.receive, work())
        reason = "abort" if result is None else "done"
        usage.prompt_tokens += 0 if result is None else num_tokens
    except asyncio.CancelledError:
        reason = "abort"
        raise
    except TimeoutError:
        raise DeadlineExceeded(f"the request took longer than {context.timeout_s:g} seconds") from None
    finally:
        ticket.release()
        elapsed_s = time.monotonic() - started_s
        server.recorder.on_embedding_finish(task, reason, num_inputs, num_tokens, elapsed_s)
        usage.requests += 1
        usage.errors += reason == "error"
    await server.usage.commit(usage)
    return result


def _get_info(encoder: EncoderClient) -> EncoderInfo:
    if encoder.info is None:
        raise ModelLoading("the encoder is still loading; see /health")
    return encoder.info


def _get_tokenizer(encoder: EncoderClient) -> EncoderTokenizer:
    assert encoder.tokenizer is not None, "an encoder with info has a tokenizer"
    return encoder.tokenizer
