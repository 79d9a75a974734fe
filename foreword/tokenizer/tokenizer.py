"""Text to token ids and back, as `transformers` does it, without transformers.

Two families cover every generative model in use: byte-level BPE, whose tokens spell bytes in a printable
alphabet, and SentencePiece, whose tokens are text with "▁" for a space and "<0xE4>" for a byte. The bytes of
each token are known, so decoding is concatenation.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.families import FORMATS
from foreword.core.structured_output import Vocabulary
from foreword.errors import (
    CheckpointError,
    ContextLengthExceeded,
    ForewordError,
    InvalidRequest,
    RequestFailed,
)
from foreword.tokenizer.files import ADDED_TOKEN_FLAGS, MAX_TOKENS, TokenizerFiles, read_tokenizer_files

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PANIC_TYPE_NAME = "PanicException"  # a BaseException of Rust libraries, which cannot be imported
PROBE_TEXT = "a \ue000"  # a private-use character: the unknown token
MAX_CACHED = 256  # texts of TokenSearch
MAX_TEXT_TOKENS = 1 << 20
# A long text's first characters, whose tokens are counted: as many as it may have tokens, this long each.
COUNTED_TOKEN_CHARS = 8
MIN_COUNTED_CHARS, MAX_COUNTED_CHARS = 1 << 16, 1 << 20
CUT_TOKENS = 64  # that a part may have more than the whole text, cut inside of a word


def _build_byte_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: printable Latin-1 is unchanged, other bytes are characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return MappingProxyType({chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)})


BYTE_ALPHABET = _build_byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """Turns tokens into bytes, as the `decoder` of a tokenizer.json does."""

    byte_level: bool = False  # tokens use the byte alphabet
    space: str = ""  # character for a space
    byte_fallback: bool = False  # "<0xE4>" is a byte
    strip_leading_space: bool = False  # drop one space at the start of a text

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one token; an added token outside the byte alphabet is plain text."""
        if self.byte_level:
            spelled = [BYTE_ALPHABET.get(char) for char in token]
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self.space, " ") if self.space else token).encode()


def parse_decoder(decoder: Mapping[str, Any] | None) -> ByteDecoder:
    """Parse the `decoder` of a tokenizer.json. Raises CheckpointError if it is not supported."""
    decoding = ByteDecoder()
    for step in _flatten_steps(decoder):
        decoding = _apply_step(decoding, step)
    return decoding


def _flatten_steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        raise CheckpointError("tokenizer.json has no decoder, which is needed to detokenize", "decoder")
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten_steps(inner)]
    return [decoder]


def _apply_step(byte_decoder: ByteDecoder, step: Mapping[str, Any]) -> ByteDecoder:
    match step:
        case {"type": "ByteLevel"}:
            return replace(byte_decoder, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(byte_decoder, byte_fallback=True)
        case {"type": "Fuse"}:
            return byte_decoder
        case {"type": "Replace", "pattern": {"String": space}, "content": " "}:
            return replace(byte_decoder, space=space)
        case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
            return replace(byte_decoder, strip_leading_space=start == 1)
        case {"type": "Metaspace", "replacement": space}:
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            return replace(byte_decoder, space=space, strip_leading_space=not never)
    raise CheckpointError(f"tokenizer.json: decoder {dict(step)!r} is not supported", "decoder")


class TokenSearch:
    """Substring search over all tokens of a vocabulary, in one concatenated text."""

    __slots__ = ("_cache", "_starts", "_text")

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """tokens: the bytes of each id"""
        self._text = b"".join(tokens)
        self._starts = list(accumulate(map(len, tokens), initial=0))
        self._cache: dict[bytes, tuple[int, ...]] = {}

    def containing(self, part: bytes) -> tuple[int, ...]:
        """Ids of the tokens that contain `part`, ascending."""
        if part not in self._cache:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[part] = tuple(self._search(part))
        return self._cache[part]

    def ending_with(self, part: bytes) -> Iterator[int]:
        """Ids of the tokens that end with `part`, ascending."""
        for token_id in self.containing(part):
            if self._text.endswith(part, self._starts[token_id], self._starts[token_id + 1]):
                yield token_id

    def _search(self, part: bytes) -> Iterator[int]:
        index = self._text.find(part)
        while index >= 0:
            token_id = bisect_right(self._starts, index) - 1
            end = self._starts[token_id + 1]
            if index + len(part) <= end:
                yield token_id
                index = end - 1
            index = self._text.find(part, index + 1)


class Tokenizer:
    """The tokenizer of a checkpoint. Thread-safe."""

    def __init__(
        self, backend: tokenizers.Tokenizer, files: TokenizerFiles | None = None, can_decode: bool = True
    ) -> None:
        """can_decode: False for a tokenizer that only encodes, whose decoder may be unsupported"""
        files = files or TokenizerFiles()
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, files)
        self._backend = backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        self._byte_decoder = parse_decoder(decoder) if can_decode else ByteDecoder()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_by_id: dict[int, bytes] = {}
        self._token_search: TokenSearch | None = None
        used_ids = set(backend.get_vocab(with_added_tokens=True).values())
        # Highest id + 1; a model's vocabulary may be padded beyond it.
        self.vocab_size = max(used_ids, default=-1) + 1
        if self.vocab_size > MAX_TOKENS:
            raise CheckpointError(
                f"the tokenizer has a token with id {self.vocab_size - 1}; ids are below {MAX_TOKENS}",
                "model",
            )
        self._gaps = tuple(token_id for token_id in range(self.vocab_size) if token_id not in used_ids)
        self.special_tokens = dict(files.special_tokens)  # text by name (`bos_token`, ...)
        self.chat_template = files.chat_template  # Jinja source
        self.response_template = files.response_template  # transformers' description of answers
        self.generation_config = files.generation_config
        self.suppress_tokens = files.suppress_tokens  # ids that are never sampled
        eos_ids = list(files.eos_token_ids)
        named = self.token_to_id(files.special_tokens.get("eos_token", ""))
        if named is not None and named not in eos_ids:
            eos_ids.append(named)
        self.eos_token_ids = tuple(eos_ids)  # ids that end an answer

    @classmethod
    def from_directory(cls, path: str | Path, can_decode: bool = True) -> Tokenizer:
        """Load from a checkpoint directory. Raises CheckpointError without a usable tokenizer.json."""
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{path} has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(...) "
                "of transformers writes one from tokenizer.model, or vocab.json and merges.txt",
                "model",
            )
        with translate_errors(lambda why: CheckpointError(f"{file} cannot be read: {why}", "model")):
            backend = tokenizers.Tokenizer.from_file(str(file))
            backend.encode(PROBE_TEXT)  # fails if the unknown token is missing
        return cls(backend, read_tokenizer_files(Path(path)), can_decode)

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` drops a space at the start of a text."""
        return self._byte_decoder.strip_leading_space

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int = MAX_TEXT_TOKENS
    ) -> list[int]:
        """Ids of `text`; special tokens in it become their ids. Releases the GIL.

        add_special_tokens  apply tokenizer.json's post-processor; as in transformers 5, `add_bos_token` of
                            tokenizer_config.json is ignored
        max_tokens          checked for texts of more than COUNTED_TOKEN_CHARS a token only, with CUT_TOKENS
                            of tolerance: it saves work, and is no limit of the result
        Raises ContextLengthExceeded.
        """
        self._check_text(text, max_tokens)
        with translate_errors(_encode_error):
            ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def encode_truncated(
        self,
        text: str,
        pair: str | None,
        max_tokens: int | None,
        add_special_tokens: bool = True,
        max_whole_tokens: int = MAX_TEXT_TOKENS,
    ) -> tuple[list[int], list[int]]:
        """Ids and type ids of a text or a pair of texts, for encoder models.

        max_tokens        limit with special tokens, which are kept; of a pair, the longer text is cut first
        max_whole_tokens  as in encode(), without max_tokens
        Raises InvalidRequest, also if special tokens alone exceed the limit; ContextLengthExceeded.
        """
        for part in (text, pair or ""):
            self._check_text(part, max_whole_tokens if max_tokens is None else MAX_TEXT_TOKENS)
        with translate_errors(_encode_error):
            encoded = self._encode(text if pair is None else (text, pair), add_special_tokens)
            if max_tokens is None or len(encoded) <= max_tokens:
                return encoded.ids, encoded.type_ids
            encodings = [self._encode(part, False) for part in (text, pair) if part is not None]
            special = self._backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
            if special > max_tokens:
                raise InvalidRequest(
                    f"truncate_prompt_tokens {max_tokens} leaves no room for {special} special tokens",
                    "truncate_prompt_tokens",
                )
            lengths = _truncated_lengths(list(map(len, encodings)), max_tokens - special)
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length)
            second = encodings[1] if pair is not None else None
            cut = self._backend.post_process(encodings[0], second, add_special_tokens)
            return cut.ids, cut.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD; unassigned ids are skipped."""
        raw = b"".join(
            self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids)
        )
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an unassigned id."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._bytes_by_id[token_id] = (
                b"" if token is None else self._byte_decoder.token_bytes(token)
            )
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token, U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token in the vocabulary's spelling, or None."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def vocabulary(self) -> Vocabulary:
        """The bytes of all tokens."""
        tokens = tuple(self.token_bytes(token_id) for token_id in range(self.vocab_size))
        bound = [bind_format(fmt, self.token_to_id) for fmt in FORMATS.values()]
        markers = {token_id for fmt in bound for token_id in fmt.token_ids.values()}
        return Vocabulary(tokens, tuple(sorted(self.special_ids)), self.eos_token_ids, tuple(sorted(markers)))

    def engine_vocabulary(self) -> Vocabulary:
        """The same with the tokenizer itself, some megabytes more, for drafters that write text.

        Raises CheckpointError.
        """
        with translate_errors(lambda why: CheckpointError(f"the tokenizer has no JSON: {why}", "model")):
            return replace(self.vocabulary(), tokenizer=self._backend.to_str())

    def token_search(self) -> TokenSearch:
        """Substring search over the tokens; cached."""
        if self._token_search is None:
            self._token_search = TokenSearch(self.vocabulary().tokens)
        return self._token_search

    def unassigned_ids(self, model_vocab_size: int) -> tuple[int, ...]:
        """Ids of the model's vocabulary without a token: padding, never sampled."""
        gaps = (token_id for token_id in self._gaps if token_id < model_vocab_size)
        return (*gaps, *range(self.vocab_size, model_vocab_size))

    def diff(self, other: Tokenizer) -> str | None:
        """The first token that differs in `other`, as text; None if `other` can draft for this tokenizer.

        Ids without a token here are never sampled, and added tokens that `other` lacks are never drafted;
        only those that end an answer are needed. Whether a token is special may differ: GGUF files mark
        more of them than tokenizer.json.
        """
        unneeded = {*self.added_tokens_missing_in(other)}
        for token_id in range(self.vocab_size):
            here, there = self.id_to_token(token_id), other.id_to_token(token_id)
            if here not in (None, there) and token_id not in unneeded:
                second = "no token" if there is None else repr(there)
                return f"id {token_id} is {here!r} in the one and {second} in the other"
        return None

    def added_tokens_missing_in(self, other: Tokenizer) -> list[int]:
        """Ids of added tokens that do not end an answer and have no token in `other`."""
        added = self._backend.get_added_tokens_decoder().keys() - {*self.eos_token_ids}
        return sorted(token_id for token_id in added if other.id_to_token(token_id) is None)

    def _encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> tokenizers.Encoding:
        # encode_batch releases the GIL, encode does not.
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _check_text(self, text: str, max_tokens: int) -> None:
        """Raises InvalidRequest for a lone surrogate, ContextLengthExceeded for a long text of more tokens.

        An encoding takes 200 bytes a token, and the GIL while it is freed. So the tokens of ever longer parts
        of a long text are counted, until one has too many.
        """
        _check_unicode(text)
        num_chars = min(max(COUNTED_TOKEN_CHARS * max_tokens, MIN_COUNTED_CHARS), MAX_COUNTED_CHARS)
        while num_chars < len(text):
            with translate_errors(_encode_error):
                num_tokens = len(self._encode(text[:num_chars], False))
            if num_tokens > max_tokens + CUT_TOKENS:
                raise ContextLengthExceeded(
                    f"prompt is too long: its first {num_chars} characters have {num_tokens} tokens, "
                    f"the limit is {max_tokens}",
                    "prompt",
                )
            num_chars *= 2


@contextmanager
def translate_errors(make_error: Callable[[str], ForewordError]) -> Iterator[None]:
    """Turn an Exception or panic of the tokenizers library into make_error(its message)."""
    try:
        yield
    except ForewordError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC_TYPE_NAME:
            raise
        raise make_error(str(error)) from None


def _encode_error(_: str) -> ForewordError:
    """Without the library's message, which may quote the text: this error is logged."""
    return RequestFailed("the tokenizer fails on this text")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"prompt is not valid Unicode: a lone surrogate at character {error.start}", "prompt"
        ) from None


def _truncated_lengths(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Lengths of one or two texts in `max_tokens`: a shorter one of up to half of them is not cut."""
    if len(lengths) == 1:
        return [max_tokens]
    short = min(lengths)
    if short > max_tokens // 2:
        short, long = max_tokens // 2, max_tokens - max_tokens // 2
    else:
        long = max_tokens - short
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add tokens that only tokenizer_config.json has, in the order of transformers."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = set(files.special_tokens.values())
    for _, properties in sorted(files.added_tokens.items()):
        flags = {flag: properties[flag] for flag in ADDED_TOKEN_FLAGS if flag in properties}
        flags["special"] = flags.get("special", False) or properties["content"] in named
        token = AddedToken(properties["content"], **flags)
        if repr(known.get(token.content)) != repr(token):
            backend.add_tokens([token])
            known[token.content] = token
    for text in (*files.special_tokens.values(), *files.extra_special_tokens):
        if text not in known:
            known[text] = AddedToken(text, special=True)
            backend.add_special_tokens([known[text]])
