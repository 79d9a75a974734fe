"""POST /v1/rerank, also under the paths that clients of Jina, Cohere and vLLM know"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.serve.access import AccessDep
from foreword.serve.disconnect import CLIENT_CLOSED
from foreword.serve.embedding import scorer_of, scores_of
from foreword.serve.schema.ranking import RerankBody
from foreword.serve.state import ServerDep
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: RerankBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """Documents by how well they answer a query, best first."""
    scorer, documents = scorer_of(server, body.model, access), body.texts()
    pairs = [(body.query, text) for text in documents]
    names = [("query", f"documents[{index}]") for index in range(len(documents))]
    scores = await scores_of(server, request, access, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return Json(
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
        {"index": index, "relevance_score": scores[index], **({"document": {"text": documents[index]}} if shown else {})}
        for index in order
    ]
