"""The load generator against a server that is made up: what it counts, and what it does not forgive."""

import argparse
import asyncio
import json
from typing import Any

import httpx
import pytest

from foreword.bench.serve import ClientResult, ServeRepetition, measure_repetition, summary

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ARGS = argparse.Namespace(rounds=1, num_requests=2, concurrency=2, temperature=0.0)


def chunk(text: str = "", reason: str | None = None, usage: int | None = None) -> dict[str, Any]:
    choices = [{"delta": {"content": text}, "finish_reason": reason}] if usage is None else []
    return {"choices": choices, "usage": None if usage is None else {"completion_tokens": usage}}


def sse(*chunks: dict[str, Any]) -> httpx.Response:
    return httpx.Response(
        200, text="".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    )


async def one_call(response: httpx.Response) -> ClientResult:
    async with httpx.AsyncClient(
        base_url="http://box", transport=httpx.MockTransport(lambda _: response)
    ) as http:
        return (await measure_repetition(http, [BODY], 1)).results[0]


async def test_a_full_answer() -> None:
    call = await one_call(sse(chunk("ab"), chunk("c"), chunk(reason="stop"), chunk(usage=5)))
    assert (call.text, call.num_tokens, call.error) == ("abc", 5, None)
    assert call.ttft_s is not None and len(call.inter_token_s) == 1
    assert 0 < call.ttft_s <= call.total_s


@pytest.mark.parametrize(
    ("response", "part"),
    [
        (httpx.Response(503, text="gone"), "503"),
        (sse(chunk("ab")), "without a finish_reason"),
        (sse({"error": {"message": "engine died"}}), "engine died"),
    ],
)
async def test_what_is_not_an_answer(response: httpx.Response, part: str) -> None:
    assert part in str((await one_call(response)).error)


async def test_no_more_at_once_than_asked_for() -> None:
    open_now, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.001)
        open_now -= 1
        return sse(chunk("a", "stop"))

    async with httpx.AsyncClient(base_url="http://box", transport=httpx.MockTransport(handler)) as http:
        got = await measure_repetition(http, [BODY] * 9, 3)
    assert len(got.results) == 9
    assert most == 3


def round_of(*texts: str, seconds: float = 1.0, error: str | None = None) -> ServeRepetition:
    return ServeRepetition(tuple(ClientResult(text, 10, 0.1, [0.01], 0.5, error) for text in texts), seconds)


def test_summary() -> None:
    got = summary({"off": [round_of("a", "b", seconds=2.0)], "auto": [round_of("a", "b", seconds=1.0)]}, ARGS)
    assert (got["answered_all"], got["equal"], got["throughput_ratio"]) == (True, True, 2.0)
    assert got["modes"]["auto"]["tokens_per_second"] == 20.0
    assert got["modes"]["off"]["ttft_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}


def test_a_different_text_or_a_missing_answer_is_noticed() -> None:
    assert not summary({"off": [round_of("a", "b")], "auto": [round_of("a", "c")]}, ARGS)["equal"]
    assert not summary({"off": [round_of("a")], "auto": [round_of("a", error="503")]}, ARGS)["answered_all"]
