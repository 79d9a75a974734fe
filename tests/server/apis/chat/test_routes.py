"""/v1/chat/completions with a fake engine."""

from typing import Any

import openai
import pytest

from foreword.core.request import Request
from tests.server.conftest import RunningServer
from tests.support.fakes import END, EOS, START, FakeOutput

BURSTS = [(1,), (2, 5, 1)]


def pieces(stream: Any) -> list[Any]:
    return list(stream)


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == index
    )


def reasons_of(chunks: list[Any]) -> list[tuple[int, str]]:
    return [
        (c.choices[0].index, c.choices[0].finish_reason)
        for c in chunks
        if c.choices and c.choices[0].finish_reason
    ]


def test_answer(served: RunningServer) -> None:
    served.set_output(FakeOutput("Héllo wörld 😀", (2, 5, 1), num_cached=3))
    answer = served.chat()
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.model == "fake-model" and answer.system_fingerprint == "fp_fake"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Héllo wörld 😀"
    assert answer.choices[0].finish_reason == "stop"
    tokens = len("Héllo wörld 😀".encode()) + 1
    prompt = len(served.client.submitted[0].prompt_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, tokens)
    assert answer.usage.total_tokens == prompt + tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("bursts", BURSTS)
def test_stream(served: RunningServer, bursts: tuple[int, ...]) -> None:
    served.set_output(FakeOutput("Héllo wörld 😀", bursts))
    chunks = pieces(served.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "Héllo wörld 😀"
    assert "\ufffd" not in text_of(chunks)
    assert reasons_of(chunks) == [(0, "stop")]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (
        chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len("Héllo wörld 😀".encode()) + 1
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_prompt_is_the_rendered_conversation(served: RunningServer) -> None:
    served.chat(
        messages=[
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}]},
        ]
    )
    expected = [START, *b"system\nS", END, 10, START, *b"user\nU", END, 10, START, *b"assistant\n"]
    assert list(served.client.submitted[0].prompt_ids) == expected


def test_continue_final_message(served: RunningServer) -> None:
    served.set_output(FakeOutput(" world"))
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "Hello"}]
    served.chat(messages=messages, continue_final_message=True)
    assert bytes(served.client.submitted[0].prompt_ids[-5:]) == b"Hello"


def test_template_options_reach_the_template(served: RunningServer) -> None:
    served.chat(chat_template_kwargs={"open_end": True}, add_generation_prompt=False)
    assert bytes(served.client.submitted[0].prompt_ids[-2:]) == b"Hi"


def test_parameters_reach_the_engine(served: RunningServer) -> None:
    served.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=42,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"65": 5},
        bad_words=["no"],
        allowed_token_ids=[65, 66],
        min_tokens=2,
        max_completion_tokens=5,
        stop=["x", "y"],
        stop_token_ids=[67],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        priority=3,
        speculation={"method": "off", "max_tokens": 2},
    )
    request = served.client.submitted[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.logit_bias, params.bad_words, params.allowed_token_ids) == ({65: 5}, ("no",), (65, 66))
    assert (params.min_tokens, params.max_tokens, params.stop, params.stop_token_ids) == (
        2,
        5,
        ("x", "y"),
        (67,),
    )
    assert params.include_stop_str_in_output and params.ignore_eos and not params.skip_special_tokens
    assert (params.speculation.method, params.speculation.max_draft_tokens) == ("off", 2)
    assert (request.seed, request.priority, request.bad_words_ids) == (42, 3, (tuple(b"no"),))


def test_default_max_tokens_is_the_context(served: RunningServer) -> None:
    served.set_output(FakeOutput("abc", (7, 64)))
    answer = served.chat(ignore_eos=True)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 2048


def by_choice(request: Request) -> FakeOutput:
    return FakeOutput(f"answer {request.id[-1]}", (2,))


def test_choices(served: RunningServer) -> None:
    served.set_output(by_choice)
    answer = served.chat(n=3, seed=7)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (i, f"answer {i}", "stop") for i in range(3)
    ]
    assert [request.seed for request in served.client.submitted] == [7, 8, 9]
    assert answer.seed == 7
    assert answer.usage.completion_tokens == 3 * 9
    assert answer.usage.prompt_tokens == len(served.client.submitted[0].prompt_ids)


def test_streamed_choices(served: RunningServer) -> None:
    served.set_output(by_choice)
    chunks = pieces(served.chat(n=3, stream=True))
    assert [text_of(chunks, i) for i in range(3)] == ["answer 0", "answer 1", "answer 2"]
    assert sorted(reasons_of(chunks)) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_drawn_seed_is_returned(served: RunningServer) -> None:
    seeds = {served.chat().seed for _ in range(3)}
    assert len(seeds) == 3
    assert {request.seed for request in served.client.submitted} == seeds


@pytest.mark.parametrize("bursts", BURSTS)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_steps(served: RunningServer, bursts: tuple[int, ...], stream: bool) -> None:
    served.set_output(FakeOutput("one STOP two", bursts))
    answer = served.chat(
        stop="STOP",
        stream=stream,
        logprobs=True,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        chunks = pieces(answer)
        text, reasons, usage = text_of(chunks), reasons_of(chunks), chunks[-1].usage
        tokens = [
            t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content
        ]
    else:
        choice = answer.choices[0]
        text, reasons, usage = choice.message.content, [(0, choice.finish_reason)], answer.usage
        tokens = choice.logprobs.content
        assert choice.stop_reason == "STOP"
    assert (text, reasons, usage.completion_tokens) == ("one ", [(0, "stop")], 8)
    assert "".join(token.token for token in tokens) == "one STOP"
    served.wait_until_idle()
    assert served.client.finished == [(served.client.submitted[0].id, 8)]


def test_logprobs(served: RunningServer) -> None:
    served.set_output(FakeOutput("hé", (2,)))
    content = served.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.token for token in content] == ["h", "\ufffd", "\ufffd", "<|eos|>"]
    assert bytes(content[1].bytes + content[2].bytes).decode() == "é"
    assert content[0].logprob == -0.5
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("h", -0.5), ("i", -1.5)]
    assert served.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert served.chat().choices[0].logprobs is None
    content = (
        served.chat(logprobs=True, top_logprobs=3, logprob_token_ids=[97, 98]).choices[0].logprobs.content
    )
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
        ("h", -0.5), ("a", -97.0), ("b", -98.0)
    ]  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="logprob_token_ids needs logprobs: true"):
        served.chat(logprob_token_ids=[97])


def test_token_ids_and_prompt_logprobs(served: RunningServer) -> None:
    """The prompt's are at the top of the answer, as in vLLM."""
    served.set_output(FakeOutput("ab"))
    answer = served.chat(return_token_ids=True, prompt_logprobs=2, n=2)
    assert [choice.token_ids for choice in answer.choices] == [[97, 98, EOS]] * 2
    assert not hasattr(answer.choices[0], "prompt_token_ids")
    assert answer.prompt_token_ids == list(served.client.submitted[0].prompt_ids)
    assert answer.prompt_logprobs[0] is None
    assert answer.prompt_logprobs[1] == {
        "117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"},
        "118": {"logprob": -1.5, "rank": 2, "decoded_token": "v"}
    }  # fmt: skip


def test_prompt_token_ids_are_in_the_first_chunk(served: RunningServer) -> None:
    chunks = pieces(served.chat(return_token_ids=True, n=2, stream=True))
    assert chunks[0].prompt_token_ids == list(served.client.submitted[0].prompt_ids)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])


@pytest.mark.parametrize("bursts", BURSTS)
@pytest.mark.parametrize("n", [1, 3])
def test_continuous_usage(served: RunningServer, bursts: tuple[int, ...], n: int) -> None:
    """As in vLLM a chunk counts the tokens of its choice so far; the last one those of all choices."""
    served.set_output(FakeOutput("Hello STOP", bursts))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = pieces(served.chat(stream=True, n=n, stop="STOP", stream_options=options, return_token_ids=True))
    num_sent = [0] * n
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        num_sent[choice.index] += len(getattr(choice, "token_ids", ()))
        assert chunk.usage.completion_tokens == num_sent[choice.index]
    assert num_sent == [len("Hello STOP")] * n
    assert all(c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens for c in chunks)
    assert chunks[0].usage.completion_tokens == 0 and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == n * len("Hello STOP")
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(served.client.submitted[0].prompt_ids)}


def test_continuous_usage_of_several_prompts(served: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = served.complete(["a", "bcd"], stream=True, stream_options=options)
    ends = {c.choices[0].index: c.usage for c in chunks if c.choices[0].finish_reason}
    assert [(ends[i].prompt_tokens, ends[i].completion_tokens) for i in (0, 1)] == [(1, 12), (3, 12)]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 2 * 12)


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
def test_chunks_without_continuous_usage(served: RunningServer, options: dict[str, bool]) -> None:
    chunks = pieces(served.chat(stream=True, stream_options=options))
    assert [chunk for chunk in chunks if chunk.usage] == [chunk for chunk in chunks if not chunk.choices]


@pytest.mark.parametrize("fields", [{"tools": [], "tool_choice": "auto"}, {"parallel_tool_calls": False}])
def test_fields_without_tools_change_nothing(served: RunningServer, fields: dict[str, Any]) -> None:
    assert served.chat(**fields).choices[0].message.content == "Hello world"
    served.chat()
    assert served.client.submitted[0].prompt_ids == served.client.submitted[1].prompt_ids


def test_metrics_of_one_choice(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello world", (4,), num_cached=2))
    answer = served.chat(metrics=True, seed=5)
    assert answer.metrics == answer.choices[0].metrics
    assert answer.metrics["seed"] == 5 and answer.metrics["cached_tokens"] == 2
    assert answer.metrics["verify_steps"] == 3 and answer.metrics["draft_tokens"] == 12
    assert not hasattr(served.chat(), "metrics")


def test_metrics_of_several_choices(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello world", (4,), num_cached=2))
    answer = served.chat(metrics=True, n=2, seed=5)
    assert [choice.metrics["seed"] for choice in answer.choices] == [5, 6]
    assert [choice.metrics["draft_tokens"] for choice in answer.choices] == [12, 12]
    assert (answer.metrics["seed"], answer.metrics["draft_tokens"], answer.metrics["cached_tokens"]) == (
        5,
        24,
        2,
    )


def test_streamed_metrics_of_several_choices(served: RunningServer) -> None:
    served.set_output(lambda request: FakeOutput("Hello world", (4,), delay_s=0.002 * int(request.id[-1])))
    chunks = [chunk for chunk in served.chat(metrics=True, n=3, stream=True) if chunk.choices]
    ends = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    assert [chunk.choices[0].metrics["draft_tokens"] for chunk in ends] == [12, 12, 12]
    assert [chunk.metrics["draft_tokens"] for chunk in chunks if hasattr(chunk, "metrics")] == [36]
    assert hasattr(ends[-1], "metrics")


def test_stream_marks_draft_tokens(served: RunningServer) -> None:
    served.set_output(FakeOutput("abcdefg", (3,), confidence=2 / 3))
    chunks = pieces(served.chat(metrics=True, stream=True))
    marks = [c.choices[0].tokens for c in chunks if hasattr(c.choices[0], "tokens")]
    draft = [True, "suffix", 0.667]
    assert marks == [
        [["a", *draft], ["b", *draft], ["c", False]],
        [["d", *draft], ["e", *draft], ["f", False]],
        [["g", *draft]],
    ]
    assert [c.choices[0].accepted_draft_tokens for c in chunks if hasattr(c.choices[0], "tokens")] == [
        2,
        2,
        2,
    ]
    assert chunks[-1].metrics["verify_steps"] == 3


def test_held_back_draft_tokens_are_marked_later(served: RunningServer) -> None:
    served.set_output(FakeOutput("STxy", (2,)))
    chunks = pieces(served.chat(metrics=True, stream=True, stop="STOP"))
    told = [
        (c.choices[0].tokens, c.choices[0].accepted_draft_tokens)
        for c in chunks
        if hasattr(c.choices[0], "tokens")
    ]
    draft = [True, "suffix", None]  # the fake drafter has no confidence
    assert told == [([["S", *draft], ["T", False], ["x", *draft], ["y", False]], 2), ([], 1)]


def test_engine_dies_during_a_stream(served: RunningServer) -> None:
    served.set_output(FakeOutput("abcdef", hang_after=2))
    stream = served.chat(stream=True)
    with pytest.raises(openai.APIError, match="died"):
        for chunk in stream:
            if chunk.choices[0].delta.content == "b":
                served.client.kill()
    try:
        assert served.http.get("/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            served.chat()
        assert caught.value.status_code == 503
    finally:
        served.client.alive = True
