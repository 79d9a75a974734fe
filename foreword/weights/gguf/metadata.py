"""Strict reader of one architecture's keys in GGUF metadata."""

from __future__ import annotations

from typing import Any

from foreword.errors import CheckpointError
from foreword.weights.config_reader import MISSING, ConfigReader
from foreword.weights.gguf.header import GGUFFile, TensorInfo


class MetadataReader:
    """Reads keys without their prefix `architecture.`; errors name the full key."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            key: _collapse_uniform(value) for key, value in gguf.metadata.items() if key.startswith(prefix)
        }
        self.architecture = architecture
        self.tensors = gguf.tensors
        self._general = ConfigReader(gguf.metadata, str(gguf.path))
        self._reader = ConfigReader(values, str(gguf.path))
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._reader

    def get(self, key: str, *default: Any) -> Any:
        return self._reader.get(self._prefix + key, *default)

    def get_int(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`; required unless there is a default."""
        return self._reader.get_int(self._prefix + key, MISSING if default is None else default, low)

    def get_float(self, key: str, default: float | None = None) -> float:
        """A positive number; required unless there is a default."""
        return self._reader.get_float(self._prefix + key, MISSING if default is None else default)

    def get_optional_float(self, key: str) -> float | None:
        """A positive number; None if it is missing or 0."""
        return self.get_float(key) if self.get(key, 0) != 0 else None

    def get_choice(self, key: str, names: tuple[str, ...], default: str) -> str:
        return self._reader.get_choice(self._prefix + key, {name: name for name in names}, default)

    def require_value(self, key: str, value: Any) -> None:
        """The key must be missing or have this value, the only supported one."""
        self._reader.require_value(self._prefix + key, value)

    def require_general_value(self, key: str, value: Any) -> None:
        """Like require_value, for a full key."""
        self._general.require_value(key, value)

    def ignore(self, key: str) -> None:
        self.get(key, None)

    def error(self, key: str, reason: str) -> CheckpointError:
        return self._reader.error(self._prefix + key, reason)

    def check_all_read(self) -> None:
        """Raises CheckpointError for keys that were not read."""
        self._reader.check_all_read()

    def get_head_dim(self) -> int:
        share = self.get_int("embedding_length") // self.get_int("attention.head_count")
        return self.get_int("attention.key_length", share)

    def tensor_info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self._reader.source}: tensor `{name}` is missing", "model")
        return self.tensors[name]


def _collapse_uniform(value: Any) -> Any:
    """Replace a list of equal numbers, one per layer, by the number."""
    if not isinstance(value, list) or not value or isinstance(value[0], bool):
        return value
    return value[0] if value.count(value[0]) == len(value) else value
