"""The processes of `foreword fleet up`, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.cli import fleet
from foreword.config.options import Config


@pytest.mark.parametrize(
    ("codes", "num_started"),
    [
        ([2], 1),  # its configuration is wrong
        ([1, 2, 2, 0], 4),  # what it found at first is gone, such as Ray's head
    ],
)
def test_only_the_first_process_may_refuse_the_configuration(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], num_started: int
) -> None:
    monkeypatch.setattr(fleet, "MIN_BACKOFF_S", 0.0)
    started: list[int] = []

    class AllEnded(Exception):
        pass

    async def start() -> Any:
        if len(started) == len(codes):
            raise AllEnded
        started.append(codes[len(started)])
        return SimpleNamespace(wait=lambda code=started[-1]: asyncio.sleep(0, code))

    keep = fleet._Fleet(Config(port=8000))._keep(start)
    if len(codes) == 1:
        assert asyncio.run(keep) == fleet.EXIT_CONFIG
    else:
        with pytest.raises(AllEnded):
            asyncio.run(keep)
    assert len(started) == num_started
