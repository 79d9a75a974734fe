"""Overlapped steps that the host samples: requests with penalties, log-probabilities, biases or grammars.

The host needs the tokens of step n to sample step n + 1, but not to launch its forward pass, whose input
token is on the device. So the device computes forward pass n + 1 while the host reads the tokens of step n,
sends their events, and gathers penalties and masks:

    device  | forward 1 | sample 1 | forward 2            | sample 2 | forward 3 ...
    host      launch sample 1, forward 2 ^ read 1, update, launch sample 2, forward 3 ^ read 2 ...

Rows, parameters and kernels of sampling are those of the synchronous loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foreword.core.batch import SampleRow
from foreword.core.grammars import Grammars
from foreword.core.request import RequestState
from foreword.cuda_graphs.decode_loop import DecodeResult, DecodeSlot, ForwardResult, SplitDecodeLoop
from foreword.kernels.ops import DraftTokens
from foreword.sampling.sampler import NON_FINITE, PendingSamples, Sampler
from foreword.sampling.verify import verify

NO_DRAFT = DraftTokens((), ())


@dataclass(slots=True)
class _Step:
    """A launched step; the last one is sampled once its requests' tokens are known."""

    active_slots: tuple[int, ...]
    num_draft_tokens: int
    forward: ForwardResult
    device_drafts: Sequence[DraftTokens] = ()
    drafts: Sequence[DraftTokens] = ()  # the same, up to the first token that the grammar refuses
    samples: PendingSamples | None = None


class HostSampledLoop:
    """A DecodeLoop of these requests on top of another: slot i is states[i].

    Before launch() and collect(), the states have the tokens of all collected steps.
    """

    def __init__(
        self, loop: SplitDecodeLoop, states: Sequence[RequestState], sampler: Sampler, grammars: Grammars
    ) -> None:
        self._loop = loop
        self._states = states
        self._sampler = sampler
        self._grammars = grammars
        self._steps: deque[_Step] = deque()
        self._ended: set[int] = set()  # slots with a broken row, or that the device has advanced too far

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        self._loop.start(slots)

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        self._loop.extend_blocks(slot, block_table, draft_block_table)

    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        self._sample_last()
        forward = self._loop.launch_forward(active_slots, num_draft_tokens)
        self._steps.append(_Step(tuple(active_slots), num_draft_tokens, forward))

    def collect(self) -> dict[int, DecodeResult]:
        if len(self._steps) == 1:
            self._sample_last()
        step = self._steps.popleft()
        assert step.samples is not None
        sampled, width = step.samples.read(), 1 + step.num_draft_tokens
        results: dict[int, DecodeResult] = {}
        drafts = zip(step.active_slots, step.drafts, step.device_drafts, strict=True)
        for index, (slot, draft, device_draft) in enumerate(drafts):
            if slot in self._ended:
                continue
            first = index * width
            run = sampled.token_ids[first : first + 1 + len(draft.token_ids)]
            end = first + verify(run, draft.token_ids) + 1
            token_ids = tuple(sampled.token_ids[first:end])
            count = len(token_ids)
            if token_ids == device_draft.token_ids[:count]:
                # The mask allows the refused token, so the device went on to a row that repeats this one.
                draft = DraftTokens(token_ids, device_draft.logprobs[:count])
                token_ids = (*token_ids, NON_FINITE)
            if token_ids[-1] < 0:
                self._ended.add(slot)
            logprobs = tuple(value for value in sampled.logprobs[first:end] if value is not None)
            hashes = tuple(sampled.logits_hashes[first:end])
            results[slot] = DecodeResult(token_ids, draft.token_ids, draft.logprobs, hashes, logprobs)
        return results

    @torch.inference_mode()
    def _sample_last(self) -> None:
        """Sample the last forward pass, if it is not yet."""
        if not self._steps or self._steps[-1].samples is not None:
            return
        assert len(self._steps) == 1, "the step before is not collected"
        step = self._steps[0]
        read_drafts = step.forward.read_drafts
        drafts = [NO_DRAFT] * len(step.active_slots) if read_drafts is None else read_drafts()
        states = [self._states[slot] for slot in step.active_slots]
        step.device_drafts = drafts
        step.drafts = [_truncate_to_legal(state, draft) for state, draft in zip(states, drafts, strict=True)]
        rows = [
            SampleRow(state, draft.token_ids[:num_before])  # later rows repeat the last one, and are not used
            for state, draft in zip(states, step.drafts, strict=True)
            for num_before in range(1 + step.num_draft_tokens)
        ]
        if any(state.grammar is not None for state in states):
            self._grammars.start_masks(rows)
        step.samples = self._sampler.launch(step.forward.logits, rows)
        self._loop.commit(step.samples.token_ids)


def _truncate_to_legal(state: RequestState, draft: DraftTokens) -> DraftTokens:
    """The draft up to the first token that the grammar refuses.

    Its mask does not allow that token either, unless it was computed again after an error of the grammar.
    """
    if state.grammar is None or not draft.token_ids:
        return draft
    length = state.grammar.num_legal(draft.token_ids)
    return DraftTokens(draft.token_ids[:length], draft.logprobs[:length])
