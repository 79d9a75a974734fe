"""The host's decode loop: the oracle of the decode loop on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreword.core.batch import Chunk, build_batch
from foreword.core.request import RequestState
from foreword.cuda_graphs.decode_loop import DecodeResult, DecodeSlot
from foreword.speculation.drafters.draft_model import DraftState
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.decode_loops import TwinDecodeLoop, TwinForward
from tests.support.graph_capture_fake import BLOCK_SIZE, CONTEXT_LEN, MAX_BLOCKS, GraphTestBed

NEVER_SAMPLED_IDS = (0, 17, VOCAB_SIZE - 1)


def blocks_of(number: int) -> list[int]:
    return [1 + number + 6 * ((5 * place) % MAX_BLOCKS) for place in range(MAX_BLOCKS)]


def num_blocks(length: int) -> int:
    """Number of blocks for `length` tokens."""
    return -(-length // BLOCK_SIZE)


class HostDecodeLoop(TwinDecodeLoop):
    """The host's loop on eager passes, step by step, with a slot for each request."""

    def __init__(
        self, target: GraphTestBed, drafter: GraphTestBed | None, states: Sequence[RequestState]
    ) -> None:
        self.target, self.drafter = _forward_of(target), None if drafter is None else _forward_of(drafter)
        super().__init__(self.target, self.drafter, BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), True)
        self.start([slot_of(n, state, CONTEXT_LEN, drafter is not None) for n, state in enumerate(states)])

    def round(self, numbers: Sequence[int], num_draft: int) -> dict[int, DecodeResult]:
        self.launch(numbers, num_draft)
        return self.collect()


def _forward_of(bed: GraphTestBed) -> TwinForward:
    return TwinForward(bed.forward, bed.ops, bed.model.vocab_size, CONTEXT_LEN, lambda verb, twin: None)


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
