"""A request as it crosses the seam, and as the engine sees it while it lives.

Whether a request has time left: asked in the engine, and by its client while that cannot answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from foreword.core.images import MRopePositions, PromptImage
from foreword.core.outputs import TokenLogprob
from foreword.core.params import SamplingParams
from foreword.core.repetition import Repetition, RepetitionDetector
from foreword.core.structured import RequestGrammar
from foreword.errors import DeadlineExceeded, ForewordError, Overloaded

if TYPE_CHECKING:  # whoever only submits requests needs no torch
    from torch import Tensor

    from foreword.sampling.penalties import PenaltyState

__all__ = ["POOLING_TYPES", "FinishResult", "Request", "RequestState", "check_deadline"]

POOLING_TYPES = ("last", "mean", "cls")


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one answer: everything the engine needs, as plain values (picklable).

    id             unique among live requests
    prompt_ids     token ids, at least one
    params         n is 1 here: choices are requests of their own
    seed           0..2^64-1, resolved where the request entered
    eos_token_ids  ids that end the answer unless ignore_eos
    bad_words_ids  `params.bad_words` as token id sequences
    dry_breakers   `params.dry_sequence_breakers` as token id sequences
    delivered_ids  output tokens already delivered (by an engine that died); they count as output
    resumed        an engine that died had begun to answer it: what is counted at its first start was counted there
    priority       lower is served first
    tenant         namespace of the prefix cache and of what drafters learn
    prediction_ids what the caller expects the output to be, as token ids; drafts come from it
    reasoning_end_ids  token sequences of which any ends the reasoning, for a grammar that begins behind it; empty: at once
    pooling        the request wants no tokens but its prompt as one vector: one of POOLINGS
    arrival_s      time.monotonic() where the request entered
    start_by_s     time.monotonic() at which it fails if it has not run at all by then; None: it may wait
    deadline_s     time.monotonic() at which it fails, whatever it has; None: it may take its time
    pictures       what the placeholders in the prompt stand for, in order of place
    account        whose share of the engine it takes: those that wait are served in turn, account by account
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    resume_output_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    prediction_ids: tuple[int, ...] = ()
    reasoning_end_ids: tuple[tuple[int, ...], ...] = ()
    pooling: str | None = None
    arrival_s: float = 0.0
    queue_deadline_s: float | None = None
    deadline_s: float | None = None
    fairness_key: str = ""
    is_resumed: bool = False
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishResult:
    """Where a run of new tokens ends the answer, if it does.

    kept           tokens of the run that belong to the answer
    finish_reason  "stop", "length" or "repetition"; None: the answer goes on
    stop_id        the id that stopped it
    repeating      the pattern that the answer was found to repeat with these tokens, or None
    """

    num_kept: int
    finish_reason: str | None = None
    stop_id: int | None = None
    repetition: Repetition | None = None


class RequestState:
    """The engine's record of a live request.

    |<-------- num_prompt ------->|<-- output -->|<-- draft -->|
    |<---------------- tokens ------------------>|
    |<------- num_computed: KV is in the cache ------ ... chases len(tokens) + len(draft)

    limit         tokens never grows beyond it (context limit and max_tokens)
    arrival       order of arrival within the engine, breaks ties of turn
    turn          when its account is served, breaks ties of priority (engine/queue.py)
    draft         guessed continuation, not yet verified; `drafter` names who guessed it
    blocks        block ids that hold its KV, in order of position
    ledger        what sampling keeps between steps, once it needs to
    grammar       what the output must look like, or None
    lanes         sums of the rows of a prompt that becomes their mean, while it is computed (engine/pooler.py)
    positions     where its tokens stand, for models that know several directions, if it has pictures; else None
    met           digests of its pictures that the engine has come to, for the figures (engine/encoder_runner.py)

    Of a request that wants a vector the prompt is all there is: nothing is sampled, and nothing drafted.
    """

    __slots__ = (
        "_repetition_detector",
        "_stop_ids",
        "arrival",
        "block_hashes",
        "blocks",
        "counted_images",
        "draft",
        "drafter",
        "grammar",
        "max_len",
        "mrope_positions",
        "num_cached",
        "num_computed",
        "num_prompt",
        "penalty_state",
        "pool_partials",
        "prompt_logprobs",
        "request",
        "scheduled_s",
        "tokens",
        "virtual_start",
    )

    def __init__(
        self, request: Request, arrival: int, max_model_len: int, grammar: RequestGrammar | None = None
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.virtual_start = 0
        prompt = (
            request.prompt_ids[:1] if request.pooling == "cls" else request.prompt_ids
        )  # the first sees none behind it
        self.num_prompt = len(prompt)
        self.tokens: list[int] = [*prompt, *request.resume_output_ids]
        self.max_len = self._compute_max_len(max_model_len)
        assert 0 < self.num_prompt <= max_model_len, "admitted a prompt that leaves no room"
        assert len(self.tokens) < self.max_len or self.is_pooling, (
            "admitted a request that is already complete"
        )
        self.num_computed = 0
        self.num_cached = 0
        self.draft: list[int] = []
        self.drafter = ""
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.grammar = grammar
        self.pool_partials: Tensor | None = None
        self.mrope_positions = MRopePositions(request.images) if request.images else None
        self.counted_images: set[bytes] = set()
        eos = () if request.params.ignore_eos and grammar is None else request.eos_token_ids
        self._stop_ids = frozenset((*eos, *request.params.stop_token_ids))
        self._repetition_detector = (
            RepetitionDetector()
            if request.params.on_runaway in ("warn", "stop") and not self.is_pooling
            else None
        )
        self._feed_detector(request.resume_output_ids)
        self.penalty_state: PenaltyState | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.scheduled_s: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def is_pooling(self) -> bool:
        """The prompt becomes a vector."""
        return self.request.pooling is not None

    @property
    def is_decoding(self) -> bool:
        """Its next row samples a token: only its last token is to be computed."""
        return self.num_uncomputed == 1 and not self.is_pooling

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Order of service: priority, then the turn of its account, then arrival. The smallest rank always progresses."""
        return self.request.priority, self.virtual_start, self.arrival

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still missing; one while the request decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the answer when they are emitted."""
        return self._stop_ids

    def check_finish(self, run: Sequence[int]) -> FinishResult:
        """Where a run of new tokens ends the answer; nothing changes.

        The earliest token decides; one that both stops and fills the limit has stopped, and one that fills the limit with a
        repetition has filled it.
        """
        end = self._check_stop(run)
        found = (
            None if self._repetition_detector is None else self._repetition_detector.peek(run[: end.num_kept])
        )
        if found is None:
            return end
        if self.params.on_runaway == "stop" and (
            end.finish_reason is None or found.num_tokens < end.num_kept
        ):
            return FinishResult(found.num_tokens, "repetition", None, found)
        return replace(end, repetition=found)

    def _check_stop(self, run: Sequence[int]) -> FinishResult:
        """Where stop ids and the limit end the answer."""
        room = self.max_len - len(self.tokens)
        for index, token_id in enumerate(run[:room]):
            if token_id in self._stop_ids:
                return FinishResult(index + 1, "stop", token_id)
        return FinishResult(room, "length") if len(run) >= room else FinishResult(len(run))

    def _feed_detector(self, token_ids: Sequence[int]) -> None:
        """Let the guard see tokens of the answer. It tells of a runaway once."""
        if self._repetition_detector is not None and self._repetition_detector.feed(token_ids) is not None:
            self._repetition_detector = None

    def _compute_max_len(self, max_model_len: int) -> int:
        if self.is_pooling:
            return self.num_prompt
        max_tokens = self.request.params.max_tokens
        return max_model_len if max_tokens is None else min(max_model_len, self.num_prompt + max_tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit sampled tokens."""
        self.tokens.extend(token_ids)
        self._feed_detector(token_ids)
        if self.grammar is not None:
            self.grammar.accept(token_ids)
        assert len(self.tokens) <= self.max_len

    def set_draft(self, token_ids: Sequence[int], drafter: str) -> None:
        """Keep a guess, cut so that every verified row may still be emitted."""
        room = self.max_len - len(self.tokens) - 1
        self.draft = list(token_ids[: max(room, 0)])
        self.drafter = drafter if self.draft else ""


MAX_RETRY_AFTER_S: Final = 60.0  # is asked of a caller


def check_deadline(request: Request, now_s: float, has_run: bool) -> ForewordError | None:
    """Why a request has no more time, or None. One that was resumed has run before."""
    waited_s = now_s - request.arrival_s
    if request.deadline_s is not None and now_s >= request.deadline_s:
        return DeadlineExceeded(
            f"the request was given {request.deadline_s - request.arrival_s:.3g} s, and took longer"
        )
    if (
        request.queue_deadline_s is None
        or now_s < request.queue_deadline_s
        or has_run
        or request.resume_output_ids
    ):
        return None
    return Overloaded(
        f"the request waited {waited_s:.3g} s and could not be started",
        retry_after_s=min(max(waited_s, 1.0), MAX_RETRY_AFTER_S),
    )
