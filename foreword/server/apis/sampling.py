"""Sampling fields of chat and completions, under OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from foreword.core.params import SamplingParams, Speculation
from foreword.errors import InvalidRequest, shown
from foreword.server.apis.body import TABLES, RequestBody, SlotId, StrictModel
from foreword.server.apis.structured import StructuredBody
from foreword.server.http.errors import rename_field

MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_ALL_STOP_CHARS = 64, 1024, 4096
MAX_ID_DIGITS = 20  # digits of a token id; int() raises for thousands of digits
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
PARAMS_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class StreamOptions(StrictModel):
    peer_fields = TABLES["stream_options"]
    include_usage: bool | None = None  # a last chunk with usage and no choices
    continuous_usage_stats: bool | None = None  # usage so far in every chunk; needs include_usage


class SpeculationBody(StrictModel):
    """Speculation of this request; null fields take the server's settings."""

    method: str | None = None
    max_tokens: int | None = None


class TextPart(StrictModel):
    is_lenient: ClassVar[bool] = True
    type: Literal["text"]
    text: str


class PredictionBody(StrictModel):
    """OpenAI's `prediction`: a text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SamplingBody(StructuredBody, RequestBody):
    """Fields of both chat and completions."""

    peer_fields = TABLES["generation"]
    aliases: ClassVar[Mapping[str, str]] = {
        **RequestBody.aliases,
        "n_predict": "max_tokens",  # llama-server
        "num_predict": "max_tokens",  # Ollama
        "max_new_tokens": "max_tokens",  # SGLang, text-generation-webui
        "repeat_penalty": "repetition_penalty",  # llama-server, Ollama
        "n_cmpl": "n",  # llama-server
        "slot_id": "id_slot",  # llama-server, before
        "typical": "typical_p",  # text-generation-webui
        "nsigma": "top_n_sigma",
        "stopping_strings": "stop",
    }

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
    logit_bias: dict[str, float | None] | None = None
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
    truncation_side: str | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    on_runaway: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    speculation: SpeculationBody | str | None = None  # a text is its method
    prediction: PredictionBody | None = None
    metrics: bool | None = None
    id_slot: SlotId | None = None  # llama-server
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs name tokens "token_id:42"

    @property
    def wants_usage(self) -> bool:
        """Raises InvalidRequest for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """As in vLLM, include_usage switches it on."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params_with(
        self, defaults: Mapping[str, Any], names: Mapping[str, str], **changes: Any
    ) -> SamplingParams:
        """SamplingParams with `changes`.

        defaults  values of fields that are not given
        names     this body's names of changed fields, for errors
        """
        self._check_stop()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in a stream", "prompt_logprobs")
        speculation = self.speculation
        if not isinstance(speculation, SpeculationBody):
            speculation = SpeculationBody(method=speculation)
        default: Speculation = defaults.get("speculation", Speculation())
        method = default.method if speculation.method is None else speculation.method
        with rename_field({"speculation.max_draft_tokens": "speculation.max_tokens"}):
            drafting = Speculation(method, speculation.max_tokens)
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in PARAMS_FIELDS.intersection(SamplingBody.model_fields)},
            "stop": self.stop,
            "logit_bias": self._parse_logit_bias(),
            "speculation": drafting,
            "prediction": self.prediction.text if self.prediction else None,
            "structured": self.structured(),
            **changes,
        }
        if given["max_tokens"] is None and "max_tokens" in defaults:
            given["max_tokens"] = max(defaults["max_tokens"], self.min_tokens or 0)
        with rename_field(names):
            fields = {name: value for name, value in given.items() if value is not None}
            return SamplingParams(**{**defaults, **fields})

    def _parse_logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
                raise InvalidRequest(f"logit_bias: {shown(key, 40)} is not a token id", "logit_bias")
        return {int(key): value for key, value in self.logit_bias.items() if value is not None}

    def _check_stop(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} texts, got {len(stops)}", "stop")
        if max(map(len, stops), default=0) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a text of stop may have at most {MAX_STOP_CHARS} characters", "stop")
        if (num_chars := sum(map(len, stops))) > MAX_ALL_STOP_CHARS:
            raise InvalidRequest(
                f"the texts of stop have {num_chars} characters; the limit is {MAX_ALL_STOP_CHARS}", "stop"
            )
