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
from foreword.serve.draining import Drain
from foreword.serve.errors import envelope, error_headers
from foreword.serve.probe import Probe
from foreword.serve.wire import Json

__all__ = ["Health", "HealthBody"]

RETRY_AFTER_S = 1.0
SILENT = Readiness("unresponsive", "the engine was idle, and gives no answer to a request for one token")
ENDING = "the server is ending: open answers may finish, new requests are refused"


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
    drain: Drain
    probe: Probe | None = None

    async def readiness(self) -> Readiness:
        """The engine's, or "draining" while the server ends."""
        found = self.client.readiness
        if self.drain.began:
            return replace(found, status="draining", detail=ENDING)
        if found.ready and self.probe is not None and not await self.probe.answers():
            return replace(SILENT, restarts=found.restarts)
        return found

    async def response(self) -> Response:
        """A body of the same shape with 200 and 503."""
        found = await self.readiness()
        error = None if found.ready else _error(found)
        body = HealthBody(
            status=found.status,  # type: ignore[arg-type]  # validated
            detail=found.detail,
            progress=found.progress,
            restarts=found.restarts,
            encoder=None if self.encoder is None else "ok" if self.encoder.alive else "down",
            error=None if error is None else HealthError(**envelope(error)["error"]),
        )
        if error is None:
            return Json(body.model_dump())
        return Json(body.model_dump(), status_code=error.status, headers=error_headers(error))


def _error(found: Readiness) -> ForewordError:
    if found.status == "draining":
        return ShuttingDown(found.detail)
    error = EngineDead(found.detail or f"the engine is {found.status}")
    error.retry_after_s = None if found.status == "dead" else RETRY_AFTER_S
    return error
