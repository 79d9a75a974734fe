"""Rounds: steps of plain decoding that follow each other on the device without the host in between.

A round drafts (if there is a draft model), computes 1 + d rows of each request, samples them, matches the draft, and
leaves everything that the next round needs where it is: on the device. The host launches a round while the one before
is computed, and reads results one round late. A request that ends meanwhile has computed a round in vain, and that is
all: its tokens are dropped, and what it wrote lies behind what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from foreword.kernels.ops import DraftSamplingParams

__all__ = ["DecodeSlot", "DecodeResult", "DecodeLoop", "SupportsDecodeLoop"]


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A request whose temperature and filters are all of its sampling, with one token left to compute.

    token_ids     its last two tokens, or the only one
    length        tokens known; KV is there for all but the last
    blocks        block table in the target's cache
    draft_blocks  block table in the draft model's cache, where KV is there for all but the last two; () without
                  a draft model
    shift         for models with M-RoPE, as in DraftLane
    """

    last_token_ids: tuple[int, ...]
    num_tokens: int
    block_table: Sequence[int]
    sampling: DraftSamplingParams
    draft_block_table: Sequence[int] = ()
    mrope_offset: int = 0


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What a round yielded for one lane.

    token_ids  what the target sampled: the drafted tokens that it agrees with and one more; the last is -1 where a row of
               logits is broken. A lane with -1 takes no part in what was launched after it: its results there are None
    drafted    what was verified
    logprobs   of each drafted token, in the distribution it was sampled from
    hashes     of the raw logits of each row of token_ids, if they were asked for
    """

    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] = ()
    draft_logprobs: tuple[float, ...] = ()
    logits_hashes: tuple[int, ...] = ()


class DecodeLoop(Protocol):
    """One run of rounds. At most two are launched and not collected."""

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        """The requests of all rounds to come, by number. Nothing is under way."""

    def extend_blocks(self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()) -> None:
        """The whole block tables of a lane, longer than they were, for rounds launched from now on."""

    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        """Begin a round of these lanes, at most num_draft drafted tokens each, and do not wait for it.

        Every lane has slots for all that it may come to: 1 + num_draft tokens for each round that is not collected.
        """

    def collect(self) -> dict[int, DecodeResult]:
        """Of the oldest round that is not collected, by lane; waits for it."""


@runtime_checkable
class SupportsDecodeLoop(Protocol):
    """What compile() of a recordable backend returns, beside a forward pass and a DraftLoop."""

    def get_decode_loop(self, block_size: int, never_sampled_ids: Tensor, drafter: SupportsDecodeLoop | None = None, with_hashes: bool = False) -> DecodeLoop:
        """Rounds of this forward pass, which yields logits, drafted for by that one.

        unused  int64 [U]: ids that are never sampled
        hashed  results tell hashes of the raw logits, as the sampler's in test mode; this waits for the device
        """
