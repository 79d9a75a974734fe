"""The load generator of `foreword bench serve` against a fake server."""

import argparse
import asyncio
import json
from typing import Any

import httpx
import pytest

from foreword.bench.regime import RegimeError
from foreword.bench.serve import ClientResult, ServeRepetition, measure_repetition, summary

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ARGS = argparse.Namespace(rounds=1, num_requests=2, concurrency=2, temperature=0.0)


def chunk(text: str = "", reason: str | None = None, usage: int | None = None) -> dict[str, Any]:
    choices = [{"delta": {"content": text}, "finish_reason": reason}] if usage is None else []
    return {"choices": choices, "usage": None if usage is None else {"completion_tokens": usage}}


def sse(*chunks: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def client(handler: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://box", transport=httpx.MockTransport(handler))


async def send_one(response: httpx.Response) -> ClientResult:
    async with client(lambda _: response) as http:
        return (await measure_repetition(http, [BODY], 1)).results[0]


async def test_complete_answer_is_counted() -> None:
    result = await send_one(sse(chunk("ab"), chunk("c"), chunk(reason="stop"), chunk(usage=5)))
    assert (result.text, result.num_tokens, result.error) == ("abc", 5, None)
    assert result.ttft_s is not None and len(result.inter_token_s) == 1
    assert 0 < result.ttft_s <= result.total_s


@pytest.mark.parametrize(
    ("response", "part"),
    [
        (httpx.Response(503, text="gone"), "503"),
        (sse(chunk("ab")), "without a finish_reason"),
        (sse({"error": {"message": "engine died"}}), "engine died"),
    ],
)
async def test_incomplete_answer_is_an_error(response: httpx.Response, part: str) -> None:
    assert part in str((await send_one(response)).error)


async def test_concurrency_is_bounded() -> None:
    running, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return sse(chunk("a", "stop"), chunk(usage=1))

    async with client(handler) as http:
        repetition = await measure_repetition(http, [BODY] * 9, 3)
    assert (len(repetition.results), most) == (9, 3)


async def test_answer_without_usage_is_no_measurement() -> None:
    async with client(lambda _: sse(chunk("a", "stop"))) as http:
        with pytest.raises(RegimeError, match="answers without a number of tokens"):
            await measure_repetition(http, [BODY], 1)


def repetition_of(*texts: str, seconds: float = 1.0, error: str | None = None) -> ServeRepetition:
    return ServeRepetition(tuple(ClientResult(text, 10, 0.1, [0.01], 0.5, error) for text in texts), seconds)


def test_summary_compares_throughput_and_texts() -> None:
    plain, fast = repetition_of("a", "b", seconds=2.0), repetition_of("a", "b", seconds=1.0)
    result = summary({"off": [plain], "auto": [fast]}, ARGS)
    assert (result["answered_all"], result["equal"], result["throughput"]) == (True, True, {"ratio": 2.0})
    assert result["modes"]["auto"]["tokens_per_second"] == 20.0
    assert result["modes"]["off"]["ttft_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert not summary({"off": [plain], "auto": [repetition_of("a", "c")]}, ARGS)["equal"]
    failed = repetition_of("a", "b", error="503")
    assert not summary({"off": [plain], "auto": [failed]}, ARGS)["answered_all"]
