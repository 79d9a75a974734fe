"""POST /v1/rerank and /v1/score, also under the paths of Jina, Cohere and vLLM"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from foreword.errors import InvalidRequest
from foreword.server.answering.embeddings import Scorer, get_scorer, with_metrics
from foreword.server.apis.body import TABLES, StrictModel
from foreword.server.apis.embeddings import MAX_INPUTS, PoolingBody
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import CLIENT_CLOSED, JSONResponse
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep

TextPair = tuple[str, str]
TextsField = str | list[str] | None
PAIR_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
router = APIRouter(route_class=IntakeRoute)


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
