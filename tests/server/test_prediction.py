"""The `prediction` field: draft tokens in the engine, and their usage."""

import json
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.core.request import Request
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput

CONTENT = {"type": "content", "content": "Hello there"}
PARTS = {
    "type": "content",
    "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}],
}
GUESSED = FakeOutput(
    "abcdefg", (4,), drafter="prediction"
)  # two drafts of four tokens; all but the EOS are accepted: 3 and 3


def details_of(served: RunningServer, stream: bool, **fields: Any) -> Any:
    """`completion_tokens_details` of an answer, streamed or whole."""
    if not stream:
        return served.chat(**fields).usage.completion_tokens_details
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    return chunks[-1].usage.completion_tokens_details


@pytest.mark.parametrize("prediction", [CONTENT, PARTS])
def test_prediction_reaches_the_engine_as_tokens(served: RunningServer, prediction: Any) -> None:
    served.chat(prediction=prediction, n=2)
    for request in served.client.submitted:
        assert bytes(request.prediction_ids) == b"Hello there"
        assert request.params.prediction is None


def of_one_choice(request: Request) -> FakeOutput:
    """Only the second choice is drafted from the prediction."""
    return FakeOutput("abcdefg", (4,), drafter="prediction" if request.id.endswith("-1") else "suffix")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "accepted", "rejected"),
    [
        (GUESSED, {}, 3 + 3, 1 + 1),
        (GUESSED, {"n": 3}, 18, 6),
        (of_one_choice, {"n": 3}, 6, 2),
        (FakeOutput("abcdefg", (8,), drafter="prediction"), {"stop": "c"}, 3, 8 - 3),
        (FakeOutput("abcdefg", (4,), drafter="suffix"), {}, 0, 0),
        (FakeOutput(), {"prediction": {"type": "content", "content": ""}}, 0, 0),
    ],
)
def test_usage_counts_accepted_tokens(
    served: RunningServer, script: Any, fields: dict[str, Any], accepted: int, rejected: int, stream: bool
) -> None:
    served.set_output(script)
    details = details_of(served, stream, **{"prediction": CONTENT, **fields})
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, rejected)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_without_a_prediction_has_no_prediction_tokens(served: RunningServer, stream: bool) -> None:
    served.set_output(GUESSED)
    for fields in ({}, {"prediction": None}):
        assert details_of(served, stream, **fields).model_dump(exclude_none=True) == {"reasoning_tokens": 0}


def test_rejected_tokens_are_not_completion_tokens(served: RunningServer) -> None:
    served.set_output(GUESSED)
    assert served.chat(prediction=CONTENT).usage.completion_tokens == len("abcdefg") + 1


def test_prediction_is_accepted_with_speculation_off() -> None:
    with run_server(Config(speculate="off"), FakeEngineClient()) as server:
        details = details_of(server, False, prediction=CONTENT)
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_prediction_in_completions(served: RunningServer) -> None:
    served.set_output(lambda request: script_of(request, {97: "prediction", 98: "suffix"}))
    answer = served.complete(["a", "b"], prediction=CONTENT, n=2)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, 4)
    assert {bytes(request.prediction_ids) for request in served.client.submitted} == {b"Hello there"}
    assert served.complete("a").usage.completion_tokens_details is None


def script_of(request: Request, drafters: dict[int, str]) -> FakeOutput:
    return FakeOutput("abcdefg", (4,), drafter=drafters[request.prompt_ids[0]])


def test_prompt_scoring_accepts_no_prediction_tokens(served: RunningServer) -> None:
    answer = served.complete("Say", echo=True, logprobs=1, max_tokens=0, prediction=CONTENT)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_prediction_with_other_features(served: RunningServer) -> None:
    served.set_output(GUESSED)
    answer = served.chat(
        prediction=CONTENT, temperature=0.7, seed=1, logprobs=True, top_logprobs=2,
        metrics=True, n=2, stop=["zz"],
        frequency_penalty=0.5, max_completion_tokens=5, return_token_ids=True, logit_bias={"97": 1},
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["abcde", "abcde"]
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2 * (3 + 1)


@pytest.mark.parametrize(
    ("prediction", "param", "words"),
    [
        ("Hello", "prediction", "must be"),
        ({"content": "x"}, "prediction.type", "required"),
        ({"type": "text", "content": "x"}, "prediction.type", "'content'"),
        ({"type": "content"}, "prediction.content", "required"),
        ({"type": "content", "content": 3}, "prediction.content", "must be a text or a list"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more", "unknown field"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type", "'text'"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]", "must be"),
        ({"type": "content", "content": "\ud800"}, "prediction", "surrogate at character 0"),
        ({"type": "content", "content": "x" * 2049}, "prediction", "2049 tokens; an answer has at most 2048"),
    ],
)
def test_invalid_prediction_is_named(served: RunningServer, prediction: Any, param: str, words: str) -> None:
    body = json.dumps({"prompt": "Hi", "prediction": prediction})
    reply = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert words in error["message"] and "prediction" in error["message"]
    assert not served.client.submitted
