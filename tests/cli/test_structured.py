"""Flags of structured output, and the same constraint in a request body."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.client import request_body
from foreword.cli.flags import add_structured_options, read_structured
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ConfigError, InvalidRequest
from foreword.server.apis.chat.body import ChatBody


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
