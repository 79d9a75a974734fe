"""Random weights, KV caches and batches for kernel benchmarks, and the sampling operations that they time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightMatrix
from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.kernels.ops import Float8Blocks, GroupedInts, LoraTable, Matrix, Ops, QuantizedBlocks
from foreword.utils.mapped_memory import HugePages

BLOCK_SIZE = 16
VOCAB_SIZE = 256  # token ids of a batch are below this
GROUP_SIZE = 128  # columns that share a scale, as in most checkpoints
QUANTIZED_SCALE = 2.0**-10  # scale of GGUF blocks: a random float16 would be inf or NaN once in 32 blocks


class RandomInputs:
    """Random values of one dtype on one device, the same in every run."""

    def __init__(self, device: str, dtype: str, seed: int = 0) -> None:
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._pages = HugePages()

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype).mul_(scale)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def weight(self, name: str, n: int, k: int) -> Matrix:
        """[n, k] with values around 1 / sqrt(k).

        A tensor, GGUF blocks of format `name`, or as in checkpoints: "grouped4" and "grouped8" in groups of
        128 columns, "fp8_blocks" in blocks of 128 x 128.
        """
        if name.startswith("grouped"):
            return self._grouped_ints(int(name.removeprefix("grouped")), n, k)
        if name == "fp8_blocks":
            values = self.normal(n, k, scale=50.0, dtype=torch.float32).to(torch.float8_e4m3fn)
            scales = self.normal(-(-n // GROUP_SIZE), -(-k // GROUP_SIZE), dtype=torch.float32)
            return Float8Blocks(values, scales.mul_(0.02 * k**-0.5), (GROUP_SIZE, GROUP_SIZE))
        fmt = WEIGHT_FORMATS.get(name)
        if fmt is None or not fmt.is_blocks:
            return self.normal(n, k, scale=k**-0.5)
        blocks = self.integers(0, 256, n, k // fmt.block_values, fmt.block_bytes, dtype=torch.uint8)
        scale = torch.tensor([QUANTIZED_SCALE], dtype=torch.float16, device=self.device).view(torch.uint8)
        for offset in fmt.scale_offsets:
            blocks[..., offset : offset + 2] = scale
        return QuantizedBlocks(name, blocks.view(n, -1), k)

    def _grouped_ints(self, bits: int, n: int, k: int) -> GroupedInts:
        """Groups of GROUP_SIZE columns, or one for each row."""
        size = GROUP_SIZE if k % GROUP_SIZE == 0 else k
        values = self.integers(0, 256, n, k * bits // 8, dtype=torch.uint8)
        scales = self.normal(n, k // size, scale=2.0 ** (2 - bits) * k**-0.5, dtype=torch.float16)
        zeros = self.integers(0, 1 << bits, n, k // size, dtype=torch.uint8)
        return GroupedInts(bits, size, values, scales.to(torch.float32), zeros)

    def lora_table(self, slots: int, rank: int, matrix: WeightMatrix) -> LoraTable:
        """Adapters of one linear layer."""
        a = self.normal(slots, 1, rank, matrix.k, scale=matrix.k**-0.5)
        b = self.normal(slots, rank, matrix.n)
        ranks = torch.full((slots, 1), rank, dtype=torch.int64, device=self.device)
        return LoraTable((matrix.n,), a, b, ranks, torch.ones_like(ranks, dtype=torch.float32))

    def kv_cache(self, shape: ModelShape, slots: int, kind: str = "auto") -> KVLayer:
        """K and V of one layer; `kind` as --kv-cache-dtype."""
        size = (slots, shape.kv_heads, shape.head_dim)
        if kind == "auto":
            return KVLayer(self._paged(self.normal(*size)), self._paged(self.normal(*size)))
        scales = [self.normal(*size[:2], dtype=torch.float32).abs_().add_(0.5).mul_(0.01) for _ in range(2)]
        if kind == "int8":
            k, v = (self.integers(-127, 128, *size, dtype=torch.int8) for _ in range(2))
        else:
            wide = [self.normal(*size, scale=50.0, dtype=torch.float32) for _ in range(2)]
            k, v = (values.to(torch.float8_e4m3fn) for values in wide)
        return KVLayer(self._paged(k), self._paged(v), *scales)

    def _paged(self, values: Tensor) -> Tensor:
        """In huge pages on a CPU, as the engine's cache is: a context took twice as long to read without."""
        if values.device.type != "cpu":
            return values
        memory = self._pages.allocate(values.nbytes).view(values.dtype).view(values.shape)
        return memory.copy_(values)

    def block_table(self, tokens: int, first: int = 1) -> list[int]:
        """Shuffled block ids from `first` on, enough for `tokens`."""
        count = -(-tokens // BLOCK_SIZE)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(tokens + first))
        return [first + int(number) for number in order]

    def batch(self, ops: Ops, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> Batch:
        """A batch of (first position, rows, block table) chunks; a position always has the same token."""
        made = [
            Chunk([position % VOCAB_SIZE for position in range(start, start + rows)], start, blocks, 1)
            for start, rows, blocks in chunks
        ]
        return build_batch(
            made, BLOCK_SIZE, ops.row_tile, self.device, with_request_index=ops.supports_graphs
        )


def sampling_ops(ops: Ops, count: int, device: str) -> dict[str, Callable[[Tensor], object]]:
    """Operations on logits [count, V] by name; filters change the logits in place."""
    numbers = torch.arange(count, device=device)
    sampled, greedy = (torch.full_like(numbers, value, dtype=torch.bool) for value in (False, True))
    k, p = torch.full_like(numbers, 40), torch.full_like(numbers, 0.95, dtype=torch.float64)
    return {
        "greedy": lambda logits: ops.sample(logits, numbers, numbers, greedy),
        "sampled": lambda logits: ops.sample(logits, numbers, numbers, sampled),
        "top-k 40": lambda logits: ops.apply_top_k(logits, k),
        "top-p 0.95": lambda logits: ops.apply_top_p(logits, p),
        "min-p 0.05": lambda logits: ops.apply_min_p(logits, 1 - p),
        "logprobs": lambda logits: (ops.log_sum_exp(logits), ops.top_ids(logits, 20)),
    }
