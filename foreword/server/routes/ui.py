"""The page at GET /, its files below /ui, and the API's fields at /docs: static files of this package."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

router = APIRouter(include_in_schema=False)
STATIC = Path(__file__).parent.parent / "static" / "ui"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The browser enforces: nothing of another origin, no inline script or style, no text that becomes HTML.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",  # pasted images
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked for by its ETag: a new version shows at once
    "Vary": "Accept-Encoding",
}
GET = ["GET", "HEAD"]


@dataclass(frozen=True, slots=True)
class _StaticFile:
    content: bytes
    gzipped: bytes
    media_type: str
    etag: str


@cache
def _read(path: Path) -> _StaticFile:
    content = path.read_bytes()
    etag = f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    return _StaticFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[path.suffix], etag)


@cache
def _files() -> dict[str, Path]:
    return {path.name: path for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}


def _respond(request: Request, name: str) -> Response:
    """A file; 304 if the browser has it. Raises HTTPException 404."""
    path = _files().get(name)
    if path is None:
        raise HTTPException(404)
    file = _read(path)
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = file.gzipped, "gzip"
    response = Response(content, media_type=file.media_type, headers=headers)
    if request.method == "HEAD":
        response.body = b""  # with the Content-Length of GET
    return response


@router.api_route("/", methods=GET)
def page(request: Request) -> Response:
    """Chat, and the server at work."""
    return _respond(request, "index.html")


@router.api_route("/docs", methods=GET)
def docs(request: Request) -> Response:
    """Routes and fields."""
    return _respond(request, "docs.html")


@router.api_route("/ui/{name}", methods=GET)
def file(name: str, request: Request) -> Response:
    """A file of the page."""
    return _respond(request, name)
