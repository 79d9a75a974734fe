"""The vocabulary in a GGUF file's metadata. What reads the file hands the metadata over as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "Metadata", "Vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class Metadata:
    """Values by key, below `tokenizer.ggml.`; `source` is what error messages call the file."""

    values: Mapping[str, Any]
    source: str

    def text(self, key: str) -> str:
        value = self.optional(key, str)
        if value is None:
            raise self.error(key, "is missing")
        return str(value)

    def optional(self, key: str, kind: type) -> Any:
        """The value, None where there is none."""
        value = self.values.get(PREFIX + key)
        if value is not None and type(value) is not kind:
            raise self.error(key, f"must be of type {kind.__name__}, got {value!r:.60}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key, bool)
        return default if value is None else bool(value)

    def texts(self, key: str) -> list[str]:
        values = self.optional(key, list)
        if not values or type(values[0]) is not str:
            raise self.error(key, "must be a list of texts")
        return list(values)

    def numbers(self, key: str, length: int) -> list[float] | None:
        values: list[float] | None = self.optional(key, list)
        if values is None:
            return None
        if len(values) != length or type(values[0]) not in (int, float):
            raise self.error(key, f"must be a list of {length} numbers, one for each token")
        return values

    def token_id(self, key: str, limit: int) -> int | None:
        value: int | None = self.optional(key, int)
        if value is not None and not 0 <= value < limit:
            raise self.error(key, f"is {value}; the vocabulary has {limit} tokens")
        return value

    def refuse(self, key: str, allowed: Any) -> None:
        """The key must be missing or have a value that asks for nothing."""
        value = self.values.get(PREFIX + key)
        if value not in (None, allowed):
            raise self.error(key, f"{value!r:.60} is not supported")

    def error(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: `{PREFIX}{key}` {why}", "model")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, the unused ones left out.

    size  ids of the file, used or not
    """

    ids: Mapping[str, int]
    types: Sequence[float]
    scores: Sequence[float] | None
    size: int

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Raises CheckpointError for lists of unequal lengths and for a token that is there twice."""
        tokens = metadata.texts("tokens")
        types = metadata.numbers("token_type", len(tokens)) or [NORMAL] * len(tokens)
        used = [(token, index) for index, token in enumerate(tokens) if types[index] != UNUSED]
        ids = dict(used)
        if len(ids) < len(used):
            token, index = next(pair for pair in used if ids[pair[0]] != pair[1])
            raise metadata.error("tokens", f"holds {token!r:.60} twice, as {index} and {ids[token]}")
        return cls(ids, types, metadata.numbers("scores", len(tokens)), len(tokens))

    def of_type(self, *types: int) -> list[str]:
        """Tokens by id."""
        return [token for token, index in self.ids.items() if self.types[index] in types]
