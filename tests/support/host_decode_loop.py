"""The host's decode loop: the oracle of the decode loop on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.request import RequestState
from foreword.cuda_graphs.decode_loop import DecodeResult, DecodeSlot
from foreword.kernels.ops import DraftJob
from foreword.sampling.sampler import Sampler
from foreword.sampling.verify import verify
from foreword.speculation.drafters.draft_model import DraftState
from foreword.speculation.drafters.eager_draft_loop import EagerDraftLoop
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.graph_capture_fake import BLOCK_SIZE, MAX_BLOCKS, GraphTestBed

NEVER_SAMPLED_IDS = (0, 17, VOCAB_SIZE - 1)


def blocks_of(number: int) -> list[int]:
    return [1 + number + 6 * ((5 * place) % MAX_BLOCKS) for place in range(MAX_BLOCKS)]


def num_blocks(length: int) -> int:
    """Number of blocks for `length` tokens."""
    return -(-length // BLOCK_SIZE)


class HostDecodeLoop:
    """The host's loop, step by step: draft, forward, sample, verify."""

    def __init__(
        self, target: GraphTestBed, drafter: GraphTestBed | None, states: Sequence[RequestState]
    ) -> None:
        self.target = target
        self.states = states
        self.forward: Callable[[Batch], Tensor] = target.forward
        self.sampler = Sampler(target.ops, VOCAB_SIZE, NEVER_SAMPLED_IDS, test_mode=True)
        self.passes = self.drafted = None
        if drafter is not None:
            self.drafted = drafter.model.vocab_size
            unused = [i for i in NEVER_SAMPLED_IDS if i < self.drafted] + list(
                range(VOCAB_SIZE, self.drafted)
            )
            sampler = Sampler(drafter.ops, self.drafted, unused)
            self.passes = EagerDraftLoop(drafter.forward, drafter.ops, sampler, BLOCK_SIZE, "cpu")

    @torch.inference_mode()
    def round(self, numbers: Sequence[int], num_draft: int) -> dict[int, DecodeResult]:
        drafts, logprobs = self._drafts(numbers, num_draft)
        chunks = [
            Chunk(
                [self.states[n].tokens[-1], *drafts[n]],
                len(self.states[n].tokens) - 1,
                blocks_of(n),
                1 + len(drafts[n]),
            )
            for n in numbers
        ]
        rows = [
            SampleRow(self.states[n], drafts[n][:place])
            for n in numbers
            for place in range(len(drafts[n]) + 1)
        ]
        sampled = self.sampler(self.forward(build_batch(chunks, BLOCK_SIZE, 1, "cpu")), rows)
        results, line = {}, 0
        for n in numbers:
            end = line + 1 + len(drafts[n])
            count = 1 + verify(sampled.token_ids[line:end], drafts[n])
            run = tuple(sampled.token_ids[line : line + count])
            results[n] = DecodeResult(
                run, drafts[n], logprobs[n], tuple(sampled.logits_hashes[line : line + count])
            )
            if run[-1] >= 0:
                self.states[n].append(run)
            line = end
        return results

    def _drafts(
        self, numbers: Sequence[int], num_draft: int
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[float, ...]]]:
        if self.passes is None or self.drafted is None:
            return dict.fromkeys(numbers, ()), dict.fromkeys(numbers, ())
        jobs = []
        for n in numbers:
            tokens = self.states[n].tokens
            known = [token if token < self.drafted else 0 for token in tokens[-2:]]
            sampling = DraftState.from_state(self.states[n], self.drafted).sampling
            first = len(tokens) - len(known)
            jobs.append(DraftJob(known, first, blocks_of(n), len(tokens), num_draft, -torch.inf, sampling))
        drafted = self.passes.draft([DraftRequest(self.states[n]) for n in numbers], jobs)
        return (
            {n: draft.token_ids for n, draft in zip(numbers, drafted, strict=True)},
            {n: draft.logprobs for n, draft in zip(numbers, drafted, strict=True)},
        )


def compute_prompts(bed: GraphTestBed, states: Sequence[RequestState]) -> None:
    """Compute KV of all known tokens but the last."""
    vocab = bed.model.vocab_size
    for number, state in enumerate(states):
        token_ids = [token if token < vocab else 0 for token in state.tokens[:-1]]
        if token_ids:
            with torch.inference_mode():
                bed.forward(build_batch([Chunk(token_ids, 0, blocks_of(number), 0)], BLOCK_SIZE, 1, "cpu"))


def slot_of(number: int, state: RequestState, length: int, drafted: bool) -> DecodeSlot:
    """A slot with blocks for `length` tokens."""
    blocks = blocks_of(number)[: num_blocks(length)]
    sampling = DraftState.from_state(state, VOCAB_SIZE).sampling
    return DecodeSlot(
        tuple(state.tokens[-2:]), len(state.tokens), blocks, sampling, blocks if drafted else ()
    )


def copy_states(states: Sequence[RequestState]) -> list[RequestState]:
    return [RequestState(state.request, state.arrival, 4096) for state in states]
