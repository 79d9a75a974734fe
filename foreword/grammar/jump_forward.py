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

JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag", "tools")
PUNCTUATION: Final = (b":", b",", b'"', b"{", b"[", b"}", b"]")
TAG: Final = b"<"  # counts as punctuation in calls
VALUE_STARTS: Final = (b"a", b"0", b"-", b"t", b"f", b"n")  # legal only where a value or a string is free
NAME_PARTS: Final = (b"_",)  # legal in a call where a name may go on
# Whitespace after each punctuation mark in the output so far.
WHITESPACE_AFTER: Final = {
    b":": re.compile(rb'":(\s*)[^\s]'),
    b",": re.compile(rb'["\]}0-9el],(\s*)["{\[0-9tfn-]'),
    b"{": re.compile(rb'\{(\s*)"'),
    b"[": re.compile(rb'\[(\s*)["{\[0-9tfn-]'),
    b">": re.compile(rb">(\s*)[<{\[]"),
}
DEFAULT_WHITESPACE: Final = {b":": b" ", b",": b" ", b">": b"\n"}
AFTER_MARKER: Final = re.compile(rb"(?:\A|[>\]])(\s*)[<{\[]")  # whitespace after the marker of a call
TAIL_TOKENS: Final = 96  # end of the output that shows its style
MAX_TEXT_BYTES: Final = 256
MARKER_BYTE: Final = b"\xff"  # begins a token that is no text, in llguidance
OPEN_STRING: Final = re.compile(rb'[:,\[{(]\s*"\Z')


class JumpForward:
    """Proposes the forced tokens of one request."""

    __slots__ = ("_is_json", "_marker_ids", "_punctuation", "_value_start_ids", "_vocab")

    def __init__(self, vocab: GrammarVocab, kind: str) -> None:
        self._vocab = vocab
        self._is_json = kind in JSON_KINDS
        is_call = kind == "tools"
        self._marker_ids = vocab.marker_ids if is_call else ()
        signs = (*PUNCTUATION, TAG) if is_call else PUNCTUATION
        starts = (*VALUE_STARTS, *NAME_PARTS) if is_call else VALUE_STARTS
        self._punctuation = tuple(
            (sign, token_id) for sign in signs if (token_id := vocab.id_of(sign)) is not None
        )
        self._value_start_ids = tuple(
            token_id for sign in starts if (token_id := vocab.id_of(sign)) is not None
        )

    def propose(self, llg: LLMatcher, output: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], bool]:
        """At most max_tokens forced tokens, and whether the output must end after them.

        The matcher is rolled back; the caller checks it for an error.
        """
        done: list[int] = []  # up to and including the last marker
        text, num_consumed = b"", 0
        while len(text) < MAX_TEXT_BYTES and len(done) < max_tokens:
            more = llg.compute_ff_bytes().partition(MARKER_BYTE)[0] or self._next_punctuation(
                llg, output, text
            )
            ids = self._vocab.tokenize(more, MAX_TEXT_BYTES) or self._next_marker(llg, output)
            if not ids or not llg.consume_tokens(list(ids)):
                break
            num_consumed += len(ids)
            text += more
            if not more:
                done += (*self._vocab.tokenize(text, MAX_TEXT_BYTES), *ids)
                text = b""
        ended = llg.is_stopped()
        if num_consumed:
            llg.rollback(num_consumed)
        rest = self._vocab.tokenize(text if ended else text.rstrip(), MAX_TEXT_BYTES)
        if not ended and not text.rstrip().endswith(b":") and not OPEN_STRING.search(text):
            rest = rest[:-1]  # the model may prefer a longer token
        draft = (*done, *rest)
        return draft[:max_tokens], ended and len(draft) <= max_tokens

    def _next_punctuation(self, llg: LLMatcher, output: Sequence[int], text: bytes) -> bytes:
        """The only legal punctuation mark, after its predicted whitespace; empty if several are legal."""
        if not self._is_json or self._is_free(llg):
            return b""
        legal = [sign for sign, token_id in self._punctuation if llg.validate_tokens([token_id])]
        if len(legal) != 1:
            return b""
        blank = _predict_whitespace(self._written(output) + text, legal[0])
        more = b"" if blank is None else blank + legal[0]
        ids = self._vocab.tokenize(more, MAX_TEXT_BYTES)
        return more if llg.validate_tokens(list(ids)) == len(ids) else b""

    def _next_marker(self, llg: LLMatcher, output: Sequence[int]) -> tuple[int, ...]:
        """The only legal marker, after whitespace as at the begin of the call; () where text is legal."""
        legal = [token_id for token_id in self._marker_ids if llg.validate_tokens([token_id])]
        if len(legal) != 1 or self._is_free(llg):
            return ()
        if any(llg.validate_tokens([token_id]) for _, token_id in self._punctuation):
            return ()
        blanks = AFTER_MARKER.findall(self._written(output))
        ids = (*self._vocab.tokenize(blanks[-1] if blanks else b"", MAX_TEXT_BYTES), legal[0])
        return ids if llg.validate_tokens(list(ids)) == len(ids) else ()

    def _is_free(self, llg: LLMatcher) -> bool:
        """Whether a value, a string or a name goes on."""
        return any(llg.validate_tokens([token_id]) for token_id in self._value_start_ids)

    def _written(self, output: Sequence[int]) -> bytes:
        """The end of the output, markers included."""
        return b"".join(self._vocab.spelled[i] for i in output[-TAIL_TOKENS:])


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
