"""Each constraint type against its reference language."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from foreword.core.structured_output import CONSTRAINT_TYPES, StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import compiler as compiler_module
from foreword.grammar.compiler import CompiledGrammar, to_llguidance
from foreword.grammar.manager import GrammarManager
from foreword.grammar.vocab import GrammarVocab
from tests.support.budget import examples
from tests.support.grammar_walks import EOS, begin_request, is_legal, random_walk, tokenizer

EXAMPLES = {
    "json_schema": ('{"type": "integer"}', "12", "x"),
    "json_object": ("", '{"a": 1}', "[1]"),
    "regex": ("a+|b", "aaa", "ab"),
    "choice": ('["a b", "c"]', "a b", "a"),
    "lark": ('start: "a" WORD\nWORD: /[b-d]+/', "abcd", "a"),
    "gbnf": ('root ::= "a" [b-d]+', "abcd", "a"),
    "structural_tag": ('{"format": {"type": "const_string", "value": "x"}}', "x", "y"),
    "tools": ('start: "x" %json {"const": 1}', "x1", "x2"),
}


@pytest.mark.parametrize("kind", CONSTRAINT_TYPES)
def test_constraint_type_accepts_good_and_rejects_bad(grammars: GrammarManager, kind: str) -> None:
    text, good, bad = EXAMPLES[kind]
    structured = StructuredOutput(kind, text)
    assert is_legal(grammars, structured, good) and not is_legal(grammars, structured, bad)


def test_errors_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: the schema is not JSON") as caught:
        to_llguidance(StructuredOutput("json_schema", "{", field="response_format"))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"^a|b$", "b", "ab"),
        (r"\$\d+\$$", "$12$", "$12"),
        (r"cost\$", "cost$", "cost"),
        (r"(?i)yes", "YeS", "no"),
        (r"[^\n]*/[^\n]*", "a/b", "ab"),
        (r".{3}", 'é"/', "a\nb"),
        (r"\d", "7", "٧"),
        (r"(?P<year>\d{4})-(?:\w+)", "2024-мир", "24-x"),
    ],
)
def test_regular_expressions(grammars: GrammarManager, regex: str, good: str, bad: str) -> None:
    assert is_legal(grammars, StructuredOutput("regex", regex), good)
    assert not is_legal(grammars, StructuredOutput("regex", regex), bad)


ATOMS = st.sampled_from(["a", "bc", "[a-c]", r"\d", "[^ab ]", ".", "é", r"\.", "(x|yz)", "q?"])
REGEXES = st.lists(
    st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}"])), min_size=1, max_size=5
).map(lambda parts: "".join(f"(?:{atom}){times}" for atom, times in parts))


@settings(max_examples=examples(60))
@given(regex=REGEXES, seed=st.integers(0, 2**32))
def test_random_output_matches_the_regex(grammars: GrammarManager, regex: str, seed: int) -> None:
    output = random_walk(
        begin_request(grammars, StructuredOutput("regex", regex)), random.Random(seed), max_tokens=60
    )
    if output[-1] == EOS:
        assert re.fullmatch(regex, tokenizer().decode(output[:-1]), re.ASCII)


@settings(max_examples=examples(60))
@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_choices_may_hold_any_characters(grammars: GrammarManager, choices: list[str], seed: int) -> None:
    choices = [text.encode("utf-8", "replace").decode() for text in choices]
    output = random_walk(
        begin_request(grammars, StructuredOutput("choice", json.dumps(choices))), random.Random(seed)
    )
    assert b"".join(map(tokenizer().token_bytes, output[:-1])).decode() in choices
    assert all(is_legal(grammars, StructuredOutput("choice", json.dumps(choices)), text) for text in choices)


def test_first_grammar_is_as_cheap_as_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trie of the vocabulary is built once, and only the one that is needed: no part of a compilation."""
    now = 0.0

    class SlowVocab(GrammarVocab):
        def tokenizer(self, for_tools: bool) -> LLTokenizer:
            nonlocal now
            now += 9.0
            return super().tokenizer(for_tools)

    monkeypatch.setattr(compiler_module.time, "thread_time", lambda: now)
    vocabulary = replace(tokenizer().vocabulary(), marker_ids=(300,))
    vocab = SlowVocab(vocabulary, len(vocabulary.tokens))
    compiled = CompiledGrammar(StructuredOutput("tools", EXAMPLES["tools"][0]), vocab)
    assert compiled._is_cheap
    assert vocab.tokenizer(for_tools=False) is not vocab.tokenizer(for_tools=True)
