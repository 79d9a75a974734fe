"""The operations of the engine: one signature each, implemented by every backend.

Shapes use the letters of `core.batch`. Every operation is row-invariant: the bits of one row do not
depend on how many other rows there are, on what they hold, or on the row's place among them.
`reference.py` is the specification; a backend that cannot do better for some operation inherits it.

Operations that are others in a row, for backends that gain nothing from doing them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.core.batch import Batch, KVLayer

__all__ = [
    "AttentionMetadata",
    "DraftJob",
    "DraftLoop",
    "DraftSamplingParams",
    "DraftTokens",
    "MRopeSections",
    "Matrix",
    "Ops",
    "PackedLinear",
    "QuantizedBlocks",
    "UnfusedOps",
]

PackedLinear = Any  # what pack_linear() of the same backend made
AttentionMetadata = Any  # what plan_attention() of the same backend made


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A quantized matrix [N, columns] as it stands in a file.

    kind  "q8_0", "q5_0", "q4_0", "q4_k", "q5_k" or "q6_k": the blocks of GGUF
    data  uint8 [N, bytes of one row]
    """

    format: str
    data: Tensor
    columns: int


Matrix = Tensor | QuantizedBlocks  # [N, K]


@dataclass(frozen=True, slots=True)
class MRopeSections:
    """Which direction (0 time, 1 row, 2 column) each angle of a head turns by, in models with M-RoPE.

    sections     angles for each direction, D_rot / 2 in all
    interleaved  directions take turns (time, row, column, time, ...) as long as a section lasts, and time has the rest; else
                 one section follows the other
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def angle_axes(self) -> tuple[int, ...]:
        """One for each angle."""
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        angles = range(sum(self.sections))
        return tuple(i % 3 if i % 3 and i < 3 * self.sections[i % 3] else 0 for i in angles)


@dataclass(frozen=True, slots=True)
class DraftSamplingParams:
    """How one request samples, where temperature and filters are all of it; as in core/params.py, seed unsigned."""

    seed: int
    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(slots=True)  # not frozen: that costs a microsecond for each request of each draft
class DraftJob:
    """One request of a draft.

    token_ids   known tokens, at least one: computed in the first pass
    start       position of the first of them
    blocks      int64, its block table: a slot for each known token and for each guess but the last
    first       absolute index of the first guess, the counter of its noise
    max_tokens  guesses at most; 0: the known tokens are computed, and that is all
    floor       no more guesses once the sum of their log-probabilities is below this
    shift       for models with M-RoPE: how far its tokens, which are text, stand behind (or before) their positions in all
                directions; see RopePositions.shift
    """

    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]
    first_draft_index: int
    max_tokens: int
    min_logprob_sum: float
    sampling: DraftSamplingParams
    mrope_offset: int = 0


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """What was guessed for one request, and the log-probability of each guess in the distribution it was sampled from.

    Fewer than wanted if the floor was reached, or if no token was legal.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@runtime_checkable
class DraftLoop(Protocol):
    """What compile() may return: a forward pass that yields logits [R, V] and also runs a whole draft as one call."""

    def __call__(self, batch: Batch) -> Tensor: ...

    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """Pass after pass, each lane's next token sampled from its row: the bits of the same operations one by one.

        A lane that is done has no row in the next pass. unused int64 [U]: ids that are never sampled.
        """


class Ops(Protocol):
    """What a backend offers.

    name      as in `foreword env` and the fingerprint
    row_tile  batches are padded to a multiple of this many rows
    recordable  nothing here looks at a tensor's values on the host: whole passes can be put into a graph, and run ahead of it.
              Batches then have owners
    """

    name: str
    row_tile: int
    supports_graphs: bool

    def num_torch_threads(self, max_threads: int) -> int:
        """Threads that torch may use without changing bits, at most `wanted`."""

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """The same function, perhaps faster from its second call on, and perhaps a DraftLoop. What it computes must go
        through these operations and views of tensors, the same ones for every batch."""

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        """A matrix [N, K], given as parts one below the other, laid out once at load; bias [N].

        kind  what tensors become: "float32", "bfloat16", "float16", "int8" or "fp8" (a scale for each row) or "int4" (a
              scale for each 32 values of a row). Blocks keep what they are.
        """

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N] of `dtype` (that of x if None), added to `add_to` [T, N] if given, which stays as it is.
        The reduction over K has one order whatever T."""

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """gated(linear(x, weight), activation): x [T, K], weight [2I, K] -> [T, I]."""

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        """ids int64 [T], weight [V, H] -> [T, H] of `dtype`, times scale."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, both [T, H]."""

    def index_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows int64 [R] -> [R, H]."""

    def scatter_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """x[rows[i]] = values[i], in place; x [T, H], rows int64 [N], values [N, H]. Not within compile()."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, ..., H], weight float32 [H] -> x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def rope(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
    ) -> Tensor:
        """x [T, heads, D] rotated in halves over its first D_rot values.

        table float32 [positions, D_rot]: cosines of D_rot / 2 angles, then their sines; positions int64 [T], or with axes
        int64 [T, 3]: each angle turns by the position in its direction.
        """

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> activation(gate) * up [T, I]; activation is "silu", "gelu" or "gelu_tanh"."""

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        mrope_sections: MRopeSections | None,
        cache: KVLayer,
        slots: Tensor,
    ) -> Tensor:
        """rope() of q [T, Hq, D], which is returned, and of k [T, Hk, D], which goes with v to the cache as by write_kv()."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        """k, v [T, Hk, D] into the cache at slots [T]."""

    def build_attention_metadata(self, batch: Batch, window: int | None = None) -> AttentionMetadata:
        """What the attention of all layers with this window shares in one forward pass."""

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]. Row t attends to the positions of its own request in
        (positions[t] - window, positions[t]]; scores are capped to softcap * tanh(s / softcap) if given.
        `plan` is plan_attention(batch, window), made here if missing; rows of padding yield zeros."""

    def varlen_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Attention without order, as towers need it: q [N, heads, D], k and v [M, heads, D] -> [N, heads, D].

        Rows q_starts[i] to q_starts[i + 1] attend to all rows kv_starts[i] to kv_starts[i + 1]; no section is empty, and
        both cover their rows. What a section's rows become depends on the section only. Not within compile().
        """

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""

    # Rows of logits: float32 [R, V]; masked ids are -inf. In place where nothing is returned.

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R], summed in one order."""

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]: ids by (value descending, id ascending)."""

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        """Mask ids whose bit is clear; masks int32 [R, W], bit i % 32 of word i // 32 for id i. An id beyond
        them is not allowed. NaN and +inf stay: a mask must not hide that a row is broken."""

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        """logits[r, ids[i]] += amounts[i] for starts[r] <= i < starts[r + 1].

        starts int64 [R+1], ids int64 [N], none twice in a row, amounts float32 [N]. An id beyond V is nowhere.
        """

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        """Divide those of the ids that are positive by penalties[r], and multiply the others; ids as in add_at,
        penalties float32 [R]."""

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        """logits[r] /= by[r], rounded as IEEE 754 demands; by float32 [R]."""

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        """Mask ids further than n[r] standard deviations (of all that are not masked) below the likeliest;
        n float64 [R], > 0. A value counts as at most 1024 below the likeliest."""

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        """Mask all but the k[r] first ids by (value descending, id ascending); k int64 [R], >= 1."""

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask all but the shortest run of ids by (value descending, id ascending) whose probability
        reaches p[r]; the id that crosses the bound stays; p float64 [R] in (0, 1]."""

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask all but the shortest run of ids whose probability reaches p[r], by (float32 distance of -log(probability)
        from its mean, the entropy, ascending; id ascending); p float64 [R] in (0, 1]."""

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask ids less likely than p[r] times the likeliest; p float64 [R] in [0, 1]."""

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        """XTC: with probability chances[r], mask the ids whose probability reaches thresholds[r], all but the last of
        them by (value descending, id ascending). The coin is keyed as the noise of sample() is, for a purpose of its
        own; chances and thresholds float64 [R] in [0, 1]."""

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """argmax over ids of logits + gumbel(seed, position, id), ties to the lowest id -> int64 [R].

        seeds int64 [R] (bits of the unsigned seed), positions int64 [R], greedy bool [R] (no noise).
        A row with no finite value yields -1; so does a row that holds a NaN.
        """


class UnfusedOps:
    """Mixin of a backend that has the parts."""

    def linear_gated_act(self: Ops, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K], weight [2I, K] -> [T, I]"""
        return self.gated_act(self.linear(x, weight), activation)

    def rope_and_cache(
        self: Ops,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        mrope_sections: MRopeSections | None,
        cache: KVLayer,
        slots: Tensor,
    ) -> Tensor:
        """q [T, Hq, D] turned; k and v [T, Hk, D] go to the cache"""
        turned = self.rope(q, cos_sin, positions, mrope_sections)
        self.write_kv(self.rope(k, cos_sin, positions, mrope_sections), v, cache, slots)
        return turned
