"""Drafts from the text of a request: what an agent copies out of tool results into calls.

Tokens of the same text differ between a result, where it has line numbers, marks of a diff or colour codes,
and a call, where it is a JSON string. So texts are compared, and the continuation is written as its place
needs it, then encoded by the model's tokenizer. Reading and matching are C++ (csrc/drafting/text_*.cpp).
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

import tokenizers

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.core.structured_output import Vocabulary
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter

MAX_BYTES = 256  # bytes of a continuation; the next ones are looked up before they are used up
BYTES_PER_TOKEN = 6
TAIL_TOKENS = 4  # output tokens encoded again with the continuation, since tokens span words
MAX_READ_TOKENS = 16_384  # prompt tokens of all requests in one call: some 12 ms of prose
MIN_LEFT = 8  # tokens of a continuation: fewer are looked for again
MIN_CONFIDENCE = 0.05  # probability of a draft's tokens together


class TextIndex:
    """Texts of live requests, read as tokens. A text for which memory is short has no drafts any more."""

    def __init__(self, library: ctypes.CDLL, vocabulary: Vocabulary) -> None:
        self._library = library
        self._propose = library.foreword_text_propose
        tokens = vocabulary.tokens
        lengths = array("i", map(len, tokens))
        markers = bytearray(len(tokens))
        for token_id in (*vocabulary.special_ids, *vocabulary.eos_ids, *vocabulary.marker_ids):
            markers[token_id] = 1
        arguments = b"".join(tokens), lengths.buffer_info()[0], bytes(markers), len(tokens)
        self._index: int | None = library.foreword_text_new(*arguments)
        if not self._index:
            raise MemoryError("out of memory for the texts of requests")
        weakref.finalize(self, library.foreword_text_delete, self._index).atexit = False  # may be in use then
        self._bytes = ctypes.create_string_buffer(MAX_BYTES)
        self._products = array("f", bytes(4 * MAX_BYTES))
        self._outputs = ctypes.addressof(self._bytes), self._products.buffer_info()[0]

    def start(self) -> int:
        """The id of a new text."""
        text_id: int = self._library.foreword_text_start(self._index)
        if text_id < 0:
            raise MemoryError("out of memory for the texts of requests")
        return text_id

    def finish(self, text_id: int) -> None:
        self._library.foreword_text_finish(self._index, text_id)

    def num_texts(self) -> int:
        return int(self._library.foreword_text_num_texts(self._index))

    def work(self, text_id: int) -> int:
        """Steps of work on a text so far: its cost, without a clock."""
        return int(self._library.foreword_text_work(self._index, text_id))

    def memory(self) -> int:
        """Bytes of all texts and what is found in them."""
        return int(self._library.foreword_text_memory(self._index))

    def propose(
        self, text_id: int, new_ids: Sequence[int], max_bytes: int = MAX_BYTES
    ) -> tuple[bytes, array[float]]:
        """Extend a text, then the bytes that most likely follow, and P(all bytes up to each are right).

        max_bytes  at most MAX_BYTES
        """
        buffer, room = array("i", new_ids), min(max_bytes, MAX_BYTES)
        length = self._propose(
            self._index, text_id, buffer.buffer_info()[0], len(buffer), room, *self._outputs
        )
        if length < 0:
            raise (
                MemoryError("out of memory for the texts of requests")
                if length == -2
                else ValueError("no such text")
            )
        return self._bytes.raw[:length], self._products[:length]


@dataclass(slots=True)
class _TextState:
    """The text of one request, and the continuation that was found last."""

    text_id: int
    num_read: int = 0  # its tokens in the index
    begin: int = 0  # begin of the continuation in the request's tokens
    token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()


class TextDrafter(EngineDrafter):
    """Drafts from each request's own text, so that no key's text reaches another's."""

    name = "text"
    is_fallback = True

    def __init__(self, never_sampled_ids: Collection[int], library: ctypes.CDLL) -> None:
        self._never_sampled_ids = frozenset(never_sampled_ids)
        self._library = library
        self._tokens: Sequence[bytes] = ()
        self._tokenizer_json = ""  # not parsed yet
        self._encoder: tokenizers.Tokenizer | None = None
        self._index: TextIndex | None = None  # None: no vocabulary yet, or its tokenizer cannot be parsed
        self._texts: dict[str, _TextState] = {}
        self._num_readable = MAX_READ_TOKENS  # tokens that this call may still read

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Requests that start from now on get drafts."""
        if not self._tokens and vocabulary.tokenizer:
            self._index = TextIndex(self._library, vocabulary)
            self._tokenizer_json, self._tokens = vocabulary.tokenizer, vocabulary.tokens

    @property
    def is_timed(self) -> bool:
        """False while a call may parse the tokenizer, which happens once."""
        return not self._tokenizer_json

    def prepare(self) -> None:
        """Parse the tokenizer once: 150,000 tokens take 0.4 s. Nothing is drafted if it fails."""
        if self._tokenizer_json:
            json, self._tokenizer_json = self._tokenizer_json, ""
            index, self._index = self._index, None
            self._encoder = tokenizers.Tokenizer.from_str(json)
            self._encoder.encode_special_tokens = True  # a marker that is spelled in a text is text
            self._index = index

    def start(self, state: RequestState) -> bool:
        if self._index is not None:
            self._texts[state.id] = _TextState(self._index.start())
        return self._index is not None

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and self._index is not None:
            self._index.finish(text.text_id)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._texts)
        assert self._index is None or self._index.num_texts() == len(self._texts)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self._num_readable = MAX_READ_TOKENS
        return [
            self._propose(state, length) if self._index is not None else None for state, length, _ in requests
        ]

    def _propose(self, state: RequestState, max_tokens: int) -> Draft | None:
        text, tokens = self._texts[state.id], state.tokens
        done = len(tokens) - text.begin
        left = len(text.token_ids) - done
        if left < min(max_tokens, MIN_LEFT) or tuple(tokens[text.begin :]) != text.token_ids[:done]:
            self._continue(text, tokens, BYTES_PER_TOKEN * (max_tokens + MIN_LEFT))
            done = 0
        token_ids = text.token_ids[done : done + max_tokens]
        return Draft(token_ids, self.name, text.confidence[done : done + max_tokens]) if token_ids else None

    def _continue(self, text: _TextState, tokens: list[int], max_bytes: int) -> None:
        """Look for the continuation of the tokens."""
        assert self._index is not None
        new_ids = tokens[text.num_read : text.num_read + self._num_readable]
        self._num_readable -= len(new_ids)
        text.num_read += len(new_ids)
        text.begin, text.token_ids, text.confidence = len(tokens), (), ()
        if not new_ids and text.num_read < len(tokens):
            return
        more, products = self._index.propose(text.text_id, new_ids, max_bytes)
        if more and text.num_read == len(tokens):
            text.token_ids, text.confidence = self._encode(tokens, more, products)

    def _encode(
        self, tokens: list[int], more: bytes, products: array[float]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens of `more` behind `tokens`, and P(right | those before it right) of each.

        Empty where the tokenizer would not end a token between the two: the output goes on in another way.
        """
        self.prepare()  # if the engine was never idle
        encoder = self._encoder
        assert encoder is not None
        table = self._tokens
        tail = b"".join(map(table.__getitem__, tokens[-TAIL_TOKENS:]))
        ids = encoder.encode((tail + more).decode("utf-8", "ignore"), add_special_tokens=False).ids
        at, first = len(more), len(ids)
        while at > 0 and first > 0:
            first -= 1
            at -= len(table[ids[first]])
        if at != 0:
            return (), ()
        confidence, before, end = [], 1.0, 0
        ends_value = more[-1:] in (b'"', b"'")
        last = len(ids) - (not ends_value)  # a word goes on in the last token
        for index in range(first, last):
            end += len(table[ids[index]])
            product = products[end - 1]
            if product < MIN_CONFIDENCE:
                break
            confidence.append(min(product / before, 1.0))
            before = product
        return tuple(ids[first : first + len(confidence)]), tuple(confidence)
