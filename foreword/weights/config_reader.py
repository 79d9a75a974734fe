"""A strict reader of config.json: an option that is not supported is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

# Options without effect on the forward pass: training, bookkeeping, and defaults of generate().
IGNORED_KEYS = frozenset(
    (
        *("architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id"),
        *("cache_implementation", "chunk_size_feed_forward", "diversity_penalty", "do_sample"),
        *("dtype", "early_stopping", "embd_pdrop", "embed_dropout", "encoder_no_repeat_ngram_size"),
        "eos_token_id",
        *("finetuning_task", "hidden_dropout", "id2label", "initializer_range", "label2id"),
        *("length_penalty", "max_length", "max_sequence_length", "min_length", "model_type"),
        *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels"),
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_past"),
        *("output_scores", "pad_token_id", "pretraining_tp", "problem_type", "remove_invalid_values"),
        *("repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate"),
        *("task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype"),
        *("torchscript", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version"),
        *("use_bfloat16", "use_cache"),
    )
)
# Defaults that old versions of transformers write to nested configs; other values are not supported.
NOOP_VALUES: Mapping[str, Any] = MappingProxyType(
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
MAX_INT = 1 << 24  # above any model's positions, tokens or values
MIN_FLOAT, MAX_FLOAT = 1e-30, 1e30  # products of a few such numbers stay finite


# Defaults of LLaVA's text_config: files on the hub hold only the differences.
LLAVA_TYPES = ("llava", "llava_next")
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
}
LLAVA_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            **LLAMA_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        "mistral": {
            **LLAMA_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        "qwen2": {
            **LLAMA_DEFAULTS,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    }
)


def read_json(path: Path, param: str | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, for option `param`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", param) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", param) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", param)
    return values


class ConfigReader:
    """Options of one checkpoint. check_all_read() refuses options that were not read."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = dict(values)
        self._read_keys: set[str] = set()
        self.source = source  # name in errors

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The raw value; null counts as missing."""
        self._read_keys.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise CheckpointError(f"{self.source} lacks `{key}`")
        return default

    def get_int(self, key: str, default: Any = MISSING, low: int = 1, high: int = MAX_INT) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._value_error(key, value, f"a whole number of at least {low}")
        if value > high:
            raise self._value_error(key, value, f"a whole number of at most {high}")
        return value

    def get_optional_int(self, key: str, default: int | None = None, low: int = 1) -> int | None:
        """A whole number; None for null, the default if missing."""
        is_null = key not in self and not self._uses_default(key, default)
        return self.get(key, None) if is_null else self.get_int(key, default, low)

    def get_uniform_int(self, key: str, length: int, default: Any = MISSING, high: int = MAX_INT) -> int:
        """A whole number of at least 1, or a list of `length` equal ones."""
        value = self.get(key, default)
        if isinstance(value, list) and len(value) == length and len(set(map(repr, value))) == 1:
            value = value[0]
        return ConfigReader({key: value}, self.source).get_int(key, high=high)

    def get_float(self, key: str, default: Any = MISSING, allows_zero: bool = False) -> float:
        """A positive number; with allows_zero also 0."""
        value = self.get(key, default)
        if allows_zero and _is_number(value) and value == 0:
            return 0.0
        if not _is_number(value) or value <= 0:
            raise self._value_error(key, value, "a positive number")
        if not MIN_FLOAT <= value <= MAX_FLOAT:
            raise self._value_error(key, value, f"between {MIN_FLOAT:g} and {MAX_FLOAT:g}")
        return float(value)

    def get_optional_float(self, key: str, default: float | None = None) -> float | None:
        """A positive number; None for null, the default if missing."""
        is_null = key not in self and not self._uses_default(key, default)
        return self.get(key, None) if is_null else self.get_float(key, default)

    def get_bool(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._value_error(key, value, "true or false")
        return value

    def get_choice(self, key: str, allowed: Mapping[str, str] | Sequence[str], default: Any = MISSING) -> str:
        """One of the names in `allowed`, mapped to its value if it has one."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._value_error(key, value, f"one of {', '.join(allowed)}")
        return allowed[value] if isinstance(allowed, Mapping) else value

    def get_strs(self, key: str, length: int | None = None) -> tuple[str, ...] | None:
        """A list of strings, of `length` if that is given, or None."""
        value = self.get(key, None)
        if value is None:
            return None
        is_list = isinstance(value, list) and length in (None, len(value))
        if not is_list or not all(isinstance(item, str) for item in value):
            count = "" if length is None else f"{length} "
            raise self._value_error(key, value, f"a list of {count}names")
        return tuple(value)

    def get_floats(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
            raise self._value_error(key, value, f"a list of {length} numbers")
        for item in value:
            if not MIN_FLOAT <= item <= MAX_FLOAT:
                expected = f"a list of numbers between {MIN_FLOAT:g} and {MAX_FLOAT:g}"
                raise self._value_error(key, item, expected)
        return tuple(float(item) for item in value)

    def get_section(self, key: str) -> ConfigReader | None:
        """A reader of a nested object; None if it is missing."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._value_error(key, value, "an object")
        return ConfigReader(value, f"{self.source}: {key}")

    def get_sections(self, key: str) -> list[ConfigReader]:
        """Readers of a list of nested objects; empty if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self._value_error(key, values, "a list of objects")
        return [ConfigReader(value, f"{self.source}: {key}") for value in values]

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same options, with defaults for missing ones. What is read there counts as read here."""
        return self._with_values({**defaults, **self._values})

    def with_value(self, key: str, value: Any) -> ConfigReader:
        """The same options, one of them with another value. What is read there counts as read here."""
        return self._with_values({**self._values, key: value})

    def _with_values(self, values: Mapping[str, Any]) -> ConfigReader:
        reader = ConfigReader(values, self.source)
        reader._read_keys = self._read_keys
        return reader

    def without(self, keys: Collection[str]) -> ConfigReader:
        """The options but these, which have no effect."""
        return ConfigReader(
            {key: value for key, value in self._values.items() if key not in keys}, self.source
        )

    def require_value(self, key: str, value: Any) -> None:
        """The option must be missing or have this value, the only supported one."""
        actual = self.get(key, value)
        if actual != value:
            raise self._value_error(key, actual, json.dumps(value))

    def ignore_repeats_of(self, other: ConfigReader) -> None:
        """Accept options that `other` has with the same value."""
        self._read_keys |= {key for key, value in self._values.items() if other._values.get(key) == value}

    def get_dtype(self) -> str:
        """Data type of the weights."""
        key = "dtype" if "dtype" in self else "torch_dtype"
        value = str(self.get(key, "float32")).removeprefix("torch.")
        if value not in DTYPES:
            raise self._value_error(key, value, f"one of {', '.join(DTYPES)}")
        return value

    def check_all_read(self) -> None:
        """Raises CheckpointError for options that were not read, unless they are unset or without effect."""
        for key, value in self._values.items():
            if key in self._read_keys or key in IGNORED_KEYS or key.startswith("_"):
                continue
            if value in (None, {}, []) or (key in NOOP_VALUES and value == NOOP_VALUES[key]):
                continue
            raise self.error(key, f"= {_abbreviate(value)} is not supported for this architecture")

    def error(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: `{key}` {reason}")

    def _uses_default(self, key: str, default: object) -> bool:
        return key not in self._values and default is not None

    def _value_error(self, key: str, value: Any, expected: str) -> CheckpointError:
        return self.error(key, f"must be {expected} here, got {_abbreviate(value)}")


def read_text_config(config: ConfigReader) -> ConfigReader:
    """The decoder's options: `text_config` if there is one, with defaults for LLaVA, else all of them."""
    text = config.get_section("text_config")
    if config.get("model_type", None) not in LLAVA_TYPES:
        return config if text is None else text
    text = text or ConfigReader({}, f"{config.source}: text_config")
    return text.with_defaults(LLAVA_TEXT_DEFAULTS.get(str(text.get("model_type", "llama")), {}))


def read_vocab_size(config: ConfigReader) -> int:
    """Rows of the embedding and width of the logits, 1 to MAX_INT; GGUFFile.vocab_size for GGUF files.

    config  the decoder's options (read_text_config), which win over another `vocab_size` beside a
            `text_config`, or those of an encoder
    """
    return config.get_int("vocab_size")


def _is_number(value: Any) -> bool:
    """Whether the value is a finite number and no bool; large ints would overflow a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
