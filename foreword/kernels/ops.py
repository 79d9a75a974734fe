"""The operations of the engine: one signature each, implemented by every backend.

Shapes use the letters of `core.batch`. Every operation is row-invariant: the bits of one row do not
depend on how many other rows there are, on what they hold, or on the row's place among them.
`reference.py` is the specification; a backend that cannot do better for some operation inherits it.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from foreword.core.batch import Batch

__all__ = ["AttentionPlan", "Ops", "PackedLinear"]

PackedLinear = Any  # what pack_linear() of the same backend made
AttentionPlan = Any  # what plan_attention() of the same backend made


class Ops(Protocol):
    """What a backend offers.

    name      as in `foreword env` and the fingerprint
    row_tile  batches are padded to a multiple of this many rows
    """

    name: str
    row_tile: int

    def threads(self, wanted: int) -> int:
        """Threads that torch may use without changing bits, at most `wanted`."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [N, K], bias [N] -> what `linear` wants, laid out once at load."""

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """x [T, K] -> [T, N]. The reduction over K has one order whatever T."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, D], cos and sin float32 [T, D_rot] -> x rotated in halves over its first D_rot values."""

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> activation(gate) * up [T, I]; activation is "silu", "gelu" or "gelu_tanh"."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids int64 [T], weight [V, H] -> [T, H]."""

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """k, v [T, Hk, D] into k_cache, v_cache [S, Hk, D] at slots [T]."""

    def plan_attention(self, batch: Batch, window: int | None = None) -> AttentionPlan:
        """What the attention of all layers with this window shares in one forward pass."""

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]. Row t attends to the positions of its own request in
        (positions[t] - window, positions[t]]; scores are capped to softcap * tanh(s / softcap) if given.
        `plan` is plan_attention(batch, window), made here if missing; rows of padding yield zeros."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""

    # Rows of logits: float32 [R, V]; masked ids are -inf. In place where nothing is returned.

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R], summed in one order."""

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]: ids by (value descending, id ascending)."""

    def keep_top_k(self, logits: Tensor, k: Tensor) -> None:
        """Mask all but the k[r] first ids by (value descending, id ascending); k int64 [R], >= 1."""

    def keep_top_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask all but the shortest run of ids by (value descending, id ascending) whose probability
        reaches p[r]; the id that crosses the bound stays; p float64 [R] in (0, 1]."""

    def keep_min_p(self, logits: Tensor, p: Tensor) -> None:
        """Mask ids less likely than p[r] times the likeliest; p float64 [R] in [0, 1]."""

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """argmax over ids of logits + gumbel(seed, position, id), ties to the lowest id -> int64 [R].

        seeds int64 [R] (bits of the unsigned seed), positions int64 [R], greedy bool [R] (no noise).
        A row with no finite value yields -1; so does a row that holds a NaN.
        """
