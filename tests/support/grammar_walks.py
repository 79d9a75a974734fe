"""Grammars over the demo model's vocabulary, and random walks through them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import RequestGrammar, StructuredOutput
from foreword.demo import MODEL
from foreword.grammar.manager import GrammarManager
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.waiting import WAIT_S

CLOSING = ('"', "}", "]", '"}', '"]', "</f>")
PADDING = 13  # columns of the logits beyond the vocabulary


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


EOS = tokenizer().eos_token_ids[0]


def vocab_size() -> int:
    return tokenizer().vocab_size + PADDING


@contextmanager
def open_grammar_manager() -> Iterator[GrammarManager]:
    grammars = GrammarManager(vocab_size(), num_threads=2)
    grammars.set_vocabulary(tokenizer().vocabulary())
    try:
        yield grammars
    finally:
        grammars.close()


def request(structured: StructuredOutput, **fields: object) -> Request:
    eos = tokenizer().eos_token_ids
    values = {
        "prompt_ids": (5, 6, 7),
        "seed": 0,
        "eos_token_ids": eos,
        "params": SamplingParams(structured=structured),
    }
    return Request("r", **{**values, **fields})  # type: ignore[arg-type]


def begin_request(grammars: GrammarManager, structured: StructuredOutput, **fields: object) -> RequestGrammar:
    return grammars.compile(request(structured, **fields)).result(WAIT_S)


def encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def is_legal(grammars: GrammarManager, structured: StructuredOutput, text: str) -> bool:
    """Whether the grammar accepts the text as a complete output."""
    draft = (*encode(text), EOS)
    return begin_request(grammars, structured).num_legal(draft) == len(draft)


def legal_ids(mask: Tensor | None) -> list[int]:
    assert mask is not None
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


def random_walk(
    grammar: RequestGrammar, draw: random.Random, max_tokens: int = 300, end_soon: float = 0.5
) -> list[int]:
    """A random output up to and including EOS, or its first max_tokens tokens.

    The longer the output, the more likely the walk picks tokens that close a bracket or a string.
    """
    output: list[int] = []
    eos = set(tokenizer().eos_token_ids)
    while len(output) < max_tokens:
        legal = legal_ids(grammar.mask(()))
        assert legal, f"no legal token after {tokenizer().decode(output)!r}: {grammar.error}"
        ends = [token_id for token_id in legal if token_id in eos]
        if ends and draw.random() < end_soon:
            token_id = draw.choice(ends)
        else:
            should_close = draw.random() < len(output) / max_tokens
            closing = [i for i in legal if tokenizer().token_text(i) in CLOSING] if should_close else []
            token_id = draw.choice(closing or legal)
        output.append(token_id)
        grammar.accept([token_id])
        if token_id in eos:
            break
    return output
