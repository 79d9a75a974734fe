"""`foreword run-batch -i FILE -o FILE [MODEL]`: answer a file of requests in OpenAI's batch format.

The server's application runs in this process, or --url names a running server. Results are written as they
come; the same command continues an interrupted run.

Exit codes: 0 all lines answered, 1 some failed or the server is gone, 2 it could not start, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from httpx import ASGITransport
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from foreword.cli.batch_file import BatchLine, BatchOutput, InvalidLine, error_line, read_lines, success_line
from foreword.cli.client import connection_options, server_url
from foreword.cli.configuration import read_config
from foreword.cli.startup import startup_line
from foreword.cli.terminal import progress_bar, set_up_logging, stderr_console
from foreword.config.models_file import ModelsConfig, read_models
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ConfigError, EngineDead, ModelLoadFailed, shown
from foreword.fleet.memory import plan_server
from foreword.fleet.model_manager import ModelManager
from foreword.server.app import create_app
from foreword.server.health import DrainState, Health
from foreword.server.http.request_log import open_request_log

SERVER_GONE_S = 30.0  # pauses without an answer after which a remote server counts as gone
MIN_RETRY_S, MAX_RETRY_S = 0.05, 5.0  # between tries where the server does not say when
MAX_RETRY_AFTER_S = 120.0  # limit of Retry-After
WAIT_NOTICE_S = 30.0  # between two lines that say that requests wait
RETRIED = (429, 502, 503, 504)  # the server, or the proxy before it, cannot answer now
REMOTE_CONCURRENCY = 64
IN_PROCESS = "http://in-process"


@dataclass(slots=True)
class BatchSummary:
    done: int = 0  # answered by an earlier run
    ok: int = 0
    failed: int = 0
    retries: int = 0  # requests that a busy server was sent again
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def add(self, ok: bool, body: Any) -> None:
        self.ok += ok
        self.failed += not ok
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += _int_or_zero(usage.get("prompt_tokens"))
            self.generated_tokens += _int_or_zero(usage.get("completion_tokens"))

    def text(self, output: Path) -> str:
        seconds = time.monotonic() - self.started_s
        before = f", {self.done} were before" if self.done else ""
        retries = f", {self.retries} retries of a busy server" if self.retries else ""
        rate = self.generated_tokens / max(seconds, 1e-9)
        return (
            f"{output}: {self.ok} answered, {self.failed} failed{before}{retries}; "
            f"{self.prompt_tokens} tokens read, "
            f"{self.generated_tokens} written in {seconds:.1f} s ({rate:.1f} tokens/s)"
        )


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level, config.log_format)
    if config.log_level != "debug":
        logging.getLogger("foreword").setLevel("WARNING")  # not one line per request
    source, target = Path(args.input), Path(args.output)
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}", "concurrency")
    if args.url is not None:
        _check_url(args.url)
    total, summary = sum(1 for _ in read_lines(source)), BatchSummary()
    with BatchOutput(target) as output:
        try:
            with progress_bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
                lines = read_lines(source)
                if args.url is None and config.models is not None:
                    lines = lines_by_model(source, read_models(config))
                items = _pending_lines(lines, output, summary, progress, total)
                if (first := next(items, None)) is not None:
                    say = partial(progress.console.print, markup=False)
                    asyncio.run(_run(config, args, chain([first], items), output, summary, say))
        finally:
            startup_line.end()
            stderr_console().print(summary.text(target), markup=False)
        return 1 if summary.failed or output.num_errors else 0


def _check_url(text: str) -> None:
    """Raises ConfigError: retries would not mend it."""
    try:
        is_valid = httpx.URL(server_url(text)).scheme in ("http", "https")
    except httpx.InvalidURL:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {shown(text, 200)}", "url")


def lines_by_model(source: Path, models: ModelsConfig) -> Iterator[BatchLine | InvalidLine]:
    """The lines grouped by model, so that each is loaded once; the file is read once for each model."""
    owners = {name: entry.name for entry in models.entries for name in entry.names}

    def owner(item: BatchLine | InvalidLine) -> str | None:
        """The name of its model; None for a line that no model answers."""
        if not isinstance(item, BatchLine):
            return None
        name = item.body.get("model")
        return owners.get(name) if isinstance(name, str) else models.entries[0].name

    for group in dict.fromkeys(map(owner, read_lines(source))):
        yield from (item for item in read_lines(source) if owner(item) == group)


def _pending_lines(
    lines: Iterable[BatchLine | InvalidLine],
    output: BatchOutput,
    summary: BatchSummary,
    progress: Progress,
    total: int,
) -> Iterator[BatchLine | InvalidLine]:
    """The lines without a result. Progress counts a line when the next one is taken."""
    task = progress.add_task("answering", total=total)
    for item in lines:
        if output.contains(item):
            summary.done += 1
        else:
            yield item
        progress.advance(task)


async def _run(
    config: Config,
    args: argparse.Namespace,
    items: Iterator[BatchLine | InvalidLine],
    output: BatchOutput,
    summary: BatchSummary,
    say: Callable[[str], None],
) -> None:
    if args.url is not None:
        async with _http_client(args.url, config) as http:
            startup_line.end()
            client = BatchClient(http, SERVER_GONE_S, say)
            return await answer_all(client, items, output, summary, args.concurrency or REMOTE_CONCURRENCY)
    # No other client can connect, so keys are not needed and requests may wait.
    config = replace(config, api_key=None, api_key_file=None, queue_timeout=0.0)
    # A model that is alone is gone with its engine; one of several is loaded again.
    gone_s = 0.0 if config.models is None else SERVER_GONE_S
    async with (
        _application(config) as (app, max_num_seqs),
        _http_client(IN_PROCESS, config, ASGITransport(app, raise_app_exceptions=False)) as http,
    ):
        concurrency = args.concurrency or 2 * max_num_seqs
        await answer_all(BatchClient(http, gone_s, say), items, output, summary, concurrency)


@asynccontextmanager
async def _application(config: Config) -> AsyncIterator[tuple[FastAPI, int]]:
    """The server's application, and the largest number of requests that one of its models runs at a time."""
    with ForkServer() as fork_server:
        plan = await plan_server(config, fork_server)
        async with (
            open_request_log(config) as request_log,
            ModelManager(config, plan, fork_server) as manager,
        ):
            await manager.wait_ready()
            startup_line.end()
            drain = DrainState()
            app = create_app(manager.models, Health(drain, manager), drain, request_log)
            async with app.router.lifespan_context(app):
                if manager.alone is not None:
                    yield app, manager.alone.info().resolved.max_num_seqs
                else:
                    resolved = (each.resolved for each in plan.plans)
                    yield app, max(each.max_num_seqs if each else REMOTE_CONCURRENCY for each in resolved)


def _http_client(
    url: str, config: Config, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    options = connection_options(url, config.api_key)
    return httpx.AsyncClient(**options, transport=transport, limits=httpx.Limits(max_connections=None))


async def answer_all(
    client: BatchClient,
    items: Iterator[BatchLine | InvalidLine],
    output: BatchOutput,
    summary: BatchSummary,
    concurrency: int,
) -> None:
    """Send all items, `concurrency` at a time, and write the results. Raises EngineDead."""

    async def work() -> None:
        for item in items:  # shared by all workers
            if isinstance(item, InvalidLine):
                output.write(error_line(item))
                summary.failed += 1
            else:
                response = await client.ask(item)
                body = _response_body(response)
                record = success_line(item, response.status_code, response.headers.get("x-request-id"), body)
                output.write(record)
                summary.add(response.status_code == 200 and record["error"] is None, body)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        summary.retries += client.num_retries
        await asyncio.gather(*workers, return_exceptions=True)


class BatchClient:
    """Retries requests: without limit at a server that is busy or says when to retry (Retry-After), for
    `gone_timeout_s` at one that does not answer.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        gone_timeout_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,  # called with a line about waiting requests
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.num_retries = 0
        self._http = http
        self._gone_timeout_s = gone_timeout_s
        self._say = say
        self._sleep = sleep
        self._num_waiting = 0
        self._said_s = -WAIT_NOTICE_S

    async def ask(self, line: BatchLine) -> httpx.Response:
        """The response to one line. Raises EngineDead."""
        content, pause_s, gone_s = json.dumps(line.body).encode(), MIN_RETRY_S, 0.0
        while True:
            retry_after_s = None
            try:
                response = await self._http.post(
                    line.url, content=content, headers={"Content-Type": "application/json"}
                )
            except httpx.HTTPError as error:
                status, reason = None, str(error) or type(error).__name__
            else:
                status, reason = response.status_code, f"status {response.status_code}"
                if status not in RETRIED or _is_load_failure(response):
                    return response
                retry_after_s = _retry_after_s(response)
            is_alive = status == 429 or retry_after_s is not None
            gone_s = 0.0 if is_alive else gone_s + pause_s
            if gone_s > self._gone_timeout_s:
                raise EngineDead(
                    f"{self._http.base_url} does not answer ({reason}); the same command continues the run"
                )
            self.num_retries += 1
            await self._wait(reason, pause_s if retry_after_s is None else retry_after_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _wait(self, reason: str, seconds: float) -> None:
        self._num_waiting += 1
        if time.monotonic() - self._said_s >= WAIT_NOTICE_S:
            self._said_s = time.monotonic()
            count = f"{self._num_waiting} request{'s' * (self._num_waiting > 1)}"
            again = f"{count} will be sent again in {seconds:g} s"
            self._say(f"{self._http.base_url} cannot answer now ({reason}); {again}")
        try:
            await self._sleep(seconds)
        finally:
            self._num_waiting -= 1


def _is_load_failure(response: httpx.Response) -> bool:
    """Whether the model of the line cannot be loaded; lines of other models are answered."""
    body = _response_body(response)
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == ModelLoadFailed.code


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of Retry-After, a number or a date; None without a valid one."""
    text = response.headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def _response_body(response: httpx.Response) -> Any:
    """The JSON of a response, or its text."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text


def _int_or_zero(value: Any) -> int:
    """A count of a server that may send anything."""
    return value if isinstance(value, int) else 0
