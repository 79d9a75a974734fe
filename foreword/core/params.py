"""Sampling parameters of a request, validated on construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, shown

MAX_LOGPROBS = 20
MAX_N = 128
SEED_MASK = 2**64 - 1
RANDOM_SEED = -1  # a random seed, as in llama-server
TO_THE_END = -1  # max_tokens: the end of the context is the only limit
GREEDY_TEMPERATURE = 1e-5  # below: greedy
MAX_LOGPROB_IDS = 128
MAX_REPEAT_LEN = 256  # tokens; DRY caps longer repeats
MAX_BREAKERS, MAX_BREAKER_CHARS = 64, 40
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 1024, 16_384  # each costs a comparison a row and step
ON_RUNAWAY_CHOICES = ("warn", "stop", "off")
TRUNCATION_SIDES = ("left", "right")
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding of one request."""

    method: str = "auto"  # "auto" (all drafters of the server), "off", or one drafter
    max_draft_tokens: int | None = None  # longest draft per step; None: the server's bound

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise InvalidRequest("speculation.method must be a non-empty string", "speculation.method")
        if self.max_draft_tokens is not None:
            _check_int("speculation.max_draft_tokens", self.max_draft_tokens, 0)


# Inclusive bounds of numeric fields.
FLOAT_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "typical_p": (0.0, 1.0),
        "top_n_sigma": (-1.0, 100.0),
        "xtc_probability": (0.0, 1.0),
        "xtc_threshold": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (0.01, 100.0),
        "dry_multiplier": (0.0, 100.0),
        "dry_base": (1.0, 100.0),
    }
)
EXCLUSIVE_LOWER_BOUND = frozenset({"top_p", "typical_p"})  # must be above the lower bound
INT_BOUNDS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "n": (1, MAX_N),
        "top_k": (-1, None),
        "dry_allowed_length": (0, MAX_REPEAT_LEN - 1),
        "dry_penalty_last_n": (-1, None),
        "min_tokens": (0, None),
    }
)
OPTIONAL_INT_BOUNDS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "truncate_prompt_tokens": (-1, None),
        "logprobs": (0, MAX_LOGPROBS),
        "prompt_logprobs": (0, MAX_LOGPROBS),
        "seed": (-(2**63), SEED_MASK),
    }
)
BOOL_FIELDS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
FIELD_TYPES: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "speculation": (Speculation, "a Speculation"),
        "prediction": (str | None, "a string"),
        "structured": (StructuredOutput | None, "a StructuredOutput"),
    }
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request, named as in OpenAI's API, vLLM, or llama.cpp.

    Raises InvalidRequest, which names the field and its limit.
    """

    n: int = 1
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0 or -1: all
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None  # -1: to the end of the context; None: the default, in the engine that end
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # tokens to keep; -1: as many as fit with max_tokens
    truncation_side: str = "left"  # where the prompt is cut: "left" keeps its end, "right" its beginning
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # ids whose log-probabilities are returned at each position
    prompt_logprobs: int | None = None
    seed: int | None = None
    speculation: Speculation = Speculation()
    prediction: str | None = None  # expected output, for drafts; does not change the output
    structured: StructuredOutput | None = None  # its end ends the output, despite ignore_eos and min_tokens
    on_runaway: str | None = None  # "warn", "stop" or "off"; None: the server's default, else "off"

    def __post_init__(self) -> None:
        self._coerce()
        for name, bounds in FLOAT_BOUNDS.items():
            _check_float(name, getattr(self, name), *bounds, exclusive_low=name in EXCLUSIVE_LOWER_BOUND)
        for name, limits in INT_BOUNDS.items():
            _check_int(name, getattr(self, name), *limits)
        for name, limits in OPTIONAL_INT_BOUNDS.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), *limits)
        if self.max_tokens not in (None, TO_THE_END):
            _check_int("max_tokens", self.max_tokens, 1)
        for name in BOOL_FIELDS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {shown(getattr(self, name))}", name)
        for name, (field_type, description) in FIELD_TYPES.items():
            if not isinstance(getattr(self, name), field_type):
                raise InvalidRequest(f"{name} must be {description}, got {shown(getattr(self, name))}", name)
        self._check_ids()
        self._check_breakers()
        if self.on_runaway not in (None, *ON_RUNAWAY_CHOICES):
            raise InvalidRequest(
                f"on_runaway must be one of {', '.join(ON_RUNAWAY_CHOICES)}, got {shown(self.on_runaway)}",
                "on_runaway",
            )
        if self.truncation_side not in TRUNCATION_SIDES:
            raise InvalidRequest(
                f"truncation_side must be one of {', '.join(TRUNCATION_SIDES)}, "
                f"got {shown(self.truncation_side)}",
                "truncation_side",
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens"
            )
        if self.max_tokens not in (None, TO_THE_END) and self.min_tokens > (self.max_tokens or 0):
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )

    def _coerce(self) -> None:
        """Convert lists to tuples, and a single string to a tuple of one."""
        for name in ("stop", "bad_words", "dry_sequence_breakers"):
            set_field(self, name, _to_str_tuple(name, getattr(self, name)))
        num_chars = sum(map(len, self.bad_words))
        if len(self.bad_words) > MAX_BAD_WORDS or num_chars > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words may hold {MAX_BAD_WORDS} texts of {MAX_BAD_WORD_CHARS} characters in all, "
                f"got {len(self.bad_words)} of {num_chars}",
                "bad_words",
            )
        for name in ("stop_token_ids", "logprob_token_ids"):
            set_field(self, name, _to_tuple(name, getattr(self, name) or ()))
        if self.logprob_token_ids and self.logprobs is None:
            set_field(self, "logprobs", 0)
        if self.allowed_token_ids is not None:
            set_field(self, "allowed_token_ids", _to_tuple("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.logit_bias or {}, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}", "logit_bias"
            )
        set_field(self, "logit_bias", dict(self.logit_bias or {}))

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token_id in getattr(self, name) or ():
                _check_int(name, token_id, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
        if len(self.logprob_token_ids) > MAX_LOGPROB_IDS:
            raise InvalidRequest(
                f"logprob_token_ids has {len(self.logprob_token_ids)} ids; the limit is {MAX_LOGPROB_IDS}",
                "logprob_token_ids",
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_float("logit_bias", bias, -100.0, 100.0)

    def _check_breakers(self) -> None:
        name = "dry_sequence_breakers"
        if len(self.dry_sequence_breakers) > MAX_BREAKERS:
            raise InvalidRequest(
                f"{name} has {len(self.dry_sequence_breakers)} strings; the limit is {MAX_BREAKERS}", name
            )
        if max(map(len, self.dry_sequence_breakers), default=0) > MAX_BREAKER_CHARS:
            raise InvalidRequest(f"strings of {name} may have at most {MAX_BREAKER_CHARS} characters", name)

    @property
    def uses_dry(self) -> bool:
        """Whether DRY penalties are active."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def for_choice(self, index: int, seed: int) -> SamplingParams:
        """Parameters of choice `index`: n = 1 and seed `seed + index` mod 2^64.

        The prediction is dropped: Request carries it as token ids.
        """
        params = copy(self)  # unlike replace(), it checks no field again
        for name, value in (("n", 1), ("seed", (seed + index) & SEED_MASK), ("prediction", None)):
            set_field(params, name, value)
        return params

    def non_default_fields(self) -> dict[str, object]:
        """Fields that differ from the defaults, for the request's log line."""
        values = ((name, getattr(self, name), default) for name, default in _default_values())
        return {name: value for name, value, default in values if value != default}


set_field = object.__setattr__


@cache
def _default_values() -> tuple[tuple[str, object], ...]:
    """Names and values of SamplingParams(), which takes as long to make as a log line to write."""
    defaults = SamplingParams()
    return tuple((each.name, getattr(defaults, each.name)) for each in fields(defaults))


def _to_str_tuple(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _to_tuple(name, value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"{name} must contain non-empty strings, got {shown(string)}", name)
        try:
            string.encode()
        except UnicodeEncodeError as error:  # no tokenizer and no other machine takes it
            raise InvalidRequest(
                f"{name} is not valid Unicode: a lone surrogate at character {error.start}", name
            ) from None
    return strings


def _to_tuple(name: str, value: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {shown(value)}", name)
    return tuple(value)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {shown(value)}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", name)


def _check_float(name: str, value: object, low: float, high: float, exclusive_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidRequest(f"{name} must be a number, got {shown(value)}", name)
    if not low <= value <= high or (exclusive_low and value == low):
        bound = f"above {low:g} and at most {high:g}" if exclusive_low else f"between {low:g} and {high:g}"
        raise InvalidRequest(f"{name} must be {bound}, got {shown(value, 40)}", name)
