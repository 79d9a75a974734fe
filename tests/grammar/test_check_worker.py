"""What the worker says about a constraint, in this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foreword.core.structured import StructuredOutput
from foreword.grammar.check_worker import check_grammar
from foreword.grammar.vocab import GrammarVocab
from tests.support.grammar_walks import tokenizer


@pytest.fixture(scope="module")
def tokens() -> GrammarVocab:
    vocabulary = tokenizer().vocabulary()
    return GrammarVocab(vocabulary, len(vocabulary.tokens))


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (StructuredOutput("regex", "a+"), None),
        (StructuredOutput("choice", '["only"]'), None),
        (StructuredOutput("gbnf", 'root ::= ""'), None),
        (StructuredOutput("regex", "(a", field="f"), "unclosed group"),
        (StructuredOutput("lark", "start: start"), "no text conforms"),
        (StructuredOutput("json_schema", '{"$ref": "#"}'), "no text conforms"),
        (
            StructuredOutput("json_schema", '{"minimum": 3, "maximum": 2, "type": "number"}'),
            "greater than maximum",
        ),
        (StructuredOutput("json_schema", '{"oneOf": [{"minLength": 1}, {"maxLength": 3}]}'), "oneOf"),
    ],
)
def test_objection(tokens: GrammarVocab, structured: StructuredOutput, reason: str | None) -> None:
    found = check_grammar(structured, tokens)
    assert (
        found is None
        if reason is None
        else found is not None and reason in found and not found.startswith("f:")
    )


def test_the_worker_starts_without_torch() -> None:
    code = (
        "import sys, foreword.grammar.check, foreword.grammar.check_worker; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
