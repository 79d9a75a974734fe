"""GET /docs: the routes in a page of our own, which loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

__all__ = ["router"]

router = APIRouter()
PAGE = Path(__file__).parent.parent / "static" / "docs.html"


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))
