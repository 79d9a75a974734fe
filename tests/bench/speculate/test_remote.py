"""A server asked over HTTP: a real one end to end, and one that is made up where something must go wrong."""

import json
from pathlib import Path

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.bench.speculate.remote import RemoteTarget, draft_stats_since
from foreword.bench.speculate.types import AUTO, SpecCase
from foreword.bench.speculate.workloads import PromptBudget, make_conversations
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.errors import ForewordError
from tests.support.checkpoints import write_checkpoint

ROOM = PromptBudget(40, 8, 1.0, 1.0, range(10, 60), ("def f(value):\n    return value",))
METRICS = """# TYPE foreword_spec_drafts_total counter
foreword_spec_drafts_total{drafter="suffix"} 3
"""


def test_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    words = [
        "--categories",
        "repeat,predicted,agent,random,library continuation",
        "--concurrency",
        "2",
        "--rounds",
        "1",
    ]
    with ServerProcess(
        Config(model=model, speculate="ngram", draft_length="fixed", kv_cache_memory="3000tokens")
    ) as server:
        sizes = ["--requests", "2", "--max-tokens", "8", "--context", "160"]
        code = main(["bench", "speculate", "--base-url", server.url, *words, *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, result["equal"], result["answered_all"]) == (0, True, True)
    assert {cell["category"] for cell in result["cells"]} == {
        "repeat",
        "predicted",
        "agent",
        "random",
        "library continuation",
    }
    agent = next(cell for cell in result["cells"] if cell["category"] == "agent")
    assert agent["requests"] > 2
    assert {"throughput", "first_token", "stage_us_per_token"} <= set(agent["modes"]["auto"])
    drafted = [cell["modes"]["auto"].get("drafted", 0) for cell in result["cells"]]
    assert max(drafted) > 0, "the counts come from /metrics"
    assert all("drafted" not in cell["modes"]["off"] for cell in result["cells"])


def answering(status: int, lines: str) -> httpx.MockTransport:
    """A server that knows one answer."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})
        return (
            httpx.Response(200, text=METRICS)
            if request.url.path == "/metrics"
            else httpx.Response(status, text=lines)
        )

    return httpx.MockTransport(handle)


@pytest.mark.parametrize(
    ("status", "lines", "part"),
    [
        (503, "gone", "503"),
        (200, 'data: {"error": {"message": "engine died"}}\n\n', "engine died"),
        (
            200,
            'data: {"choices": [{"token_ids": [1], "finish_reason": null}]}\n\ndata: [DONE]\n\n',
            "without a finish_reason",
        ),
    ],
)
def test_what_is_not_an_answer_is_an_error(status: int, lines: str, part: str) -> None:
    target = RemoteTarget("http://box/v1", None, answering(status, lines))
    assert (target.model, target.max_len, target.drafters) == ("m", 100, ("suffix",))
    cell = SpecCase("chat", 2, lambda variant: make_conversations("chat", 2, variant, ROOM))
    pair = target.run_pairs(cell, (AUTO,), 0)["auto"]
    assert all(part in str(call.error) for call in pair.other.results)


def test_no_server_is_one_line() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ForewordError, match="refused"):
        RemoteTarget("http://box", None, httpx.MockTransport(refuse))


def test_every_pair_has_prompts_of_its_own() -> None:
    asked: list[tuple[str, str]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path in ("/v1/models", "/metrics"):
            return httpx.Response(200, text=METRICS, json=None) if request.url.path == "/metrics" else CARD
        body = json.loads(request.content)
        asked.append((body["speculation"]["method"], json.dumps(body["messages"])))
        return httpx.Response(
            200, text='data: {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}\n\n'
        )

    target = RemoteTarget("http://box", None, httpx.MockTransport(handle))
    cell = SpecCase("json", 1, lambda variant: make_conversations("json", 1, variant, ROOM))
    for number in range(2):
        target.run_pairs(cell, (AUTO,), number)
    first, second = asked[:3], asked[3:]
    assert [method for method, _ in first] == ["off", "off", "auto"], "primed, then the pair"
    assert [method for method, _ in second] == ["off", "auto", "off"], "the other way round"
    assert len({prompt for _, prompt in first}) == len({prompt for _, prompt in second}) == 1
    assert first[0][1] != second[0][1]


CARD = httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})


def test_counts_between_two_readings() -> None:
    before = {("spec_drafts_total", "a", ""): 1.0, ("spec_draft_tokens_total", "a", ""): 4.0}
    after = {
        ("spec_drafts_total", "a", ""): 3.0,
        ("spec_drafts_total", "b", ""): 0.0,
        ("spec_draft_tokens_total", "a", ""): 9.0,
        ("spec_accepted_tokens_total", "a", ""): 2.0,
        ("spec_emitted_tokens_total", "a", ""): 4.0,
        ("spec_draft_tokens_per_position_total", "a", "0"): 2.0,
        ("spec_draft_tokens_per_position_total", "a", "1"): 2.0,
        ("spec_draft_tokens_per_position_total", "a", "10"): 1.0,
        ("spec_accepted_tokens_per_position_total", "a", "0"): 2.0,
    }
    found = draft_stats_since(before, after)
    assert set(found) == {"a"}
    assert (
        found["a"].num_verify_steps,
        found["a"].num_drafted,
        found["a"].num_accepted,
        found["a"].num_emitted,
    ) == (2, 5, 2, 4)
    assert (found["a"].drafted_per_position, found["a"].accepted_per_position) == ([2, 2, 1], [2])
