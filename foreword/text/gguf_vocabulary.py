"""The vocabulary in a GGUF file's metadata. What reads the file hands the metadata over as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "TokenizerMetadata", "GGUFVocab"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEY_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """Values by key, below `tokenizer.ggml.`; `source` is what error messages call the file."""

    values: Mapping[str, Any]
    source: str

    def get_str(self, key: str) -> str:
        value = self.get_optional(key, str)
        if value is None:
            raise self.error(key, "is missing")
        return str(value)

    def get_optional(self, key: str, expected_type: type) -> Any:
        """The value, None where there is none."""
        value = self.values.get(KEY_PREFIX + key)
        if value is not None and type(value) is not expected_type:
            raise self.error(key, f"must be of type {expected_type.__name__}, got {value!r:.60}")
        return value

    def get_bool(self, key: str, default: bool) -> bool:
        value = self.get_optional(key, bool)
        return default if value is None else bool(value)

    def get_strs(self, key: str) -> list[str]:
        values = self.get_optional(key, list)
        if not values or type(values[0]) is not str:
            raise self.error(key, "must be a list of texts")
        return list(values)

    def get_floats(self, key: str, length: int) -> list[float] | None:
        values: list[float] | None = self.get_optional(key, list)
        if values is None:
            return None
        if len(values) != length or type(values[0]) not in (int, float):
            raise self.error(key, f"must be a list of {length} numbers, one for each token")
        return values

    def get_token_id(self, key: str, vocab_size: int) -> int | None:
        value: int | None = self.get_optional(key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise self.error(key, f"is {value}; the vocabulary has {vocab_size} tokens")
        return value

    def require_value(self, key: str, allowed: Any) -> None:
        """The key must be missing or have a value that asks for nothing."""
        value = self.values.get(KEY_PREFIX + key)
        if value not in (None, allowed):
            raise self.error(key, f"{value!r:.60} is not supported")

    def error(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: `{KEY_PREFIX}{key}` {reason}", "model")


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """Tokens by id, the unused ones left out.

    size  ids of the file, used or not
    """

    ids: Mapping[str, int]
    token_types: Sequence[float]
    scores: Sequence[float] | None
    size: int

    @classmethod
    def from_metadata(cls, metadata: TokenizerMetadata) -> GGUFVocab:
        """Raises CheckpointError for lists of unequal lengths and for a token that is there twice."""
        tokens = metadata.get_strs("tokens")
        types = metadata.get_floats("token_type", len(tokens)) or [NORMAL] * len(tokens)
        used = [(token, index) for index, token in enumerate(tokens) if types[index] != UNUSED]
        ids = dict(used)
        if len(ids) < len(used):
            token, index = next(pair for pair in used if ids[pair[0]] != pair[1])
            raise metadata.error("tokens", f"holds {token!r:.60} twice, as {index} and {ids[token]}")
        return cls(ids, types, metadata.get_floats("scores", len(tokens)), len(tokens))

    def tokens_of_type(self, *token_types: int) -> list[str]:
        """Tokens by id."""
        return [token for token, index in self.ids.items() if self.token_types[index] in token_types]
