"""Sampling fields of chat and completions, under OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

from foreword.core.params import SamplingParams, Speculation
from foreword.errors import InvalidRequest
from foreword.server.errors import rename_field
from foreword.server.protocol.base import StrictModel
from foreword.server.protocol.structured import StructuredBody

__all__ = ["PredictionBody", "SamplingBody", "SpeculationBody", "StreamOptions"]

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1024
MAX_ID_DIGITS = 20  # digits of a token id; int() raises for thousands of digits
NO_MIROSTAT = (
    "its state depends on every sampled token, so draft tokens could not be verified independently; "
    "typical_p and min_p bound surprise without state"
)
NO_BEAM_SEARCH = (
    "beam search ranks unfinished answers and does not sample; "
    "best_of of /v1/completions returns the likeliest of several answers"
)
NO_LOGITS_PROCESSORS = (
    "a server runs no code of its callers; "
    "logit_bias, allowed_token_ids, bad_words and structured_outputs restrict tokens"
)
PARAMS_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class StreamOptions(StrictModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"continuous_usage_stats": (False,)}
    include_usage: bool | None = None  # a last chunk with usage and no choices


class SpeculationBody(StrictModel):
    """Speculation of this request; null fields take the server's settings."""

    method: str | None = None
    max_tokens: int | None = None


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class PredictionBody(StrictModel):
    """OpenAI's `prediction`: a text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SamplingBody(StructuredBody):
    """Fields of both chat and completions; null means not given."""

    ignored: ClassVar[frozenset[str]] = StructuredBody.ignored | {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logits_processors": ([],),
        "logit_processors": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "spaces_between_special_tokens": (True,),
        "cache_salt": ("",),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
        "lora_request": (),
        "mm_processor_kwargs": ({},),
        "early_stopping": (False,),
        "mirostat": (0,),
        "mirostat_tau": (5, 5.0),
        "mirostat_eta": (0.1,),
        "repeat_last_n": (-1,),
        "samplers": (),
        "dynatemp_range": (0, 0.0),
        "dynatemp_exponent": (1, 1.0),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta"), NO_MIROSTAT),
        **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), NO_BEAM_SEARCH),
        **dict.fromkeys(("logits_processors", "logit_processors"), NO_LOGITS_PROCESSORS),
        "samplers": "the order of the sampling steps is fixed; see docs/python.md",
        "repeat_last_n": "penalties count all of the text; dry_penalty_last_n limits those of repeats",
    }
    aliases: ClassVar[Mapping[str, str]] = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    on_runaway: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    timeout: float | None = None
    speculation: SpeculationBody | None = None
    prediction: PredictionBody | None = None
    metrics: bool | None = None
    return_token_ids: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """Raises InvalidRequest for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        return bool(self.stream_options and self.stream_options.include_usage)

    def params_with(self, names: Mapping[str, str], **changes: Any) -> SamplingParams:
        """SamplingParams with `changes`; `names` maps changed fields to this body's names, for errors."""
        self._check_stop()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in a stream", "prompt_logprobs")
        speculation = self.speculation or SpeculationBody()
        method = "auto" if speculation.method is None else speculation.method
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in PARAMS_FIELDS.intersection(SamplingBody.model_fields)},
            "stop": self.stop,
            "logit_bias": self._parse_logit_bias(),
            "speculation": Speculation(method, speculation.max_tokens),
            "prediction": self.prediction.text if self.prediction else None,
            "structured": self.structured(),
            **changes,
        }
        with rename_field(names):
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def _parse_logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
                raise InvalidRequest(f"logit_bias: {key!r:.40} is not a token id", "logit_bias")
        return {int(key): value for key, value in self.logit_bias.items()}

    def _check_stop(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} texts, got {len(stops)}", "stop")
        if max(map(len, stops), default=0) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a text of stop may have at most {MAX_STOP_CHARS} characters", "stop")
