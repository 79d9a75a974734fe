"""The specification of every operation, in plain torch.

Torch changes its order of summation, and even its exponential, with the shape of the input. So each
operation that is not exact by itself runs on exactly `row_tile` rows, the last tile padded: the bits of a row
then depend only on the row. FastMathOps has no row tiles: faster for many rows, and bits depend on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch, KVLayer
from foreword.kernels.ops import NO_ALPHAS, ExpertsConfig, LoraTable, Matrix, MRopeSections, Ops, PackedHeads
from foreword.kernels.quantization import dequantize, fake_quantize
from foreword.kernels.reference.attention import (
    ReferenceAttnMetadata,
    attend,
    build_attention_metadata,
    map_values,
)
from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.reference.states import GATES, causal_conv, gated_delta_rule, ssm_scan

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # constants of "gpt_oss"


def _swish(gate: Tensor) -> Tensor:
    """The activation of "gpt_oss", whose gate is at most SWIGLU_LIMIT."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gpt_oss": _swish,
    "relu2": lambda x: x.relu().square(),
}


def _xielu(x: Tensor, alphas: tuple[float, float]) -> Tensor:
    positive, negative = alphas
    return torch.where(x > 0, positive * x * x, negative * (torch.expm1(x) - x)) + 0.5 * x


def reference_threads(cores: int) -> int:
    """Torch threads to use on `cores`: a power of two, so that a tile of rows splits evenly."""
    assert cores > 0
    return min(1 << (cores.bit_length() - 1), 16)


@dataclass(frozen=True, slots=True)
class TypedWeight:
    """A weight for activations of one type."""

    matrix: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    row_by_row: bool = (
        False  # this machine's product rounds by a row's place in the tile: compute each row alone
    )


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A weight, and its casts to the types of activations so far."""

    values: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    by_dtype: dict[torch.dtype, TypedWeight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Weights of each expert."""

    gate_up: tuple[ReferenceWeight, ...]  # [2I, H]
    down: tuple[ReferenceWeight, ...]  # [H, I]
    bias: Tensor | None  # float32 [E]
    scales: Tensor | None  # float32 [E]


class ReferenceOps(ReferenceSampling, Ops):
    """Row-invariant torch: every tiled operation runs on `row_tile` rows."""

    name = "reference"
    supports_graphs = False

    def __init__(self, row_tile: int = 16) -> None:
        self.row_tile = row_tile

    def num_torch_threads(self, max_threads: int) -> int:
        return reference_threads(max_threads)

    def compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        return forward

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> ReferenceWeight:
        return ReferenceWeight(torch.cat([_cast_part(part, weight_format) for part in parts]), bias)

    def first_rows(self, weight: ReferenceWeight, count: int) -> ReferenceWeight:
        return ReferenceWeight(weight.values[:count], None if weight.bias is None else weight.bias[:count])

    def linear(
        self,
        x: Tensor,
        weight: ReferenceWeight,
        dtype: torch.dtype | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        product = self._matmul(x, self._get_typed_weight(weight, x.dtype))
        product = product if dtype is None else product.to(dtype)
        return product if add_to is None else self.add(add_to, product)

    def pack_experts(
        self,
        gate_up: Sequence[ReferenceWeight],
        down: Sequence[ReferenceWeight],
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> ReferenceExperts:
        return ReferenceExperts(tuple(gate_up), tuple(down), bias, scales)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ReferenceExperts,
        config: ExpertsConfig,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """See Ops.experts: one expert after the other, then the sum of each row's outputs."""
        order, shares = _route(logits, weights.bias, config)
        if weights.scales is not None:
            shares = shares * weights.scales[order]
        outputs = torch.zeros(*order.shape, x.shape[1], dtype=torch.float32, device=x.device)
        for expert in sorted(set(order.flatten().tolist())):
            rows, ranks = torch.nonzero(order == expert, as_tuple=True)
            inputs = x.index_select(0, rows)
            outputs[rows, ranks] = self._run_expert(inputs, weights, expert, config)
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rank in range(config.top_k):
            result = result + outputs[:, rank] * shares[:, rank, None]
        return (result if add_to is None else result + add_to).to(x.dtype)

    def _run_expert(self, x: Tensor, weights: ReferenceExperts, expert: int, config: ExpertsConfig) -> Tensor:
        """float32 [T, H]"""
        if config.gated:
            inner = self.linear_gated_act(x, weights.gate_up[expert], config.activation)
        else:
            inner = self.act(self.linear(x, weights.gate_up[expert]), config.activation)
        return self.linear(inner, weights.down[expert], torch.float32)

    def pack_heads(self, heads: Sequence[ReferenceWeight]) -> PackedHeads:
        return tuple(heads)

    def linear_by_head(self, x: Tensor, weights: PackedHeads, append: Tensor | None = None) -> Tensor:
        y = torch.stack([self.linear(x[:, head], weight) for head, weight in enumerate(weights)], 1)
        return y if append is None else torch.cat((y, append), -1)

    def scale_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        scale = map_values(torch.sigmoid, gate.to(torch.float32))
        return (x.to(torch.float32) * scale).to(x.dtype)

    def gate(self, x: Tensor, gate: Tensor, activation: str) -> Tensor:
        factor = map_values(GATES[activation], gate.to(torch.float32))
        return (x.to(torch.float32) * factor).to(x.dtype)

    causal_conv = staticmethod(causal_conv)
    gated_delta_rule = staticmethod(gated_delta_rule)
    ssm_scan = staticmethod(ssm_scan)
    build_attention_metadata = staticmethod(build_attention_metadata)

    def add_lora(self, y: Tensor, x: Tensor, table: LoraTable, batch: Batch) -> Tensor:
        """See Ops.add_lora: each row alone, so that no other row can change its bits."""
        assert batch.lora_slots is not None, "a batch without adapters' slots"
        starts = list(accumulate(table.part_sizes, initial=0))
        x, out = x.contiguous(), y.clone()
        for row, slot in enumerate(batch.lora_slots.tolist()):
            ranks = table.ranks[slot].tolist() if slot >= 0 else ()
            wide = x[row : row + 1].to(torch.float32)
            for part, rank in enumerate(ranks):
                if rank:
                    columns = slice(starts[part], starts[part + 1])
                    hidden = F.linear(wide, table.a[slot, part, :rank].to(torch.float32))
                    b = table.b[slot, :rank, columns].to(torch.float32)
                    delta = hidden.mul_(table.scales[slot, part]) @ b
                    out[row, columns] = (y[row, columns].to(torch.float32) + delta[0]).to(y.dtype)
        return out

    def embedding(
        self, token_ids: Tensor, weight: ReferenceWeight, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        rows = weight.values.index_select(0, token_ids)
        return (rows if scale == 1.0 else rows.to(torch.float32) * scale).to(dtype)

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        if scale == 1.0:
            return a + b
        return ((a.to(torch.float32) + b.to(torch.float32)) * scale).to(a.dtype)

    def index_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def scatter_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        x.index_copy_(0, rows, values)

    def _get_typed_weight(self, weight: ReferenceWeight, dtype: torch.dtype) -> TypedWeight:
        """The weight for activations of this type, cast on first use."""
        typed = weight.by_dtype.get(dtype)
        if typed is None:
            bias = None if weight.bias is None else weight.bias.to(dtype)
            typed = TypedWeight(weight.values.to(dtype), bias)
            typed = weight.by_dtype[dtype] = replace(typed, row_by_row=self._position_changes_bits(typed))
        return typed

    def _matmul(self, x: Tensor, weight: TypedWeight) -> Tensor:
        if weight.row_by_row:
            return torch.cat(
                [F.linear(row, weight.matrix, weight.bias) for row in torch.split(x.contiguous(), 1)]
            )
        return self._apply_by_tile(lambda rows: F.linear(rows, weight.matrix, weight.bias), x)

    def _position_changes_bits(self, weight: TypedWeight) -> bool:
        """Whether the same row gets different bits at different places of a tile, as in some BLAS."""
        like = weight.matrix[0]
        ramp = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
        for step in (0.7, 1.9, 3.1):
            row = torch.sin(ramp * step).to(like.dtype)
            tile = self._matmul(row.expand(self.row_tile, -1).contiguous(), weight)
            if not torch.equal(tile, tile[:1].expand_as(tile)):
                return True
        return False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = weight.to(torch.float32)

        def norm(rows: Tensor) -> Tensor:
            wide = rows.to(torch.float32)
            inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            return (wide * inverse).mul_(scale).to(x.dtype)

        return self._apply_by_tile(norm, x)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        def norm(rows: Tensor) -> Tensor:
            wide = rows.to(torch.float32)
            wide = wide - wide.mean(-1, keepdim=True)
            inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            scaled = (wide * inverse).mul_(weight)
            return (scaled if bias is None else scaled + bias).to(x.dtype)

        return self._apply_by_tile(norm, x)

    def rope(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
    ) -> Tensor:
        """See Ops.rope: products and sums of single values, exact for any T."""
        rotary = cos_sin.shape[1]
        if mrope_sections is None:
            angles = cos_sin.index_select(0, positions)
        else:
            axes = torch.tensor(mrope_sections.angle_axes() * 2, device=cos_sin.device)
            angles = cos_sin.gather(0, positions.index_select(1, axes))
        cos, sin = angles[:, None].chunk(2, -1)
        left, right = x[..., :rotary].to(torch.float32).chunk(2, -1)
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
        return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), -1)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        activated = map_values(ACTIVATIONS[activation], gate.to(torch.float32))
        return activated.mul_(_clamp_up(up.to(torch.float32), activation)).to(gate_up.dtype)

    def act(self, x: Tensor, activation: str, alphas: tuple[float, float] = NO_ALPHAS) -> Tensor:
        function = ACTIVATIONS.get(activation, functools.partial(_xielu, alphas=alphas))
        return map_values(function, x.to(torch.float32)).to(x.dtype)

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
        for vectors, values, scales in ((k, cache.own_keys, cache.k_scale), (v, cache.v, cache.v_scale)):
            if scales is None:
                values.index_copy_(0, slots, vectors)
            else:
                rounded, scale = _quantize_vectors(vectors, values.dtype)
                values.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))
                scales.index_copy_(0, slots, scale)

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        metadata: ReferenceAttnMetadata | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
        causal: bool = True,
    ) -> Tensor:
        metadata = metadata or build_attention_metadata(batch, window, first, causal)
        return attend(q, cache, metadata, scale, softcap, sinks)

    def varlen_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        scale: float,
    ) -> Tensor:
        """See Ops.varlen_attention: one call for each section."""
        queries = torch.split(q, cu_seqlens_to_lens(cu_seqlens_q))
        keys, values = (torch.split(rows, cu_seqlens_to_lens(cu_seqlens_k)) for rows in (k, v))
        return torch.cat([_sdpa(*section, scale) for section in zip(queries, keys, values, strict=True)])

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return map_values(torch.tanh, x / cap).mul_(cap)

    def write_hidden(self, x: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache.index_copy_(0, slots, x)

    def read_hidden(self, cache: Tensor, slots: Tensor) -> Tensor:
        return cache.index_select(0, slots)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), 1)

    def expand_vocab(self, logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)

    def _apply_by_tile(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `operation` on the rows of x, `row_tile` contiguous rows at a time."""
        num_rows = x.shape[0]
        if num_rows == self.row_tile:
            return operation(x.contiguous())
        padding = -num_rows % self.row_tile
        if padding:
            x = torch.cat((x, x.new_zeros(padding, *x.shape[1:])))
        return torch.cat([operation(rows) for rows in torch.split(x.contiguous(), self.row_tile)])[:num_rows]


def _route(logits: Tensor, bias: Tensor | None, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Experts of each row, int64 [T, top_k], and their weights, float32 [T, top_k]."""
    is_softmax, is_sigmoid = config.scoring == "softmax", config.scoring == "sigmoid"
    scores = map_values(torch.sigmoid, logits) if is_sigmoid else logits
    ranked = scores
    if bias is not None:
        ranked = (_softmax(logits) if is_softmax else scores) + bias
    order = torch.sort(ranked, dim=1, descending=True, stable=True).indices
    if config.topk_groups < config.num_groups:
        order = _of_best_groups(order, ranked, config)
    order = order[:, : config.top_k]
    if config.scoring == "sparse_mixer":
        return order, _sparse_mixer_shares(logits, order, config.tolerance) * config.scale
    powers = scores.gather(1, order)
    all_powers = powers
    if is_softmax:
        top = (powers if config.renormalize else logits).amax(1, keepdim=True)
        powers = all_powers = map_values(torch.exp, powers - top)
        if not config.renormalize:
            all_powers = map_values(torch.exp, logits - top)
    if is_softmax or config.renormalize:
        powers = powers / _sum_in_order(all_powers)[:, None]
    return order, powers * config.scale


def _sparse_mixer_shares(logits: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """Weights float32 [T, top_k] of the experts in `order`: see ExpertsConfig. Source: arXiv 2409.12136."""
    remaining, shares = logits, []
    for expert in torch.split(order, 1, dim=1):
        own = logits.gather(1, expert)
        is_far = (own - logits) / torch.maximum(logits.abs(), own) > tolerance
        powers = map_values(torch.exp, remaining.masked_fill(is_far, -math.inf) - own)
        shares.append(1.0 / _sum_in_order(powers))
        remaining = remaining.scatter(1, expert, -math.inf)
    return torch.stack(shares, 1)


def _softmax(logits: Tensor) -> Tensor:
    """float32 [T, E], summed in order"""
    powers = map_values(torch.exp, logits - logits.amax(1, keepdim=True))
    return powers / _sum_in_order(powers)[:, None]


def _of_best_groups(order: Tensor, ranked: Tensor, config: ExpertsConfig) -> Tensor:
    """Experts in `order` of the chosen groups alone: int64 [T, E] -> [T, experts of the groups]."""
    size = config.num_experts // config.num_groups
    by_rank = torch.sort(ranked.view(len(ranked), config.num_groups, size), dim=2, descending=True).values
    group_scores = by_rank[:, :, 0]
    if config.scoring == "sigmoid" and size > 1:
        group_scores = group_scores + by_rank[:, :, 1]
    groups = torch.sort(group_scores, dim=1, descending=True, stable=True).indices[:, : config.topk_groups]
    is_chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, groups, True)
    return order[is_chosen.gather(1, order // size)].view(len(order), config.topk_groups * size)


def cu_seqlens_to_lens(cu_seqlens: Sequence[int]) -> list[int]:
    """Lengths of sections from their cumulative starts."""
    return [end - start for start, end in pairwise(cu_seqlens)]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, heads, D], k and v [m, heads, D] -> [n, heads, D]"""
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def _sum_in_order(values: Tensor) -> Tensor:
    """[T, n] -> [T]: torch's sum would depend on T."""
    return functools.reduce(torch.add, values.unbind(1))


def _clamp_up(up: Tensor, activation: str) -> Tensor:
    """The factor of the activated gate."""
    return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0 if activation == "gpt_oss" else up


def _cast_part(part: Matrix, weight_format: str) -> Tensor:
    """The values of a part in this weight format."""
    if not isinstance(part, Tensor):
        return dequantize(part)
    if weight_format in ("int8", "int4", "fp8"):
        return fake_quantize(part, weight_format)
    return part.to(getattr(torch, weight_format))


def _quantize_vectors(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, Hk, D] -> int8 or float8_e4m3fn, and scales [T, Hk], not finite where a vector is not."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = vectors.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True) / largest
    usable = (scale > 0) & scale.isfinite()
    values = torch.where(usable, wide / scale, 0.0)
    if dtype == torch.int8:
        values.round_()
    return values.clamp_(-largest, largest).to(dtype), scale.squeeze(-1)


class FastMathOps(ReferenceOps):
    """Torch on whole batches: `--fast-math`, and the negative control of the exactness tests."""

    name = "fast-math"

    def __init__(self) -> None:
        super().__init__(row_tile=1)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate) * _clamp_up(up, activation)

    def _apply_by_tile(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return operation(x)
