"""Text that must follow an output, but for whitespace, and the tokens that most likely spell it.

Between the parts of JSON whitespace is free, so that hardly anything is forced to the letter: behind a key stands a colon,
but a space may come first. What the output has done so far is what it will most likely do again. A guess that is wrong costs
a row of verification; it never costs a token.
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
VALUE_STARTS: Final = (
    b"a",
    b"0",
    b"-",
    b"t",
    b"f",
    b"n",
)  # where one of these may follow, a value or a text is free
# What stood between two parts the last time: behind a colon, behind a comma, behind an opening bracket.
WHITESPACE_AFTER: Final = {
    b":": re.compile(rb'":(\s*)[^\s]'),
    b",": re.compile(rb'["\]}0-9el],(\s*)["{\[0-9tfn-]'),
    b"{": re.compile(rb'\{(\s*)"'),
    b"[": re.compile(rb'\[(\s*)["{\[0-9tfn-]'),
}
DEFAULT_WHITESPACE: Final = {b":": b" ", b",": b" "}
TAIL_TOKENS: Final = 96  # of the output are looked at for its style
MAX_TEXT_BYTES: Final = 256
OPEN_STRING: Final = re.compile(rb'[:,\[{(]\s*"\Z')


class JumpForward:
    """Finds the text for one request."""

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
        """Tokens that most likely follow, at most max_tokens, and whether only the end can come behind them.

        The automaton is left as it was; the caller finds out if it gave up.
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
            draft = draft[:-1]  # the model may well prefer a longer token
        return draft[:max_tokens], ended and len(draft) <= max_tokens

    def _next_punctuation(self, llg: LLMatcher, output: Sequence[int], text: bytes) -> bytes:
        """The one sign that may come next, with the whitespace that most likely stands before it; empty if there are more."""
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
    """The rest of the whitespace before a sign, as it was in such a place before; None: nobody knows."""
    body = written.rstrip()
    begun = written[len(body) :]
    if punctuation in b"]}":
        return None if begun or b"\n" in _last_whitespace(body, b"{") + _last_whitespace(body, b",") else b""
    if punctuation in b":,":
        return None if begun else b""
    habit = _last_whitespace(body, body[-1:])
    return habit[len(begun) :] if habit.startswith(begun) else None


def _last_whitespace(written: bytes, punctuation: bytes) -> bytes:
    """The whitespace that stood behind such a sign the last time."""
    found = WHITESPACE_AFTER[punctuation].findall(written) if punctuation in WHITESPACE_AFTER else []
    return found[-1] if found else DEFAULT_WHITESPACE.get(punctuation, b"")
