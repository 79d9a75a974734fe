"""One step on the device: forward, process, sample, match."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.cache.storage import KVStorage
from foreword.core.batch import Batch
from foreword.core.draft import Outcome
from foreword.core.events import TokenLogprob
from foreword.core.request import RequestState
from foreword.core.uploads import uploaded
from foreword.engine.assemble import PromptRow, StepBatch
from foreword.engine.plan import Work
from foreword.engine.pooling import Pooler
from foreword.engine.stages import Stages
from foreword.errors import ForewordError, RequestFailed, Unsatisfiable
from foreword.grammar.grammars import Grammars
from foreword.kernels.rounds import RunsAhead
from foreword.models.base import Model
from foreword.sampling.sampler import NOTHING_LEGAL, Sampled, Sampler
from foreword.sampling.steps import masking_fields
from foreword.sampling.verify import verify

__all__ = ["Runner"]

NOT_FINITE = "no token can be sampled: the logits are not finite"


class Runner:
    """The model with its KV and its sampler. Masks of grammars are computed while the model is.

    pooler      the pass over prompts that become vectors
    vocab_size  of the model's logits
    directions  the model knows positions in several directions
    """

    def __init__(self, model: Model, kv: KVStorage, sampler: Sampler, grammars: Grammars, stages: Stages) -> None:
        self.sampler = sampler
        self.grammars = grammars
        self.stages = stages
        self.pooler = Pooler(model, kv)
        self.vocab_size = model.vocab_size
        self.directions = model.directions
        self._logits = model.compiled(kv)

    @property
    def forward(self) -> Callable[[Batch], Tensor]:
        """The pass that yields logits, compiled."""
        return self._logits

    @property
    def ahead(self) -> RunsAhead | None:
        """The same pass for rounds, if the backend can compute them."""
        return self._logits if isinstance(self._logits, RunsAhead) else None

    def warm_up(self, batch: Batch) -> None:
        """One pass: allocators and kernels are ready before the first request."""
        with torch.inference_mode():
            self._logits(batch)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> tuple[Outcome, ...]:
        """One outcome for each piece of work. It may be run again, in whole or in parts, and yields the same."""
        if any(row.state.grammar is not None for row in batch.rows):
            with self.stages("sample"):
                self.grammars.prepare(batch.rows)
        with self.stages("forward"):
            logits = self._logits(batch.forward)
            if not batch.rows and logits.device.type == "cuda":
                torch.cuda.synchronize()  # nothing of it is read, but what it takes, and its errors, are those of this step
        with self.stages("sample"):
            scored = self._score_prompts(batch, logits)
            sampled = self.sampler(_lines(logits, batch.lines), batch.rows)
            _check(sampled.token_ids, len(batch.rows), logits.shape[1])
            return _match(batch.plan.work, sampled, scored)

    def _score_prompts(self, batch: StepBatch, logits: Tensor) -> Sequence[tuple[TokenLogprob, ...]]:
        if not any(batch.prompt_rows):
            return [()] * len(batch.prompt_rows)
        return [
            self._score(work, rows, logits) if rows else () for work, rows in zip(batch.plan.work, batch.prompt_rows, strict=True)
        ]

    def _score(self, work: Work, rows: Sequence[PromptRow], logits: Tensor) -> tuple[TokenLogprob, ...]:
        lines = logits[rows[0].line : rows[-1].line + 1]
        targets = [row.target for row in rows]
        return tuple(self.sampler.prompt_logprobs(lines, targets, work.state.params.prompt_logprobs or 0))


def _lines(logits: Tensor, lines: Sequence[int]) -> Tensor:
    if len(lines) == logits.shape[0]:
        return logits
    (chosen,) = uploaded([np.array(lines, np.int64)], logits.device)
    return logits.index_select(0, chosen)


def _check(token_ids: Sequence[int], num_rows: int, vocab_size: int) -> None:
    """What is no id would be an index out of range in the next step, where nobody knows whose it is."""
    if len(token_ids) != num_rows:
        raise RuntimeError(f"{len(token_ids)} tokens were sampled of {num_rows} rows")
    if token_ids and not NOTHING_LEGAL <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RuntimeError(f"ids from {min(token_ids)} to {max(token_ids)} were sampled; there are {vocab_size}")


def _match(works: Sequence[Work], sampled: Sampled, scored: Sequence[tuple[TokenLogprob, ...]]) -> tuple[Outcome, ...]:
    """Cut the sampled rows into one outcome per piece of work."""
    outcomes: list[Outcome] = []
    line = 0
    for work, prompt_logprobs in zip(works, scored, strict=True):
        if not work.samples:
            outcomes.append(Outcome(prompt_logprobs=prompt_logprobs))
            continue
        end = line + 1 + work.num_draft
        outcomes.append(_outcome(work, sampled, line, end, prompt_logprobs))
        line = end
    return tuple(outcomes)


def _outcome(work: Work, sampled: Sampled, line: int, end: int, prompt_logprobs: tuple[TokenLogprob, ...]) -> Outcome:
    """Keep the drafted prefix that the model itself sampled and one token more, then cut at the end of the answer."""
    state = work.state
    token_ids = sampled.token_ids[line:end]
    accepted = verify(token_ids, state.draft[: work.num_draft]) if work.num_draft else 0
    run = token_ids[: accepted + 1]
    if run[-1] < 0 and accepted:  # the next step tells it, by a row that no draft has touched
        run, accepted = run[:-1], accepted - 1
    failed = run[-1] < 0
    ending = state.ending([] if failed else run)
    kept = ending.kept
    wanted = state.params.logprobs is not None
    return Outcome(
        token_ids=tuple(run[:kept]),
        accepted=min(accepted, kept),
        logprobs=tuple(lp for lp in sampled.logprobs[line : line + kept] if lp is not None) if wanted else (),
        prompt_logprobs=prompt_logprobs,
        hashes=tuple(sampled.hashes[line : line + kept]),
        finish_reason=ending.finish_reason,
        stop_id=ending.stop_id,
        repeating=ending.repeating,
        error=_failure(state, run[-1], state.num_output + kept) if failed and ending.finish_reason is None else None,
    )


def _failure(state: RequestState, token_id: int, num_output: int) -> ForewordError:
    """Why there is no token after `num_output` of the answer: our fault, or that of what the request asks for."""
    if token_id != NOTHING_LEGAL:
        return RequestFailed(NOT_FINITE)
    fields = masking_fields(state.request)
    if state.grammar is not None and state.grammar.error is not None:
        return Unsatisfiable(state.grammar.error, fields[0])
    told = " and ".join(fields) + (" leaves" if len(fields) == 1 else " contradict each other: together they leave")
    return Unsatisfiable(f"{told} no token that could follow the first {num_output} tokens of the answer", fields[0])
