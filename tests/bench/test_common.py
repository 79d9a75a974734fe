"""Helpers of all benchmarks."""

import argparse
import json
from pathlib import Path

import pytest

from foreword.bench.common import (
    PromptExample,
    modes,
    print_json,
    print_table,
    read_examples,
    with_all_drafters,
)
from foreword.config.options import Config
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError


def test_modes_omit_drafters_without_input() -> None:
    assert modes(()) == ("off",)
    assert modes(("ngram",)) == modes(("prediction", "suffix")) == ("off", "auto")
    assert modes(("prediction", "suffix", "draft")) == ("off", "suffix", "draft", "auto")


def test_demo_gets_its_draft_model() -> None:
    assert with_all_drafters(Config()).drafter_names() == ("grammar", "prediction", "suffix", "draft")
    assert with_all_drafters(Config(model="other")).drafter_names() == ("grammar", "prediction", "suffix")
    assert with_all_drafters(Config(speculate="off")).drafter_names() == ()


def test_read_examples_reads_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"kind": "k", "prompt": "p"}\n\n{"prompt": "q"}\n')
    examples = (PromptExample("k", "p"), PromptExample("all", "q"))
    assert read_examples(argparse.Namespace(prompts=str(file))) == examples
    assert len(read_examples(argparse.Namespace(prompts=None))) == len(EXAMPLES)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"text": "x"}'])
def test_read_examples_refuses_files_without_prompts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="prompts"):
        read_examples(argparse.Namespace(prompts=str(file)))


def test_table_is_followed_by_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("a", "b"), [["1", "2"]])
    print_json({"bench": "x"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("title")
    assert json.loads(lines[-1])["bench"] == "x"
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"ratio": float("nan")})
