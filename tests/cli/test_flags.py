"""Flags of requests: sampling parameters, and structured output with the same constraint in a body."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.client import request_body
from foreword.cli.flags import (
    FLAGS,
    add_config_options,
    add_sampling_options,
    add_structured_options,
    read_params,
    read_structured,
)
from foreword.core.params import SamplingParams, Speculation
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ConfigError, InvalidRequest
from foreword.server.apis.chat.body import ChatBody


def parse_sampling(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    return parser.parse_args(words)


def test_default_is_greedy_and_bounded() -> None:
    """A terminal needs reproducible answers that do not fill the context."""
    assert read_params(parse_sampling()) == SamplingParams(temperature=0.0, max_tokens=512)


def test_every_flag_reaches_the_parameters() -> None:
    words = [word for item in FLAGS for word in ("--" + item.name.replace("_", "-"), "1")]
    params = read_params(parse_sampling(*words, "--stop", "a", "--stop", "b", "--speculation", "off"))
    assert all(getattr(params, item.name) == 1 for item in FLAGS)
    assert (params.stop, params.speculation) == (("a", "b"), Speculation("off"))


def test_other_defaults_match_the_sampler() -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=512)
    assert all(item.default == getattr(plain, item.name) for item in FLAGS)


def test_flags_precede_the_checkpoint_and_it_precedes_the_defaults() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 99}
    params = read_params(parse_sampling("--top-p", "1"), defaults)
    assert params == SamplingParams(temperature=0.7, top_p=1.0, max_tokens=99)


def test_on_runaway_reaches_a_server() -> None:
    """It is an option of the engine, so the request must carry it."""
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    add_config_options(parser, ("scheduler",))
    assert read_params(parser.parse_args(["--on-runaway", "stop"])).on_runaway == "stop"
    assert read_params(parser.parse_args([])).on_runaway is None


def read(*words: str) -> StructuredOutput | None:
    parser = argparse.ArgumentParser()
    add_structured_options(parser)
    return read_structured(parser.parse_args(words))


def test_each_flag(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "ä"', encoding="utf-8")
    assert read() is None
    assert read("--json-schema", str(schema)) == StructuredOutput(
        "json_schema", '{"type": "object"}', field="--json-schema"
    )
    assert read("--grammar", str(grammar)) == StructuredOutput("gbnf", 'root ::= "ä"', field="--grammar")
    assert read("--regex", "a+") == StructuredOutput("regex", "a+", field="--regex")
    assert read("--choice", "yes", "--choice", "no") == StructuredOutput(
        "choice", '["yes","no"]', field="--choice"
    )


def test_errors_name_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--json-schema"):
        read("--json-schema", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidRequest, match="--choice"):
        read("--choice", "")
    with pytest.raises(SystemExit):
        read("--regex", "a", "--choice", "b")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput.json_schema({"type": "object"}),
        StructuredOutput.json_object(whitespace=False),
        StructuredOutput.regex("a+", after="</think>"),
        StructuredOutput.choice(["a", "b"]),
        StructuredOutput.grammar('root ::= "a"'),
        StructuredOutput.grammar('start: "a"'),
        StructuredOutput.structural_tag({"type": "structural_tag", "format": {}}),
    ],
    ids=lambda one: one.constraint_type,
)
def test_request_body_has_the_same_constraint(structured: StructuredOutput) -> None:
    _, body = request_body("m", [{"role": "user", "content": "Hi"}], SamplingParams(structured=structured))
    parsed: Any = ChatBody.model_validate(json.loads(json.dumps(body))).params().structured
    assert (parsed.constraint_type, parsed.text) == (structured.constraint_type, structured.text)
    assert (parsed.whitespace, parsed.after) == (structured.whitespace, structured.after)
