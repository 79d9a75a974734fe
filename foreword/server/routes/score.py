"""POST /v1/score, also as /score"""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerDep
from foreword.server.disconnect import CLIENT_CLOSED
from foreword.server.embeddings import get_scorer, score_pairs
from foreword.server.json_response import JSONResponse
from foreword.server.protocol.ranking import ScoreBody

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/score")
@router.post("/score")
async def score(
    body: ScoreBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """How well the texts of each pair go together."""
    scorer, (pairs, names) = get_scorer(server, body.model, permissions), body.pairs()
    scores = await score_pairs(server, request, permissions, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": scorer.name,
            "data": [
                {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
            ],
            "usage": {"prompt_tokens": scorer.num_tokens, "total_tokens": scorer.num_tokens},
        }
    )
