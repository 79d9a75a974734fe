"""Generators of training text: deterministic, correct, disjoint from the test set."""

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from foreword import LLM, SamplingParams, demo
from foreword.chat_formats.tools import Tool
from foreword.cli.chat_tools import TOOLS
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.training.answers import read_prompts
from training import corpus, evaluate, everyday, faq, page, prompts, stories, tasks, tool_tasks
from training.tokenizer import CHAT_TEMPLATE

TOKENIZER = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))


def test_rows_are_deterministic() -> None:
    one, same, other = (corpus.pack_rows(TOKENIZER, Random(seed), 4, 256) for seed in (1, 1, 2))
    for name in ("tokens", "positions", "documents", "labels"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.tokens, other.tokens)


def test_labels_are_next_tokens_of_a_document() -> None:
    rows = corpus.pack_rows(TOKENIZER, Random(0), 4, 256)
    learned = rows.labels >= 0
    assert not learned[:, -1].any()
    assert np.array_equal(rows.labels[:, :-1][learned[:, :-1]], rows.tokens[:, 1:][learned[:, :-1]])
    assert np.array_equal(rows.documents[:, :-1][learned[:, :-1]], rows.documents[:, 1:][learned[:, :-1]])
    assert (rows.documents[learned] >= 0).all()


@pytest.mark.parametrize(
    "kind", [one for one in corpus.KINDS if one != "greeting"]
)  # greetings are too few to split
def test_held_out_prompts_are_not_trained(kind: str) -> None:
    tests = {(one.prompt, bool(one.tools)) for one in corpus.test_samples(kind, 50)}
    rng = Random(3)
    turns = [turn for _ in range(3000) for turn in corpus.conversation(rng, 4)]
    trained = {(turn.prompt, bool(turn.tools)) for turn in turns}
    assert tests and tests.isdisjoint(trained)


def test_held_out_wordings_are_not_trained() -> None:
    train, held_out = faq.wordings()
    assert set(train) == set(held_out) == set(page.answers())
    forbidden = {faq.normalize(one) for several in held_out.values() for one in several}
    assert len(forbidden) == 2 * len(held_out)
    rng = Random(5)
    assert forbidden.isdisjoint(faq.normalize(faq.ask(rng, 1).prompt) for _ in range(20_000))
    assert forbidden.isdisjoint(faq.normalize(one) for several in train.values() for one in several)


def test_held_out_everyday_questions_are_not_trained() -> None:
    assert len(set(everyday.held_out())) >= 100
    rng = Random(6)
    draws = [corpus.draw(rng, 1, corpus.REFRESH, "everyday") for _ in range(2000)]
    asked = [one.prompt for one in draws if one.answer == faq.FALLBACK and not one.tools]
    assert len(asked) > 200
    assert not any("{" in one or everyday.is_held_out(one) for one in asked)


def test_edits_on_one_line_have_no_second() -> None:
    for sample in corpus.test_samples("one line", 100):
        assert "\n" not in sample.prompt + sample.answer


def test_faq_answers_are_short() -> None:
    assert len(page.answers()) >= 30
    assert all(len(answer.split()) <= 50 for answer in page.answers().values())


def test_prompts_for_a_head_are_valid_and_not_held_out(tmp_path: Path) -> None:
    lines = list(prompts.prompt_lines(300, seed=4))
    assert lines == list(prompts.prompt_lines(400, seed=4))[:300]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_prompts(file)
    assert {prompt.field for prompt in read} == {"messages", "prompt"}
    assert all(prompt.value[-1]["role"] == "user" for prompt in read if prompt.field == "messages")
    tests = {
        sample.prompt
        for kind in corpus.KINDS
        if kind != "greeting"
        for sample in corpus.test_samples(kind, 30)
    }
    asked = {line["messages"][0]["content"] if "messages" in line else line["prompt"] for line in lines}
    assert tests.isdisjoint(asked)


def test_json_answers_are_json() -> None:
    for kind in ("json edit", "json write"):
        for sample in corpus.test_samples(kind, 50):
            json.loads(sample.answer)


def test_calls_name_a_tool_and_its_parameters() -> None:
    for sample in corpus.test_samples("tool call", 100):
        signatures = dict(tool.rstrip(")").split("(") for tool in sample.tools)
        calls = re.findall("<tool_call>(.*?)</tool_call>", sample.answer)
        assert "".join(f"<tool_call>{call}</tool_call>" for call in calls) == sample.answer and calls
        for call in map(json.loads, calls):
            assert ", ".join(call["arguments"]) == signatures[call["name"]]


def test_tools_of_the_terminal_are_trained() -> None:
    functions = [tool["function"] for tool in TOOLS]
    named = [f"{one['name']}({', '.join(one['parameters']['properties'])})" for one in functions]
    assert tuple(named) == tool_tasks.FILE_TOOLS


def test_bundled_models_have_the_chat_template() -> None:
    for folder in (demo.MODEL, demo.DRAFTER):
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("kind", corpus.TOOL_KINDS)
def test_training_text_is_what_the_chat_template_renders(kind: str) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    for sample in corpus.test_samples(kind, 10):
        messages = [message for turn in (sample.before, sample) if turn for message in _messages(turn)]
        tools = [_definition(signature) for signature in sample.tools]
        text = template.render(messages[:-1], tools=tools)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == evaluate.chat_ids(TOKENIZER, sample)
        whole = template.render(messages, tools=tools, add_generation_prompt=False)
        assert whole == text + sample.answer + corpus.END


def _definition(signature: str) -> Tool:
    name, fields = signature.rstrip(")").split("(")
    properties: dict[str, object] = {field: {} for field in fields.split(", ") if field}
    return Tool(name, parameters={"type": "object", "properties": properties})


def _messages(turn: tasks.Sample) -> list[dict[str, object]]:
    """The exchange as messages of OpenAI's chat."""
    asked: list[dict[str, object]] = [{"role": "user", "content": turn.prompt}]
    if results := re.findall("<tool_response>(.*?)</tool_response>", turn.prompt, re.DOTALL):
        asked = [{"role": "tool", "content": result} for result in results]
    calls = re.findall("<tool_call>(.*?)</tool_call>", turn.answer)
    if not calls:
        return [*asked, {"role": "assistant", "content": turn.answer}]
    functions = [{"type": "function", "function": json.loads(call)} for call in calls]
    return [*asked, {"role": "assistant", "content": None, "tool_calls": functions}]


@pytest.mark.full
@pytest.mark.parametrize(("temperature", "n", "at_most"), [(0.0, 1, 0), (1.0, 3, 8)])
def test_everyday_questions_without_tools_are_answered_without_calls(
    temperature: float, n: int, at_most: int
) -> None:
    chats = [[{"role": "user", "content": one}] for one in everyday.held_out()]
    params = SamplingParams(temperature=temperature, n=n, seed=0, max_tokens=200)
    outputs = LLM(threads=1).chat(chats, params)
    said = [choice.text for output in outputs for choice in output.outputs]
    assert len(said) == n * len(chats)
    assert len([one for one in said if tool_tasks.CALL in one]) <= at_most


def test_replace_keeps_the_rest() -> None:
    assert tasks.swap("a cat, the cat and a catalog", "cat", "dog") == "a dog, the dog and a catalog"


def test_delete_removes_one_word() -> None:
    for sample in corpus.test_samples("delete", 50):
        passage = sample.prompt.partition(":\n")[2] or sample.prompt.rpartition("\n\n")[0]
        assert (
            len(re.findall(r"\w+", passage)) == len(re.findall(r"\w+", sample.answer)) + 1
            or "\n\n" in sample.answer
        )


def test_stories_are_recognised() -> None:
    for sample in corpus.test_samples("story", 10, size=2):
        assert stories.is_story(sample.prompt, sample.answer)
        assert not stories.is_story(sample.prompt, sample.answer.replace("a", "e", 1))
        assert not stories.is_story(sample.prompt, sample.answer.rpartition(". ")[0] + ".")


def test_chain_length_equals_speculative_decoding() -> None:
    output = [1, 2, 3, 4, 5, 6, 7]
    assert evaluate.count_accepted(output, lambda at: output[at : at + 4]) == (
        6,
        6,
    )  # 4 and a free one, then the last 2
    assert evaluate.count_accepted(output, lambda at: [0, 0, 0, 0]) == (4 + 4 + 4 + 4 + 3 + 2 + 1, 0)
    assert evaluate.count_accepted(output, lambda at: []) == (0, 0)


def test_lookup_prefers_longest_then_latest() -> None:
    assert evaluate.prompt_lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == [9, 2, 3, 8]
    assert evaluate.prompt_lookup([2, 3, 9, 2, 3, 8, 7, 6, 2, 3]) == [8, 7, 6, 2]
    assert evaluate.prompt_lookup([5, 6, 5, 6]) == [5, 6, 5, 6]
    assert evaluate.prompt_lookup([1, 2, 3]) == []
