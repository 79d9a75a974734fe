"""POST /v1/rerank and /v1/score, also under the paths of Jina, Cohere and vLLM"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.server.answering.embeddings import Scorer, get_scorer, with_metrics
from foreword.server.apis.ranking.body import RankingBody, RerankBody, ScoreBody, TextPair
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.responses import CLIENT_CLOSED, JSONResponse
from foreword.server.loaded_model import LoadedModel, offload_if_large
from foreword.server.registry import ModelsDep

router = APIRouter()


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(
    body: RerankBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Documents by how well they answer a query, best first."""
    models.check_fields(body, request)
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
    models.check_fields(body, request)
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
    await offload_if_large(request, lambda: scorer.tokenize(pairs, names, body.truncate_prompt_tokens))
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
