"""Files of pictures, from wherever the operator allows."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Final

import httpx

from foreword.errors import InvalidRequest, ShuttingDown
from foreword.media.download import download
from foreword.media.limits import MediaLimits
from foreword.media.source import ImageSource
from foreword.media.urls import check_bytes, read_data_url, read_file_url

__all__ = ["Fetcher"]

NO_KEEPALIVE: Final = httpx.Limits(max_keepalive_connections=0)  # two hosts at one address must not share a connection


class Fetcher:
    """May be used from any thread; each call blocks its own. Downloads run in a loop, begun with the first of them."""

    def __init__(self, media_limits: MediaLimits) -> None:
        self._limits = media_limits
        self._lock = threading.Lock()
        self._download_loop: _DownloadLoop | None = None
        self._closed = False

    def fetch(self, source: ImageSource) -> bytes:
        """The file. Raises InvalidRequest, which names the field and says why; ShuttingDown after `close`."""
        where, max_bytes = source.where, self._limits.max_bytes
        if source.url is None:
            assert source.data is not None
            check_bytes(len(source.data), max_bytes, where)
            return source.data
        scheme = source.url.partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(source.url, max_bytes, where)
        if scheme == "file":
            return read_file_url(source.url, self._limits.local_path, max_bytes, where)
        if scheme in ("http", "https"):
            return self._get_download_loop().fetch(source.url, where)
        raise InvalidRequest(f"{where}: must be a data:, http:, https: or file: URL", where)

    def close(self) -> None:
        """Downloads are given up."""
        with self._lock:
            self._closed = True
            if self._download_loop is not None:
                self._download_loop.close()

    def _get_download_loop(self) -> _DownloadLoop:
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is about to end")
            if self._download_loop is None:
                self._download_loop = _DownloadLoop(self._limits)
            return self._download_loop


class _DownloadLoop:
    """A thread with a loop, in which every download has its deadline, whatever it waits for."""

    def __init__(self, media_limits: MediaLimits) -> None:
        self._limits = media_limits
        self._ssl_context = httpx.create_ssl_context(trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
        self._thread.start()

    def fetch(self, url: str, where: str) -> bytes:
        future = asyncio.run_coroutine_threadsafe(self._download(url, where), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ShuttingDown("the server is about to end") from None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _download(self, url: str, where: str) -> bytes:
        """With a client of its own: no cookie of one request reaches another."""
        async with httpx.AsyncClient(
            verify=self._ssl_context, trust_env=False, timeout=self._limits.timeout_s, limits=NO_KEEPALIVE
        ) as client:
            return await download(client, url, where, self._limits)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._cancel_downloads())
        self._loop.close()

    async def _cancel_downloads(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
