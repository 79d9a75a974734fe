"""Jump-forward: text that a grammar forces, as draft tokens.

JSON allows whitespace between its parts, so the grammar alone forces little. The output's own style predicts
the whitespace. A wrong draft costs a row of verification, never a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher

from foreword.grammar.vocab import GrammarVocab

__all__ = ["JumpForward"]

JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
PUNCTUATION: Final = (b":", b",", b'"', b"{", b"[", b"}", b"]")
VALUE_STARTS: Final = (b"a", b"0", b"-", b"t", b"f", b"n")  # legal only where a value or a string is free
# Whitespace after each punctuation mark in the output so far.
WHITESPACE_AFTER: Final = {
    b":": re.compile(rb'":(\s*)[^\s]'),
    b",": re.compile(rb'["\]}0-9el],(\s*)["{\[0-9tfn-]'),
    b"{": re.compile(rb'\{(\s*)"'),
    b"[": re.compile(rb'\[(\s*)["{\[0-9tfn-]'),
}
DEFAULT_WHITESPACE: Final = {b":": b" ", b",": b" "}
TAIL_TOKENS: Final = 96  # end of the output that shows its style
MAX_TEXT_BYTES: Final = 256
OPEN_STRING: Final = re.compile(rb'[:,\[{(]\s*"\Z')


class JumpForward:
    """Proposes the forced tokens of one request."""

    __slots__ = ("_is_json", "_punctuation", "_value_start_ids", "_vocab")

    def __init__(self, vocab: GrammarVocab, kind: str) -> None:
        self._vocab = vocab
        self._is_json = kind in JSON_KINDS
        self._punctuation = tuple(
            (sign, token_id) for sign in PUNCTUATION if (token_id := vocab.id_of(sign)) is not None
        )
        self._value_start_ids = tuple(
            token_id for sign in VALUE_STARTS if (token_id := vocab.id_of(sign)) is not None
        )

    def propose(self, llg: LLMatcher, output: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], bool]:
        """At most max_tokens forced tokens, and whether the output must end after them.

        The matcher is rolled back; the caller checks it for an error.
        """
        text, num_consumed = b"", 0
        while len(text) < MAX_TEXT_BYTES:
            more = llg.compute_ff_bytes() or self._next_punctuation(llg, output, text)
            ids = self._vocab.tokenize(more, MAX_TEXT_BYTES)
            if not ids or not llg.consume_tokens(list(ids)):
                break
            num_consumed += len(ids)
            text += more
        ended = llg.is_stopped()
        if num_consumed:
            llg.rollback(num_consumed)
        draft = self._vocab.tokenize(text if ended else text.rstrip(), MAX_TEXT_BYTES)
        if not ended and not text.rstrip().endswith(b":") and not OPEN_STRING.search(text):
            draft = draft[:-1]  # the model may prefer a longer token
        return draft[:max_tokens], ended and len(draft) <= max_tokens

    def _next_punctuation(self, llg: LLMatcher, output: Sequence[int], text: bytes) -> bytes:
        """The only legal punctuation mark, after its predicted whitespace; empty if several are legal."""
        if not self._is_json or any(llg.validate_tokens([token_id]) for token_id in self._value_start_ids):
            return b""
        legal = [sign for sign, token_id in self._punctuation if llg.validate_tokens([token_id])]
        if len(legal) != 1:
            return b""
        written = b"".join(self._vocab.token_bytes[i] for i in output[-TAIL_TOKENS:]) + text
        blank = _predict_whitespace(written, legal[0])
        more = b"" if blank is None else blank + legal[0]
        ids = self._vocab.tokenize(more, MAX_TEXT_BYTES)
        return more if llg.validate_tokens(list(ids)) == len(ids) else b""


def _predict_whitespace(written: bytes, punctuation: bytes) -> bytes | None:
    """The rest of the whitespace before a punctuation mark, by the output's style; None: unknown."""
    body = written.rstrip()
    begun = written[len(body) :]
    if punctuation in b"]}":
        return None if begun or b"\n" in _last_whitespace(body, b"{") + _last_whitespace(body, b",") else b""
    if punctuation in b":,":
        return None if begun else b""
    usual = _last_whitespace(body, body[-1:])
    return usual[len(begun) :] if usual.startswith(begun) else None


def _last_whitespace(written: bytes, punctuation: bytes) -> bytes:
    """The whitespace after the last such punctuation mark."""
    matches = WHITESPACE_AFTER[punctuation].findall(written) if punctuation in WHITESPACE_AFTER else []
    return matches[-1] if matches else DEFAULT_WHITESPACE.get(punctuation, b"")
