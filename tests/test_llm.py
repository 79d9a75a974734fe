"""The offline API, on a real checkpoint."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foreword import LLM, ReasoningOptions, SamplingParams, Speculation
from foreword.core.outputs import StepReport
from foreword.core.request import RequestState
from foreword.engine.scheduler import ScheduleOutput
from foreword.errors import CheckpointError, ConfigError, ContextLengthExceeded, InvalidRequest
from tests.support.checkpoints import write_checkpoint
from tests.support.images import png
from tests.support.tool_checkpoint import WEATHER, reasoning_bias, write_tool_checkpoint
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, write_vision_checkpoint

TEXT = "the cat and the dog and the cat"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The model drafts for itself, so that tokens come in bursts."""
    path = write_checkpoint(tmp_path_factory.mktemp("llm") / "model", "llama", seed=5)
    return LLM(
        str(path),
        draft_model=str(path),
        speculate="prediction,draft",
        draft_length="fixed",
        threads=1,
        max_model_len=128,
        kv_cache_memory="2000tokens",
        seed=3,
    )


def test_texts_and_ids_give_equal_outputs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    ids = llm.tokenizer.encode(TEXT, add_special_tokens=True)
    from_text, from_ids = llm.generate([TEXT, {"prompt_token_ids": ids}], params)
    assert from_text.token_ids == from_ids.token_ids and from_text.text == from_ids.text
    assert (from_text.prompt, from_text.prompt_token_ids) == (TEXT, tuple(ids))
    assert llm.generate(TEXT, params)[0].token_ids == from_text.token_ids


def test_chat_equals_the_rendered_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = llm.chat(messages, params)
    (text,) = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", params)
    assert chat.token_ids == text.token_ids
    assert [output.token_ids for output in llm.chat([messages, messages], params)] == [chat.token_ids] * 2


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_tool_checkpoint(tmp_path_factory.mktemp("calling"))
    return LLM(str(path), threads=1, max_model_len=1024, kv_cache_memory="4000tokens")


def test_chat_with_tools(calling: LLM) -> None:
    params = SamplingParams(max_tokens=300, seed=2, temperature=0.8)
    arguments: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
    messages = [{"role": "user", "content": "Weather in Bonn?"}]
    (output,) = calling.chat(
        messages, params, **arguments, tool_choice="required", reasoning=ReasoningOptions(budget_tokens=5)
    )
    (call,) = output.tool_calls
    assert output.finish_reason == "tool_calls" and output.text == ""
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])
    function = {"name": call.name, "arguments": call.arguments}
    result = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    (second,) = calling.chat([*messages, *result], params, **arguments)
    assert second.prompt is not None and call.name in second.prompt and "sunny" in second.prompt
    (third,) = calling.chat(
        [*messages, *result],
        params,
        **arguments,
        tool_choice="required",
        reasoning=ReasoningOptions(budget_tokens=5),
    )
    assert third.tool_calls[0].id != call.id
    assert b"foreword_tool_calls_total 0.0" not in calling.render_metrics()


def test_reasoning_of_a_chat(calling: LLM) -> None:
    """A stream has all of the text; an answer separates its parts."""
    messages = [{"role": "user", "content": "Weather in Bonn?"}]
    params = SamplingParams(max_tokens=60, seed=2, temperature=0.8, logit_bias=reasoning_bias())
    (output,) = calling.chat(messages, params)
    raw = "".join(piece.text for piece in calling.stream(messages, params))
    assert output.reasoning and "<think>" in raw and "think>" not in output.text + output.reasoning


def test_tools_beside_images(tmp_path: Path) -> None:
    """The template knows no tools: a text describes them, and the calls have the generic format."""
    path = write_vision_checkpoint(tmp_path, "llava", text_config={"max_position_embeddings": 4096})
    llm = LLM(str(path), threads=1, kv_cache_memory="4000tokens")
    parts = [{"type": "image", "image": png("red")}, {"type": "text", "text": "Where is it?"}]
    (output,) = llm.chat(
        [{"role": "user", "content": parts}],
        SamplingParams(max_tokens=300, seed=2, temperature=0.8),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning=ReasoningOptions(enabled=False),
    )
    (call,) = output.tool_calls
    jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])
    assert IMAGE_TOKEN_ID in output.prompt_token_ids


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_refused_tools(calling: LLM, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        calling.chat([{"role": "user", "content": "x"}], **arguments)
    assert caught.value.param == field and field in str(caught.value)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi"], [["hi"]]])
def test_messages_that_are_no_list_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages are a list such as .*, got .*hi"):
        llm.chat(messages)


def test_each_prompt_has_its_own_params(llm: LLM) -> None:
    first, second = llm.generate(
        [TEXT, TEXT],
        [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)],
    )
    assert (len(first.token_ids), len(second.token_ids)) == (3, 5)
    with pytest.raises(InvalidRequest, match="2 prompts, but 1"):
        llm.generate([TEXT, TEXT], [SamplingParams()])


def test_stream_equals_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    pieces = list(llm.stream(TEXT, params))
    (whole,) = llm.generate(TEXT, params)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.metrics is not None and whole.metrics.draft_tokens_acceptance == 1.0
    assert {piece.is_draft for piece in pieces} == {True, False}


def test_leaving_a_stream_aborts_the_request(llm: LLM) -> None:
    stream = llm.stream(TEXT, SamplingParams(ignore_eos=True))
    next(stream)
    stream.close()
    assert llm._client.idle
    llm.check()


def test_interrupt_waits_for_the_end_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    step = llm._client.step

    def interrupted_step() -> StepReport:
        steps.append("begun")
        signal.raise_signal(signal.SIGINT)
        report = step()
        steps.append("done")
        return report

    monkeypatch.setattr(llm._client, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], SamplingParams(max_tokens=4))
    assert steps == ["begun", "done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm._client.idle
    llm.check()


def test_second_interrupt_ends_a_step_that_hangs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    num_interrupts = 0

    def hanging_step() -> StepReport:
        nonlocal num_interrupts
        while num_interrupts < 9:
            num_interrupts += 1
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("no interrupt ended the step")

    monkeypatch.setattr(llm._client, "step", hanging_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], SamplingParams(max_tokens=4))
    assert num_interrupts == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stop_string_within_a_burst(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    (whole,) = llm.generate(TEXT, SamplingParams(**params))  # type: ignore[arg-type]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    (cut,) = llm.generate(TEXT, SamplingParams(stop=stop, logprobs=0, **params))  # type: ignore[arg-type]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.logprobs is not None and len(cut.logprobs) == len(cut.token_ids)
    llm.check()


def test_prompt_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=1))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert [lp.token_id for lp in output.prompt_logprobs[1:] if lp] == list(output.prompt_token_ids[1:])
    assert all(
        lp is None or (len(lp.top) == 2 and lp.top[0][1] >= lp.top[1][1]) for lp in output.prompt_logprobs
    )
    assert output.logprobs is not None and output.logprobs[0].rank == 1


def test_too_long_prompt_is_refused_before_running(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="200 tokens"):
        llm.generate([TEXT, {"prompt_token_ids": [50] * 200}])
    assert llm._client.idle


@pytest.mark.parametrize(
    "prompt", [{"text": "x"}, {"prompt_token_ids": []}, {"prompt_token_ids": [10**7]}, ""]
)
def test_invalid_prompts_are_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([prompt])  # type: ignore[list-item]


def test_config_seed_makes_outputs_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = llm.generate([TEXT, TEXT], params)
    assert first.token_ids == second.token_ids and first.outputs[0].seed == 3


def test_load_errors_name_the_problem(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="speculate"):
        LLM(speculate="magic")
    with pytest.raises(ConfigError, match="LLM has no option 'no_such_option'"):
        LLM(no_such_option=1)


def test_concurrent_streams_and_generate(llm: LLM) -> None:
    """Each gets its own tokens in any reading order."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [output.text for output in llm.generate([TEXT, "another text"], params)]
    first, second = llm.stream(TEXT, params), llm.stream("another text", params)
    heard = ["", ""]
    heard[0] += next(first).text
    heard[1] += next(second).text
    assert llm.generate(TEXT, params)[0].text == expected[0]
    heard[1] += "".join(piece.text for piece in second)
    heard[0] += "".join(piece.text for piece in first)
    assert heard == expected
    assert not llm._event_queues


def test_refused_batch_leaves_no_state(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequest, match=r"speculation.method must be one of auto, off, prediction, draft"
    ):
        llm.generate([TEXT, TEXT], [SamplingParams(), SamplingParams(speculation=Speculation("ngram"))])
    assert llm._client.idle and not llm._event_queues


def test_render_metrics_has_engine_metrics(llm: LLM) -> None:
    llm.generate(TEXT, SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    text = llm.render_metrics().decode()
    assert f"foreword_preemptions_total {float(llm.stats.preemptions_total)}" in text
    assert f"foreword_prefix_cache_queries_total {float(llm.stats.prefix_cache_queries_total)}" in text
    assert " nan" not in text.lower()


def test_output_metrics_sum_its_choices(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, SamplingParams(n=2, max_tokens=9, ignore_eos=True))
    each = [choice.metrics for choice in output.outputs if choice.metrics]
    assert output.metrics is not None and len(each) == 2
    assert output.metrics.draft_tokens == sum(metrics.draft_tokens or 0 for metrics in each) > 0
    assert output.metrics.seed == output.outputs[0].seed


def test_prediction_changes_no_token(llm: LLM) -> None:
    plain = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, speculation=Speculation("prediction")
    )
    (whole,) = llm.generate(TEXT, plain)
    assert whole.metrics is not None and whole.metrics.draft_tokens is None, "drafts without a prediction"
    # Tokenizing the text may differ in places from the sampled tokens.
    for prediction in (
        whole.text,
        whole.text[:30] + "something else" + whole.text[60:],
        "nothing of the kind",
    ):
        (same,) = llm.generate(TEXT, replace(plain, prediction=prediction))
        assert same.token_ids == whole.token_ids
    (same,) = llm.generate(TEXT, replace(plain, prediction=whole.text))
    assert same.metrics is not None and (same.metrics.draft_tokens_acceptance or 0) > 0.3


def test_each_choice_uses_the_prediction(llm: LLM) -> None:
    params = SamplingParams(
        n=3, max_tokens=30, ignore_eos=True, seed=4, speculation=Speculation("prediction")
    )
    (plain,) = llm.generate(TEXT, params)
    (guessed,) = llm.generate(TEXT, replace(params, prediction=plain.outputs[1].text))
    assert [choice.token_ids for choice in guessed.outputs] == [choice.token_ids for choice in plain.outputs]
    drafted = [choice.metrics.draft_tokens or 0 for choice in guessed.outputs if choice.metrics]
    assert drafted[1] > 10
    llm.check()


def test_too_long_prediction_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="the prediction has 300 tokens; an answer has at most 128"):
        llm.generate(TEXT, SamplingParams(prediction="7" * 300))


def test_speculation_off_calls_no_drafter(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch with a request that has drafts."""
    engine = llm._client._engine
    asked: set[str] = set()
    drafted: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def record_drafts(used_rows: int = 0) -> ScheduleOutput:
        scheduled = schedule(used_rows)
        drafted.update({request.state.id: request.num_draft_tokens for request in scheduled.requests})
        return scheduled

    for drafter in (*engine.proposer.drafters, *engine.proposer.model_drafters):
        monkeypatch.setattr(drafter, "start", _hearing(drafter.start, asked))
    monkeypatch.setattr(engine.scheduler, "schedule", record_drafts)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prediction=TEXT)
    outputs = llm.generate([TEXT, TEXT], [params, replace(params, speculation=Speculation("off"))])
    on, off = (f"{output.request_id}-0" for output in outputs)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert on in asked and off not in asked
    assert drafted[on] > 0 and drafted[off] == 0


def _hearing(start: Callable[[RequestState], None], heard: set[str]) -> Callable[[RequestState], None]:
    def hear(state: RequestState) -> None:
        heard.add(state.id)
        start(state)

    return hear


def test_drafters_get_delivered_outputs_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[tuple[int, ...]] = []
    finish = llm._client._engine.proposer.finish

    def hear(request_id: str, output: Sequence[int] = ()) -> None:
        learned.append(tuple(output))
        finish(request_id, output)

    monkeypatch.setattr(llm._client._engine.proposer, "finish", hear)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (whole,) = llm.generate(TEXT, params)
    (cut,) = llm.generate(TEXT, replace(params, stop=(whole.text[20:23],)))
    assert len(cut.token_ids) < len(whole.token_ids)
    stream = llm.stream(TEXT, params)
    next(stream)
    stream.close()
    assert learned == [whole.token_ids, cut.token_ids, ()]
