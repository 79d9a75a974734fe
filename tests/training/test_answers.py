"""Prompts are checked by line and field; answers are kept, and a second run goes on after them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError
from foreword.training.answers import (
    Answer,
    AnswerOptions,
    AnswersFile,
    answer_prompts,
    choose_draft_vocabulary,
    read_prompts,
)
from tests.support.checkpoints import EOS, VOCAB_SIZE, write_checkpoint

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}
LONG = "word " * 100


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_wrong_lines_are_named(tmp_path: Path) -> None:
    for line, problem in [
        ("{", "not JSON"),
        ("[]", "must be an object, got []"),
        ({}, "must have one of messages, prompt, text, and has none of them, but nothing"),
        ({"conversations": []}, "none of them, but conversations"),
        ({"prompt": "a", "text": "b"}, "has prompt and text"),
        ({"prompt": ""}, "prompt must be a text, got ''"),
        ({"text": 5}, "text must be a text, got 5"),
        ({"messages": "hi"}, "messages must be a list of messages, got 'hi'"),
        ({"messages": []}, "messages must be a list of messages, got []"),
        ({"messages": [USER, "hi"]}, "messages[1] must be an object with role and content, got 'hi'"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "messages[0].role must be one of system"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content must be a text, got None"),
        ({"messages": [ASSISTANT]}, "messages has no message before the assistant's"),
        ({"messages": [USER], "tools": [{}]}, "tools are not supported"),
    ]:
        path = write(tmp_path / "data", {"prompt": "fine"}, "", line)
        with pytest.raises(ConfigError) as caught:
            read_prompts(path)
        assert f"{path}, line 3: " in caught.value.message and problem in caught.value.message


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(write(tmp_path / "data", ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "nowhere")


def test_an_answer_of_the_data_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "data", {"messages": [USER, ASSISTANT, USER, ASSISTANT], "id": 7})
    (prompt,) = read_prompts(path)
    assert prompt.value == [USER, ASSISTANT, USER]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_checkpoint(tmp_path_factory.mktemp("answers") / "model", "llama", seed=5)
    return LLM(str(path), speculate="off", threads=1, max_model_len=128, kv_cache_memory="2000tokens")


def options(data: Path, temperature: float = 0.0, max_tokens: int = 8) -> AnswerOptions:
    return AnswerOptions.create("tiny", data, max_tokens, temperature, seed=3)


def test_a_stopped_run_goes_on_with_the_same_answers(llm: LLM, tmp_path: Path) -> None:
    lines = [{"messages": [USER]}, {"prompt": "the cat"}, {"text": "the dog"}] * 3
    data = write(tmp_path / "data", *lines)
    prompts, chosen = read_prompts(data), options(data, temperature=1.0)
    whole = AnswersFile(tmp_path / "whole", chosen)
    assert list(answer_prompts(llm, prompts, whole, chosen, batch_size=100)) == [9]
    for _ in answer_prompts(llm, prompts, AnswersFile(tmp_path / "part", chosen), chosen, batch_size=4):
        break  # as if killed
    with (tmp_path / "part").open("a") as file:
        file.write('{"prompt":[1,2')  # while it wrote
    again = AnswersFile(tmp_path / "part", chosen)
    assert again.num_done == 4
    assert list(answer_prompts(llm, prompts, again, chosen, batch_size=4)) == [8, 9]
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()
    answers = again.answers(100, VOCAB_SIZE)
    assert len({answer.token_ids.tobytes() for answer in answers}) > 3, "seeds differ by line"
    ids = llm.tokenizer.encode("the dog")
    assert answers[2].token_ids.tolist() == list(ids) and answers[2].num_prompt == 1


def test_answers_are_those_of_the_engine(llm: LLM, tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"messages": [USER]})
    chosen, file = options(data), AnswersFile(tmp_path / "out", options(data))
    list(answer_prompts(llm, read_prompts(data), file, chosen, batch_size=1))
    (answer,), (output,) = (
        file.answers(1000, VOCAB_SIZE),
        llm.chat([USER], SamplingParams(temperature=0, max_tokens=8)),
    )
    assert answer.token_ids[answer.num_prompt :].tolist() == list(output.token_ids)
    assert answer.token_ids[: answer.num_prompt].tolist() == list(output.prompt_token_ids)


def test_prompts_that_do_not_fit_are_skipped_with_their_line(llm: LLM, tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"prompt": "a"}, {"prompt": LONG}, {"prompt": "b"})
    chosen, file = options(data), AnswersFile(tmp_path / "out", options(data))
    assert list(answer_prompts(llm, read_prompts(data), file, chosen, batch_size=3)) == [3]
    (reason,) = file.skipped
    assert reason.startswith("line 2: ") and "context" in reason
    assert len(file.answers(100, VOCAB_SIZE)) == 2


def test_answers_of_other_options_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"prompt": "a"})
    AnswersFile(tmp_path / "out", options(data))
    AnswersFile(tmp_path / "out", options(data))
    with pytest.raises(ConfigError, match=r"was made with temperature 0\.0: choose another --output"):
        AnswersFile(tmp_path / "out", options(data, temperature=0.5))


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt":[1],"answer":["a"]}', '{"prompt":[1],"answer":[1e99]}']
)
def test_lines_that_are_no_answers_are_named(tmp_path: Path, line: str) -> None:
    data = write(tmp_path / "data", {"prompt": "a"})
    AnswersFile(tmp_path / "out", options(data)).append([{"prompt": [1], "answer": [2]}])
    with (tmp_path / "out").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 3 is no answer"):
        AnswersFile(tmp_path / "out", options(data))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path: Path, token_id: int) -> None:
    data = write(tmp_path / "data", {"prompt": "a"})
    file = AnswersFile(tmp_path / "out", options(data))
    file.append([{"prompt": [1], "answer": [2, token_id]}])
    with pytest.raises(
        ConfigError, match=f"line 2 is no answer .token ids must be from 0 to {VOCAB_SIZE - 1}"
    ):
        file.answers(100, VOCAB_SIZE)


def test_answers_are_cut_and_empty_ones_left_out(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"prompt": "a"})
    file = AnswersFile(tmp_path / "out", options(data))
    file.append([{"prompt": [1, 2], "answer": [3, EOS]}, {"prompt": [1, 2, 3], "answer": [4]}])
    file.append([{"prompt": [1], "answer": []}])
    assert [(each.token_ids.tolist(), each.num_prompt) for each in file.answers(3, VOCAB_SIZE)] == [
        ([1, 2, 3], 2)
    ]


def test_draft_vocabulary_has_the_most_frequent_tokens_of_answers() -> None:
    answers = [Answer(np.array(ids, np.int32), 2) for ids in ([1, 1, 7, 7, 5], [9, 9, 7, 5, 4])]
    assert choose_draft_vocabulary(answers, 10, 2) == [5, 7]
    assert choose_draft_vocabulary(answers, 10, 4) == [0, 4, 5, 7]
    assert choose_draft_vocabulary(answers, 10, 99) == list(range(10))
