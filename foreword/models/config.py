"""A strict reader of config.json: an option that the code does not honour is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["ConfigReader", "read_json"]

# Without influence on the forward pass: training, bookkeeping, and defaults of generate().
IRRELEVANT = frozenset(
    (
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    )
)
# Defaults that old versions of transformers wrote out in nested configs: nothing else is honoured.
HARMLESS: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
    }
)
DTYPES = ("float32", "bfloat16", "float16")
MISSING: Any = object()
HIGHEST = 1 << 24  # whole number: more positions, tokens or values than any model has
SMALLEST, LARGEST = 1e-30, 1e30  # positive number: products of a few of these stay finite


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return values


class ConfigReader:
    """Options of one checkpoint. Whatever was not asked for by the time of `finish()` is refused.

    source  what the error messages call it
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = dict(values)
        self._taken: set[str] = set()
        self.source = source

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str, default: Any = MISSING) -> Any:
        """The value as it stands; null counts as missing."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise CheckpointError(f"{self.source} lacks `{key}`")
        return default

    def whole(self, key: str, default: Any = MISSING, low: int = 1, high: int = HIGHEST) -> int:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._bad(key, value, f"a whole number of at least {low}")
        if value > high:
            raise self._bad(key, value, f"a whole number of at most {high}")
        return value

    def optional_whole(self, key: str, absent: int | None = None) -> int | None:
        """A whole number, None where null stands, `absent` where nothing does."""
        return self.whole(key, absent) if key in self or self._lacks(key, absent) else self.raw(key, None)

    def number(self, key: str, default: Any = MISSING) -> float:
        """A positive number that can be computed with."""
        value = self.raw(key, default)
        if not _is_number(value) or value <= 0:
            raise self._bad(key, value, "a positive number")
        if not SMALLEST <= value <= LARGEST:
            raise self._bad(key, value, f"between {SMALLEST:g} and {LARGEST:g}")
        return float(value)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """A positive number, None where null stands, `absent` where nothing does."""
        return self.number(key, absent) if key in self or self._lacks(key, absent) else self.raw(key, None)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Mapping[str, str], default: Any = MISSING) -> str:
        """One of the names of `allowed`, as what we call it."""
        value = self.raw(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._bad(key, value, f"one of {', '.join(allowed)}")
        return allowed[value]

    def texts(self, key: str, length: int) -> tuple[str, ...] | None:
        """A list of so many texts, or None."""
        value = self.raw(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise self._bad(key, value, f"a list of {length} names")
        return tuple(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
            raise self._bad(key, value, f"a list of {length} numbers")
        for item in value:
            if not SMALLEST <= item <= LARGEST:
                raise self._bad(key, item, f"a list of numbers between {SMALLEST:g} and {LARGEST:g}")
        return tuple(float(item) for item in value)

    def table(self, key: str) -> ConfigReader | None:
        """A nested object, read as strictly; None if it is missing."""
        value = self.raw(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return ConfigReader(value, f"{self.source}: {key}")

    def completed(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same options, and those of `defaults` that are not there."""
        return ConfigReader({**defaults, **self._values}, self.source)

    def expect(self, key: str, value: Any) -> None:
        """The option must be missing or have the only value that is honoured."""
        given = self.raw(key, value)
        if given != value:
            raise self._bad(key, given, json.dumps(value))

    def repeats(self, other: ConfigReader) -> None:
        """What stands in `other` with the same value need not be asked for here too."""
        self._taken |= {key for key, value in self._values.items() if other._values.get(key) == value}

    def dtype(self) -> str:
        """Data type that the weights are said to have."""
        key = "dtype" if "dtype" in self else "torch_dtype"
        value = str(self.raw(key, "float32")).removeprefix("torch.")
        if value not in DTYPES:
            raise self._bad(key, value, f"one of {', '.join(DTYPES)}")
        return value

    def finish(self) -> None:
        """Raises CheckpointError for options that nobody asked for, unless they are unset or without influence."""
        for key, value in self._values.items():
            if key in self._taken or key in IRRELEVANT or key.startswith("_") or value in (None, {}, []):
                continue
            if key in HARMLESS and value == HARMLESS[key]:
                continue
            raise CheckpointError(f"{self.source}: `{key}` = {_short(value)} is not supported for this architecture")

    def refuse(self, key: str, why: str) -> CheckpointError:
        """An error about one option."""
        return CheckpointError(f"{self.source}: `{key}` {why}")

    def _lacks(self, key: str, default: object) -> bool:
        """Nothing stands there, not even null, and there is a default."""
        return key not in self._values and default is not None

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return self.refuse(key, f"must be {wanted} here, got {_short(value)}")


def _is_number(value: Any) -> bool:
    """Finite, and no bool. Whole numbers may be too long for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
