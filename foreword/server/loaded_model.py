"""A loaded model, as routes use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foreword.config.models_file import ModelVariant
from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request as EngineRequest
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.base import EngineClient
from foreword.errors import (
    EngineDead,
    Forbidden,
    ForewordError,
    InvalidRequest,
    ModelLoading,
)
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder, ServerCounters
from foreword.metrics.tracing import current_span
from foreword.planning.resolve import EngineInfo
from foreword.server.admission import Admission
from foreword.server.answering.image_intake import ImageIntake
from foreword.server.apis.body import RequestBody
from foreword.server.auth.keys import KeyPermissions, RequestContext
from foreword.server.auth.usage_log import UsageLog
from foreword.server.health import EngineProbe
from foreword.server.intake import Intake
from foreword.server.model_names import ModelNames, ServedName
from foreword.server.slots import SlotKey, SlotTable
from foreword.tokenizer.chat_processor import ChatInputProcessor
from foreword.tokenizer.input_processor import has_seed, make_requests, resolve_seed
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.utils.threads import run_in_own_thread

ANY_SLOT = -1  # llama-server's: the request may run in any
MAX_TIMEOUT_S = 86_400.0  # largest `timeout` of a request, where the server sets no limit


class Abortable(Protocol):
    """The choices of one HTTP request."""

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error for its caller; a finished choice stays as it is."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its encoder, if there is one; with the name that a request has used."""

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    chat_processor: ChatInputProcessor
    recorder: MetricsRecorder
    admission: Admission  # shared by all models of the server
    intake: Intake  # shared
    generations: dict[str, Abortable]  # shared; by the request id of each choice
    usage: UsageLog  # shared
    names: ModelNames
    served: ServedName  # the name of the request
    grammar_checker: GrammarChecker
    probe: EngineProbe
    encoder: EncoderClient | None = None
    pooling_config: PoolingConfig = DECODER_POOLING  # for embeddings from the generating model
    image_intake: ImageIntake | None = None  # None: the model takes no images
    logged_keywords: set[str] = field(default_factory=set)  # keywords in schemas that are not enforced
    slots: SlotTable = field(default_factory=SlotTable)
    variant: ModelVariant | None = None  # the variant that `served` names

    async def close(self) -> None:
        """End the worker processes; the clients are the caller's."""
        await run_in_own_thread(self.grammar_checker.close)
        if self.image_intake is not None:
            await run_in_own_thread(self.image_intake.close)

    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises ModelLoading before there is one, EngineDead after it."""
        info = self.client.info
        if info is None:
            raise ModelLoading("the model is still loading; see /health")
        if not self.client.alive:
            raise EngineDead("the engine is not running")
        return info

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer. Raises ModelLoading, EngineDead."""
        limit = self.info().resolved.max_model_len
        if self.variant is None or self.variant.max_model_len is None:
            return limit
        return min(limit, self.variant.max_model_len)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of SamplingParams for requests that leave them out: the checkpoint's, then the variant's."""
        defaults: Mapping[str, Any] = self.tokenizer.generation_config.params
        if self.variant is None:
            return defaults
        method = self.variant.speculation
        own = {} if method is None else {"speculation": Speculation(method)}
        return {**defaults, **self.variant.sampling, **own}

    def check_access(self, name: str, permissions: KeyPermissions) -> None:
        """Raises Forbidden for a name of this model that the key may not use."""
        served = self.names.find(name) or self.names.default
        with count_forbidden(self.recorder):
            permissions.check_model(name, served.names)
        if (span := current_span.get()) is not None:
            span.on_model(name, served.name)

    def request_context(
        self,
        permissions: KeyPermissions,
        body: RequestBody,
        timeout_s: float | None = None,
    ) -> RequestContext:
        """Context of one request, from its key and body.

        Raises Forbidden, InvalidRequest.
        """
        limit = self.config.request_timeout
        if timeout_s is not None and not 0 < timeout_s <= (limit or MAX_TIMEOUT_S):
            raise InvalidRequest(
                f"timeout must be above 0 and at most {limit or MAX_TIMEOUT_S:g} seconds, got {timeout_s}",
                "timeout",
            )
        with count_forbidden(self.recorder):
            context = permissions.request_context(body.priority, timeout_s or limit or None)
        if body.cache_salt:  # a namespace within the key's
            digest = hashlib.sha256(body.cache_salt.encode("utf-8", "surrogatepass")).hexdigest()
            context = replace(context, cache_salt=f"{context.cache_salt}:{digest[:32]}")
        return replace(
            context,
            is_seeded=has_seed(getattr(body, "seed", None), self.config.seed),
            slot=self._slot_key(permissions, body),
            model=self.served.name,
            adapter=self.served.digest,
        )

    def _slot_key(self, permissions: KeyPermissions, body: RequestBody) -> SlotKey | None:
        """The slot of a request; 0 if it names none. Without --kv-cache-dir there are no slots."""
        if self.config.kv_cache_dir is None:
            return None
        number = getattr(body, "id_slot", None)
        if number is None or number == ANY_SLOT:
            return SlotKey(permissions.slot_owner, 0)
        self.check_slot(number)
        return SlotKey(permissions.slot_owner, number)

    def check_slot(self, number: int) -> None:
        """Raises InvalidRequest."""
        count = self.info().resolved.max_num_seqs
        if not 0 <= number < count:
            raise InvalidRequest(f"id_slot must be from 0 to {count - 1}, got {number}", "id_slot")

    @property
    def model_name(self) -> str:
        """The generating model's name in answers."""
        return self.names.model_name

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed. Raises InvalidRequest for a drafter that does not run."""
        self.info().resolved.check_method(params.speculation.method)
        return replace(params, seed=resolve_seed(params.seed, self.config.seed))


@contextmanager
def count_forbidden(recorder: ServerCounters) -> Iterator[None]:
    """Count a refusal by a key's permissions."""
    try:
        yield
    except Forbidden:
        recorder.on_reject("forbidden")
        raise


def make_probe_request(client: EngineClient, tokenizer: Tokenizer, request_id: str) -> EngineRequest:
    """A greedy request for one token, without speculation."""
    assert client.info is not None, "a loaded model has info"
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculation=Speculation("off"))
    (request,) = make_requests(
        tokenizer.encode("a", add_special_tokens=False)[:1],
        params,
        tokenizer,
        request_id,
        client.info.resolved.max_model_len,
        vocab_size=client.info.vocab_size,
    )
    return replace(request, cache_salt="probe")
