"""What the benchmarks share."""

import argparse
import json
from pathlib import Path

import pytest

from foreword.bench.common import (
    PromptExample,
    modes,
    percentile,
    print_json,
    print_table,
    ratio,
    read_examples,
    rotate,
    with_all_drafters,
)
from foreword.config.options import Config
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError


@pytest.mark.parametrize(("percent", "value"), [(1, 1.0), (50, 2.0), (51, 3.0), (100, 4.0)])
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_ratio_is_the_median_of_pairs() -> None:
    assert ratio([2.0, 2.0, 9.0], [1.0, 2.0, 1.0]) == 2.0


def test_every_mode_goes_first_once() -> None:
    assert [rotate("abc", by) for by in range(4)] == [tuple("abc"), tuple("bca"), tuple("cab"), tuple("abc")]


def test_modes() -> None:
    assert modes(()) == ("off",)
    assert modes(("ngram",)) == modes(("prediction", "suffix")) == ("off", "auto")
    assert modes(("prediction", "suffix", "draft")) == ("off", "suffix", "draft", "auto")


def test_the_demo_brings_its_drafter() -> None:
    assert with_all_drafters(Config()).drafter_names() == ("grammar", "prediction", "suffix", "draft")
    assert with_all_drafters(Config(model="other")).drafter_names() == ("grammar", "prediction", "suffix")
    assert with_all_drafters(Config(speculate="off")).drafter_names() == ()


def test_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"kind": "k", "prompt": "p"}\n\n{"prompt": "q"}\n')
    assert read_examples(argparse.Namespace(prompts=str(file))) == (
        PromptExample("k", "p"),
        PromptExample("all", "q"),
    )
    assert len(read_examples(argparse.Namespace(prompts=None))) == len(EXAMPLES)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"text": "x"}'])
def test_prompts_that_are_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="prompts"):
        read_examples(argparse.Namespace(prompts=str(file)))


def test_a_table_and_then_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("a", "b"), [["1", "2"]])
    print_json({"bench": "x"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("title")
    assert json.loads(lines[-1])["bench"] == "x"


def test_a_nan_is_never_printed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"ratio": float("nan")})
