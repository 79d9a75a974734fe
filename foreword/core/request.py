"""A request as the client sends it, and its state in the engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from foreword.core.finish import FinishChecker, FinishResult
from foreword.core.images import MRopePositions, PromptImage
from foreword.core.outputs import TokenLogprob
from foreword.core.params import SEED_MASK, SamplingParams
from foreword.core.structured_output import RequestGrammar
from foreword.errors import DeadlineExceeded, ForewordError, InvalidRequest, Overloaded, shown

if TYPE_CHECKING:  # a client needs no torch
    from torch import Tensor

POOLING_TYPES = ("last", "mean", "cls")
NO_LORA: Final = -1  # slot of requests and rows without an adapter
CONSTRAINT_CHARS_PER_TOKEN: Final = 32  # bytes of an id in a tuple
MAX_RETRY_AFTER_S: Final = 60.0  # longest Retry-After that a client is given


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one completion: everything the engine needs, as plain values (picklable)."""

    id: str  # unique among live requests
    prompt_ids: tuple[int, ...]  # not empty
    params: SamplingParams  # n is 1: each choice is a request
    seed: int  # 0..2^64-1, resolved where the request entered
    eos_token_ids: tuple[int, ...] = ()  # end the output unless ignore_eos
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # `params.bad_words`
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # `params.dry_sequence_breakers`
    resume_output_ids: tuple[int, ...] = ()  # output delivered by a crashed engine; counts as output
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # namespace of the prefix cache and of the suffix drafter's corpus
    prediction_ids: tuple[int, ...] = ()  # expected output, for drafts
    reasoning_end_ids: tuple[tuple[int, ...], ...] = ()  # any of these starts the grammar; empty: at once
    pooling: str | None = None  # embed the prompt instead of sampling: one of POOLING_TYPES
    arrival_s: float = 0.0  # time.monotonic() where the request entered
    queue_deadline_s: float | None = None  # time.monotonic() by which it must have started
    deadline_s: float | None = None  # time.monotonic() at which it fails
    fairness_key: str = ""  # waiting requests are scheduled fairly between keys
    is_resumed: bool = False  # started in a crashed engine, where its first start was counted
    images: tuple[PromptImage, ...] = ()  # order of their placeholders
    adapter: str = ""  # digest of its LoRA adapter; empty: the base model
    adapter_name: str = ""  # used by statistics

    def check_bounds(self, vocab_size: int) -> None:
        """Raises InvalidRequest for an id outside the vocabulary, or another number without a meaning.

        Kernels index logits by some of them; others become arrays of 64 bits, or the shape of one.
        """
        params = self.params
        if not 0 <= self.seed <= SEED_MASK:
            raise InvalidRequest(
                f"seed must be between 0 and {SEED_MASK}, got {shown(self.seed, 40)}", "seed"
            )
        scope = None if params.structured is None else params.structured.scope
        for name, sequences in (
            ("prompt", (self.prompt_ids, self.resume_output_ids)),
            ("stop_token_ids", (self.eos_token_ids, params.stop_token_ids)),
            ("logit_bias", (params.logit_bias,)),
            ("allowed_token_ids", (params.allowed_token_ids or (),)),
            ("logprob_token_ids", (params.logprob_token_ids,)),
            ("bad_words", self.bad_words_ids),
            ("dry_sequence_breakers", self.dry_breakers),
            ("structured_outputs.after", self.reasoning_end_ids),
            ("structured_outputs.scope", () if scope is None else (scope.token_ids,)),
        ):
            for ids in filter(None, sequences):
                if not 0 <= min(ids) <= max(ids) < vocab_size:
                    outside = next(i for i in ids if not 0 <= i < vocab_size)
                    problem = f"token id {outside} is outside the vocabulary 0..{vocab_size - 1}"
                    raise InvalidRequest(f"{name}: {problem}", name)
        for image in self.images:
            image.check_bounds(len(self.prompt_ids))

    @property
    def num_param_tokens(self) -> int:
        """Ids in its parameters, and a constraint's text as tokens: what each choice takes in the engine."""
        params = self.params
        sequences = (*self.bad_words_ids, *self.dry_breakers, *self.reasoning_end_ids)
        ids = (params.allowed_token_ids or (), params.stop_token_ids, params.logit_bias, self.prediction_ids)
        num_chars = 0 if params.structured is None else len(params.structured.text)
        return sum(map(len, (*sequences, *ids))) + num_chars // CONSTRAINT_CHARS_PER_TOKEN

    @property
    def namespace(self) -> str:
        """Requests of equal namespaces share KV and outputs: those of one adapter and one salt."""
        return f"{self.adapter}\0{self.cache_salt}" if self.adapter else self.cache_salt


class RequestState:
    """The engine's record of a live request.

    |<-------- num_prompt ------->|<-- output -->|<-- draft -->|
    |<---------------- tokens ------------------>|
    |<------- num_computed: KV is in the cache ------ ... chases len(tokens) + len(draft)

    An embedding request has only its prompt: no output and no draft.
    """

    __slots__ = (
        "anchors",
        "arrival",
        "block_hashes",
        "blocks",
        "confidence",
        "counted_images",
        "draft",
        "drafter",
        "finish_checker",
        "grammar",
        "id",
        "is_loading",
        "is_pooling",
        "lora_slot",
        "max_len",
        "mrope_positions",
        "num_cached",
        "num_computed",
        "num_prompt",
        "params",
        "penalty_state",
        "pool_partials",
        "prompt_logprobs",
        "request",
        "sampling_plan",
        "scheduled_s",
        "state_slot",
        "stop_ids",
        "tokens",
        "virtual_start",
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        max_model_len: int,
        grammar: RequestGrammar | None = None,
        lora_slot: int = NO_LORA,
    ) -> None:
        params = request.params
        self.request = request
        self.id = request.id
        self.params = params
        self.is_pooling = request.pooling is not None  # the prompt becomes an embedding
        self.arrival = arrival  # order of arrival in the engine, breaks ties of virtual_start
        self.virtual_start = 0  # fair-queue tag, breaks ties of priority (engine/waiting_queue.py)
        # a causal model's first row sees no other token
        prompt = request.prompt_ids[:1] if request.pooling == "cls" else request.prompt_ids
        self.num_prompt = len(prompt)
        self.tokens: list[int] = [*prompt, *request.resume_output_ids]
        max_len = max_model_len if params.max_tokens is None else self.num_prompt + params.max_tokens
        self.max_len = self.num_prompt if self.is_pooling else min(max_model_len, max_len)
        assert 0 < self.num_prompt <= max_model_len, "the prompt is longer than the context"
        assert len(self.tokens) < self.max_len or self.is_pooling, "the request is already complete"
        self.num_computed = 0
        self.num_cached = 0
        self.draft: list[int] = []  # not yet verified
        self.drafter = ""  # source of the draft
        self.confidence: tuple[float, ...] = ()  # confidence of the draft, as in Draft
        self.is_loading = False  # waits for blocks of its prefix that are read from disk
        self.blocks = array("q")  # ids of its KV's blocks, in order of position
        self.block_hashes: list[bytes] = []
        self.state_slot = 0  # ring of its rows in layers with state
        self.anchors: dict[int, int] = {}  # anchor ids by segment (kv_cache/state_cache.py)
        self.grammar = grammar
        self.lora_slot = lora_slot  # slot of its adapter
        self.pool_partials: Tensor | None = None  # partial sums of mean pooling (engine/pooler.py)
        self.mrope_positions = MRopePositions(request.images) if request.images else None
        self.counted_images: set[bytes] = set()  # digests that image statistics include
        # Where text is free beside a grammar, check_finish() ignores EOS.
        eos = () if params.ignore_eos and grammar is None else request.eos_token_ids
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        on_runaway = None if self.is_pooling else params.on_runaway
        self.finish_checker = FinishChecker(self.stop_ids, on_runaway)
        self.finish_checker.record(request.resume_output_ids)
        self.sampling_plan: Any = None  # owned by the sampler (sampling/sampler.py)
        self.penalty_state: object = None  # owned by the sampler (sampling/penalties.py)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.scheduled_s: float | None = None

    @property
    def is_decoding(self) -> bool:
        """Only its last token is uncomputed: the next row samples a token."""
        return len(self.tokens) - self.num_computed == 1 and not self.is_pooling

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Order of service: priority, fair-queue tag, arrival. The smallest key always makes progress."""
        return self.request.priority, self.virtual_start, self.arrival

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV; 1 while the request decodes."""
        return len(self.tokens) - self.num_computed

    def check_finish(self, run: Sequence[int]) -> FinishResult:
        """Where a run of new tokens ends the output, without changing the state."""
        return self.finish_checker.check(run, self.max_len - len(self.tokens), self._is_end)

    def _is_end(self, run: Sequence[int], stop_id: int) -> bool:
        """Whether a stop id behind output and run ends the output: EOS does not where it is ignored."""
        if self.grammar is None or not self.params.ignore_eos or stop_id in self.params.stop_token_ids:
            return True
        return self.grammar.is_open(run)

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit sampled tokens."""
        self.tokens.extend(token_ids)
        self.finish_checker.record(token_ids)
        if self.grammar is not None:
            self.grammar.accept(token_ids)
        assert len(self.tokens) <= self.max_len

    def set_draft(self, token_ids: Sequence[int], drafter: str, confidence: tuple[float, ...] = ()) -> None:
        """Keep a draft, cut so that every verified row may still be emitted."""
        room = self.max_len - len(self.tokens) - 1
        self.draft = list(token_ids[: max(room, 0)])
        self.drafter = drafter if self.draft else ""
        self.confidence = confidence


def check_deadline(request: Request, now_s: float, has_run: bool) -> ForewordError | None:
    """The error of a request whose time is up, or None. A resumed request has run before."""
    waited_s = now_s - request.arrival_s
    if request.deadline_s is not None and now_s >= request.deadline_s:
        limit_s = request.deadline_s - request.arrival_s
        return DeadlineExceeded(f"the request exceeded its deadline of {limit_s:.3g} s")
    has_run = has_run or bool(request.resume_output_ids)
    if has_run or request.queue_deadline_s is None or now_s < request.queue_deadline_s:
        return None
    return Overloaded(
        f"the request waited {waited_s:.3g} s in the queue without starting",
        retry_after_s=min(max(waited_s, 1.0), MAX_RETRY_AFTER_S),
    )
