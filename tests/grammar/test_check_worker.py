"""The verdict of the worker, computed in this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foreword.core.structured_output import StructuredOutput
from foreword.grammar.check_worker import check_grammar
from foreword.grammar.vocab import GrammarVocab
from tests.support.grammar_walks import tokenizer


@pytest.fixture(scope="module")
def vocab() -> GrammarVocab:
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
def test_check_grammar_returns_the_reason(
    vocab: GrammarVocab, structured: StructuredOutput, reason: str | None
) -> None:
    actual = check_grammar(structured, vocab)
    if reason is None:
        assert actual is None
    else:
        assert actual is not None and reason in actual and not actual.startswith("f:")


def test_worker_does_not_import_torch() -> None:
    code = (
        "import sys, foreword.grammar.check, foreword.grammar.check_worker; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
