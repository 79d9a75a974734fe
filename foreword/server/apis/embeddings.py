"""POST /v1/embeddings, /v1/rerank and /v1/score, also under the paths of Jina, Cohere and vLLM"""

from __future__ import annotations

import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from foreword.embedding.encoder_messages import FLOAT_BYTES, normalize_embedding
from foreword.errors import InvalidRequest, shown
from foreword.server.answering.embeddings import (
    Scorer,
    TokenizeOptions,
    get_embedder,
    get_scorer,
    tokenize_inputs,
    with_metrics,
)
from foreword.server.apis.body import TABLES, RequestBody, StrictModel, TextOrIds, TextsOrIds, is_token_ids
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import CLIENT_CLOSED, JSONResponse, json_pieces
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep
from foreword.utils.threads import join_in_own_thread

MAX_INPUTS = 2048  # inputs of one request, OpenAI's limit
router = APIRouter(route_class=IntakeRoute)
THREAD_MIN_BYTES = (1 << 15) * FLOAT_BYTES  # vectors above which JSON is written in a thread
TextPair = tuple[str, str]
TextsField = str | list[str] | None
PAIR_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
VECTOR_LEVELS = 3  # lists and maps of an answer around a vector


class PoolingBody(RequestBody):
    """Fields of every request for vectors or scores."""

    peer_fields = TABLES["pooling"]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: the model's limit


class EmbeddingBody(PoolingBody):
    """OpenAI's fields, vLLM's, and `pooling` and `prompt_name`."""

    peer_fields = TABLES["embedding"]
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's newer name of `normalize`
    pooling: str | None = None
    prompt_name: str | None = None  # one of the checkpoint's named prefixes
    add_special_tokens: bool | None = None

    @property
    def should_normalize(self) -> bool:
        """Raises InvalidRequest if normalize and use_activation differ."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation mean the same, and differ", "normalize")
        return self.normalize is not False and self.use_activation is not False

    def inputs(self) -> list[TextOrIds]:
        """Texts or token ids. Raises InvalidRequest."""
        given = self.input
        if isinstance(given, str) or (given and is_token_ids(given)):
            return [given]
        if not isinstance(given, list) or not given:
            raise InvalidRequest(
                f"input must be a text, token ids, or a list of either, not empty, got {shown(given)}",
                "input",
            )
        if len(given) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(given)} items; at most {MAX_INPUTS} are taken", "input")
        for index, item in enumerate(given):
            if not isinstance(item, str) and not (item and is_token_ids(item)):
                name = f"input[{index}]"
                raise InvalidRequest(
                    f"{name} must be a text or token ids, not empty, got {shown(item)}", name
                )
        return given


@router.post("/v1/embeddings")
async def embeddings(
    body: EmbeddingBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Vectors of texts."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, allow_encoder=True)
    embedder = get_embedder(server, body.model, permissions)
    context = server.request_context(permissions, body)
    normalize = body.should_normalize
    if body.dimensions is not None and body.dimensions > embedder.hidden_size:
        problem = f"dimensions must be at most {embedder.hidden_size}, got {body.dimensions}"
        raise InvalidRequest(problem, "dimensions")
    inputs = await server.intake.offload_if_large(request, body.inputs)
    server.admission.check(len(inputs), context.meter)
    options = TokenizeOptions(
        body.truncate_prompt_tokens, body.add_special_tokens is not False, body.prompt_name
    )
    named = {f"input[{index}]": text for index, text in enumerate(inputs)}
    ids = await server.intake.offload_if_large(request, lambda: tokenize_inputs(embedder, named, options))
    num_tokens = sum(map(len, ids))

    vectors = await with_metrics(
        server,
        request,
        context,
        embedder.name,
        "embed",
        len(ids),
        num_tokens,
        lambda: embedder.embed(ids, body.pooling, context),
    )
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED)

    def pieces() -> Iterator[bytes]:
        values = [normalize_embedding(vector, body.dimensions, normalize) for vector in vectors]
        answer = {
            "object": "list",
            "id": f"embd-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": embedder.name,
            "data": _embedding_data(values, body.encoding_format == "base64"),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_pieces(answer, VECTOR_LEVELS)

    is_large = sum(map(len, vectors)) > THREAD_MIN_BYTES
    content = await join_in_own_thread(pieces) if is_large else b"".join(pieces())
    return Response(content, media_type="application/json")


def _embedding_data(vectors: Sequence[array[float]], base64: bool) -> list[dict[str, object]]:
    encoded = [b64encode(vector).decode() if base64 else vector.tolist() for vector in vectors]
    return [
        {"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(encoded)
    ]


class DocumentBody(StrictModel):
    text: str


class RankingBody(PoolingBody):
    """Fields of rerank and score."""

    peer_fields = TABLES["ranking"]


class RerankBody(RankingBody):
    query: str
    documents: list[str | DocumentBody]
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0 or null: all
    return_documents: bool | None = None  # default: true

    def texts(self) -> list[str]:
        """The documents' texts. Raises InvalidRequest."""
        _check_count("documents", len(self.documents))
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(RankingBody):
    """One text against several, or two lists of equal length; the pairs of field names are synonyms."""

    text_1: TextsField = None
    text_2: TextsField = None
    data_1: TextsField = None
    data_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    items: TextsField = None

    def pairs(self) -> tuple[list[TextPair], list[TextPair]]:
        """Pairs of texts, and the field names of both texts of each pair. Raises InvalidRequest."""
        first_name, second_name = self._field_names()
        first, second = self._texts_of(first_name), self._texts_of(second_name)
        _check_count(first_name, len(first))
        _check_count(second_name, len(second))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{first_name} must hold one text, or as many as {second_name}: "
                f"{len(first)} and {len(second)}",
                first_name,
            )
        if len(first) == 1:
            indices = [(0, j) for j in range(len(second))]
        else:
            indices = [(j, j) for j in range(len(second))]
        names = [(f"{first_name}[{i}]", f"{second_name}[{j}]") for i, j in indices]
        return [(first[i], second[j]) for i, j in indices], names

    def _field_names(self) -> tuple[str, str]:
        """The two fields that are given."""
        fields = ("text_1", "data_1", "queries", "text_2", "data_2", "documents", "items")
        given = tuple(name for name in fields if self._texts_of(name))
        for names in PAIR_FIELDS:
            if given == names:
                return names
        raise InvalidRequest(
            "text_1 and text_2 are required (or queries and documents, or data_1 and data_2), "
            f"got {', '.join(given) or 'none of them'}",
            "text_1",
        )

    def _texts_of(self, name: str) -> list[str]:
        value: TextsField = getattr(self, name)
        return [value] if isinstance(value, str) else value or []


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{name} must hold 1 to {MAX_INPUTS} texts, got {count}", name)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(
    body: RerankBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Documents by how well they answer a query, best first."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, allow_encoder=True)
    scorer, documents = get_scorer(server, body.model, permissions), body.texts()
    pairs = [(body.query, text) for text in documents]
    names = [("query", f"documents[{index}]") for index in range(len(documents))]
    scores = await _score_pairs(server, request, permissions, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": scorer.name,
            "usage": {"prompt_tokens": scorer.num_tokens, "total_tokens": scorer.num_tokens},
            "results": _rerank_results(documents, scores, body),
        }
    )


def _rerank_results(
    documents: Sequence[str], scores: Sequence[float], body: RerankBody
) -> list[dict[str, Any]]:
    """Best first; equal scores keep the order of the request."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index], "document": {"text": documents[index]}}
        for index in order
    ]
    if body.return_documents is False:
        for result in results:
            del result["document"]
    return results


@router.post("/v1/score")
@router.post("/score")
async def score(
    body: ScoreBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """How well the two texts of each pair match."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, allow_encoder=True)
    scorer, (pairs, names) = get_scorer(server, body.model, permissions), body.pairs()
    scores = await _score_pairs(server, request, permissions, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": scorer.name,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)],
            "usage": {"prompt_tokens": scorer.num_tokens, "total_tokens": scorer.num_tokens},
        }
    )


async def _score_pairs(
    server: LoadedModel,
    request: Request,
    permissions: KeyPermissions,
    scorer: Scorer,
    pairs: Sequence[TextPair],
    names: Sequence[TextPair],
    body: RankingBody,
) -> list[float] | None:
    """One score per pair; `names` are its texts' fields, for errors. None after a disconnect.

    Raises InvalidRequest, Overloaded.
    """
    context = server.request_context(permissions, body)
    server.admission.check(len(pairs), context.meter)
    num_chars = sum(len(first) + len(second) for first, second in pairs)  # a ranker reads a query once a pair
    await server.intake.offload_if_large(
        request, lambda: scorer.tokenize(pairs, names, body.truncate_prompt_tokens), num_chars
    )
    return await with_metrics(
        server,
        request,
        context,
        scorer.name,
        "rank",
        len(pairs),
        scorer.num_tokens,
        lambda: scorer.score(context),
    )
