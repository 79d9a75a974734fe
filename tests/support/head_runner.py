"""A target with its trained head on one backend: passes over one request, and chains of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Chunk, at_fixed_positions, build_batch
from foreword.core.states import StateSizes
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.ops import DraftJob, DraftLoop, DraftSamplingParams, DraftTokens, Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.heads.head_loader import load_head, load_mtp_head
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from tests.support.cpu_kernels import isas_under_test

BLOCK_SIZE = 8
DRAFT = 4
BACKENDS = ("reference", *isas_under_test()[-1:])  # tests of the kernels have every instruction set
GREEDY = DraftSamplingParams(seed=0, greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


class HeadRunner:
    """One request of `text`, in shuffled blocks with scratch blocks behind."""

    def __init__(
        self,
        model: Path,
        head: Path,
        backend: str,
        text: Sequence[int],
        draft_vocab_size: int = 0,
        num_scratch: int = 2,
    ) -> None:
        """backend: "reference" or an instruction set; head: the model itself if it has an MTP head"""
        self.text = text
        self.ops: Ops = ReferenceOps() if backend == "reference" else CpuOps(backend)
        precision, max_len = Precision.from_dtypes("float32"), 128
        self.target = target = load_model(model, self.ops, precision, "cpu", max_len)
        if head == model:
            options: dict[str, Any] = {"draft_vocab_size": draft_vocab_size}
            target.head = load_mtp_head(model, target, self.ops, precision, "cpu", **options)
        else:
            target.head = load_head(head, target, self.ops, precision, "cpu", max_len)
        num_blocks, shape = max_len // BLOCK_SIZE, target.head.cache_shape
        options = {"states": StateSizes(2, 4, max_rows=max_len), "head": shape}
        options["num_draft_blocks"] = num_scratch
        self.kv = KVStorage(num_blocks, BLOCK_SIZE, target.cache_shapes, "float32", **options)
        assert self.kv.head is not None
        self.cache = self.kv.head
        self.fixed_position = target.head.has_fixed_position
        self.forward = target.compile_logits(self.kv)
        self.draft = target.head.compile_draft(self.kv)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.blocks = (order + 1).tolist()
        self.scratch = [num_blocks + 1 + i for i in range(num_scratch)]

    def commit(self, start: int, end: int) -> None:
        """A pass of the target over text[start:end]."""
        anchors = [1, 2][start // 64 : end // 64 + 1]
        chunk = Chunk(self.text[start:end], start, self.blocks, 1, state_slot=1, anchors=anchors)
        self._run(self.forward, chunk, with_states=self.target.has_states)

    def chain(self, length: int, count: int) -> list[Tensor]:
        """Logits of greedy draft tokens after text[:length], of which the target has computed all but one."""
        token_id, logits = self.text[length - 1], []
        for position in range(length - 1, length - 1 + count):
            chunk = Chunk([token_id], position, self._draft_blocks(length), 1)
            fixed = length - 2 if self.fixed_position else None
            logits.append(self._run(self.draft, chunk, fixed)[0])
            token_id = int(logits[-1].argmax())
        return logits

    def draft_in_loop(self, length: int, count: int) -> DraftTokens:
        """The tokens of chain() by one call."""
        assert isinstance(self.draft, DraftLoop)
        first, blocks = self.text[length - 1], self._draft_blocks(length)
        fixed = length - 2 if self.fixed_position else None
        job = DraftJob([first], length - 1, blocks, length, count, -1e9, GREEDY, fixed_position=fixed)
        (tokens,) = self.draft.draft([job], BLOCK_SIZE, torch.empty(0, dtype=torch.int64))
        return tokens

    def slots(self, start: int, end: int) -> list[int]:
        """Slots of text[start:end]."""
        return [block * BLOCK_SIZE + i for block in self.blocks for i in range(BLOCK_SIZE)][start:end]

    def _draft_blocks(self, length: int) -> list[int]:
        return [*self.blocks[: -(-length // BLOCK_SIZE)], *self.scratch]

    def _run(
        self, forward: Any, chunk: Chunk, fixed_position: int | None = None, with_states: bool = False
    ) -> Tensor:
        options = {"with_states": with_states, "with_prev_slots": True}
        batch = build_batch([chunk], BLOCK_SIZE, self.ops.row_tile, "cpu", **options)
        if fixed_position is not None:
            batch = at_fixed_positions(batch, [fixed_position])
        with torch.inference_mode():
            return forward(batch).clone()


def check_memory(runners: Sequence[HeadRunner]) -> None:
    """One pass, chunks, and single rows after another draft in the same slots leave the same bits."""
    end = len(runners[0].text) - 1
    runners[0].commit(0, end)
    for start in range(0, end, 7):
        runners[1].commit(start, min(start + 7, end))
    for position in range(end):
        if position > 1:
            runners[2].chain(position + 1, DRAFT)
        runners[2].commit(position, position + 1)
    slots = runners[0].slots(1, end)
    caches = [
        [x.cache.hidden, *(part for layer in x.cache.layers for part in (layer.k, layer.v))] for x in runners
    ]
    chains = [runner.chain(end + 1, DRAFT) for runner in runners]
    for cache, chain in zip(caches[1:], chains[1:], strict=True):
        assert all(torch.equal(mine[slots], one[slots]) for mine, one in zip(cache, caches[0], strict=True))
        assert all(map(torch.equal, chain, chains[0]))
