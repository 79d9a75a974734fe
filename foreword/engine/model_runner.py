"""One step on the device: forward pass, sampling, verification of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import upload
from foreword.core.grammars import Grammars
from foreword.core.outputs import StepOutput, TokenLogprob
from foreword.core.request import RequestState
from foreword.cuda_graphs.decode_loop import SupportsDecodeLoop
from foreword.cuda_graphs.graph_runner import with_graphs
from foreword.engine.batch_builder import ModelInput, PromptLogprobRow
from foreword.engine.pooler import Pooler
from foreword.engine.scheduler import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import ForewordError, GrammarFailed, RequestFailed, Unsatisfiable
from foreword.kv_cache.storage import KVStorage
from foreword.models.decoder import Decoder
from foreword.sampling.logits_processors import masking_fields
from foreword.sampling.sampler import ALL_MASKED, Sampler, SamplerOutput
from foreword.sampling.verify import verify


class ModelRunner:
    """A model with its KV cache and sampler. Grammar masks are computed during the forward pass."""

    def __init__(
        self, model: Decoder, kv: KVStorage, sampler: Sampler, grammars: Grammars, timer: StepTimer
    ) -> None:
        self.ops = model.ops
        self.sampler = sampler
        self.grammars = grammars
        self.timer = timer
        self.kv = kv
        self.pooler = Pooler(model, kv)
        self.vocab_size = model.vocab_size  # width of the logits
        self.mrope = model.uses_mrope
        # batch -> logits
        is_eager = model.has_states or model.head is not None
        self.forward = with_graphs(model.ops, model.compile_logits(kv), is_eager)

    @property
    def decode_loop_forward(self) -> SupportsDecodeLoop | None:
        """The forward pass if the backend can run it in a decode loop."""
        return self.forward if isinstance(self.forward, SupportsDecodeLoop) else None

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> tuple[StepOutput, ...]:
        """One output per request. Can be retried, also in parts, with the same results."""
        if any(row.state.grammar is not None for row in batch.sample_rows):
            with self.timer("sample"):
                self.grammars.start_masks(batch.sample_rows)
        with self.timer("forward"):
            logits = self.forward(batch.batch)
            if not batch.sample_rows and logits.device.type == "cuda":
                torch.cuda.synchronize()  # charge time and errors to this step: no result is read
        with self.timer("sample"):
            prompt_logprobs = [
                self._score_prompt(request, rows, logits) if rows else ()
                for request, rows in zip(batch.requests, batch.prompt_logprob_rows, strict=True)
            ]
            sampled = self.sampler(_select_logits(logits, batch.logits_indices), batch.sample_rows)
            _check_token_ids(sampled.token_ids, len(batch.sample_rows), logits.shape[1])
            return _verify_drafts(batch.requests, sampled, prompt_logprobs)

    def _score_prompt(
        self, request: ScheduledRequest, rows: Sequence[PromptLogprobRow], logits: Tensor
    ) -> tuple[TokenLogprob, ...]:
        scored = logits[rows[0].logits_index : rows[-1].logits_index + 1]
        target_ids = [row.target_id for row in rows]
        count = request.state.params.prompt_logprobs or 0
        return tuple(self.sampler.prompt_logprobs(scored, target_ids, count))


def _select_logits(logits: Tensor, indices: Sequence[int]) -> Tensor:
    if len(indices) == logits.shape[0]:
        return logits
    (index,) = upload([np.array(indices, np.int64)], logits.device)
    return logits.index_select(0, index)


def _check_token_ids(token_ids: Sequence[int], num_rows: int, vocab_size: int) -> None:
    """Reject ids out of range here: in the next step they would fail without a request to blame."""
    if len(token_ids) != num_rows:
        raise RuntimeError(f"the sampler returned {len(token_ids)} tokens for {num_rows} rows")
    if token_ids and not ALL_MASKED <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RuntimeError(
            f"the sampler returned ids {min(token_ids)} to {max(token_ids)}, the vocabulary has {vocab_size}"
        )


def _verify_drafts(
    requests: Sequence[ScheduledRequest],
    sampled: SamplerOutput,
    prompt_logprobs: Sequence[tuple[TokenLogprob, ...]],
) -> tuple[StepOutput, ...]:
    """Split the sampled rows into one output per request."""
    outputs: list[StepOutput] = []
    row = 0
    for request, logprobs in zip(requests, prompt_logprobs, strict=True):
        if request.is_sampled:
            outputs.append(_sampled_output(request, sampled, row, logprobs))
            row += 1 + request.num_draft_tokens
        else:
            outputs.append(StepOutput(prompt_logprobs=logprobs))
    return tuple(outputs)


def _sampled_output(
    request: ScheduledRequest, sampled: SamplerOutput, start: int, prompt_logprobs: tuple[TokenLogprob, ...]
) -> StepOutput:
    """Keep the accepted draft tokens and one more."""
    state, num_draft = request.state, request.num_draft_tokens
    run = sampled.token_ids[start : start + 1 + num_draft]
    if num_draft:
        del run[verify(run, state.draft[:num_draft]) + 1 :]
    end = start + len(run)
    logprobs = () if state.params.logprobs is None else sampled.logprobs[start:end]
    return step_output(state, run, logprobs, sampled.logits_hashes[start:end], prompt_logprobs)


def step_output(
    state: RequestState,
    run: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    logits_hashes: Sequence[int],
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
) -> StepOutput:
    """Cut a run of accepted draft tokens and one more, which may be none (NON_FINITE), at the output's end.

    logprobs, logits_hashes  of each token, or empty
    """
    accepted = len(run) - 1
    if run[-1] < 0 and accepted:  # the next step reports the error, from a row without draft tokens
        run, accepted = run[:-1], accepted - 1
    failed = run[-1] < 0
    kept, finish_reason, stop_id, repetition = state.check_finish([] if failed else run)
    error = None
    if failed and finish_reason is None:
        error = _sampling_error(state, run[-1], state.num_output + kept)
    return StepOutput(
        tuple(run[:kept]),
        min(accepted, kept),
        tuple([logprob for logprob in logprobs[:kept] if logprob is not None]),
        prompt_logprobs,
        tuple(logits_hashes[:kept]),
        finish_reason,
        stop_id,
        repetition,
        error,
    )


def _sampling_error(state: RequestState, token_id: int, num_output: int) -> ForewordError:
    """Why no token can follow the first `num_output` output tokens."""
    if token_id != ALL_MASKED:
        return RequestFailed("no token can be sampled: the logits are not finite")
    fields = masking_fields(state.request)
    if state.grammar is not None and (reason := state.grammar.error):
        kind = GrammarFailed if num_output else Unsatisfiable  # only the first mask is known beforehand
        return kind(reason, fields[0])
    names = " and ".join(fields)
    verb = "leaves" if len(fields) == 1 else "contradict each other: together they leave"
    return Unsatisfiable(
        f"{names} {verb} no token that could follow the first {num_output} tokens of the answer", fields[0]
    )
