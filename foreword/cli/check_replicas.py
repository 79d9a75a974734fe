"""The servers of --replica-urls: what they run, and which of them cannot go on with the others' answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from foreword.cli.check_report import CheckResult
from foreword.config.options import Config
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.router import describe_difference
from foreword.errors import ConfigError, ForewordError
from foreword.planning.resolve import EngineInfo

ANSWER_S: Final = 5.0  # until a server counts as absent


def check_replicas(config: Config) -> Iterator[CheckResult]:
    """Compare each server with the first that answers."""
    first: EngineInfo | None = None
    for url, answer in zip(config.remote_urls, asyncio.run(_ask_all(config)), strict=True):
        if isinstance(answer, ForewordError):
            yield CheckResult(False, f"replica {url}: {answer.message}")
            continue
        first = first or answer
        problem = describe_difference(first, answer, config.max_model_len)
        facts = f"context {answer.resolved.max_model_len} tokens, fingerprint {answer.fingerprint}"
        yield CheckResult(not problem, f"replica {url}: {problem or facts}")


async def _ask_all(config: Config) -> Sequence[EngineInfo | ForewordError]:
    return await asyncio.gather(*(_ask(url, str(config.engine_key)) for url in config.remote_urls))


async def _ask(url: str, key: str) -> EngineInfo | ForewordError:
    client = RemoteClient(url, key)
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.start()
    except ForewordError as error:
        return error
    except TimeoutError:
        return ConfigError(client.readiness.detail, "replica_urls")
    finally:
        await client.close()
