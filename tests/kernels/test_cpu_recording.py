"""A recorded forward pass gives the bits of the operations one by one, for batches of every shape."""

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
from foreword.kernels.ops import MRopeSections

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 97, 48, 4, 2, 16, 40
BLOCK_SIZE, NUM_BLOCKS = 4, 40

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")


@dataclass
class Small:
    """One layer with everything that operations can be used for, two kinds of rows and a fused matrix of two kinds."""

    ops: CpuOps
    dtype: torch.dtype
    kind: str
    axes: MRopeSections | None = None

    def __post_init__(self) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=chance) / columns**0.5

        chance = torch.Generator().manual_seed(1)
        ops, kind = self.ops, self.kind
        self.table = ops.pack_linear([weight(VOCAB, HIDDEN).bfloat16()], kind)
        self.norm = torch.rand(HIDDEN, generator=chance) + 0.5
        self.head_norm = torch.rand(DIM, generator=chance) + 0.5
        q, k = weight(HEADS * DIM, HIDDEN), weight(2 * KV_HEADS * DIM, HIDDEN).bfloat16()
        self.qkv = ops.pack_linear([q, k], kind, torch.randn((HEADS + 2 * KV_HEADS) * DIM, generator=chance))
        self.out = ops.pack_linear([weight(HIDDEN, HEADS * DIM)], kind)
        self.gate_up = ops.pack_linear([weight(INNER, HIDDEN), weight(INNER, HIDDEN)], kind)
        self.down = ops.pack_linear([weight(HIDDEN, INNER)], kind)
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
        return ops.linear(ops.attention(q, self.kv, batch, 0.25, window=9).view(x.shape[0], -1), self.out)


def batches(directions: bool = False) -> list[Batch]:
    """One row, a verification, prompts, mixtures, and a batch of which nothing is sampled.

    directions  for a model that knows them: all requests have a picture
    """
    chance = random.Random(3)
    picture = PromptImage(b"", 6, (1, 2, 3), (28, 28), (1, 3, 28, 28), None, start=4)
    positions = MRopePositions((picture,)) if directions else None

    def chunk(rows: int, start: int, sampled: int, blocks: range) -> Chunk:
        return Chunk([chance.randrange(VOCAB) for _ in range(rows)], start, list(blocks), sampled, positions)

    mixtures = [
        [chunk(1, 0, 1, range(1, 2))],
        [chunk(5, 3, 5, range(1, 5))],
        [chunk(70, 0, 1, range(1, 20))],
        [chunk(3, 0, 2, range(1, 3)), chunk(1, 17, 1, range(3, 9)), chunk(20, 5, 0, range(9, 20))],
        [chunk(8, 0, 0, range(1, 3))],
    ]
    return [build_batch(mixture, BLOCK_SIZE, 1, "cpu", directions) for mixture in mixtures]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("isa", supported_isas())
def test_equals_the_operations_one_by_one(isa: str, kind: str, dtype: torch.dtype) -> None:
    check_recording(Small(CpuOps(isa, threads=2), dtype, kind), batches())


@pytest.mark.parametrize("isa", supported_isas())
def test_positions_in_several_directions_are_recorded(isa: str) -> None:
    model = Small(CpuOps(isa, threads=2), torch.float32, "float32", MRopeSections((1, 1, 1)))
    check_recording(model, batches(directions=True))
    with pytest.raises(AssertionError, match="without positions in several directions"):
        model.ops.compile(model)(batches()[0])


def check_recording(model: Small, batches: list[Batch]) -> None:
    compiled = model.ops.compile(model)
    recorded_on, own = model.kv, model.cache()
    for batch in batches:
        found = compiled(batch).clone()
        model.kv = own
        assert torch.equal(found, model(batch))
        assert found.shape == (batch.sample_rows.shape[0], VOCAB)
        model.kv = recorded_on
        assert torch.equal(own.k[BLOCK_SIZE:], recorded_on.k[BLOCK_SIZE:]), "slots of requests"
        assert torch.equal(own.v[BLOCK_SIZE:], recorded_on.v[BLOCK_SIZE:])


def test_arithmetic_of_torch_is_noticed() -> None:
    """It would be done once, while recording, and never again."""
    ops = CpuOps()
    table = ops.pack_linear([torch.randn(VOCAB, HIDDEN)], "float32")

    def forward(batch: Batch) -> Tensor:
        x = ops.embedding(batch.token_ids, table, torch.float32)
        return ops.linear(ops.index_rows(x * 2, batch.sample_rows), table)

    with pytest.raises(AssertionError, match="no recorded operation made"):
        ops.compile(forward)


def test_results_that_live_at_once_do_not_overlap() -> None:
    chance = random.Random(5)
    for _ in range(50):
        results = []
        for number in range(30):
            tensor = torch.empty(3, chance.randrange(1, 200))
            results.append(Buffer(tensor, number, number + chance.randrange(1, 8)))
        size = plan_arena(results)
        for a in results:
            assert a.per_row % 64 == 0 and a.per_row + a.row_bytes <= size
            for b in results:
                apart = a.per_row + a.row_bytes <= b.per_row or b.per_row + b.row_bytes <= a.per_row
                assert a is b or a.last < b.first or b.last < a.first or apart
        assert size < sum(result.row_bytes for result in results), "places are used again"


def test_a_model_with_one_position_is_recorded() -> None:
    """More rows are recorded than it has positions; none may be read behind its table."""
    seen = []

    def forward(batch: Batch) -> Tensor:
        seen.append(batch.positions.tolist())
        return ops.index_rows(ops.embedding(batch.token_ids, table, torch.float32), batch.sample_rows)

    ops = CpuOps()
    table = ops.pack_linear([torch.randn(VOCAB, HIDDEN)], "float32")
    ops.compile(forward)
    assert len(seen[0]) > 1 and set(seen[0]) == {0}
