"""What /health says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fastapi import Response
from pydantic import BaseModel, Field

from foreword.core.readiness import Readiness
from foreword.encoders.client import EncoderClient
from foreword.engine.client import EngineClient
from foreword.errors import EngineDead, ForewordError, ShuttingDown
from foreword.serve.draining import DrainState
from foreword.serve.errors import error_body, error_headers
from foreword.serve.probe import EngineProbe
from foreword.serve.wire import JSONResponse

__all__ = ["Health", "HealthBody"]

RETRY_AFTER_S = 1.0
UNRESPONSIVE = Readiness("unresponsive", "the engine was idle, and gives no answer to a request for one token")
DRAINING_MESSAGE = "the server is ending: open answers may finish, new requests are refused"


class HealthError(BaseModel):
    """As in OpenAI's envelope."""

    message: str
    type: str
    param: str | None
    code: str | None


class HealthBody(BaseModel):
    """The body of /health, whatever its status code."""

    status: Literal["ok", "loading", "restarting", "unresponsive", "draining", "dead"] = Field(
        description="ok: a step could run now (200). All else is a 503."
    )
    detail: str = Field(description="what an operator should know; empty where all is well")
    progress: float | None = Field(ge=0, le=1, description="how much of the weights is loaded, while they are")
    restarts: int = Field(ge=0, description="how often the engine was replaced")
    encoder: Literal["ok", "down"] | None = Field(description="the encoder beside the model; null where there is none")
    error: HealthError | None = Field(description="null with status ok")


@dataclass(frozen=True, slots=True)
class Health:
    """Who knows how the server is.

    probe  None while the engine is loading
    """

    client: EngineClient
    encoder: EncoderClient | None
    drain: DrainState
    probe: EngineProbe | None = None

    async def readiness(self) -> Readiness:
        """The engine's, or "draining" while the server ends."""
        found = self.client.readiness
        if self.drain.draining:
            return replace(found, status="draining", detail=DRAINING_MESSAGE)
        if found.is_ready and self.probe is not None and not await self.probe.is_responsive():
            return replace(UNRESPONSIVE, restarts=found.restarts)
        return found

    async def response(self) -> Response:
        """A body of the same shape with 200 and 503."""
        found = await self.readiness()
        error = None if found.is_ready else _readiness_error(found)
        body = HealthBody(
            status=found.status,  # type: ignore[arg-type]  # validated
            detail=found.detail,
            progress=found.progress,
            restarts=found.restarts,
            encoder=None if self.encoder is None else "ok" if self.encoder.alive else "down",
            error=None if error is None else HealthError(**error_body(error)["error"]),
        )
        if error is None:
            return JSONResponse(body.model_dump())
        return JSONResponse(body.model_dump(), status_code=error.status, headers=error_headers(error))


def _readiness_error(readiness: Readiness) -> ForewordError:
    if readiness.status == "draining":
        return ShuttingDown(readiness.detail)
    error = EngineDead(readiness.detail or f"the engine is {readiness.status}")
    error.retry_after_s = None if readiness.status == "dead" else RETRY_AFTER_S
    return error
