"""`foreword run-batch -i FILE -o FILE [MODEL]`: a file of requests in OpenAI's batch format becomes a file of answers.

The server's own application answers, in this process; with --url one that runs already. Answers are written as they
come. A run that was cut short is taken up by the same command.

Exit codes: 0 every line is answered, 1 some are errors or the server is gone, 2 it could not start, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from httpx import ASGITransport
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from foreword.checkpoint import prepare_checkpoint
from foreword.cli.batch_file import BatchLine, BatchOutput, InvalidLine, error_line, read_lines, success_line
from foreword.cli.options import add_config_options, read_config
from foreword.cli.server_stack import ServerStack
from foreword.cli.terminal import set_up_logging, stderr_console
from foreword.config.options import Config
from foreword.errors import ConfigError, EngineDead
from foreword.metrics.recorder import MetricsRecorder

__all__ = ["BatchClient", "BatchSummary", "add_arguments", "answer_all", "run"]

SERVER_GONE_S = 30.0  # a server that has been gone for so long is gone
MIN_RETRY_S, MAX_RETRY_S = 0.05, 5.0
REMOTE_CONCURRENCY = 64
IN_PROCESS = "http://in-process"


@dataclass(slots=True)
class BatchSummary:
    """What became of the lines: done counts those that had their answer before."""

    done: int = 0
    ok: int = 0
    failed: int = 0
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
        return (
            f"{output}: {self.ok} answered, {self.failed} failed{before}; {self.prompt_tokens} tokens read, "
            f"{self.generated_tokens} written in {seconds:.1f} s ({self.generated_tokens / max(seconds, 1e-9):.1f} tokens/s)"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model"
    )
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="requests, one JSON object a line"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="answers; those it holds already stay"
    )
    parser.add_argument("--url", metavar="URL", help="ask this server instead of loading a model here")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at once (default: twice what the engine runs)"
    )
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level)
    logging.getLogger("foreword").setLevel(
        "DEBUG" if config.log_level == "debug" else "WARNING"
    )  # no line for each request
    source, target = Path(args.input), Path(args.output)
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}", "concurrency")
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError("--output must be another file than --input", "output")
    total, tally = sum(1 for _ in read_lines(source)), BatchSummary()
    with BatchOutput(target) as output:
        try:
            with _progress() as progress:
                items = _pending_lines(source, output, tally, progress, total)
                if (first := next(items, None)) is not None:
                    asyncio.run(_run(config, args, chain([first], items), output, tally))
        finally:
            stderr_console().print(tally.text(target), markup=False)
        return 1 if tally.failed or output.num_errors else 0


def _pending_lines(
    source: Path, output: BatchOutput, summary: BatchSummary, progress: Progress, total: int
) -> Iterator[BatchLine | InvalidLine]:
    """The lines without an answer. A line counts as done when the next one is asked for."""
    task = progress.add_task("answering", total=total)
    for item in read_lines(source):
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
) -> None:
    if args.url is not None:
        async with _client(args.url.rstrip("/").removesuffix("/v1"), config) as http:
            return await answer_all(
                BatchClient(http, SERVER_GONE_S),
                items,
                output,
                summary,
                args.concurrency or REMOTE_CONCURRENCY,
            )
    config = _without_auth(config)
    async with (
        _application(config) as app,
        _client(IN_PROCESS, config, ASGITransport(app, raise_app_exceptions=False)) as http,
    ):
        concurrency = args.concurrency or 2 * app.state.server.info().resolved.max_num_seqs
        await answer_all(BatchClient(http), items, output, summary, concurrency)


def _without_auth(config: Config) -> Config:
    """Nobody else comes in here: keys are not asked for, and whoever waits may wait."""
    return replace(config, api_key=None, api_key_file=None, queue_timeout=0.0)


@asynccontextmanager
async def _application(config: Config) -> AsyncIterator[FastAPI]:
    """The server's application with a running engine behind it."""
    async with ServerStack(prepare_checkpoint(config)) as backends:
        info = await backends.start()
        app = backends.serving_app(
            MetricsRecorder(info.resolved.drafters, multimodal=info.image_token_id is not None)
        )
        async with app.router.lifespan_context(app):
            yield app


def _client(url: str, config: Config, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {config.api_key.split(',')[0]}"} if config.api_key else {}
    timeout, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=url, headers=headers, transport=transport, timeout=timeout, limits=limits
    )


async def answer_all(
    client: BatchClient,
    items: Iterator[BatchLine | InvalidLine],
    output: BatchOutput,
    summary: BatchSummary,
    concurrency: int,
) -> None:
    """Ask for every item, `concurrency` at a time, and write what comes. Raises EngineDead when nobody answers any more."""

    async def work() -> None:
        for item in items:  # shared: whoever is free takes the next
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
        await asyncio.gather(*workers, return_exceptions=True)


class BatchClient:
    """Asks a server until it answers: a busy one for as long as it takes, one that is gone for `patience_s`."""

    def __init__(self, http: httpx.AsyncClient, gone_timeout_s: float = 0.0) -> None:
        self._http = http
        self._gone_timeout_s = gone_timeout_s
        self._was_reached = False

    async def ask(self, line: BatchLine) -> httpx.Response:
        """The answer to one line. Raises EngineDead; a server that was never there is not waited for."""
        content, pause_s, gone_s = json.dumps(line.body).encode(), MIN_RETRY_S, 0.0
        while True:
            response, reason = await self._post(line.url, content)
            self._was_reached |= response is not None
            if response is not None and response.status_code not in (429, 503):
                return response
            gone_s = 0.0 if response is not None and response.status_code == 429 else gone_s + pause_s
            if gone_s > (self._gone_timeout_s if self._was_reached else 0.0):
                raise EngineDead(
                    f"{self._http.base_url} does not answer ({reason}); the same command goes on from here"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _post(self, url: str, content: bytes) -> tuple[httpx.Response | None, str]:
        """A response if there is one, and what to say if it is none to keep."""
        try:
            response = await self._http.post(
                url, content=content, headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            return None, str(error) or type(error).__name__
        return response, f"status {response.status_code}"


def _response_body(response: httpx.Response) -> Any:
    """The JSON of a response; what is none of ours may be a text."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text


def _int_or_zero(value: Any) -> int:
    """A count that a server tells; one of another make may tell anything."""
    return value if isinstance(value, int) else 0


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = stderr_console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
