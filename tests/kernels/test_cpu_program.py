"""A traced forward pass has the bits of its single operations, for batches of every shape."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.core.images import MRopePositions, PromptImage
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.cpu.program import Buffer, plan_arena
from foreword.kernels.ops import ExpertsConfig, GroupedInts, MRopeSections
from tests.support.cpu_kernels import isas_under_test

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 97, 48, 4, 2, 16, 40
EXPERTS = ExpertsConfig(num_experts=5, top_k=2, renormalize=True, activation="gpt_oss")
BLOCK_SIZE, NUM_BLOCKS = 4, 40

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")


@dataclass
class SmallModel:
    """One layer with every operation, and a fused matrix of two weight formats."""

    ops: CpuOps
    dtype: torch.dtype
    weight_format: str
    axes: MRopeSections | None = None

    def __post_init__(self) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=rng) / columns**0.5

        rng = torch.Generator().manual_seed(1)
        ops, weight_format = self.ops, self.weight_format
        self.table = ops.pack_linear([weight(VOCAB, HIDDEN).bfloat16()], weight_format)
        self.norm = torch.rand(HIDDEN, generator=rng) + 0.5
        self.head_norm = torch.rand(DIM, generator=rng) + 0.5
        q, k = weight(HEADS * DIM, HIDDEN), weight(2 * KV_HEADS * DIM, HIDDEN).bfloat16()
        self.qkv = ops.pack_linear(
            [q, k], weight_format, torch.randn((HEADS + 2 * KV_HEADS) * DIM, generator=rng)
        )
        inputs = HEADS * DIM
        values = torch.randint(0, 256, (HIDDEN, inputs // 2), dtype=torch.uint8, generator=rng)
        scales, zeros = 0.1 * weight(HIDDEN, 2), torch.full((HIDDEN, 2), 8, dtype=torch.uint8)
        order = torch.randperm(inputs, generator=rng)
        self.out = ops.pack_linear([GroupedInts(4, inputs // 2, values, scales, zeros, order)], "bfloat16")
        self.gate_up = ops.pack_linear([weight(INNER, HIDDEN), weight(INNER, HIDDEN)], weight_format)
        self.down = ops.pack_linear([weight(HIDDEN, INNER)], weight_format)
        self.router = ops.pack_linear([weight(EXPERTS.num_experts, HIDDEN)], "float32")
        self.shared_gate = ops.pack_linear([weight(1, HIDDEN)], "float32")
        self.experts = ops.pack_experts(
            [ops.pack_linear([weight(2 * INNER, HIDDEN)], weight_format) for _ in range(EXPERTS.num_experts)],
            [ops.pack_linear([weight(HIDDEN, INNER)], weight_format) for _ in range(EXPERTS.num_experts)],
        )
        self.sinks = torch.randn(HEADS, generator=rng)
        angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.3, 0.1])
        self.rope = torch.cat((angles.cos(), angles.sin()), -1)
        self.kv = self.cache()

    def cache(self) -> KVLayer:
        shape = ((NUM_BLOCKS + 1) * BLOCK_SIZE, KV_HEADS, DIM)
        return KVLayer(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))

    def __call__(self, batch: Batch) -> Tensor:
        ops = self.ops
        x = ops.embedding(batch.token_ids, self.table, self.dtype, scale=2.0)
        for _ in range(2):
            x = ops.add(x, self.attention(ops.rms_norm(x, self.norm, 1e-6), batch))
            x = ops.add(x, ops.linear(ops.gated_act(ops.linear(x, self.gate_up), "silu"), self.down))
            shared = ops.scale_by_sigmoid(x, ops.linear(x, self.shared_gate))
            x = ops.experts(x, ops.linear(x, self.router, torch.float32), self.experts, EXPERTS, shared)
            x = ops.experts(x, ops.linear(x, self.router, torch.float32), self.experts, EXPERTS)
        x = ops.index_rows(ops.rms_norm(x, self.norm, 1e-6), batch.sample_rows)
        return ops.softcap(ops.linear(x, self.table, torch.float32), 30.0)

    def attention(self, x: Tensor, batch: Batch) -> Tensor:
        ops = self.ops
        qkv = ops.linear(x, self.qkv).view(x.shape[0], HEADS + 2 * KV_HEADS, DIM)
        q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
        positions = batch.positions if self.axes is None else batch.mrope_positions
        assert positions is not None
        q = ops.rope(ops.rms_norm(q, self.head_norm, 1e-6), self.rope, positions, self.axes)
        ops.write_kv(ops.rope(k, self.rope, positions, self.axes), v, self.kv, batch.slots)
        return ops.linear(
            ops.attention(q, self.kv, batch, 0.25, window=9, sinks=self.sinks).view(x.shape[0], -1), self.out
        )


def batches(mrope: bool = False) -> list[Batch]:
    """One row, a verification, a prompt, a mixture, and a batch without sampled rows.

    mrope  with M-RoPE: all requests have an image
    """
    rng = random.Random(3)
    image = PromptImage(b"", 6, (1, 2, 3), (28, 28), (1, 3, 28, 28), None, start=4)
    positions = MRopePositions((image,)) if mrope else None

    def chunk(rows: int, start: int, sampled: int, blocks: range) -> Chunk:
        return Chunk([rng.randrange(VOCAB) for _ in range(rows)], start, list(blocks), sampled, positions)

    mixtures = [
        [chunk(1, 0, 1, range(1, 2))],
        [chunk(5, 3, 5, range(1, 5))],
        [chunk(70, 0, 1, range(1, 20))],
        [chunk(3, 0, 2, range(1, 3)), chunk(1, 17, 1, range(3, 9)), chunk(20, 5, 0, range(9, 20))],
        [chunk(8, 0, 0, range(1, 3))],
    ]
    return [build_batch(mixture, BLOCK_SIZE, 1, "cpu", mrope) for mixture in mixtures]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("isa", isas_under_test())
def test_program_equals_single_operations(isa: str, weight_format: str, dtype: torch.dtype) -> None:
    check_program(SmallModel(CpuOps(isa, threads=2), dtype, weight_format), batches())


@pytest.mark.parametrize("isa", isas_under_test())
def test_program_takes_mrope_positions(isa: str) -> None:
    model = SmallModel(CpuOps(isa, threads=2), torch.float32, "float32", MRopeSections((1, 1, 1)))
    check_program(model, batches(mrope=True))
    with pytest.raises(AssertionError, match="without M-RoPE positions"):
        model.ops.compile(model)(batches()[0])


def check_program(model: SmallModel, batches: list[Batch]) -> None:
    compiled = model.ops.compile(model)
    traced_kv, plain_kv = model.kv, model.cache()
    for batch in batches:
        logits = compiled(batch).clone()
        model.kv = plain_kv
        assert torch.equal(logits, model(batch))
        assert logits.shape == (batch.sample_rows.shape[0], VOCAB)
        model.kv = traced_kv
        assert torch.equal(plain_kv.k[BLOCK_SIZE:], traced_kv.k[BLOCK_SIZE:]), "slots of requests differ"
        assert torch.equal(plain_kv.v[BLOCK_SIZE:], traced_kv.v[BLOCK_SIZE:])


def test_torch_arithmetic_is_refused() -> None:
    """Torch operations would run once, while tracing, and never again."""
    ops = CpuOps()
    table = ops.pack_linear([torch.randn(VOCAB, HIDDEN)], "float32")

    def forward(batch: Batch) -> Tensor:
        x = ops.embedding(batch.token_ids, table, torch.float32)
        return ops.linear(ops.index_rows(x * 2, batch.sample_rows), table)

    with pytest.raises(AssertionError, match="an operand from outside"):
        ops.compile(forward)


def test_live_buffers_do_not_overlap() -> None:
    rng = random.Random(5)
    for _ in range(50):
        results = []
        for number in range(30):
            tensor = torch.empty(3, rng.randrange(1, 200))
            results.append(Buffer(tensor, number, number + rng.randrange(1, 8)))
        size = plan_arena(results)
        for a in results:
            assert a.offset_per_row % 64 == 0 and a.offset_per_row + a.row_bytes <= size
            for b in results:
                below = a.offset_per_row + a.row_bytes <= b.offset_per_row
                above = b.offset_per_row + b.row_bytes <= a.offset_per_row
                assert a is b or a.last_use < b.first_use or b.last_use < a.first_use or below or above
        assert size < sum(result.row_bytes for result in results), "arena space is reused"


def test_model_with_one_position_can_be_traced() -> None:
    """Tracing uses more rows than the model has positions; none may be read beyond its RoPE table."""
    seen = []

    def forward(batch: Batch) -> Tensor:
        seen.append(batch.positions.tolist())
        return ops.index_rows(ops.embedding(batch.token_ids, table, torch.float32), batch.sample_rows)

    ops = CpuOps()
    table = ops.pack_linear([torch.randn(VOCAB, HIDDEN)], "float32")
    ops.compile(forward)
    assert len(seen[0]) > 1 and set(seen[0]) == {0}
