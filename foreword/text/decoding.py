"""What bytes a token stands for, read from the `decoder` of a tokenizer.json.

Two families cover every generating model in use: byte-level BPE, whose tokens spell bytes in a
printable alphabet, and SentencePiece, whose tokens are text with "▁" for a space and "<0xE4>" for a
byte. With bytes known token by token, decoding is concatenation: nothing is ever decoded twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["ByteDecoder", "parse_decoder"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _build_byte_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return MappingProxyType({chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)})


BYTE_ALPHABET = _build_byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """How one tokenizer turns tokens into bytes.

    byte_level     tokens are spelled in the byte alphabet
    space          the character that stands for a space, or ""
    byte_fallback  "<0xE4>" is a byte
    strip_start    one space at the very beginning of a text belongs to no word and is dropped
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    strip_leading_space: bool = False

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one token. An added token outside the byte alphabet stands for its own text."""
        if self.byte_level:
            spelled = [BYTE_ALPHABET.get(char) for char in token]
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self.space, " ") if self.space else token).encode()


def parse_decoder(decoder: Mapping[str, Any] | None) -> ByteDecoder:
    """Read `decoder` of a tokenizer.json. Raises CheckpointError for one that is not known."""
    decoding = ByteDecoder()
    for step in _flatten_steps(decoder):
        decoding = _apply_step(decoding, step)
    return decoding


def _flatten_steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        raise CheckpointError("tokenizer.json has no decoder: how its tokens join into text is not known", "decoder")
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
