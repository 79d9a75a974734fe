"""POST /v1/score, also as /score"""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from foreword.serve.embedding import counted, scorer_of
from foreword.serve.respond import CLIENT_CLOSED
from foreword.serve.schema.ranking import ScoreBody
from foreword.serve.state import Caller, ServerDep, away_from_loop
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreBody, request: Request, server: ServerDep) -> Response:
    """How well the texts of each pair go together."""
    scorer, (pairs, names) = scorer_of(server, body.model), body.pairs()
    server.admission.check(len(pairs))
    await away_from_loop(request, lambda: scorer.read(pairs, names, body.truncate_prompt_tokens))
    caller = Caller(request.state.tenant, body.priority or 0)
    scores = await counted(server, request, "rank", len(pairs), scorer.num_tokens, lambda: scorer.score(caller))
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
