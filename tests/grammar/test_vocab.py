"""Vocabularies: padded, cut, without EOS, with duplicate tokens."""

from __future__ import annotations

import pytest
import torch

from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.grammar.manager import GrammarManager
from foreword.grammar.vocab import GrammarVocab
from tests.support.grammar_walks import encode, legal_ids, tokenizer
from tests.support.waiting import WAIT_S

LETTERS = tuple(bytes([code]) for code in range(97, 123))


def _grammar_of(vocabulary: Vocabulary, vocab_size: int, regex: str, eos: tuple[int, ...]):  # type: ignore[no-untyped-def]
    grammars = GrammarManager(vocab_size, num_threads=1)
    grammars.set_vocabulary(vocabulary)
    params = SamplingParams(structured=StructuredOutput("regex", regex))
    try:
        return grammars.compile(Request("r", (1,), params, 0, eos_token_ids=eos)).result(WAIT_S)
    finally:
        grammars.close()


@pytest.mark.parametrize("vocab_size", [20, 26, 27, 31, 32, 33, 64, 100])
def test_mask_width_is_that_of_the_logits(vocab_size: int) -> None:
    eos = (3,) if vocab_size < 27 else (26,)
    vocabulary = Vocabulary((*LETTERS, b"</s>"), eos, eos)
    grammar = _grammar_of(vocabulary, vocab_size, "[a-z]+", eos)
    mask = grammar.mask(())
    assert mask.dtype == torch.int32 and mask.shape == ((vocab_size + 31) // 32,)
    letters = [i for i in range(min(26, vocab_size)) if i not in eos]
    assert legal_ids(mask) == letters
    grammar.accept([0])
    assert legal_ids(grammar.mask(())) == sorted({*letters, *eos})


@pytest.mark.parametrize("vocab_size", [26, 32, 40])
def test_vocabulary_without_eos(vocab_size: int) -> None:
    grammar = _grammar_of(Vocabulary(LETTERS, (), ()), vocab_size, "ab", ())
    grammar.accept([0, 1])
    assert grammar.must_end(()) and grammar.forced(4) == ()
    assert not [i for i in legal_ids(grammar.mask(())) if i < vocab_size]


def test_tokens_of_equal_bytes_are_all_legal() -> None:
    grammar = _grammar_of(Vocabulary((b"a", b"b", b"a", b"ab", b""), (), ()), 5, "ab", ())
    assert legal_ids(grammar.mask(()))[:3] == [0, 2, 3]
    assert [grammar.num_legal([i]) for i in range(5)] == [1, 0, 1, 1, 0]


def test_eos_id_has_no_bytes() -> None:
    """Also if the tokenizer lists it as an ordinary token: "</s>" inside a text must not end it."""
    vocabulary = Vocabulary((b"<", b"/", b"s", b">", b"</s>"), (), (4,))
    grammar = _grammar_of(vocabulary, 5, "(</s>){2}", (4,))
    assert legal_ids(grammar.mask(())) == [0]
    grammar.accept([0, 1, 2, 3] * 2)
    assert legal_ids(grammar.mask(())) == [4]


def test_tokenize_agrees_with_the_tokenizer() -> None:
    vocabulary = tokenizer().vocabulary()
    vocab = GrammarVocab(vocabulary, len(vocabulary.tokens))
    for text in (
        '{"name": "Clara", "age": 31}',
        "Write a short story about Viktor, a bear.",
        '[\n  {\n    "item": "lamp"',
        "größer",
    ):
        assert vocab.tokenize(text.encode(), 99) == encode(text)
        assert vocab.tokenize(text.encode(), 3) == encode(text)[:3]


def test_tokenize_stops_at_bytes_without_a_token() -> None:
    vocab = GrammarVocab(Vocabulary((b"a", b"b", b"ab", b"abc", b"ab"), (3,), (3,)), 5)
    assert vocab.tokenize(b"abaabd", 9) == (2, 0, 2)
    assert vocab.tokenize(b"d", 9) == vocab.tokenize(b"", 9) == ()
