"""The largest steps that there can be: run once before the KV cache is made, to see what memory they take.

They are real ones, from assembling to matching, over requests that nobody sent. All their KV lies in the scratch block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreword.core.batch import SCRATCH_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import PassDrafter
from foreword.engine.assemble import Assembler
from foreword.engine.plan import Plan, Work
from foreword.engine.runner import Runner
from foreword.models.base import Tower
from foreword.resolve import Resolved

__all__ = ["LargestSteps", "graph_rows"]

GRAPH_ROWS = 256  # rows of the largest graph, unless more requests may run at once
LARGEST_PICTURE = 16_384  # tokens: processors of the models here make none that has more
LOGPROBS = 20
EVERYTHING = SamplingParams(
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
    logprobs=LOGPROBS,
    max_tokens=64,
    ignore_eos=True,
)
SCORED = SamplingParams(temperature=1.0, prompt_logprobs=LOGPROBS, max_tokens=1, ignore_eos=True)


def graph_rows(resolved: Resolved) -> int:
    """Rows of the largest graph."""
    return min(max(resolved.max_num_seqs, GRAPH_ROWS), resolved.max_num_batched_tokens)


class LargestSteps:
    """See engine.memory.Passes.

    drafters  those that run models of their own
    towers    of all models that see
    """

    def __init__(
        self,
        resolved: Resolved,
        assembler: Assembler,
        runner: Runner,
        drafters: Sequence[PassDrafter] = (),
        towers: Sequence[Tower] = (),
    ) -> None:
        self._resolved = resolved
        self._assembler = assembler
        self._runner = runner
        self._drafters = drafters
        self._towers = towers

    def largest(self) -> None:
        """A prompt at the end of the longest context, one that is scored, every row sampled with everything, and what draft
        models and towers do."""
        resolved = self._resolved
        rows = min(resolved.max_num_batched_tokens, resolved.max_model_len - 1)
        self._run([self._prompt(rows, resolved.max_model_len - 1 - rows, SamplingParams(temperature=0.0))])
        self._run([self._prompt(rows, 0, SCORED)])
        self._run(self._everybody(resolved.max_num_batched_tokens, EVERYTHING))
        for drafter in self._drafters:
            drafter.pass_seconds(resolved.max_num_batched_tokens, min(resolved.max_num_seqs, resolved.max_num_batched_tokens))
        for tower in self._towers:
            self._look(tower)

    def captured(self) -> None:
        """One row of each of so many requests."""
        rows = graph_rows(self._resolved)
        self._run(self._everybody(rows, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)))
        for drafter in self._drafters:
            drafter.pass_seconds(rows, rows)

    def _run(self, works: Sequence[Work]) -> None:
        self._runner.run(self._assembler.build(Plan(tuple(works))))

    def _prompt(self, rows: int, start: int, params: SamplingParams) -> Work:
        return Work(self._state(0, start + rows, 0, params), start, rows, samples=True)

    def _everybody(self, rows: int, params: SamplingParams) -> list[Work]:
        """As many requests as may run; each samples behind its last token and behind each token of a draft, `rows` in all."""
        resolved = self._resolved
        count = min(resolved.max_num_seqs, rows)
        most = min(resolved.num_speculative_tokens if resolved.drafters else 0, resolved.max_model_len - 3, rows // count - 1)
        works = []
        for number in range(count):
            state = self._state(number, 1, max(most, 0), params)
            works.append(Work(state, 0, 1, samples=True, num_draft=len(state.draft)))
        return works

    def _state(self, number: int, num_tokens: int, num_draft: int, params: SamplingParams) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request(f"largest-{number}", (0,) * num_tokens, params, seed=number)
        state = RequestState(request, number, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "largest")
        state.blocks = [SCRATCH_BLOCK] * -(-(num_tokens + num_draft) // self._assembler.block_size)
        return state

    def _look(self, tower: Tower) -> None:
        with torch.inference_mode():
            for _ in tower.encode(tower.largest(min(LARGEST_PICTURE, self._resolved.max_model_len))):
                pass
