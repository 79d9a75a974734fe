"""`foreword bench speculate --base-url`: a real server end to end, and a fake one that fails."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from foreword.bench.measurement import AUTO, BenchCase
from foreword.bench.remote import RemoteTarget, draft_stats_since
from foreword.bench.server import ServerProcess
from foreword.bench.workloads import PromptBudget, make_conversations
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.errors import ForewordError
from tests.support.checkpoints import write_checkpoint

BUDGET = PromptBudget(40, 8, 1.0, 1.0, range(10, 60), ("def f(value):\n    return value",))
ANSWER = 'data: {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}\n\n'
METRICS = """# TYPE foreword_spec_drafts_total counter
foreword_spec_drafts_total{drafter="suffix"} 3
"""


@pytest.mark.full
def test_bench_speculate_measures_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    categories = {"repeat", "predicted", "agent"}
    words = ["--concurrency", "2", "--rounds", "1", "--requests", "2", "--max-tokens", "8"]
    config = Config(model=model, speculate="ngram", draft_length="fixed", kv_cache_memory="3000tokens")
    with ServerProcess(config) as server:
        words += ["--context", "160", "--base-url", server.url, "--categories", ",".join(categories)]
        code = main(["bench", "speculate", *words])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, result["equal"], result["answered_all"]) == (0, True, True)
    assert {cell["category"] for cell in result["cells"]} == categories
    agent = next(cell for cell in result["cells"] if cell["category"] == "agent")
    assert agent["requests"] > 2
    assert {"throughput", "first_token", "stage_us_per_token"} <= set(agent["modes"]["auto"])
    drafted = [cell["modes"]["auto"].get("drafted", 0) for cell in result["cells"]]
    assert max(drafted) > 0, "the counts come from /metrics"
    assert all("drafted" not in cell["modes"]["off"] for cell in result["cells"])


def fake_server(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.MockTransport:
    """A server with a model card and metrics; `answer` handles completions."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=METRICS)
        return answer(request)

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
def test_incomplete_answer_is_an_error(status: int, lines: str, part: str) -> None:
    transport = fake_server(lambda request: httpx.Response(status, text=lines))
    target = RemoteTarget("http://box/v1", None, transport)
    assert (target.model, target.max_len, target.drafters) == ("m", 100, ("suffix",))
    case = BenchCase("chat", 2, lambda variant: make_conversations("chat", 2, variant, BUDGET))
    pair = target.run_pairs(case, (AUTO,), 0)["auto"]
    assert all(part in str(result.error) for result in pair.other.results)


def test_unreachable_server_is_a_foreword_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ForewordError, match="refused"):
        RemoteTarget("http://box", None, httpx.MockTransport(refuse))


def test_every_pair_has_new_prompts() -> None:
    sent: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        sent.append((body["speculation"]["method"], json.dumps(body["messages"])))
        return httpx.Response(200, text=ANSWER)

    target = RemoteTarget("http://box", None, fake_server(answer))
    case = BenchCase("json", 1, lambda variant: make_conversations("json", 1, variant, BUDGET))
    for number in range(2):
        target.run_pairs(case, (AUTO,), number)
    first, second = sent[:3], sent[3:]
    assert [method for method, _ in first] == ["off", "off", "auto"], "prefix cache first, then the pair"
    assert [method for method, _ in second] == ["off", "auto", "off"], "in the other order"
    assert len({prompt for _, prompt in first}) == len({prompt for _, prompt in second}) == 1
    assert first[0][1] != second[0][1]


def test_draft_stats_since_subtracts_the_first_reading() -> None:
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
    ((drafter, stats),) = draft_stats_since(before, after).items()
    assert drafter == "a"
    assert (stats.num_verify_steps, stats.num_drafted) == (2, 5)
    assert (stats.num_accepted, stats.num_emitted) == (2, 4)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([2, 2, 1], [2])


def test_target_of_one_load_repeats_its_prompts() -> None:
    """Prompts of `bench serve`: the same in every round, nothing read into the cache before."""
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["speculation"]["method"])
        return httpx.Response(200, text=ANSWER)

    target = RemoteTarget("http://box", None, fake_server(answer), "m", isolated=False)
    case = BenchCase("json", 1, lambda variant: make_conversations("json", 1, 0, BUDGET))
    target.run_pairs(case, (AUTO,), 0)
    assert sent == ["off", "auto"]
    with pytest.raises(ForewordError, match="no model other; it has m"):
        RemoteTarget("http://box", None, fake_server(answer), "other")
