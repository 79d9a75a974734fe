"""The operations of a model and a sampler: one signature each, implemented by every backend.

Shapes use the letters of `core.batch`. Every operation is row-invariant: the bits of a row do not depend on
the number, content or order of the other rows. `kernels.reference` is the specification; a backend inherits
each operation that it cannot speed up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.core.batch import Batch, KVLayer, StateLayer

NO_ALPHAS = (0.0, 0.0)  # an activation without parameters
XIELU_BETA = 0.5  # factor of x in "xielu"
PackedLinear = Any  # result of pack_linear() of the same backend
PackedExperts = Any  # result of pack_experts() of the same backend
PackedHeads = Any  # result of pack_heads() of the same backend
AttentionMetadata = Any  # result of build_attention_metadata() of the same backend


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A quantized matrix [N, columns] in the layout of a GGUF file."""

    format: str  # "q8_0", "q5_0", "q4_0", "q4_k", "q5_k" or "q6_k"
    data: Tensor  # uint8 [N, bytes of a row]
    columns: int
    input_order: Tensor | None = None  # int64 [K]: column i multiplies input input_order[i]


@dataclass(frozen=True, slots=True)
class GroupedInts:
    """A quantized matrix [N, K] of AWQ, GPTQ or compressed-tensors: (value - zero) * scale, by groups."""

    bits: int  # bits of a value: 4 or 8
    group_size: int  # values of a row that share a scale and a zero; K for one group a row
    values: Tensor  # uint8 [N, K * bits / 8]; of 4 bits, the first value is in the low nibble
    scales: Tensor  # float32 [N, K / group_size]
    zeros: Tensor  # uint8 [N, K / group_size]
    input_order: Tensor | None = None  # int64 [K]: column i multiplies input input_order[i] (GPTQ's desc_act)

    @property
    def columns(self) -> int:
        return self.values.shape[1] * 8 // self.bits


@dataclass(frozen=True, slots=True)
class Float8Blocks:
    """A matrix [N, K] of float8_e4m3fn with a float32 scale for each block of rows and columns."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [ceil(N / rows), ceil(K / columns)]
    block_shape: tuple[int, int]  # rows and columns; (1, K) for a scale a row

    @property
    def columns(self) -> int:
        return self.values.shape[1]


Matrix = Tensor | QuantizedBlocks | GroupedInts | Float8Blocks  # [N, K]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: how rows choose experts, and what an expert computes."""

    num_experts: int  # E
    top_k: int  # experts of a row: those of the largest logits, ties to the lowest id
    renormalize: bool  # weights are shares of the chosen experts' sum, not of all experts'
    activation: str  # as in gated_act()
    # "softmax", or "sigmoid": weights are sigmoid(logit). With a bias, experts are chosen by their weight of
    # all experts plus their bias. "sparse_mixer": each choice has its share of the softmax over its logit and
    # those that are not chosen before it and near it: (own - other) / max(|other|, own) <= tolerance
    scoring: str = "softmax"
    scale: float = 1.0  # factor of the routing weights
    # Experts are equal groups in order of ids, and a row chooses from the topk_groups best of them: by the
    # largest logit ("softmax"), or by the sum of the two largest scores ("sigmoid"); ties to the lowest group
    num_groups: int = 1
    topk_groups: int = 1
    gated: bool = True  # experts compute down(activation(gate) * up), or else down(activation(up))
    tolerance: float = 0.0  # used by "sparse_mixer"

    def __post_init__(self) -> None:
        size = self.num_experts // self.num_groups
        assert self.num_experts % self.num_groups == 0 and 0 < self.topk_groups <= self.num_groups
        assert self.top_k <= self.topk_groups * size, "more experts than the groups have"
        # Backends differ in whether experts of other groups are in the shares
        assert self.scoring != "sparse_mixer" or self.topk_groups == self.num_groups, (
            "a sparse mixer of groups"
        )


@dataclass(frozen=True, slots=True)
class LoraTable:
    """LoRA adapters of one linear layer, by slot. Filled in place: compiled passes keep the addresses.

    A layer of P fused projections has P parts; part p yields part_sizes[p] of the N columns. Only the first
    ranks[slot, part] of r rows of `a` and `b` are read: rank 0 leaves the part's columns as they are.
    """

    part_sizes: tuple[int, ...]
    a: Tensor  # [slots, P, r, K] of the activations' type
    b: Tensor  # [slots, r, N], transposed
    ranks: Tensor  # int64 [slots, P]
    scales: Tensor  # float32 [slots, P]


@dataclass(frozen=True, slots=True)
class MRopeSections:
    """The axis (0 time, 1 row, 2 column) of each rotary angle in models with M-RoPE."""

    sections: tuple[int, int, int]  # angles for each axis, D_rot / 2 in all
    # Axes alternate (time, row, column, time, ...) while their section lasts, and time has the rest.
    interleaved: bool = False

    def angle_axes(self) -> tuple[int, ...]:
        """The axis of each angle."""
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        angles = range(sum(self.sections))
        return tuple(i % 3 if i % 3 and i < 3 * self.sections[i % 3] else 0 for i in angles)


@dataclass(frozen=True, slots=True)
class DraftSamplingParams:
    """Sampling of a draft: the fields of core/params.py that a draft loop supports; the seed is unsigned."""

    seed: int
    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(slots=True)  # not frozen: freezing costs a microsecond for each request of each draft
class DraftJob:
    """One request of a draft."""

    token_ids: Sequence[int]  # known tokens, at least one: computed in the first pass
    start_position: int  # position of the first known token
    block_table: Sequence[int]  # slots for all known tokens and all draft tokens but the last
    first_draft_index: int  # absolute index of the first draft token, the counter of its noise
    max_tokens: int  # draft tokens at most; 0: only compute the known tokens
    min_logprob_sum: float  # stop once the sum of the draft's log-probabilities is below this
    sampling: DraftSamplingParams
    mrope_offset: int = 0  # position of text minus token index on all axes; see MRopePositions.offset
    fixed_position: int | None = None  # one position for all rows, instead of their slots' indices
    in_one_pass: bool = False  # the last max_tokens of token_ids are all sampled, and no pass follows
    mask_slot: int | None = None  # all rows but the first read the hidden state of this slot

    @property
    def num_sampled(self) -> int:
        """Rows of the first pass that are sampled."""
        return self.max_tokens if self.in_one_pass else int(self.max_tokens > 0)

    @property
    def num_rows(self) -> int:
        """Rows of all passes."""
        later = 0 if self.in_one_pass else max(self.max_tokens - 1, 0)
        return len(self.token_ids) + later


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens of one request; fewer than max_tokens at the logprob floor or without a legal token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[
        float, ...
    ]  # each token's, in the distribution it was sampled from; or a confidence head's


@runtime_checkable
class DraftLoop(Protocol):
    """A compiled forward pass to logits [R, V] that also runs a whole draft in one call."""

    def __call__(self, batch: Batch) -> Tensor: ...

    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """Run pass after pass, sampling each job's next token: the bits of the same operations one by one.

        A finished job has no row in the next pass. never_sampled_ids int64 [U].
        """


class Ops(Protocol):
    """The operations of a backend, which inherits fused ones as sequences of others."""

    name: str  # in `foreword env` and in the fingerprint
    row_tile: int  # batches are padded to a multiple of this many rows
    # No operation reads tensor values on the host: passes can be captured in graphs and overlap with the
    # host. Batches then carry request_index.
    supports_graphs: bool

    def num_torch_threads(self, max_threads: int) -> int:
        """Threads that torch may use without changing bits, at most `max_threads`."""

    def set_threads(self, num_threads: int) -> None:
        """Compute with that many threads from now on. Without effect where their number changes bits."""
        return

    def precompile(
        self, run: Callable[[], object], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile the kernels that run() launches, if the backend compiles when it first launches a kernel.

        Kernels write nothing within run(); on_progress(compiled, requested).
        """
        return

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """The same function, possibly faster from its second call on, and possibly a DraftLoop.

        `forward` may use only these operations and views of tensors, the same ones for every batch.
        """

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        """Lay out a matrix [N, K], given as parts stacked along N, once at load; bias [N].

        weight_format  of tensors: "float32", "bfloat16", "float16", "int8" or "fp8" (a scale for each row) or
                       "int4" (a scale for each 32 values of a row); quantized matrices keep their format
        """

    def first_rows(self, weight: PackedLinear, count: int) -> PackedLinear:
        """The first `count` rows of a matrix, in the same memory. Results have the bits of its columns."""

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N] of `dtype` (default: of x), plus `add_to` [T, N], which is not modified.

        The reduction over K has one order for every T.
        """

    def add_lora(self, y: Tensor, x: Tensor, table: LoraTable, batch: Batch) -> Tensor:
        """y [T, N] + scale * (x A^T) B^T of each row's adapter, rounded once; y may be overwritten.

        x [T, K]. Rows whose batch.lora_slots is -1 keep their bits. x A^T, float32, is scaled before B.
        """

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """gated_act(linear(x, weight), activation): x [T, K], weight [2I, K] -> [T, I]."""
        return self.gated_act(self.linear(x, weight), activation)

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> PackedExperts:
        """Weights [2I, H], or [I, H] without gates, and [H, I] of each expert, with their biases.

        The parts may be moved.

        bias    float32 [E]: added to the scores that choose experts, with scoring "sigmoid"
        scales  float32 [E]: factors of the experts' weights
        """

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: PackedExperts,
        config: ExpertsConfig,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], router logits float32 [T, E] -> [T, H]: the weighted sum of a row's experts, plus add_to.

        Experts compute linear(gated_act(linear(x))), or without gates linear(act(linear(x))), the last
        product in float32. The sum is in float32, in order of falling scores, and is rounded once. Each
        expert's weights are read once for all its rows.
        """

    def pack_heads(self, heads: Sequence[PackedLinear]) -> PackedHeads:
        """Weights [N, K] of each head, of one format; the parts may be moved."""

    def linear_by_head(self, x: Tensor, weights: PackedHeads, append: Tensor | None = None) -> Tensor:
        """x [T, heads, K] -> [T, heads, N]: linear() with the weight of each head; then append [T, heads, A].

        The result is [T, heads, N + A] with `append`, whose values are copied.
        """

    def scale_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, H] * sigmoid(gate), gate [T, 1], computed in float32."""

    def gate(self, x: Tensor, gate: Tensor, activation: str) -> Tensor:
        """x [T, N] * activation(gate), gate [T, N], computed in float32.

        activation is "silu", "sigmoid", "gelu_tanh" or "none".
        """

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """activation(sum over j of weight[:, j] * x[t - K + 1 + j] + bias): x [T, C] -> [T, C].

        weight float32 [K, C], oldest input first; bias float32 [C]; activation "silu" or "none". A row reads
        the inputs of its own request, zeros before position 0, and adds them in float32 to the bias, oldest
        first. Its input goes to the ring; the tails of anchors in batch.anchor_tables are written.
        """

    def gated_delta_rule(
        self,
        qkv: Tensor,
        alpha: Tensor,
        beta: Tensor,
        rates: Tensor,
        offsets: Tensor,
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """qkv [T, 2 * key heads * key dim + value heads * value dim] -> [T, value heads, value dim].

        For each value head, whose key head is h // (value heads / key heads), in float32:
            S_t = d_t S_(t-1) + k_t u_t^T,  u_t = sigmoid(beta_t) (v_t - d_t S_(t-1)^T k_t),  o_t = S_t^T q_t
        where q and k are divided by sqrt(|x|^2 + 1e-6), q by sqrt(key dim) too, and
            log d_t = -rates * softplus(alpha_t + offsets); rates, offsets float32 [value heads].
        alpha, beta [T, value heads]. A row computes with the anchor of its segment and the rows since, in
        order, and leaves k_t, u_t and the sum of log decays since the anchor in the ring. The anchors in
        batch.anchor_tables are written. Source: arXiv 2412.06464.
        """

    def ssm_scan(
        self,
        cbx: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        offsets: Tensor,
        skips: Tensor,
        limits: tuple[float, float],
        state: StateLayer,
        batch: Batch,
    ) -> Tensor:
        """cbx [T, 2 * key heads * key dim + value heads * value dim] -> [T, value heads, value dim].

        Mamba-2, the gated delta rule without its correction. For each value head, whose C and B are those of
        key head h // (value heads / key heads), in float32:
            S_t = exp(-rates * s_t) S_(t-1) + B_t u_t^T,  u_t = s_t x_t,  y_t = S_t^T C_t + skips * x_t
        where s_t = softplus(time_steps_t + offsets) within `limits`; rates, offsets and skips float32
        [value heads], time_steps [T, value heads]. A row leaves B_t, u_t and the sum of log decays in the
        ring, as in gated_delta_rule(). Source: arXiv 2405.21060.
        """

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        """token_ids int64 [T], weight [V, H] -> [T, H] of `dtype`, times scale in float32."""

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """(a + b) * scale in float32, rounded once; both [T, H]."""

    def index_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows int64 [R] -> [R, H]."""

    def scatter_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """x[rows[i]] = values[i], in place; x [T, H], rows int64 [N], values [N, H]. Not within compile()."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, ..., H], weight float32 [H] -> x / sqrt(mean(x^2) + eps) * weight, computed in float32.

        Or x [T, G, H], weight [G, H].
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """x [T, ..., H] -> (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, computed in float32.

        weight, bias float32 [H]. Or x [T, G, H], weight [G, H] without a bias.
        """

    def rope(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
    ) -> Tensor:
        """Rotate the first D_rot values of x [T, heads, D] in halves.

        cos_sin    float32 [positions, D_rot]: cosines of D_rot / 2 angles, then their sines
        positions  int64 [T], or [T, 3] with mrope_sections: each angle uses the position on its axis
        """

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> activation(gate) * up [T, I].

        activation is "silu", "gelu", "gelu_tanh", "relu2": max(gate, 0)^2, or
        "gpt_oss": g * sigmoid(1.702 * g) * (u + 1), with g = min(gate, 7) and u = up within -7 and 7.
        """

    def act(self, x: Tensor, activation: str, alphas: tuple[float, float] = NO_ALPHAS) -> Tensor:
        """x [T, N] -> activation(x) [T, N], computed in float32.

        activation is as in gated_act() but for "gpt_oss", or
        "xielu": x / 2 + alphas[0] x^2 for x > 0, else x / 2 + alphas[1] (e^x - 1 - x). arXiv 2411.13010
        """

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
        """Return rope() of q [T, Hq, D]; write_kv() of rope() of k and of v."""
        rotated = self.rope(q, cos_sin, positions, mrope_sections)
        self.write_kv(self.rope(k, cos_sin, positions, mrope_sections), v, cache, slots)
        return rotated

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        """Write k, v [T, Hk, D] into the cache at slots [T].

        With latent attention v is [T, 1, Dv], and k [T, 1, D - Dv] has the other values of K.
        """

    def build_attention_metadata(
        self, batch: Batch, window: int | None = None, first: int = 0, causal: bool = True
    ) -> AttentionMetadata:
        """The part of attention that all layers with these options share in one forward pass."""

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: AttentionMetadata | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
        causal: bool = True,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D], or [T, Hq, Dv] with latent attention; padding rows yield zeros.

        Row t attends to the positions of its own request in (positions[t] - window, positions[t]] from
        `first` on, and yields zeros if there are none; scores are capped to softcap * tanh(s / softcap).
        Not causal: all rows of a request attend to the positions that its last row attends to.
        `metadata` is build_attention_metadata(batch, window, first, causal).
        sinks float32 [Hq]: a further score of each head that takes its share of the softmax and has no value.
        """

    def varlen_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Bidirectional attention of encoders: q [N, heads, D], k and v [M, heads, D] -> [N, heads, D].

        Rows cu_seqlens_q[i] to [i + 1] attend to all rows cu_seqlens_k[i] to [i + 1]. No section is empty,
        and both lists cover their rows. A section's result depends on it alone. Not within compile().
        """

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""

    def write_hidden(self, x: Tensor, cache: Tensor, slots: Tensor) -> None:
        """cache[slots[t]] = x[t]: x [T, W], cache [S, W] of the same type, slots int64 [T]."""

    def read_hidden(self, cache: Tensor, slots: Tensor) -> Tensor:
        """cache[slots]: cache [S, W], slots int64 [T] -> [T, W]."""

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[T, N] each, of one type -> [T, sum of N]."""

    def expand_vocab(self, logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        """Logits of some ids, float32 [R, n] -> [R, vocab_size], -inf elsewhere; ids int64 [n] differ."""

    # Rows of logits: float32 [R, V]; masked ids are -inf. In place where nothing is returned.

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R], summed in one order; NaN for a row where sample() yields -1."""

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]: ids by (value descending, id ascending)."""

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        """Mask ids whose bit is clear: bit i % 32 of word i // 32 of masks int32 [R, W].

        Ids beyond the words are masked. NaN and +inf stay: a mask must not hide a broken row.
        """

    def mask_ids(self, logits: Tensor, ids: Tensor) -> None:
        """Mask ids int64 [N], each in 0..V-1, in every row."""

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        """logits[r, ids[i]] += biases[i] for starts[r] <= i < starts[r + 1].

        starts int64 [R+1], ids int64 [N], unique within a row, biases float32 [N].
        Ids outside 0..V-1 are ignored.
        """

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        """Divide positive logits of the ids by penalties[r] and multiply the others by it.

        starts and ids as in add_bias(), penalties float32 [R].
        """

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        """logits[r] /= temperatures[r], rounded as IEEE 754 demands; temperatures float32 [R]."""

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        """Mask ids more than n[r] standard deviations (of all unmasked logits) below the maximum.

        n float64 [R], > 0. A logit counts as at most 1024 below the maximum.
        """

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        """Mask all but the k[r] first ids by (value descending, id ascending); k int64 [R], >= 1."""

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask all but the shortest prefix of (value descending, id ascending) with probability p[r].

        The id that crosses the bound stays; p float64 [R] in (0, 1].
        """

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask all but the shortest prefix whose probability reaches p[r], most typical ids first.

        Order: (float32 distance of -log(probability) from its mean, the entropy, ascending; id ascending);
        p float64 [R] in (0, 1].
        """

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask ids less likely than p[r] times the likeliest; p float64 [R] in [0, 1]."""

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        """With probability probabilities[r], mask all but the last id at or above thresholds[r] (XTC).

        Order: (value descending, id ascending). The coin is keyed like the noise of sample(), with its own
        purpose; probabilities and thresholds float64 [R] in [0, 1].
        """

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """argmax over ids of logits + gumbel(seed, position, id), ties to the lowest id -> int64 [R].

        seeds int64 [R] (bits of the unsigned seed), positions int64 [R], greedy bool [R] (no noise).
        -1 for a row that holds NaN or +inf or no finite value.
        """

    def sample_to_host(
        self, logits: Tensor, seeds: array[int], positions: array[int], greedy: array[int]
    ) -> list[int]:
        """sample() with parameters from the host (array codes Q, q and B), and the ids there."""
