"""POST /v1/score, also as /score"""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from foreword.serve.access import AccessDep
from foreword.serve.disconnect import CLIENT_CLOSED
from foreword.serve.embedding import scorer_of, scores_of
from foreword.serve.schema.ranking import ScoreBody
from foreword.serve.state import ServerDep
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """How well the texts of each pair go together."""
    scorer, (pairs, names) = scorer_of(server, body.model, access), body.pairs()
    scores = await scores_of(server, request, access, scorer, pairs, names, body)
    if scores is None:
        return Response(status_code=CLIENT_CLOSED)
    return Json(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": scorer.name,
            "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
            "usage": {"prompt_tokens": scorer.num_tokens, "total_tokens": scorer.num_tokens},
        }
    )
