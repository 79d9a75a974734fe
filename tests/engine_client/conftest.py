"""One fork server for the engines of all modules."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from foreword.engine_client.forkserver import ForkServer
from tests.support.client_answers import CRASHING_ENGINE


@pytest.fixture(scope="package", autouse=True)
def python_path() -> Iterator[None]:
    """Fork servers can import the tests from any directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def fork_server(python_path: None) -> AsyncIterator[ForkServer]:
    fork_server = ForkServer(CRASHING_ENGINE)
    yield fork_server
    await fork_server.close()
