"""Bits of every kernel under `foreword bench gpu`: a row alone, in every crowd, as prompt, decode and verification.

A check holds if no bit differs, and if no error is more than twice that of plain torch, or what the reference allows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.ops import BLOCK_SIZE, RandomInputs, backend, differing_rows, same_bits
from foreword.bench.gpu.report import Measurement
from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightMatrix
from foreword.core.batch import Batch, KVLayer
from foreword.kernels.ops import Ops, QuantizedBlocks
from foreword.kernels.reference.backend import ReferenceOps

__all__ = ["OpChecks"]

WEIGHT_KINDS = ("int8", "int4", "fp8", "q8_0", "q4_k", "q6_k")
KV_KINDS = ("auto", "int8", "fp8")
COMPARED_ROWS = 32  # with the reference, which is slow
MORE_THAN_PLAIN = 2.0  # times the error of plain torch that a kernel may have
CLOSE = {
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}  # of the largest value, where nothing else is known
SAMPLED_ROWS = 6
DRAFTED = 4


class OpChecks:
    """Of the operations that `backend()` yields."""

    def __init__(self, scale: BenchConfig) -> None:
        self.scale = scale
        self.device = scale.device
        self.ops: Ops = backend(scale.device)
        self.reference = ReferenceOps()
        self.inputs = RandomInputs(scale.device, scale.dtype)

    def parts(self) -> Iterator[Measurement]:
        yield Measurement("row check at load", self._row_check)
        for role in self.scale.kernel_roles:
            for matrix in self.scale.shape(role).matrices:
                yield self._part(f"linear {role} {matrix.name}", self._linear, "bfloat16", matrix)
        first = self.scale.shape(self.scale.kernel_roles[0])
        down = next(matrix for matrix in first.matrices if matrix.name == "down")
        for kind in WEIGHT_KINDS:
            if kind not in WEIGHT_FORMATS or WEIGHT_FORMATS[kind].fits(down):
                yield self._part(f"linear {kind}", self._linear, kind, down)
        yield self._part("linear, negative control", self._plain_linear, down)
        for role in self.scale.kernel_roles:
            yield self._part(f"gated {role}", self._gated, self.scale.shape(role))
            for kind in KV_KINDS:
                yield self._part(
                    f"attention {role}, {kind} KV", self._attention, self.scale.shape(role), kind, None
                )
            yield self._part(
                f"attention {role}, window", self._attention, self.scale.shape(role), "auto", 100
            )
            yield self._part(f"rows {role}", self._rows, self.scale.shape(role))
        yield self._part("sampling", self._sampling, self.scale.small.vocab)

    def _part(self, name: str, check: Callable[..., Mapping[str, Any]], *given: Any) -> Measurement:
        def run() -> Mapping[str, Any]:
            with torch.inference_mode():
                return check(*given)

        return Measurement(name, run)

    def _row_check(self) -> Mapping[str, Any]:
        """The checks that loading makes on a card, if this backend has them; they are too large for an interpreter."""
        if self.ops.name != "triton" or self.scale.is_dry_run:
            return {"skipped": f"the backend is {self.ops.name} on {self.device}"}
        checks = importlib.import_module("foreword.kernels.triton.checks")
        found = checks.check_row_invariance(self.ops, self.device) or checks.check_attention_invariance(
            self.ops, self.device
        )
        return {"ok": found is None, "found": found or "equal"}

    # Linear layers

    def _linear(self, kind: str, matrix: WeightMatrix) -> Mapping[str, Any]:
        weight = self.inputs.weight(kind, matrix.n, matrix.k)
        as_held = self.scale.dtype if kind == "bfloat16" or isinstance(weight, QuantizedBlocks) else kind
        packed = self.ops.pack_linear([weight], as_held)
        dtype = torch.float32 if matrix.name == "head" else None
        most = self._most_rows(matrix)
        x, base = self.inputs.normal(most, matrix.k), self.inputs.normal(most, matrix.n)
        result = self._crowds(x, lambda rows: self.ops.linear(rows, packed, dtype))
        if dtype is None:
            added = lambda rows: self.ops.linear(rows, packed, None, base[: len(rows)])  # noqa: E731
            result["differ"] += self._crowds(x, added, shifted=False)["differ"]
        few = x[:COMPARED_ROWS]
        got = self.ops.linear(few, packed, torch.float32)
        if isinstance(weight, Tensor) and kind == "bfloat16":
            result |= self._against(got, few.double() @ weight.double().T, few @ weight.T)
        else:
            exact = self.reference.linear(few, self.reference.pack_linear([weight], as_held), torch.float32)
            result |= self._against(got, exact)
        return _verdict(result)

    def _plain_linear(self, matrix: WeightMatrix) -> Mapping[str, Any]:
        """Torch's own product must be caught, or these checks see nothing."""
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        x = self.inputs.normal(self._most_rows(matrix), matrix.k)
        return {"caught": bool(self._crowds(x, lambda rows: rows @ weight.T)["differ"])}

    def _gated(self, shape: ModelShape) -> Mapping[str, Any]:
        size = shape.intermediate
        weight = self.inputs.normal(2 * size, shape.hidden, scale=shape.hidden**-0.5)
        packed = self.ops.pack_linear([weight], self.scale.dtype)
        x = self.inputs.normal(
            self._most_rows(WeightMatrix("gate_up", 2 * size, shape.hidden, 1)), shape.hidden
        )
        result = self._crowds(x, lambda rows: self.ops.linear_gated_act(rows, packed, "silu"))
        few = x[:COMPARED_ROWS]
        gate, up = (few.double() @ weight.double().T).chunk(2, -1)
        plain_gate, plain_up = (few @ weight.T).chunk(2, -1)
        plain = torch.nn.functional.silu(plain_gate) * plain_up
        result |= self._against(
            self.ops.linear_gated_act(few, packed, "silu"), torch.nn.functional.silu(gate) * up, plain
        )
        return _verdict(result)

    def _most_rows(self, matrix: WeightMatrix) -> int:
        """Results of more than 2^28 values are not asked for."""
        fitting = [count for count in self.scale.row_counts if count * matrix.n <= 1 << 28]
        return max(fitting)

    def _crowds(self, x: Tensor, run: Callable[[Tensor], Tensor], shifted: bool = True) -> dict[str, Any]:
        """`run` over the first rows of x, as many as each of the row counts, and over others, beside `run` over all of x."""
        whole = run(x)
        differ: list[str] = []
        for count in self.scale.row_counts:
            if count >= len(x):
                continue
            if not same_bits(run(x[:count].contiguous()), whole[:count]):
                differ.append(str(count))
            begin = min(3 + count // 2, len(x) - count)
            if shifted and not same_bits(
                run(x[begin : begin + count].contiguous()), whole[begin : begin + count]
            ):
                differ.append(f"{count} from {begin}")
        return {"rows": len(x), "differ": differ}

    # Attention

    def _attention(self, shape: ModelShape, kind: str, window: int | None) -> Mapping[str, Any]:
        """One context: all its rows as one prompt; cut elsewhere; alone; verified; with neighbours."""
        tokens, ops = self.scale.check_context, self.ops
        blocks = self.inputs.blocks(tokens)
        others = self.inputs.blocks(tokens, 1 + len(blocks))
        cache = self.inputs.cache(shape, (1 + len(blocks) + len(others)) * BLOCK_SIZE, kind)
        q = self.inputs.normal(tokens, shape.heads, shape.head_dim)

        def rows(*chunks: tuple[int, int, Sequence[int]]) -> Tensor:
            """Of the first chunk, each with the queries of its positions."""
            batch = self.inputs.batch(ops, chunks)
            asked = torch.cat([q[start : start + count] for start, count, _ in chunks])
            padding = q.new_zeros(len(batch.positions) - len(asked), *q.shape[1:])
            return self._attend(torch.cat([asked, padding]), cache, batch, shape, window)[: chunks[0][1]]

        whole = rows((0, tokens, blocks))
        places = (0, 1, tokens // 3, tokens // 2 + 1, tokens - 1, tokens - DRAFTED - 2)[
            -self.scale.check_places :
        ]
        chunks = [(0, tokens // 3 + 1), (tokens // 3 + 1, tokens - tokens // 3 - 1)]
        differ = [
            f"chunk from {start}"
            for start, count in chunks
            if differing_rows(rows((start, count, blocks)), whole[start : start + count])
        ]
        for place in places:
            crowd = [(tokens - 1 - number % 3, 1, others) for number in range(7)]
            count = min(1 + DRAFTED, tokens - place)
            seen = {
                "alone": rows((place, 1, blocks)),
                "beside decodes": rows((place, 1, blocks), *crowd),
                "beside a prompt": rows((place, 1, blocks), (0, tokens // 2, others)),
                "verified": rows((place, count, blocks)),
                "verified in a crowd": rows((place, count, blocks), *[(tokens - count, count, others)] * 3),
            }
            differ += [
                f"{name} at {place}"
                for name, got in seen.items()
                if differing_rows(got, whole[place : place + len(got)])
            ]
        last = (tokens - COMPARED_ROWS // 4, COMPARED_ROWS // 4, blocks)
        asked = q[last[0] :]
        exact_batch = self.inputs.batch(self.reference, [last])
        padding = q.new_zeros(len(exact_batch.positions) - len(asked), *q.shape[1:])
        wide = KVLayer(cache.k, cache.v, cache.k_scale, cache.v_scale)
        exact = self.reference.attention(
            torch.cat([asked, padding]), wide, exact_batch, shape.head_dim**-0.5, window
        )
        return _verdict({"differ": differ, **self._against(whole[last[0] :], exact[: len(asked)])})

    def _attend(
        self, q: Tensor, cache: KVLayer, batch: Batch, shape: ModelShape, window: int | None
    ) -> Tensor:
        plan = self.ops.build_attention_metadata(batch, window)
        return self.ops.attention(q, cache, batch, shape.head_dim**-0.5, window, metadata=plan)

    # Rows

    def _rows(self, shape: ModelShape) -> Mapping[str, Any]:
        ops, inputs = self.ops, self.inputs
        most = max(count for count in self.scale.row_counts if count <= 4096)
        weight = inputs.normal(shape.hidden, dtype=torch.float32)
        table = inputs.normal(most, shape.head_dim, dtype=torch.float32)
        embedding = ops.pack_linear([inputs.normal(64, shape.hidden)], self.scale.dtype)
        runs: dict[str, tuple[Callable[[Ops, Tensor], Tensor], Tensor]] = {
            "norm": (lambda one, x: one.rms_norm(x, weight, 1e-6), inputs.normal(most, shape.hidden)),
            "gated": (lambda one, x: one.gated_act(x, "silu"), inputs.normal(most, 2 * shape.intermediate)),
            "softcap": (lambda one, x: one.softcap(x, 30.0), inputs.normal(most, shape.hidden)),
            "add": (lambda one, x: one.add(x, x), inputs.normal(most, shape.hidden)),
        }
        result: dict[str, Any] = {"differ": []}
        worst = 0.0
        for name, (run, x) in runs.items():
            mine = lambda rows, run=run: run(ops, rows)  # noqa: E731
            result["differ"] += [f"{name} {count}" for count in self._crowds(x, mine)["differ"]]
            few = x[:COMPARED_ROWS]
            worst = max(worst, float(_distance(run(ops, few), run(self.reference, few))))
        heads = inputs.normal(most, shape.heads, shape.head_dim)
        where = torch.arange(most, device=self.device)
        turned = ops.rope(heads, table, where)
        for count in (1, 2, most // 2 + 1):
            part = ops.rope(heads[-count:].contiguous(), table, where[-count:])
            result["differ"] += [f"rope {count}"] if differing_rows(part, turned[-count:]) else []
        exact = self.reference.rope(heads[:COMPARED_ROWS], table, where[:COMPARED_ROWS])
        worst = max(worst, float(_distance(turned[:COMPARED_ROWS], exact)))
        result["differ"] += self._written(shape, table, most)
        ids = inputs.whole(0, 64, most)
        looked_up = ops.embedding(ids, embedding, self.inputs.dtype)
        result["differ"] += (
            ["embedding"]
            if differing_rows(ops.embedding(ids[-1:], embedding, self.inputs.dtype), looked_up[-1:])
            else []
        )
        return _verdict({**result, "error": worst, "close": worst <= CLOSE[self.inputs.dtype]})

    def _written(self, shape: ModelShape, table: Tensor, rows: int) -> list[str]:
        """q turned, k turned and v in the cache: at once, and one row alone; and as rope() and write_kv() do."""
        inputs, ops = self.inputs, self.ops
        q, k, v = (
            inputs.normal(rows, heads, shape.head_dim)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        where = torch.arange(rows, device=self.device)
        found = []
        for kind in KV_KINDS:
            caches = [inputs.cache(shape, rows, kind) for _ in range(2)]
            one, other = caches
            turned = ops.rope_and_cache(q, k, v, table, where, None, one, where)
            last = slice(rows - 1, rows)
            alone = ops.rope_and_cache(
                q[last], k[last], v[last], table, where[last], None, other, where[last]
            )
            pairs = [(alone, turned[last]), (other.k[last], one.k[last]), (other.v[last], one.v[last])]
            if one.k_scale is not None and other.k_scale is not None:
                pairs.append((other.k_scale[last], one.k_scale[last]))
            found += [f"rope and {kind} cache"] if any(differing_rows(a, b) for a, b in pairs) else []
        return found

    # Sampling

    def _sampling(self, vocab: int) -> Mapping[str, Any]:
        """Every operation on rows of logits beside the reference's on the CPU: bits, not closeness."""
        host = RandomInputs("cpu", "float32", seed=1)
        logits = host.normal(SAMPLED_ROWS, vocab, scale=4.0)
        logits[1].round_()
        logits[2, ::3] = -torch.inf
        logits[3] *= 100.0
        logits[4, vocab // 2] = torch.nan
        count = torch.arange(SAMPLED_ROWS)
        seeds = torch.tensor([0, 1, -1, 1 << 62, 5, -(1 << 63)])[count]
        share = torch.linspace(0.05, 1.0, SAMPLED_ROWS, dtype=torch.float64)
        starts = count.new_tensor(range(0, 2 * SAMPLED_ROWS + 1, 2))
        ids = torch.stack([count, count + vocab // 2], 1).flatten()
        amounts = host.normal(2 * SAMPLED_ROWS)
        masks = host.whole(-(1 << 31), 1 << 31, SAMPLED_ROWS, -(-vocab // 32)).to(torch.int32)
        greedy = count % 2 == 0
        steps: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
            "log_sum_exp": (lambda ops, x: ops.log_sum_exp(x), ()),
            "top_ids": (lambda ops, x: ops.top_ids(x, min(20, vocab)), ()),
            "apply_mask": (lambda ops, x, m: ops.apply_mask(x, m), (masks,)),
            "add_bias": (lambda ops, x, s, i, a: ops.add_bias(x, s, i, a), (starts, ids, amounts)),
            "apply_repetition_penalty": (
                lambda ops, x, s, i, p: ops.apply_repetition_penalty(x, s, i, p),
                (starts, ids, share.float() + 0.5),
            ),
            "apply_top_n_sigma": (lambda ops, x, n: ops.apply_top_n_sigma(x, n), (share * 3,)),
            "apply_top_k": (lambda ops, x, k: ops.apply_top_k(x, k), (count * 50 + 1,)),
            "apply_top_p": (lambda ops, x, p: ops.apply_top_p(x, p), (share,)),
            "apply_typical_p": (lambda ops, x, p: ops.apply_typical_p(x, p), (share,)),
            "apply_min_p": (lambda ops, x, p: ops.apply_min_p(x, p), (1 - share,)),
            "apply_xtc": (lambda ops, x, *g: ops.apply_xtc(x, *g), (seeds, count, share, share / 50)),
            "sample": (lambda ops, x, s, n, g: ops.sample(x, s, n, g), (seeds, count, greedy)),
            "apply_temperature": (lambda ops, x, d: ops.apply_temperature(x, d), (share.float() * 2,)),
        }
        differ = [
            name for name, (step, given) in steps.items() if not self._sampled_alike(step, logits, given)
        ]
        return {"ok": not differ, "differ": differ, "operations": len(steps), "vocab": vocab}

    def _sampled_alike(self, step: Callable[..., Any], logits: Tensor, given: Sequence[Tensor]) -> bool:
        mine, its = logits.to(self.device, copy=True), logits.clone()
        got = step(self.ops, mine, *(one.to(self.device) for one in given))
        wanted = step(self.reference, its, *given)
        results = [(mine.cpu(), its)] if got is None else [(got.cpu(), wanted)]
        return all(same_bits(_numbers(a), _numbers(b)) for a, b in results)

    def _against(self, got: Tensor, exact: Tensor, plain: Tensor | None = None) -> dict[str, Any]:
        """Errors as shares of the largest value; `plain` is what ordinary torch makes of the same."""
        error = float(_distance(got, exact))
        if plain is None:
            return {"error": error, "close": error <= CLOSE[self.inputs.dtype]}
        its = float(_distance(plain, exact))
        return {"error": error, "plain_error": its, "close": error <= MORE_THAN_PLAIN * its + 1e-6}


def _distance(got: Tensor, exact: Tensor) -> Tensor:
    """Largest difference, as a share of the largest exact value."""
    return (got.double() - exact.double()).abs().amax() / exact.double().abs().amax().clamp(min=1e-30)


def _numbers(values: Tensor) -> Tensor:
    """The bits of NaN are nobody's promise."""
    return (
        torch.where(values.isnan(), torch.zeros_like(values), values)
        if values.is_floating_point()
        else values
    )


def _verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"ok": not result["differ"] and bool(result.get("close", True)), **result}
