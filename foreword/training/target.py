"""The target of a head: the hidden states that the head reads, and the probabilities that it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foreword.config.options import Config
from foreword.core.batch import Chunk, build_batch
from foreword.engine.loader import detect_hardware
from foreword.errors import ConfigError
from foreword.kernels.registry import select_backend
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.planning.memory import blocks_for, resolve_dtypes
from foreword.training.answers import Answer

LOGITS_VALUES = 1 << 25  # float32 values of a slice of rows whose logits are computed together


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Answers of similar length as rows of L tokens, and what the target computes for them.

    Row t of an answer is its token x_t. N of all rows have a next token that is learned, in order.
    """

    token_ids: Tensor  # int64 [B, L], then zeros
    embeddings: Tensor  # [B, L, H]
    aux_hidden_states: Tensor  # [B, L, layers * H]: the residual stream entering some layers
    learned_index: Tensor  # int64 [B, L]: index among the N rows, -1 for others
    log_probs: Tensor  # float32 [N, draft vocabulary]: the target's, of the draft vocabulary's tokens
    first_rows: tuple[int, ...]  # by answer: row of its first token
    lengths: tuple[int, ...]


class TargetModel:
    """The model in `config.model`, computed by the engine's own code."""

    def __init__(self, config: Config, progress: Callable[[int, int], None] | None = None) -> None:
        """Raises ConfigError for a model that a head cannot be trained for, or CheckpointError."""
        path = Path(str(config.model))
        info = read_model_info(path, config.gguf_dequantize)
        if info.state_shapes:
            raise ConfigError(f"{info.architecture} has layers with state, for which no head is trained yet")
        hardware = detect_hardware(config, info)
        dtype, weight_dtype = resolve_dtypes(config, hardware, info)
        self.device, self.threads = hardware.device, config.threads or hardware.cores
        self.max_len = min(config.max_model_len or info.context_len, info.context_len)
        self._ops = select_backend(self.device, threads=self.threads, isa=config.cpu_isa, eager=True)
        precision = Precision.from_dtypes(dtype, weight_dtype, config.quantization)
        options = (progress, config.gguf_dequantize)
        self.model = load_model(path, self._ops, precision, self.device, self.max_len, *options)
        self._dtype, self._block_size = dtype, config.block_size
        self._kv = KVStorage(1, self._block_size, self.model.cache_shapes, dtype, self.device)

    @torch.no_grad()
    def compute(self, answers: Sequence[Answer], layers: Sequence[int], draft_ids: Tensor) -> TrainingBatch:
        """One forward pass over these answers; draft_ids int64: the draft vocabulary."""
        model, lengths = self.model, tuple(len(answer.token_ids) for answer in answers)
        streams, hidden = self._forward([answer.token_ids.tolist() for answer in answers], (0, *layers))
        rows = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        batch = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(self.device)
        shape = (len(lengths), max(lengths))

        def place(values: Tensor, fill: int = 0) -> Tensor:
            """Rows of the flat batch [T, ...] -> [B, L, ...]"""
            placed = values.new_full((*shape, *values.shape[1:]), fill)
            placed[batch, rows] = values
            return placed

        token_ids = torch.cat([torch.from_numpy(answer.token_ids).long() for answer in answers])
        first, last = (
            torch.tensor(values, device=self.device)[batch]
            for values in ([answer.num_prompt for answer in answers], lengths)
        )
        learned = (rows + 1 >= first) & (rows + 1 < last)
        index = torch.where(learned, learned.cumsum(0) - 1, -1)
        slices = torch.split(hidden[learned], max(LOGITS_VALUES // model.vocab_size, 1))
        log_probs = [model.logits(part).log_softmax(-1)[:, draft_ids] for part in slices]
        return TrainingBatch(
            token_ids=place(token_ids.to(self.device)),
            embeddings=place(streams[0]),
            aux_hidden_states=place(torch.cat(streams[1:], dim=1)),
            learned_index=place(index, -1),
            log_probs=torch.cat(log_probs),
            first_rows=tuple(answer.num_prompt for answer in answers),
            lengths=lengths,
        )

    def _forward(
        self, token_ids: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Residual streams and hidden states [T, H] of all tokens, without padding."""
        size = self._block_size
        num_blocks = [blocks_for(len(ids), size) for ids in token_ids]
        if sum(num_blocks) > self._kv.num_blocks:
            self._kv = KVStorage(sum(num_blocks), size, self.model.cache_shapes, self._dtype, self.device)
        chunks, first = [], 1
        for ids, count in zip(token_ids, num_blocks, strict=True):
            chunks.append(Chunk(ids, 0, range(first, first + count), 0))
            first += count
        batch = build_batch(
            chunks,
            size,
            self._ops.row_tile,
            self.device,
            mrope=self.model.uses_mrope,
            with_request_index=self._ops.supports_graphs,
        )
        streams, hidden = self.model.forward_with_aux_hidden_states(batch, self._kv, layers)
        num_rows = sum(map(len, token_ids))
        return [stream[:num_rows] for stream in streams], hidden[:num_rows]
