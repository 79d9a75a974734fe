"""Training of a head: batches, loss, acceptance, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import ConfigError
from foreword.training.answers import Answer
from foreword.training.eagle3 import DRAFT_TOKENS, Eagle3DraftModel
from foreword.training.target import TargetModel, TrainingBatch

WINDOW_BATCHES = 32  # answers of so many batches are sorted by length together
WARM_UP = 0.03  # share of the steps
GRADIENT_NORM = 1.0
MATRIX_RATE, OTHER_RATE = 0.02, 0.003  # learning rates: Muon of hidden matrices, AdamW of the others


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options that determine the head."""

    epochs: int
    batch_tokens: int  # tokens of a step, with padding
    max_len: int  # tokens of an answer with its prompt; the rest is cut
    ttt_steps: int  # passes of training-time test
    loss_decay: float  # weight of a pass, relative to the one before
    learning_rate: float  # factor of the learning rates
    dtype: str  # "float32" or "bfloat16": of matrix products
    seed: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of DRAFT_TOKENS tokens along held-out answers."""

    num_tokens: int  # emitted: drafted ones that agree with the answer, and one for each step
    num_steps: int
    accepted: tuple[float, ...]  # share of the steps in which draft token i was accepted

    @property
    def length(self) -> float:
        """Tokens a step; 1 + DRAFT_TOKENS at most."""
        return self.num_tokens / max(self.num_steps, 1)


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a run after a step."""

    step: int
    num_steps: int
    loss: float  # mean since the last report
    tokens_per_s: float
    left_s: float
    acceptance: Acceptance | None  # where it was measured at this step


def split_held_out(answers: Sequence[Answer], seed: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on, and held-out ones: 1 of 20, at least one and at most 64."""
    order = list(range(len(answers)))
    Random(seed).shuffle(order)
    num_held_out = min(max(len(answers) // 20, 1), 64)
    if len(answers) <= num_held_out:
        raise ConfigError(f"training needs at least 2 answers, got {len(answers)}", "data")
    held_out = set(order[:num_held_out])
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for index, answer in enumerate(answers):
        parts[index in held_out].append(answer)
    return parts


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: str) -> list[list[int]]:
    """Batches of indexes of similar lengths, at most `batch_tokens` with padding or one answer, shuffled."""
    rng = Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    mean = max(sum(lengths) // max(len(lengths), 1), 1)
    window = max(WINDOW_BATCHES * batch_tokens // mean, 1)
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        batch: list[int] = []
        for index in sorted(order[start : start + window], key=lambda i: lengths[i]):
            if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


@dataclass(frozen=True, slots=True)
class ChainPass:
    """One pass of the chains that begin at learned rows of a batch: n predictions of learned tokens."""

    logits: Tensor  # float32 [n, draft vocabulary]
    rows: Tensor  # int64 [n]: rows of the predictions among the batch's N learned ones
    hits: Tensor  # bool [B, L]: the chain that begins at a position predicts the token of this pass


def run_chains(head: Eagle3DraftModel, batch: TrainingBatch, num_passes: int) -> Iterator[ChainPass]:
    """Chains begin at each position whose next token is learned, except position 0, which has no pair."""
    size, length = batch.token_ids.shape
    first = torch.tensor(batch.first_rows).clamp(min=2) - 1
    width = max(int((torch.tensor(batch.lengths) - 1 - first).max()), 1)
    starts = (first[:, None] + torch.arange(width)).clamp(max=length - 1).to(batch.token_ids.device)
    hidden = head.unroll(batch.embeddings.float(), batch.aux_hidden_states.float(), starts, num_passes)
    following = F.pad(batch.token_ids[:, 1:], (0, 1))
    for index in range(num_passes):
        positions = starts + index
        rows = F.pad(batch.learned_index, (0, num_passes), value=-1).gather(1, positions)
        learned = rows >= 0
        logits = head.logits(hidden[index][learned])
        hits = torch.zeros_like(batch.token_ids, dtype=torch.bool)
        owners = torch.arange(size, device=starts.device)[:, None].expand_as(starts)[learned]
        correct = head.draft_ids[logits.argmax(-1)] == following[owners, positions[learned]]
        hits[owners, starts[learned]] = correct
        yield ChainPass(logits, rows[learned], hits)


def training_loss(head: Eagle3DraftModel, batch: TrainingBatch, num_passes: int, decay: float) -> Tensor:
    """KL divergence from the target on the draft vocabulary, weighted by the target's probability of it."""
    total = batch.log_probs.new_zeros(())
    for index, chains in enumerate(run_chains(head, batch, num_passes)):
        target = batch.log_probs[chains.rows]
        probs = target.exp()
        relative = target - target.logsumexp(-1, keepdim=True)
        divergence = (probs * (relative - chains.logits.log_softmax(-1))).sum(-1)
        total = total + decay**index * divergence.sum() / max(len(chains.rows), 1)
    return total / sum(decay**index for index in range(num_passes))


def count_accepted(
    hits: Sequence[Tensor], first_rows: Sequence[int], lengths: Sequence[int]
) -> tuple[int, list[int]]:
    """Walk along answers as speculative decoding does: (tokens, [steps, steps that accept 1, 2, ... tokens]).

    hits  bool [B, L] of each pass, of a ChainPass; the target itself samples an answer's first token
    """
    counts, num_tokens = [0] * (len(hits) + 1), 0
    table = torch.stack(list(hits)).cpu()
    for row, (first, length) in enumerate(zip(first_rows, lengths, strict=True)):
        position = first
        while position < length - 1:
            accepted = next((j for j in range(len(hits)) if not table[j, row, position]), len(hits))
            for reached in range(accepted + 1):
                counts[reached] += 1
            emitted = min(accepted + 1, length - 1 - position)
            num_tokens, position = num_tokens + emitted, position + emitted
    return num_tokens, counts


class Trainer:
    """One training run, which goes on from its checkpoint if there is one."""

    def __init__(
        self,
        target: TargetModel,
        head: Eagle3DraftModel,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        options: TrainingOptions,
        checkpoint: Path,
    ) -> None:
        """Raises ConfigError for a checkpoint of other options or another shape."""
        self.head, self.options = head, options
        self._target, self._answers, self._held_out = target, answers, held_out
        self._checkpoint = checkpoint
        self.step = 0
        lengths = [len(answer.token_ids) for answer in answers]
        self._batches = [
            batch
            for epoch in range(options.epochs)
            for batch in plan_epoch(lengths, options.batch_tokens, f"{options.seed}:{epoch}")
        ]
        self._optimizers = _make_optimizers(head, options.learning_rate)
        # What a checkpoint was made with, in JSON's values
        self._origin = json.loads(
            json.dumps({**asdict(options), **asdict(head.shape), "answers": len(answers)})
        )
        if checkpoint.exists():
            self._load()

    @property
    def num_steps(self) -> int:
        return len(self._batches)

    def train(
        self,
        report_s: float,
        evaluate_s: float,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Train up to the last step. A checkpoint is written with each measurement, and at the end."""
        begun, first_step = clock(), self.step
        reported = evaluated = begun
        num_tokens, losses = 0, list[float]()
        while self.step < self.num_steps:
            batch = self._compute([self._answers[index] for index in self._batches[self.step]])
            losses.append(self._update(batch))
            num_tokens += sum(batch.lengths)
            self.step += 1
            now, is_last = clock(), self.step == self.num_steps
            acceptance = None
            if is_last or now - evaluated >= evaluate_s:
                self.save()
                acceptance = self.measure()
                now = evaluated = clock()
            if acceptance is not None or now - reported >= report_s:
                elapsed = max(now - begun, 1e-9)
                left_s = elapsed / (self.step - first_step) * (self.num_steps - self.step)
                mean = sum(losses) / len(losses)
                rate = num_tokens / elapsed
                on_progress(Progress(self.step, self.num_steps, mean, rate, left_s, acceptance))
                reported, losses = now, []

    @torch.no_grad()
    def measure(self) -> Acceptance:
        """Acceptance along the held-out answers, by this head itself."""
        num_tokens, counts = 0, [0] * (DRAFT_TOKENS + 1)
        lengths = [len(answer.token_ids) for answer in self._held_out]
        for indexes in plan_epoch(lengths, self.options.batch_tokens, "held out"):
            batch = self._compute([self._held_out[index] for index in indexes])
            with self._autocast():
                hits = [chains.hits for chains in run_chains(self.head, batch, DRAFT_TOKENS)]
            tokens, reached = count_accepted(hits, batch.first_rows, batch.lengths)
            num_tokens += tokens
            counts = [a + b for a, b in zip(counts, reached, strict=True)]
        steps, *accepted = counts
        return Acceptance(num_tokens, steps, tuple(each / max(steps, 1) for each in accepted))

    def save(self) -> None:
        """Write the checkpoint under another name first: a kill keeps the old one."""
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in values.items()}
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        partial = self._checkpoint.with_suffix(".partial")
        try:
            save_file(tensors, partial, {"origin": json.dumps(self._origin), "step": str(self.step)})
            partial.replace(self._checkpoint)
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = f"{self._checkpoint} cannot be written: {error}"
            raise ConfigError(f"{problem}; the same command goes on", "output") from None

    def _load(self) -> None:
        """Raises ConfigError."""
        try:
            with safe_open(self._checkpoint, "pt") as file:
                metadata, names = file.metadata(), file.keys()  # the handle is no mapping
                tensors = {name: file.get_tensor(name) for name in names}
            origin = json.loads(metadata["origin"])
            changed = [name for name, value in self._origin.items() if origin.get(name) != value]
            if not changed:
                self.head.load_state_dict(_below(tensors, "head."))
                for number, optimizer in enumerate(self._optimizers):
                    optimizer.load_state_dict(_optimizer_state(optimizer, tensors, f"optimizer.{number}."))
                self.step = int(metadata["step"])
        except Exception as error:  # torch raises many kinds
            raise ConfigError(f"{self._checkpoint} is no checkpoint of training: {error}", "output") from None
        if changed:
            was = ", ".join(f"{name} {origin.get(name)!r:.80}" for name in changed)
            problem = f"{self._checkpoint} was made with {was}: choose another --output or remove it"
            raise ConfigError(problem, "output")

    def _compute(self, answers: Sequence[Answer]) -> TrainingBatch:
        return self._target.compute(answers, self.head.shape.aux_layers, self.head.draft_ids)

    def _update(self, batch: TrainingBatch) -> float:
        """Take one step of the optimizers and return the loss."""
        with self._autocast():
            loss = training_loss(self.head, batch, self.options.ttt_steps, self.options.loss_decay)
        if not loss.isfinite():
            problem = f"the loss is not finite at step {self.step + 1}: try a smaller --learning-rate"
            raise ConfigError(f"{problem} in another --output", "learning_rate")
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), GRADIENT_NORM)
        progress = self.step / self.num_steps
        factor = min((self.step + 1) / max(WARM_UP * self.num_steps, 1), 1.0) * (1 - progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _autocast(self) -> torch.autocast:
        enabled = self.options.dtype == "bfloat16"
        return torch.autocast(self._target.device, dtype=torch.bfloat16, enabled=enabled)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, Any]:
    """The argument of load_state_dict(); the groups are those of a new optimizer."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _below(tensors, prefix).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return {**optimizer.state_dict(), "state": state}


def _make_optimizers(head: Eagle3DraftModel, factor: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, whose rate suits every size; AdamW for norms and lm_head."""
    is_matrix = {name: value.ndim == 2 and "lm_head" not in name for name, value in head.named_parameters()}
    matrices = [value for name, value in head.named_parameters() if is_matrix[name]]
    others = [value for name, value in head.named_parameters() if not is_matrix[name]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE * factor, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE * factor, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers
