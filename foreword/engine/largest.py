"""The largest steps that there can be: run once before the KV cache is made, to see what memory they take.

They are real ones, from assembling to matching, over requests that nobody sent. All their KV lies in the scratch block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreword.core.batch import NULL_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import ModelBasedDrafter
from foreword.engine.assemble import BatchBuilder
from foreword.engine.plan import ScheduleOutput, ScheduledRequest
from foreword.engine.runner import ModelRunner
from foreword.models.base import VisionEncoder
from foreword.resolve import ResolvedConfig

__all__ = ["ProfileRun", "max_graph_rows"]

DEFAULT_GRAPH_ROWS = 256  # rows of the largest graph, unless more requests may run at once
MAX_IMAGE_TOKENS = 16_384  # tokens: processors of the models here make none that has more
NUM_LOGPROBS = 20
ALL_PARAMS = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    top_n_sigma=3.0,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    xtc_probability=0.5,
    logprobs=NUM_LOGPROBS,
    max_tokens=64,
    ignore_eos=True,
)
PROMPT_LOGPROBS = SamplingParams(temperature=1.0, prompt_logprobs=NUM_LOGPROBS, max_tokens=1, ignore_eos=True)


def max_graph_rows(resolved: ResolvedConfig) -> int:
    """Rows of the largest graph."""
    return min(max(resolved.max_num_seqs, DEFAULT_GRAPH_ROWS), resolved.max_num_batched_tokens)


class ProfileRun:
    """See engine.memory.Passes.

    drafters  those that run models of their own
    towers    of all models that see
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        drafters: Sequence[ModelBasedDrafter] = (),
        vision_encoders: Sequence[VisionEncoder] = (),
    ) -> None:
        self._resolved = resolved
        self._batch_builder = batch_builder
        self._model_runner = model_runner
        self._drafters = drafters
        self._vision_encoders = vision_encoders

    def run_max(self) -> None:
        """A prompt at the end of the longest context, one that is scored, every row sampled with everything, and what draft
        models and towers do."""
        resolved = self._resolved
        rows = min(resolved.max_num_batched_tokens, resolved.max_model_len - 1)
        self._run([self._prompt_request(rows, resolved.max_model_len - 1 - rows, SamplingParams(temperature=0.0))])
        self._run([self._prompt_request(rows, 0, PROMPT_LOGPROBS)])
        self._run(self._max_batch(resolved.max_num_batched_tokens, ALL_PARAMS))
        for drafter in self._drafters:
            drafter.pass_seconds(resolved.max_num_batched_tokens, min(resolved.max_num_seqs, resolved.max_num_batched_tokens))
        for tower in self._vision_encoders:
            self._encode(tower)

    def run_graphs(self) -> None:
        """One row of each of so many requests."""
        rows = max_graph_rows(self._resolved)
        self._run(self._max_batch(rows, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)))
        for drafter in self._drafters:
            drafter.pass_seconds(rows, rows)

    def _run(self, requests: Sequence[ScheduledRequest]) -> None:
        self._model_runner.run(self._batch_builder.build(ScheduleOutput(tuple(requests))))

    def _prompt_request(self, num_rows: int, start: int, params: SamplingParams) -> ScheduledRequest:
        return ScheduledRequest(self._dummy_state(0, start + num_rows, 0, params), start, num_rows, is_sampled=True)

    def _max_batch(self, num_rows: int, params: SamplingParams) -> list[ScheduledRequest]:
        """As many requests as may run; each samples behind its last token and behind each token of a draft, `rows` in all."""
        resolved = self._resolved
        count = min(resolved.max_num_seqs, num_rows)
        most = min(resolved.num_speculative_tokens if resolved.drafters else 0, resolved.max_model_len - 3, num_rows // count - 1)
        works = []
        for number in range(count):
            state = self._dummy_state(number, 1, max(most, 0), params)
            works.append(ScheduledRequest(state, 0, 1, is_sampled=True, num_draft_tokens=len(state.draft)))
        return works

    def _dummy_state(self, number: int, num_tokens: int, num_draft: int, params: SamplingParams) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request(f"largest-{number}", (0,) * num_tokens, params, seed=number)
        state = RequestState(request, number, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "largest")
        state.blocks = [NULL_BLOCK] * -(-(num_tokens + num_draft) // self._batch_builder.block_size)
        return state

    def _encode(self, vision_encoder: VisionEncoder) -> None:
        with torch.inference_mode():
            for _ in vision_encoder.encode(vision_encoder.make_max_image(min(MAX_IMAGE_TOKENS, self._resolved.max_model_len))):
                pass
