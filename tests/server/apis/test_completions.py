"""/v1/completions with a fake engine."""

import json
from typing import Any

import openai
import pytest

from foreword.core.outputs import TokenLogprob
from foreword.server.answering import streaming
from foreword.server.answering.generation import Generation
from foreword.server.apis import completions
from foreword.tokenizer import input_processor
from foreword.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import RunningServer
from tests.support import fakes
from tests.support.counted_work import record_threads
from tests.support.fakes import BOS, EOS, FakeOutput

HI = [{"role": "user", "content": "Hi"}]


def test_completion(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello", (2,)))
    answer = served.complete("Say")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)


def test_default_is_sixteen_tokens(served: RunningServer) -> None:
    served.set_output(FakeOutput("abc", (5,)))
    answer = served.complete(ignore_eos=True)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    assert answer.choices[0].text == "abcabcabcabcabca"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_types(served: RunningServer, prompt: Any, ids: list[list[int]], n: int) -> None:
    served.set_output(lambda request: FakeOutput(f"<{request.prompt_ids[0]}>{request.seed}"))
    answer = served.complete(prompt, n=n, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(n * len(ids)))
    assert [choice.text for choice in answer.choices] == [
        f"<{one[0]}>{1 + i}" for one in ids for i in range(n)
    ]
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_stream_of_several_prompts(served: RunningServer) -> None:
    served.set_output(lambda request: FakeOutput(f"answer {request.prompt_ids[0]}", (3,)))
    chunks = list(served.complete(["a", "b"], stream=True, stream_options={"include_usage": True}))
    texts = [
        "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i) for i in range(2)
    ]
    assert texts == ["answer 97", "answer 98"]
    assert sorted(c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason) == [0, 1]
    assert chunks[-1].usage.prompt_tokens == 2 and chunks[-1].choices == []


@pytest.mark.parametrize("prompt", ["Say", [ord("S"), ord("a"), ord("y")]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(served: RunningServer, prompt: Any, stream: bool) -> None:
    answer = served.complete(prompt, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == "SayHello world"


def test_logprobs(served: RunningServer) -> None:
    served.set_output(FakeOutput("hé", (3,)))
    found = served.complete(logprobs=2).choices[0].logprobs
    assert found.tokens == ["h", "\ufffd", "\ufffd", "<|eos|>"]
    assert found.token_logprobs == [-0.5] * 4
    assert found.text_offset == [0, 1, 1, 2]
    assert found.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    assert served.complete(logprobs=0).choices[0].logprobs.top_logprobs[0] == {"h": -0.5}
    assert served.complete().choices[0].logprobs is None


def test_token_itself_comes_first_among_its_alternatives(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(token_id: int, count: int | None) -> TokenLogprob:
        return TokenLogprob(token_id, -2.0, 2, ((ord("z"), -0.25),))

    monkeypatch.setattr(fakes, "logprob_of", second)
    served.set_output(FakeOutput("h", logprob=-2.0))
    top = served.complete(logprobs=1).choices[0].logprobs.top_logprobs[0]
    assert [*top.items()] == [("h", -2.0), ("z", -0.25)]


def test_echo_with_logprobs(served: RunningServer) -> None:
    served.set_output(FakeOutput("ab"))
    found = (
        served.complete([BOS, ord("S"), ord("o")], echo=True, logprobs=1, max_tokens=2).choices[0].logprobs
    )
    assert found.tokens == ["<|bos|>", "S", "o", "a", "b"]
    assert found.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert found.text_offset == [0, 0, 1, 2, 3]
    assert found.top_logprobs[:2] == [None, {"S": -0.5}]


def test_streamed_logprobs_match(served: RunningServer) -> None:
    served.set_output(FakeOutput("one two three", (4,)))
    whole = served.complete("So", echo=True, logprobs=1, stop="three").choices[0].logprobs
    chunks = list(served.complete("So", echo=True, logprobs=1, stop="three", stream=True))
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [
            value for c in chunks if c.choices[0].logprobs for value in getattr(c.choices[0].logprobs, key)
        ]
        assert streamed == getattr(whole, key)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_keeps_no_logprobs(served: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """20 of each token were 3 KB a token until the answer's end."""
    kept: list[int] = []

    def close(generation: Generation) -> None:
        kept.extend(len(output.logprobs) for output in generation.outputs)
        close_generation(generation)

    close_generation = Generation.close
    monkeypatch.setattr(Generation, "close", close)
    served.set_output(FakeOutput("one two three", (4,)))
    fields = (
        {"prompt": "So", "logprobs": 1} if path == "/v1/completions" else {"messages": HI, "logprobs": True}
    )
    for stream in (False, True):
        assert served.http.post(path, json={**fields, "stream": stream}).status_code == 200
        served.wait_until_idle()
    assert kept[0] > 0 == kept[-1]


def test_prompt_is_scored_without_an_answer(served: RunningServer) -> None:
    answer = served.complete("Say", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "Say"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (0, "length")


def test_best_of_may_equal_n(served: RunningServer) -> None:
    assert len(served.complete(n=2, best_of=2).choices) == 2
    assert len(list(served.complete(n=1, best_of=1, stream=True))) > 1


def rated(request: Any) -> FakeOutput:
    """The third choice is the likeliest, then the second; longer choices are less likely."""
    rank = (request.seed - 7) % 4
    return FakeOutput(f"{chr(request.prompt_ids[0])}{rank}", logprob=(-3.0, -1.0, -0.5, -2.0)[rank])


def test_best_of_returns_likeliest_and_counts_all(served: RunningServer) -> None:
    served.set_output(rated)
    answer = served.complete(["a", "b"], n=2, best_of=4, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a2"),
        (1, "a1"),
        (2, "b2"),
        (3, "b1"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2 * 4 * 3)
    assert all(choice.logprobs is None for choice in answer.choices)
    scored = served.complete("a", best_of=3, seed=7, echo=True, logprobs=1).choices
    assert [(choice.text, choice.logprobs.token_logprobs[-1]) for choice in scored] == [("aa2", -0.5)]


def test_logprob_token_ids(served: RunningServer) -> None:
    served.set_output(FakeOutput("h"))
    logprobs = served.complete(logprobs=5, logprob_token_ids=[97, 98]).choices[0].logprobs
    assert logprobs.top_logprobs[0] == {"h": -0.5, "a": -97.0, "b": -98.0}
    chunks = [*served.complete(logprobs=5, logprob_token_ids=[97], stream=True)]
    assert chunks[0].choices[0].logprobs.top_logprobs == [{"h": -0.5, "a": -97.0}]
    best = served.complete(logprobs=0, logprob_token_ids=[97], best_of=2).choices[0].logprobs
    assert best.top_logprobs[0] == {"h": -0.5, "a": -97.0}


def test_truncated_prompt_keeps_its_end(served: RunningServer) -> None:
    answer = served.complete("Something", truncate_prompt_tokens=4, echo=True)
    assert answer.choices[0].text == "hingHello world"
    assert answer.usage.prompt_tokens == 4
    assert (
        served.complete("x" * 5000, truncate_prompt_tokens=-1, max_tokens=100).usage.prompt_tokens
        == 2048 - 100
    )


def test_token_ids(served: RunningServer) -> None:
    served.set_output(FakeOutput("ab", (2,)))
    chunks = list(served.complete("S", stream=True, return_token_ids=True))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == [97, 98, EOS]
    assert chunks[0].choices[0].prompt_token_ids == [ord("S")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 4}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 0}, "n"),
        ({"logprob_token_ids": [97]}, "logprob_token_ids"),
        ({"n_predict": 4, "max_tokens": 5}, "n_predict"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 2048}, "prompt"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_invalid_bodies_are_refused(served: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = (
        '{"prompt": "Hi"'
        + "".join(f', "{name}": {json.dumps(value)}' for name, value in fields.items())
        + "}"
    )
    reply = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert param.split("[")[0] in reply.json()["error"]["message"]
    assert not served.client.submitted


def test_prompt_is_required(served: RunningServer) -> None:
    reply = served.http.post("/v1/completions", json={"model": "fake-model"})
    assert reply.json()["error"]["message"] == "prompt is required"


def test_too_many_choices_are_refused(served: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="4096"):
        served.complete(["a"] * 64, n=65)


def test_many_choices_are_made_in_a_thread(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 163 bytes that asks for 4096 held the event loop for a third of a second."""
    on_loop = record_threads(monkeypatch, completions, "build_requests")
    for count in (1, 3):
        body = {"prompt": ["Hi"] * count, "n": 128, "max_tokens": 1}
        assert served.http.post("/v1/completions", json=body).status_code == 200
    assert on_loop == [True] + [False] * 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_dry_sampling_is_encoded_in_a_thread(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """703 bytes held the event loop for 4.3 s."""
    on_loop = record_threads(monkeypatch, input_processor, "encode_dry_breakers")
    body = (
        {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    reply = served.http.post(path, json={**body, "dry_multiplier": 1, "max_tokens": 1})
    assert reply.status_code == 200 and on_loop == [False]


def test_prompts_of_ids_are_read_and_echoed_in_a_thread(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million ids to echo held the event loop for 0.34 s."""
    decoded = record_threads(monkeypatch, Tokenizer, "decode")
    read = record_threads(monkeypatch, completions.CompletionBody, "prompts")
    body = {"prompt": [[97] * 2000] * 3, "echo": True, "max_tokens": 1}
    choices = served.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"][:2000] for choice in choices] == ["a" * 2000] * 3
    assert read == [False] and decoded == [False] * 3


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"echo": True, "logprobs": 2}, {"INLINE_LOGPROBS": 1}),
        ({"return_token_ids": True}, {"INLINE_IDS": 3}),
    ],
)
def test_first_event_of_a_long_prompt_is_written_in_a_thread(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: dict[str, int]
) -> None:
    """160 KB that asked for an echo with log-probabilities held the event loop for 2 s."""
    on_loop = record_threads(monkeypatch, completions.CompletionWriter, "chunk")
    body = {"prompt": "Hello", "stream": True, "n": 2, "seed": 1, "max_tokens": 8, **fields}
    texts = []
    for limits in ({}, limit):
        for name, value in limits.items():
            monkeypatch.setattr(streaming, name, value)
        on_loop.clear()
        lines = served.http.post("/v1/completions", json=body).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        texts.append(sorted(json.dumps(event["choices"]) for event in events))
        assert on_loop.count(False) == (2 if limits else 0), "once for each choice"
    assert texts[0] == texts[1]


def test_many_logprobs_are_written_in_a_thread(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 KB that asked for 2.7 million of them held the event loop for 13 s."""
    on_loop = record_threads(monkeypatch, completions.CompletionWriter, "full")
    answers = []
    for limit in (512, 1):
        monkeypatch.setattr(streaming, "INLINE_LOGPROBS", limit)
        body = {"prompt": "Hello", "echo": True, "logprobs": 2, "prompt_logprobs": 2, "n": 2, "seed": 1}
        answers.append(served.http.post("/v1/completions", json=body).json()["choices"])
    assert answers[0] == answers[1] and on_loop == [True, False]
