"""The reader of --prompts: texts, JSON lines of several shapes, and bad lines named by number."""

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.bench.prompts import read_examples, read_file
from foreword.bench.workloads import Conversation
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError


def write(folder: Path, text: str) -> str:
    file = folder / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_demo_prompts_are_the_default() -> None:
    examples = read_examples(argparse.Namespace(prompts=None, prompt_field=None))
    assert [(example.category, example.turns) for example in examples] == [(c, (p,)) for c, p in EXAMPLES]
    with pytest.raises(ConfigError, match="--prompt-field x needs --prompts"):
        read_examples(argparse.Namespace(prompts=None, prompt_field="x"))


def test_lines_without_json_are_prompts(tmp_path: Path) -> None:
    examples = read_file(write(tmp_path, "\ufeffWhat is it?\r\n\n[1, 2] is a list\n"))
    assert [(example.turns, example.line) for example in examples] == [
        (("What is it?",), 1),
        (("[1, 2] is a list",), 3),
    ]


@pytest.mark.parametrize(
    ("record", "name", "example"),
    [
        ({"prompt": "p"}, None, Conversation(("p",), category="all")),
        ({"kind": "k", "prompt": "p"}, None, Conversation(("p",), category="k")),
        ({"category": 3, "turns": ["a", "b"]}, None, Conversation(("a", "b"), category="3")),
        ({"question": "q", "prompt": "p"}, "question", Conversation(("q",), category="all")),
        (
            {"body": {"messages": [{"role": "user", "content": "u"}]}},
            "body.messages",
            Conversation(("u",), category="all"),
        ),
        ({"a.b": "dotted"}, "a.b", Conversation(("dotted",), category="all")),
    ],
)
def test_fields_of_json_lines(
    tmp_path: Path, record: dict[str, object], name: str | None, example: Conversation
) -> None:
    assert read_file(write(tmp_path, json.dumps(record)), name) == (example,)


def test_messages_end_at_the_last_question(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}]},
        {"role": "assistant", "content": "a recorded answer"},
    ]
    (example,) = read_file(write(tmp_path, json.dumps({"messages": messages})))
    assert example.history == (("system", "Be brief."), ("user", "one"), ("assistant", "1"))
    assert example.turns == ("two",)
    assert [message["content"] for message in example.messages(())] == ["Be brief.", "one", "1", "two"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object, got a list"),
        ('{"text": "x"}', "name one of its fields (text) by --prompt-field"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": 3}', "got a number"),
        ('{"prompt": []}', "got a list"),
        ('{"prompt": ["a", 3]}', "a message has a role"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no message of the user"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "a message has a role of system"),
        ('{"messages": [{"role": "user", "content": null}]}', "is text, got null"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "got 'image_url'"),
        ('{"a": ' * 100_000, "line 2: "),
    ],
)
def test_bad_line_is_named_by_number(tmp_path: Path, line: str, part: str) -> None:
    file = write(tmp_path, f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2: ") as error:
        read_file(file)
    assert part in str(error.value)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: .*line 5: .*; 3 more lines"):
        read_file(write(tmp_path, '{"x": 1}\n' * 8))


def test_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: no field 'body\.x'; it has body"):
        read_file(write(tmp_path, '{"body": {}}'), "body.x")


@pytest.mark.parametrize(("content", "part"), [(b"\n \n", "no prompts"), (b"ab\xff", "byte 2 is not UTF-8")])
def test_file_without_prompts_is_refused(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        read_file(str(file))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_file(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PROMPT = st.fixed_dictionaries(
    {}, optional={"prompt": JSON, "messages": JSON, "turns": JSON, "category": JSON}
)


@given(
    records=st.lists(PROMPT, min_size=1, max_size=4), name=st.none() | st.sampled_from(["prompt", "turns.a"])
)
def test_any_json_is_prompts_or_an_error_with_a_line(
    tmp_path_factory: pytest.TempPathFactory, records: list[object], name: str | None
) -> None:
    file = write(tmp_path_factory.mktemp("p"), "\n".join(map(json.dumps, records)))
    try:
        examples = read_file(file, name)
    except ConfigError as error:
        assert "line " in str(error)
    else:
        assert len(examples) == len(records)
        assert all(example.turns[0].strip() for example in examples)
