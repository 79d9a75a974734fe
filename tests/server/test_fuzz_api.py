"""A few hundred requests of benchmarks/fuzz_api.py, from the server's OpenAPI document."""

import requests

from benchmarks import fuzz_api
from tests.server.conftest import RunningServer


def test_openapi_requests_are_answered_or_refused(demo: RunningServer) -> None:
    before = fuzz_api.probe(demo.url)
    findings = fuzz_api.fuzz(demo.url, 150, changes=2)
    assert not findings.failures
    assert fuzz_api.find_damage(demo.url, before) is None
    answered = {path for path, status in findings.statuses if status == 200}
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/score",
        "/tokenize",
    } <= answered
    assert {status for _, status in findings.statuses} <= {200, 400, 403, 404}  # 403: adapters are fixed


def test_violations_are_noticed(demo: RunningServer) -> None:
    assert fuzz_api.find_damage(demo.url, "another answer") == "an answer has changed"
    request = requests.Request("POST", demo.url, data=b"body").prepare()
    for status, text, wrong in (
        (500, "{}", True),
        (400, "oops", True),
        (400, '{"error": {"message": "no"}}', False),
        (200, "", False),
    ):
        reply = requests.Response()
        reply.status_code, reply.request, reply._content = status, request, text.encode()
        assert (fuzz_api.failure(reply) is not None) == wrong
