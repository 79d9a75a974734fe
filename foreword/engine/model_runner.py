"""One step on the device: forward, process, sample, match."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import Batch, upload
from foreword.core.outputs import StepOutput, TokenLogprob
from foreword.core.request import RequestState
from foreword.engine.batch_builder import ModelInput, PromptLogprobRow
from foreword.engine.pooler import Pooler
from foreword.engine.schedule import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import ForewordError, RequestFailed, Unsatisfiable
from foreword.executor.decode_loop import SupportsDecodeLoop
from foreword.grammar.manager import GrammarManager
from foreword.kv_cache.storage import KVStorage
from foreword.models.base import Model
from foreword.sampling.logits_processors import masking_fields
from foreword.sampling.sampler import ALL_MASKED, Sampler, SamplerOutput
from foreword.sampling.verify import verify

__all__ = ["ModelRunner"]

NOT_FINITE = "no token can be sampled: the logits are not finite"


class ModelRunner:
    """The model with its KV and its sampler. Masks of grammars are computed while the model is.

    pooler      the pass over prompts that become vectors
    vocab_size  of the model's logits
    directions  the model knows positions in several directions
    """

    def __init__(
        self, model: Model, kv: KVStorage, sampler: Sampler, grammars: GrammarManager, timer: StepTimer
    ) -> None:
        self.sampler = sampler
        self.grammars = grammars
        self.timer = timer
        self.pooler = Pooler(model, kv)
        self.vocab_size = model.vocab_size
        self.mrope = model.uses_mrope
        self._forward = model.compile_logits(kv)

    @property
    def forward(self) -> Callable[[Batch], Tensor]:
        """The pass that yields logits, compiled."""
        return self._forward

    @property
    def decode_loop_forward(self) -> SupportsDecodeLoop | None:
        """The same pass for rounds, if the backend can compute them."""
        return self._forward if isinstance(self._forward, SupportsDecodeLoop) else None

    def warm_up(self, batch: Batch) -> None:
        """One pass: allocators and kernels are ready before the first request."""
        with torch.inference_mode():
            self._forward(batch)

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> tuple[StepOutput, ...]:
        """One outcome for each piece of work. It may be run again, in whole or in parts, and yields the same."""
        if any(row.state.grammar is not None for row in batch.sample_rows):
            with self.timer("sample"):
                self.grammars.start_masks(batch.sample_rows)
        with self.timer("forward"):
            logits = self._forward(batch.batch)
            if not batch.sample_rows and logits.device.type == "cuda":
                torch.cuda.synchronize()  # nothing of it is read, but what it takes, and its errors, are those of this step
        with self.timer("sample"):
            scored = self._score_prompts(batch, logits)
            sampled = self.sampler(_select_logits(logits, batch.logits_indices), batch.sample_rows)
            _check_token_ids(sampled.token_ids, len(batch.sample_rows), logits.shape[1])
            return _verify_drafts(batch.scheduled.requests, sampled, scored)

    def _score_prompts(self, batch: ModelInput, logits: Tensor) -> Sequence[tuple[TokenLogprob, ...]]:
        if not any(batch.prompt_logprob_rows):
            return [()] * len(batch.prompt_logprob_rows)
        return [
            self._score_prompt(work, rows, logits) if rows else ()
            for work, rows in zip(batch.scheduled.requests, batch.prompt_logprob_rows, strict=True)
        ]

    def _score_prompt(
        self, request: ScheduledRequest, rows: Sequence[PromptLogprobRow], logits: Tensor
    ) -> tuple[TokenLogprob, ...]:
        lines = logits[rows[0].logits_index : rows[-1].logits_index + 1]
        targets = [row.target_id for row in rows]
        return tuple(self.sampler.prompt_logprobs(lines, targets, request.state.params.prompt_logprobs or 0))


def _select_logits(logits: Tensor, indices: Sequence[int]) -> Tensor:
    if len(indices) == logits.shape[0]:
        return logits
    (chosen,) = upload([np.array(indices, np.int64)], logits.device)
    return logits.index_select(0, chosen)


def _check_token_ids(token_ids: Sequence[int], num_rows: int, vocab_size: int) -> None:
    """What is no id would be an index out of range in the next step, where nobody knows whose it is."""
    if len(token_ids) != num_rows:
        raise RuntimeError(f"{len(token_ids)} tokens were sampled of {num_rows} rows")
    if token_ids and not ALL_MASKED <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RuntimeError(
            f"ids from {min(token_ids)} to {max(token_ids)} were sampled; there are {vocab_size}"
        )


def _verify_drafts(
    requests: Sequence[ScheduledRequest],
    sampled: SamplerOutput,
    prompt_scores: Sequence[tuple[TokenLogprob, ...]],
) -> tuple[StepOutput, ...]:
    """Cut the sampled rows into one outcome per piece of work."""
    outcomes: list[StepOutput] = []
    line = 0
    for work, prompt_logprobs in zip(requests, prompt_scores, strict=True):
        if not work.is_sampled:
            outcomes.append(StepOutput(prompt_logprobs=prompt_logprobs))
            continue
        end = line + 1 + work.num_draft_tokens
        outcomes.append(_make_step_output(work, sampled, line, end, prompt_logprobs))
        line = end
    return tuple(outcomes)


def _make_step_output(
    request: ScheduledRequest,
    sampled: SamplerOutput,
    start: int,
    end: int,
    prompt_logprobs: tuple[TokenLogprob, ...],
) -> StepOutput:
    """Keep the drafted prefix that the model itself sampled and one token more, then cut at the end of the answer."""
    state = request.state
    token_ids = sampled.token_ids[start:end]
    accepted = verify(token_ids, state.draft[: request.num_draft_tokens]) if request.num_draft_tokens else 0
    run = token_ids[: accepted + 1]
    if run[-1] < 0 and accepted:  # the next step tells it, by a row that no draft has touched
        run, accepted = run[:-1], accepted - 1
    failed = run[-1] < 0
    ending = state.check_finish([] if failed else run)
    kept = ending.num_kept
    wanted = state.params.logprobs is not None
    return StepOutput(
        token_ids=tuple(run[:kept]),
        num_accepted=min(accepted, kept),
        logprobs=tuple(lp for lp in sampled.logprobs[start : start + kept] if lp is not None)
        if wanted
        else (),
        prompt_logprobs=prompt_logprobs,
        logits_hashes=tuple(sampled.logits_hashes[start : start + kept]),
        finish_reason=ending.finish_reason,
        stop_id=ending.stop_id,
        repetition=ending.repetition,
        error=_sampling_error(state, run[-1], state.num_output + kept)
        if failed and ending.finish_reason is None
        else None,
    )


def _sampling_error(state: RequestState, token_id: int, num_output: int) -> ForewordError:
    """Why there is no token after `num_output` of the answer: our fault, or that of what the request asks for."""
    if token_id != ALL_MASKED:
        return RequestFailed(NOT_FINITE)
    fields = masking_fields(state.request)
    if state.grammar is not None and state.grammar.error is not None:
        return Unsatisfiable(state.grammar.error, fields[0])
    told = " and ".join(fields) + (
        " leaves" if len(fields) == 1 else " contradict each other: together they leave"
    )
    return Unsatisfiable(
        f"{told} no token that could follow the first {num_output} tokens of the answer", fields[0]
    )
