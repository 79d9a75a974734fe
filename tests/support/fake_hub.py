"""A hub on loopback with the endpoints that the real client asks for a download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

URL_TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
COMMIT = "c0ffee" * 6 + "c0de"


class FakeHub:
    """Serves the files of repositories. `requests` are (method, path, range) in order."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut_after: int | None = None  # bytes of a file, after which the connection ends: once
        self.etag: str | None = None  # of all files, instead of their digests
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def fetched(self) -> list[str]:
        """Files whose contents were read, without the repository."""
        paths = (
            path.partition(f"/resolve/{COMMIT}/") for method, path, _ in self.requests if method == "GET"
        )
        return [name for _, mark, name in paths if mark]

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(
            target=self._http.serve_forever, args=(0.01,)
        )  # seconds between looks for shutdown()
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path, self.headers.get("Range")))
                parts = path.strip("/").split("/")
                if parts[:2] == ["api", "models"] and (files := hub.repositories.get("/".join(parts[2:4]))):
                    self._send_json(_tree(files) if parts[4:5] == ["tree"] else _info(parts, files))
                elif parts[2:3] == ["resolve"] and (files := hub.repositories.get("/".join(parts[:2]))):
                    self._send_file(files.get("/".join(parts[4:])))
                else:
                    self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

            def _send_json(self, value: Any) -> None:
                self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def _send_file(self, data: bytes | None) -> None:
                if data is None:
                    self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                    return
                etag = hub.etag or _digest(data)
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                begin = self.headers.get("Range")
                if begin is None:
                    self._send(200, data, headers)
                    return
                first = int(begin.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                self._send(206, data[first:], headers)

            def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if hub.cut_after is not None and len(body) > hub.cut_after:
                    self.wfile.write(body[: hub.cut_after])
                    hub.cut_after, self.close_connection = None, True
                    return
                self.wfile.write(body)

        return Handler


@contextmanager
def fake_hub(
    repositories: Mapping[str, Mapping[str, bytes]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """The hub of the real client, with an own cache."""
    with FakeHub(repositories).running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + URL_TEMPLATE)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _info(parts: list[str], files: Mapping[str, bytes]) -> dict[str, Any]:
    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
    return {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings}


def _tree(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    entries = ((name, len(data), _digest(data)) for name, data in files.items())
    return [{"type": "file", "path": name, "size": size, "oid": digest} for name, size, digest in entries]
