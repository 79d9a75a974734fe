"""Admission: bounds on open requests and tokens, Retry-After, and deadlines, alone and over HTTP."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.options import Config
from foreword.errors import InvalidRequest, Overloaded, RateLimited
from foreword.server.admission import Admission, AdmissionTicket, DrainRateEstimator
from foreword.server.auth.rate_limit import NO_KEY, UsageMeter
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import FakeClock


def admission(
    requests: int = 4, tokens: int = 100, clock: FakeClock | None = None
) -> tuple[Admission, Counter[str]]:
    reasons: Counter[str] = Counter()
    return Admission(requests, tokens, lambda reason: reasons.update([reason]), clock or FakeClock()), reasons


def test_requests_are_bounded() -> None:
    limiter, reasons = admission()
    ticket = limiter.admit(3, 10, UsageMeter())
    with pytest.raises(Overloaded, match="3 requests are open of at most 4; try again in 1 s"):
        limiter.admit(2, 10, UsageMeter())
    with pytest.raises(Overloaded):
        limiter.check(2, UsageMeter())
    with pytest.raises(InvalidRequest, match="at most 4 at once"):
        limiter.check(5, UsageMeter())
    limiter.check(1, UsageMeter())
    assert reasons == {"queue": 2} and (limiter.num_open, limiter.num_open_tokens) == (3, 10)
    ticket.release()
    ticket.release()
    assert (limiter.num_open, limiter.num_open_tokens) == (0, 0)


def test_tokens_are_bounded() -> None:
    limiter, reasons = admission()
    ticket = limiter.admit(1, 60, UsageMeter())
    with pytest.raises(Overloaded, match="hold 60 tokens of at most 100"):
        limiter.admit(1, 41, UsageMeter())
    with pytest.raises(InvalidRequest, match="hold 101 tokens; this server takes at most 100"):
        limiter.admit(1, 101, UsageMeter())
    assert reasons == {"queue_tokens": 1} and limiter.num_open == 1
    limiter.admit(1, 40, UsageMeter()).release()
    ticket.release()
    limiter.admit(1, 100, UsageMeter()).release()


def test_key_is_charged_for_tokens() -> None:
    limiter, _ = admission()
    meter = UsageMeter(replace(NO_KEY, tokens_per_minute=50, max_concurrency=3), FakeClock())
    ticket = limiter.admit(3, 90, meter, charged_tokens=30)
    ticket.charge_generated(4)
    assert (meter.open, meter.prompt_tokens, meter.generated_tokens) == (3, 30, 4)
    with pytest.raises(RateLimited, match="3 requests open"):
        limiter.check(1, meter)
    ticket.charge_generated(16)
    ticket.release()
    with pytest.raises(RateLimited, match="50 tokens a minute"):
        limiter.admit(1, 1, meter)
    assert (meter.open, limiter.num_open) == (0, 0)


def test_retry_after_follows_the_drain_rate() -> None:
    clock = FakeClock()
    limiter, _ = admission(requests=1000, tokens=1000, clock=clock)
    for _ in range(100):  # ten at once, of one second each
        tickets = [limiter.admit(1, 1, UsageMeter()) for _ in range(10)]
        clock.now += 1.0
        for ticket in tickets:
            ticket.release()
    limiter.admit(1000, 1, UsageMeter())
    waits = []
    for _ in range(700):
        with pytest.raises(Overloaded) as caught:
            limiter.check(1, UsageMeter())
        waits.append(caught.value.retry_after_s or 0.0)
    assert waits[0] == 1.0 and waits[99] == pytest.approx(10, rel=0.1), "the hundredth waits for 99 others"
    assert waits == sorted(waits) and waits[-1] == 60.0


def test_clients_in_a_loop_do_not_add_up() -> None:
    """Four slots are freed in a second, and 40 clients return at once whatever they are told."""
    clock = FakeClock()
    limiter, _ = admission(requests=16, clock=clock)
    tickets = [limiter.admit(1, 1, UsageMeter()) for _ in range(16)]
    for _ in range(240):
        clock.now += 0.25
        tickets.pop(0).release()
        tickets.append(limiter.admit(1, 1, UsageMeter()))
        for _ in range(40):
            with pytest.raises(Overloaded) as caught:
                limiter.check(1, UsageMeter())
    assert caught.value.retry_after_s == pytest.approx(16 / 4, rel=0.1), "the whole queue is free by then"


def test_idle_time_does_not_change_the_drain_rate() -> None:
    clock = FakeClock()
    limiter, _ = admission(requests=1, clock=clock)
    for _ in range(50):
        ticket = limiter.admit(1, 1, UsageMeter())
        clock.now += 2.0
        ticket.release()
        clock.now += 3600.0
    limiter.admit(1, 1, UsageMeter())
    with pytest.raises(Overloaded) as caught:
        limiter.check(1, UsageMeter())
    assert caught.value.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_earlier_retry_estimates_expire() -> None:
    outflow = DrainRateEstimator(20, 0.0)
    outflow.advance(10.0, busy=True)
    outflow.record_freed(10)
    first = [outflow.retry_after_s(1, 10.0) for _ in range(20)][-1]
    outflow.advance(40.0, busy=False)
    assert outflow.retry_after_s(1, 40.0) < first, "clients with earlier estimates have returned"


@given(st.lists(st.tuples(st.sampled_from("tdrxz"), st.integers(1, 6), st.integers(0, 60)), max_size=60))
def test_accounting_is_exact_in_any_order(actions: list[tuple[str, int, int]]) -> None:
    """t admits, d delivers, r releases, x releases twice, z lets time pass; refusals change nothing."""
    clock = FakeClock()
    limiter, _ = admission(requests=8, clock=clock)
    meters = [UsageMeter(replace(NO_KEY, max_concurrency=5, tokens_per_minute=200), clock), UsageMeter()]
    held: list[tuple[AdmissionTicket, int, int, UsageMeter]] = []
    for action, count, tokens in actions:
        if action == "t":
            meter = meters[count % 2]
            with contextlib.suppress(Overloaded, InvalidRequest):
                held.append((limiter.admit(count, tokens, meter), count, tokens, meter))
        elif action == "z":
            clock.now += count
        elif held:
            ticket, *_ = held[tokens % len(held)]
            ticket.charge_generated(count)
            if action in "rx":
                del held[tokens % len(held)]
                ticket.release()
                if action == "x":
                    ticket.release()
        assert limiter.num_open == sum(count for _, count, _, _ in held) <= 8
        assert limiter.num_open_tokens == sum(tokens for _, _, tokens, _ in held) <= 100
        for meter in meters:
            assert meter.open == sum(count for _, count, _, own in held if own is meter)
        assert meters[0].open <= 5


CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
HELD = FakeOutput("held", hang_after=1)
POSTS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")


@pytest.fixture
def full() -> Iterator[RunningServer]:
    """A server with two open requests, of at most two."""
    with (
        run_server(Config(max_waiting=2, max_waiting_tokens=100), FakeEngineClient(HELD)) as server,
        held(server, n=2),
    ):
        yield server


@contextlib.contextmanager
def held(server: RunningServer, prompt: str = "Hi", n: int = 1) -> Iterator[None]:
    body = {"prompt": prompt, "n": n, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield
    server.wait_until_idle()


def test_full_server_refuses_before_reading_the_body(full: RunningServer) -> None:
    with full.connect() as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 429")


def test_full_server_answers_without_engine(full: RunningServer) -> None:
    assert full.http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    for path, body in (
        ("/v1/responses/input_tokens", {"input": "abc"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        assert full.http.post(path, json=body).json()["input_tokens"] > 3
    assert full.http.get("/v1/models").status_code == 200
    for path in POSTS:
        reply = full.http.post(path, content=b"not even JSON")
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded"), path
        assert int(reply.headers["Retry-After"]) >= 1


def test_flood_is_refused_and_leaves_nothing(full: RunningServer) -> None:
    def ask(index: int) -> int:
        return full.http.post(POSTS[index % len(POSTS)], json={"messages": USER}).status_code

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(ask, range(512))) == {429}
    assert len(full.client.submitted) == 2 and full.app.state.models.admission.num_open == 2
    assert (
        'foreword_requests_rejected_total{model="fake-model",reason="queue"} 512.0'
        in full.http.get("/metrics").text
    )
    assert full.http.get("/health").status_code == 200


def test_prompt_tokens_are_bounded() -> None:
    with run_server(Config(max_waiting_tokens=100), FakeEngineClient(HELD)) as server:
        with held(server, "x" * 60):
            with pytest.raises(openai.RateLimitError, match="hold 60 tokens of at most 100") as caught:
                server.complete("x" * 41)
            assert int(caught.value.response.headers["Retry-After"]) == 1
            assert server.http.post("/v1/embeddings", json={"input": "x" * 41}).status_code == 429
            assert server.app.state.models.admission.num_open_tokens == 60
        with pytest.raises(openai.BadRequestError, match="hold 120 tokens; this server takes at most 100"):
            server.complete("x" * 60, n=2)
        assert 'reason="queue_tokens"} 2.0' in server.http.get("/metrics").text


def test_parameters_count_once_for_each_choice() -> None:
    """A constraint of 1 MB and 4096 choices were 4 GB in the engine."""
    bodies: list[dict[str, Any]] = [
        {"allowed_token_ids": list(range(50))},
        {"logit_bias": {str(i): 1 for i in range(50)}},
        {"stop_token_ids": [5] * 50},
        {"bad_words": ["b" * 50]},
        {"prediction": {"type": "content", "content": "b" * 50}},
        {"structured_outputs": {"choice": ["b" * 32 * 50]}},
        {"prompt": "x" * 11, "prompt_logprobs": 1},
    ]
    with run_server(Config(max_waiting_tokens=100), FakeEngineClient(FakeOutput("ok"))) as server:
        for fields in bodies:
            body = {"prompt": "x", **fields}
            assert server.http.post("/v1/completions", json=body).status_code == 200
            param = "prompt_logprobs" if "prompt_logprobs" in body else "prompt"
            for more in ({"n": 2}, {"prompt": [body["prompt"]] * 2}):
                reply = server.http.post("/v1/completions", json={**body, **more})
                assert reply.status_code == 400
                assert "takes at most 100" in reply.json()["error"]["message"]
                assert reply.json()["error"]["param"] == param
        assert server.app.state.models.admission.num_open_tokens == 0


def test_deadlines_are_set_on_requests() -> None:
    with run_server(
        Config(queue_timeout=7, request_timeout=60), FakeEngineClient(FakeOutput("ok"))
    ) as server:
        server.chat()
        server.http.post("/v1/completions", json={"prompt": "Hi", "timeout": 2.5})
        server.http.post("/v1/embeddings", json={"input": "aa"})
        chat, completion, embedding = server.client.submitted
    assert chat.queue_deadline_s == pytest.approx(chat.arrival_s + 7)
    assert chat.deadline_s == pytest.approx(chat.arrival_s + 60)
    assert completion.deadline_s == pytest.approx(completion.arrival_s + 2.5)
    assert embedding.queue_deadline_s is not None


def test_no_limits_set_no_deadlines() -> None:
    with run_server(Config(queue_timeout=0), FakeEngineClient(FakeOutput("ok"))) as server:
        server.chat()
        server.http.post("/v1/embeddings", json={"input": "aa"})
        for request in server.client.submitted:
            assert (request.queue_deadline_s, request.deadline_s, request.fairness_key) == (None, None, "")


def test_too_long_timeout_is_refused() -> None:
    headers = {"Content-Type": "application/json"}
    with run_server(Config(request_timeout=60)) as server:
        for timeout in ("0", "-1", "61", "1e400"):
            body = f'{{"prompt": "a", "timeout": {timeout}}}'
            reply = server.http.post("/v1/completions", content=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "timeout")


def test_embedding_deadline() -> None:
    with run_server(Config(request_timeout=0.2), FakeEngineClient(HELD)) as server:
        began = time.monotonic()
        reply = server.http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert time.monotonic() - began >= 0.2
        server.wait_until_idle()
        assert sorted(server.client.aborted) == sorted(request.id for request in server.client.submitted)


def test_post_to_a_public_path_is_a_405() -> None:
    with run_server(Config(api_key="k")) as server:
        for path in ("/health", "/metrics", "/live", "/docs"):
            assert server.http.post(path, json={}).status_code == 405


def test_refusals_while_draining_are_counted() -> None:
    with run_server(Config(api_key="k")) as server:
        server.app.state.health.drain.draining = True
        assert server.http.post(CHAT, json={}).status_code == 503
        assert (
            'foreword_requests_rejected_total{model="fake-model",reason="draining"} 1.0'
            in server.http.get("/metrics").text
        )
        server.app.state.health.drain.draining = False


def test_cors_exposes_the_limits() -> None:
    with run_server(Config(cors_origins="https://a.example")) as server:
        exposed = server.http.get("/live", headers={"Origin": "https://a.example"}).headers[
            "access-control-expose-headers"
        ]
        assert {"Retry-After", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests"} <= set(
            exposed.split(", ")
        )
