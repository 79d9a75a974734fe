"""POST /v1/rerank, also under the paths that clients of Jina, Cohere and vLLM know"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerDep
from foreword.server.disconnect import CLIENT_CLOSED
from foreword.server.embeddings import get_scorer, score_pairs
from foreword.server.json_response import JSONResponse
from foreword.server.protocol.ranking import RerankBody

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(
    body: RerankBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """Documents by how well they answer a query, best first."""
    scorer, documents = get_scorer(server, body.model, permissions), body.texts()
    pairs = [(body.query, text) for text in documents]
    names = [("query", f"documents[{index}]") for index in range(len(documents))]
    scores = await score_pairs(server, request, permissions, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": scorer.name,
            "usage": {"prompt_tokens": scorer.num_tokens, "total_tokens": scorer.num_tokens},
            "results": _results(documents, scores, body),
        }
    )


def _results(documents: Sequence[str], scores: Sequence[float], body: RerankBody) -> list[dict[str, Any]]:
    """Best first; those that score the same in the order they came."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shown = body.return_documents is not False
    return [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": documents[index]}} if shown else {}),
        }
        for index in order
    ]
