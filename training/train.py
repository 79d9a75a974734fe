"""Train the target, or the drafter by distillation. Resumable: run the same command again.

    python -m training.train target  RUN --minutes 74
    python -m training.train drafter RUN --minutes 14

RUN is a folder for the tokenizer, checkpoints (every two minutes) and a loss log. The learning rate falls
to zero at the end of the planned time, however fast the machine is; `--steps` plans by steps instead and
is repeatable.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from foreword import demo
from training import corpus
from training import tokenizer as tokenizers_
from training.model import build, export

TOKENS_PER_STEP = 8192
RATES = {"target": (0.02, 0.003), "drafter": (0.02, 0.004)}  # Muon, AdamW
# Without these instructions bfloat16 takes three times as long as float32.
HALF = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
_WARM_UP_STEPS, _DECAY_FROM = 60, 0.35
_SAVE_EVERY_S = 120.0
BUNDLED = {"target": demo.MODEL, "drafter": demo.DRAFTER}
# The drafter learns from the text first, at a third of the cost, then from the target's probabilities.
_DISTIL_FROM = 0.5


def row_length(progress: float) -> int:
    """Short rows first, which are cheap and teach most; the last rows fill the context."""
    return 256 if progress < 0.8 else 512 if progress < 0.9 or progress >= corpus.REFRESH else 1024


def lr_factor(step: int, progress: float, refresh_rate: float | None = None) -> float:
    """Return the factor on the learning rates: warm-up, constant, then linear to zero."""
    if refresh_rate is not None:
        return refresh_rate * (1 - progress)
    return min(1.0, (step + 1) / _WARM_UP_STEPS, (1 - progress) / (1 - _DECAY_FROM))


def optimizers(model: nn.Module, role: str) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices (about twice as fast here), AdamW for embedding and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = RATES[role]
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for one in chosen:
        for group in one.param_groups:
            group["full_lr"] = group["lr"]
    return chosen


class Batch:
    """Packed rows as tensors, with the attention mask that separates documents."""

    def __init__(self, rows: corpus.Rows) -> None:
        self.tokens, self.positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
        documents = torch.from_numpy(rows.documents)
        same = documents[:, None, :, None] == documents[:, None, None, :]  # bool [B, 1, L, L]
        self.mask = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()
        labels = torch.from_numpy(rows.labels)
        self.learned = labels >= 0
        self.labels = labels[self.learned]

    def logits(self, model: LlamaForCausalLM, body: nn.Module) -> Tensor:
        """Return float32 [N, V] at the N learned positions."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=HALF):
            hidden = body(
                input_ids=self.tokens, position_ids=self.positions, attention_mask=self.mask, use_cache=False
            ).last_hidden_state
            logits: Tensor = model.lm_head(hidden[self.learned])
        return logits.float()


def draw_batch(tokenizer: Tokenizer, seed: int, step: int, progress: float, focus: str = "faq") -> Batch:
    """Return the batch of a step."""
    length = row_length(progress)
    rng = Random(f"{seed}:{step}")
    return Batch(corpus.pack_rows(tokenizer, rng, TOKENS_PER_STEP // length, length, progress, focus))


class Run:
    """The state of one training run: weights, their running mean, optimizers, clock."""

    def __init__(self, role: str, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.role, self.folder, self.seed = role, folder, seed
        self.model = build(role)
        self.mean = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.optimizers = optimizers(self.model, role)
        # Compiling the small drafter takes longer than it saves.
        self.body: nn.Module = (
            torch.compile(self.model.model, dynamic=False) if role == "target" else self.model.model
        )
        self.step, self.tokens, self.elapsed_s = 0, 0, 0.0
        self.path = folder / f"{role}.pt"
        if self.path.exists():
            self._load()

    def start_from_bundled(self) -> None:
        """Begin with the weights of the bundled model and new optimizers."""
        weights = load_file(BUNDLED[self.role] / "model.safetensors")
        missing = self.model.load_state_dict(
            {name: tensor.float() for name, tensor in weights.items()}, strict=False
        )
        assert (
            set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
        )  # the head is the embedding
        self.mean = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _load(self) -> None:
        saved = torch.load(self.path)
        self.model.load_state_dict(saved["model"])
        self.mean = saved["mean"]
        for one, state in zip(self.optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        self.step, self.tokens, self.elapsed_s = saved["step"], saved["tokens"], saved["elapsed_s"]

    def save(self) -> None:
        """Write the checkpoint under another name first, so that a kill keeps the old one."""
        whole = {
            "model": self.model.state_dict(),
            "mean": self.mean,
            "optimizers": [one.state_dict() for one in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(whole, partial)
        partial.replace(self.path)

    def update(self, loss: Tensor, factor: float) -> None:
        """Take one optimizer step and move the running mean."""
        loss.backward()
        for one in self.optimizers:
            for group in one.param_groups:
                group["lr"] = group["full_lr"] * factor
            one.step()
            one.zero_grad(set_to_none=True)
        keep = min(0.99, self.step / (self.step + 10))
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                self.mean[name].lerp_(tensor, 1 - keep)


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the drafter: agree with the teacher, with some weight on the text itself.

    student, teacher  float32 [N, V] logits
    """
    soft = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
    return 0.8 * soft + 0.2 * F.cross_entropy(student, labels)


def load_teacher(folder: Path) -> LlamaForCausalLM:
    """Return the trained target from its checkpoint, for inference."""
    teacher = build("target")
    teacher.load_state_dict(torch.load(folder / "target.pt")["mean"])
    teacher.requires_grad_(False)
    return teacher


@contextmanager
def save_on_exit(run: Run) -> Iterator[None]:
    """Write a checkpoint on exit, also after SIGTERM."""
    try:
        yield
    finally:
        run.save()


def train(
    run: Run,
    minutes: float,
    steps: int | None,
    distil: bool,
    refresh: str | None = None,
    refresh_rate: float = 0.4,
) -> None:
    """Train until the planned time or number of steps is over.

    refresh       learn these kinds of corpus.REFRESH_SHARES, and count time and steps from now
    refresh_rate  its learning rates at first, as a share of those of a whole run; they fall to zero
    """
    first_step, first_s = (run.step, run.elapsed_s) if refresh else (0, 0.0)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer" / "tokenizer.json"))
    teacher = load_teacher(run.folder) if distil else None

    def progress_now() -> float:
        done = (run.step - first_step) / steps if steps else (run.elapsed_s - first_s) / (60 * minutes)
        return min(1.0, done)

    note = TextColumn("{task.fields[note]}")
    bar = Progress("{task.description}", BarColumn(), "{task.percentage:.1f} %", TimeRemainingColumn(), note)
    log = (run.folder / f"{run.role}.jsonl").open("a", encoding="utf-8")
    with bar, log, ThreadPoolExecutor(1) as ahead, save_on_exit(run):
        task, saved_at = bar.add_task(run.role, total=1.0, note=""), time.monotonic()
        stage = corpus.REFRESH if refresh else progress_now()
        focus = refresh or "faq"
        pending = ahead.submit(draw_batch, tokenizer, run.seed, run.step, stage, focus)
        while (progress := progress_now()) < 1.0:
            began = time.monotonic()
            batch = pending.result()
            stage = corpus.REFRESH if refresh else progress
            pending = ahead.submit(draw_batch, tokenizer, run.seed, run.step + 1, stage, focus)
            logits = batch.logits(run.model, run.body)
            if teacher and stage >= _DISTIL_FROM:
                with torch.no_grad():
                    goal = batch.logits(teacher, teacher.model)
                loss = distillation_loss(logits, goal, batch.labels)
            else:
                loss = F.cross_entropy(logits, batch.labels)
            run.update(loss, lr_factor(run.step, progress, refresh_rate if refresh else None))
            run.step, run.tokens = run.step + 1, run.tokens + int((batch.positions > 0).sum())
            run.elapsed_s += time.monotonic() - began
            if run.step % 10 == 0:
                right = (logits.argmax(-1) == batch.labels).float().mean()
                line = {
                    "step": run.step,
                    "tokens": run.tokens,
                    "s": round(run.elapsed_s),
                    "loss": round(loss.item(), 4),
                    "right": round(right.item(), 4),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.update(
                    task, completed=progress, note=f"loss {line['loss']:.3f}  {run.tokens / 1e6:.1f} M tokens"
                )
            if time.monotonic() - saved_at > _SAVE_EVERY_S:
                run.save()
                saved_at = time.monotonic()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=("target", "drafter"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=74.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-distil", action="store_true", help="train the drafter on the text alone")
    parser.add_argument(
        "--refresh",
        nargs="?",
        const="faq",
        choices=sorted(corpus.REFRESH_SHARES),
        help="learn changed answers of the FAQ, the format of tools, or everyday questions, for --minutes, "
        "from the bundled weights where RUN has none",
    )
    parser.add_argument(
        "--refresh-rate", type=float, default=0.4, help="learning rates of --refresh, as a share of the usual"
    )
    parser.add_argument(
        "--export", type=Path, help="write the running mean of the last checkpoint here, train nothing"
    )
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    if not (args.run / "tokenizer" / "tokenizer.json").exists():
        bundled = str(demo.MODEL / "tokenizer.json")
        tokenizer = Tokenizer.from_file(bundled) if args.refresh else tokenizers_.train(args.seed)
        tokenizers_.save(tokenizer, args.run / "tokenizer")
    run = Run(args.role, args.run, args.seed)
    if args.refresh and not run.path.exists():
        run.start_from_bundled()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.export:
        export(run.mean, args.role, args.export)
        tokenizers_.save(Tokenizer.from_file(str(args.run / "tokenizer" / "tokenizer.json")), args.export)
    else:
        train(
            run,
            args.minutes,
            args.steps,
            args.role == "drafter" and not args.no_distil,
            args.refresh,
            args.refresh_rate,
        )


if __name__ == "__main__":
    main()
