"""Texts become vectors and scores: in the served decoder, or in the encoder beside it."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request

from foreword.core.vectors import cosine, finished
from foreword.encoders.client import EncoderClient, EncoderInfo, EncoderTexts
from foreword.errors import DeadlineExceeded, EngineDead, Overloaded, Unsupported
from foreword.serve.access import Access, Caller
from foreword.serve.disconnect import unless_disconnected
from foreword.serve.engine_vectors import EngineVectors
from foreword.serve.errors import naming
from foreword.serve.schema.embeddings import Text
from foreword.serve.schema.ranking import RankingBody
from foreword.serve.state import Server, away_from_loop
from foreword.text.embedding import check_input, embedding_requests

__all__ = ["Embedder", "Reading", "Scorer", "counted", "embedder_of", "ids_of", "scorer_of", "scores_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading:
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

    def ids(self, text: str, reading: Reading) -> list[int]:
        """Token ids. Raises InvalidRequest."""

    async def vectors(self, inputs: Sequence[Sequence[int]], pooling: str | None, caller: Caller) -> list[bytes]:
        """float32 [H] of each, not normalized; a caller that is cancelled leaves nothing behind."""


def embedder_of(server: Server, name: str | None, access: Access) -> Embedder:
    """The model that `name` means: of None the encoder, if it embeds, or else the decoder.

    Raises ModelNotFound, Forbidden, or Unsupported where it does not embed.
    """
    encoder = server.encoder
    if encoder is None or name not in (None, _info(encoder).name) or (name is None and _info(encoder).kind == "rank"):
        server.check_model(name, access)
        return DecoderEmbedder(server)
    if _info(encoder).kind == "rank":
        raise Unsupported(f"{name} ranks pairs of texts; it has no embeddings", "model")
    server.check_access(_info(encoder).name, access)
    return EncoderEmbedder(encoder)


class DecoderEmbedder:
    """The generating model."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._resolved = server.info().resolved
        self._recipe = server.recipe
        self.name = server.model_name
        self.max_tokens = min(self._resolved.max_model_len, self._recipe.max_tokens or self._resolved.max_model_len)
        self.vocab_size = min(server.info().vocab_size, server.tokenizer.vocab_size)

    def ids(self, text: str, reading: Reading) -> list[int]:
        text = self._recipe.prompt(reading.prompt_name, self.name) + text
        limit = self.max_tokens if reading.max_tokens == -1 else reading.max_tokens
        return self._server.tokenizer.encode_cut(text, None, limit, reading.add_special_tokens)[0]

    async def vectors(self, inputs: Sequence[Sequence[int]], pooling: str | None, caller: Caller) -> list[bytes]:
        requests = embedding_requests(
            inputs,
            pooling or self._recipe.pooling,
            f"embd-{uuid.uuid4().hex}",
            caller.tenant,
            caller.priority,
            self._server.conversations.placeholder,
        )
        accounted = [replace(request, account=caller.account) for request in requests]
        try:
            return await EngineVectors(self._server.client, self._resolved, self._server.config.queue_timeout).of(accounted)
        except Overloaded:
            self._server.recorder.rejected("queue_timeout")
            raise


class EncoderEmbedder:
    """The encoder in its own process."""

    def __init__(self, encoder: EncoderClient) -> None:
        info = _info(encoder)
        self._encoder = encoder
        self._texts = _texts(encoder)
        self.name, self.max_tokens, self.vocab_size = info.name, info.max_tokens, info.vocab_size

    def ids(self, text: str, reading: Reading) -> list[int]:
        return self._texts.encode(
            text, prompt=reading.prompt_name, max_tokens=reading.max_tokens, add_special_tokens=reading.add_special_tokens
        )

    async def vectors(self, inputs: Sequence[Sequence[int]], pooling: str | None, caller: Caller) -> list[bytes]:
        return await self._encoder.encode(inputs, pooling)


def ids_of(embedder: Embedder, texts: Mapping[str, Text], reading: Reading) -> list[list[int]]:
    """Token ids of each, by the name that errors call it. Raises InvalidRequest."""
    found: list[list[int]] = []
    for name, text in texts.items():
        if isinstance(text, str):
            with naming({"prompt": name}):
                ids = embedder.ids(text, reading)
        else:
            ids = list(text[: embedder.max_tokens if reading.max_tokens == -1 else reading.max_tokens])
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

    def read(self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None) -> None:
        """Raises InvalidRequest, which calls a text by its name."""

    async def score(self, caller: Caller) -> list[float]:
        """Of each pair."""


def scorer_of(server: Server, name: str | None, access: Access) -> Scorer:
    """The ranker, or an embedder, whose vectors are compared: of None the encoder, if there is one, or else the decoder.

    Raises ModelNotFound, Forbidden.
    """
    encoder = server.encoder
    if encoder is not None and _info(encoder).kind == "rank" and name in (None, _info(encoder).name):
        server.check_access(_info(encoder).name, access)
        return CrossScorer(encoder)
    return CosineScorer(embedder_of(server, name, access))


class CrossScorer:
    """A ranker reads both texts of a pair at once."""

    def __init__(self, encoder: EncoderClient) -> None:
        self._encoder = encoder
        self._info = _info(encoder)
        self._pairs: list[tuple[list[int], list[int]]] = []
        self.name = self._info.name
        self.num_tokens = 0

    def read(self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None) -> None:
        texts = _texts(self._encoder)
        for (first, second), (_, name) in zip(pairs, names, strict=True):
            with naming({"prompt": name}):
                ids, types = texts.encode_pair(first, second, max_tokens=max_tokens)
            check_input(name, ids, self._info.max_tokens, self._info.vocab_size)
            self._pairs.append((ids, types))
        self.num_tokens = sum(len(ids) for ids, _ in self._pairs)

    async def score(self, caller: Caller) -> list[float]:
        return await self._encoder.rank(self._pairs)


class CosineScorer:
    """An embedder reads each text once."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._places: list[tuple[int, int]] = []
        self._inputs: list[list[int]] = []
        self.name = embedder.name
        self.num_tokens = 0

    def read(self, pairs: Sequence[tuple[str, str]], names: Sequence[tuple[str, str]], max_tokens: int | None) -> None:
        named = {text: name for pair, both in zip(pairs, names, strict=True) for text, name in zip(pair, both, strict=True)}
        place = {text: index for index, text in enumerate(named)}
        self._inputs = ids_of(self._embedder, {name: text for text, name in named.items()}, Reading(max_tokens))
        self._places = [(place[first], place[second]) for first, second in pairs]
        self.num_tokens = sum(map(len, self._inputs))

    async def score(self, caller: Caller) -> list[float]:
        vectors = await self._embedder.vectors(self._inputs, None, caller)
        return await asyncio.to_thread(self._compare, vectors)

    def _compare(self, vectors: Sequence[bytes]) -> list[float]:
        units: list[array[float]] = [finished(vector) for vector in vectors]
        return [cosine(units[first], units[second]) for first, second in self._places]


# What surrounds all of it


async def counted(
    server: Server,
    request: Request,
    caller: Caller,
    kind: str,
    num_inputs: int,
    num_tokens: int,
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T | None:
    """What `work` yields; None, and everything freed, if the client went away. Raises Overloaded, DeadlineExceeded."""
    ticket = server.admission.take(num_inputs, num_tokens, caller.meter)
    server.recorder.embedding_began()
    reason, started = "error", time.monotonic()
    try:
        async with asyncio.timeout(caller.timeout_s):
            result = await unless_disconnected(request.receive, work())
        reason = "abort" if result is None else "done"
        return result
    except asyncio.CancelledError:
        reason = "abort"
        raise
    except TimeoutError:
        raise DeadlineExceeded(f"the request took longer than {caller.timeout_s:g} seconds") from None
    finally:
        ticket.release()
        server.recorder.embedding_ended(kind, reason, num_inputs, num_tokens, time.monotonic() - started)


async def scores_of(
    server: Server,
    request: Request,
    access: Access,
    scorer: Scorer,
    pairs: Sequence[tuple[str, str]],
    names: Sequence[tuple[str, str]],
    body: RankingBody,
) -> list[float] | None:
    """Of each pair, whose texts are called `names`; None if the client went away. Raises InvalidRequest, Overloaded."""
    caller = server.caller(access, body.priority)
    server.admission.check(len(pairs), caller.meter)
    await away_from_loop(request, lambda: scorer.read(pairs, names, body.truncate_prompt_tokens))
    return await counted(server, request, caller, "rank", len(pairs), scorer.num_tokens, lambda: scorer.score(caller))


def _info(encoder: EncoderClient) -> EncoderInfo:
    if encoder.info is None:
        raise EngineDead("the encoder is still loading")
    return encoder.info


def _texts(encoder: EncoderClient) -> EncoderTexts:
    assert encoder.texts is not None, "an encoder that has facts and no tokenizer"
    return encoder.texts
