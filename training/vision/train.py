"""Train the vision model, or its text-only drafter. Resumable: run the same command again.

    python -m training.vision.train target  RUN --minutes 65
    python -m training.vision.train drafter RUN --minutes 3

RUN is a folder for checkpoints (every minute) and a loss log. First the vision encoder alone learns the
content of each patch, which is cheap; then all parts learn to answer, for a while mostly the colour of
one of two things. Learning rates fall to zero at the end of the planned time, however fast the machine
is; `--steps` plans by steps.
"""

import argparse
import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from foreword import demo
from training.train import save_on_exit
from training.vision.model import VisionTrainingModel, export, with_image_token
from training.vision.rows import Rows, draw_rows
from training.vision.scenes import COLOURS

# By share of the planned time: rows with questions, images without, and the share of rows that mostly ask for
# the colour of one of two things. A few of these among many others taught nothing: it named either colour.
TARGET: Final = {0.0: (0, 128, 0.0), 0.18: (40, 48, 0.0), 0.67: (24, 0, 1.0), 0.74: (40, 48, 0.4)}
DRAFTER: Final = (32, 0)
RATES = {"target": (0.02, 0.003), "drafter": (0.02, 0.004)}  # Muon, AdamW
_WARM_UP_STEPS, _DECAY_FROM = 50, 0.4
_COLOUR_WEIGHT = {"target": 4.0, "drafter": 1.0}  # of a colour word in an answer; others weigh 1
_PATCH_LOSS_WEIGHT = 0.6  # of the patch loss once answers are learned
_SAVE_EVERY_S = 60.0


def lr_factor(step: int, progress: float) -> float:
    """Return the factor on the learning rates: warm-up, constant, then linear to zero."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS, (1 - progress) / (1 - _DECAY_FROM))


def optimizers(model: nn.Module, role: str) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, norms, biases and the patch heads."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "heads" not in n]
    others = [p for n, p in named if not any(p is one for one in matrices)]
    muon, adam = RATES[role]
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for one in chosen:
        for group in one.param_groups:
            group["full_lr"] = group["lr"]
    return chosen


def attention_mask(conversation_ids: Tensor) -> Tensor:
    """Return bool [B, 1, L, L] from the conversation ids [B, L]."""
    query, key = conversation_ids[:, None, :, None], conversation_ids[:, None, None, :]
    seen = (query == key) | ((key == 0) & (query > 0))
    return seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()


class Run:
    """The state of one training run: weights, their running mean, optimizers, clock."""

    def __init__(self, role: str, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.role, self.folder, self.seed = role, folder, seed
        self.tokenizer = with_image_token(Tokenizer.from_file(str(demo.MODEL / "tokenizer.json")))
        self.colours = torch.tensor([self.tokenizer.encode(f" {name}").ids[0] for name in COLOURS])
        self.training_model = VisionTrainingModel(role)
        self.mean = {name: tensor.clone() for name, tensor in self.training_model.state_dict().items()}
        self.optimizers = optimizers(self.training_model, role)
        self.step, self.talk_steps, self.pictures, self.elapsed_s = 0, 0, 0, 0.0
        self.path = folder / f"{role}.pt"
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        saved = torch.load(self.path)
        self.training_model.load_state_dict(saved["seer"])
        self.mean = saved["mean"]
        for one, state in zip(self.optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        self.step, self.talk_steps, self.pictures, self.elapsed_s = saved["clock"]

    def save(self) -> None:
        """Write the checkpoint under another name first, so that a kill keeps the old one."""
        whole = {
            "seer": self.training_model.state_dict(),
            "mean": self.mean,
            "optimizers": [one.state_dict() for one in self.optimizers],
            "clock": (self.step, self.talk_steps, self.pictures, self.elapsed_s),
        }
        partial = self.path.with_suffix(".partial")
        torch.save(whole, partial)
        partial.replace(self.path)

    def draw(self, step: int, progress: float) -> Rows:
        """The rows of a step; `progress` is the share of the planned time."""
        rng = Random(f"vision:{self.seed}:{step}")
        if self.role == "drafter":  # the engine gives it the text without images
            return draw_rows(self.tokenizer, rng, *DRAFTER, num_placeholders=0)
        return draw_rows(self.tokenizer, rng, *TARGET[max(start for start in TARGET if start <= progress)])

    def losses(self, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a step, and figures for the log."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = (
                self.training_model.encode_image(torch.from_numpy(rows.pixels))
                if self.role == "target"
                else None
            )
            told = self.training_model.patch_loss(seen, rows.patches) if seen is not None else torch.zeros(())
            if not rows.has_text:
                return told, {"told": told.item()}
            labels = torch.from_numpy(rows.labels)
            learned = labels >= 0
            answers = labels[learned]
            tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
            hidden = self.training_model.hidden(
                tokens,
                positions,
                attention_mask(torch.from_numpy(rows.conversation_ids)),
                None if seen is None else seen[: len(tokens)],
            )
            logits = self.training_model.model.lm_head(hidden[learned]).float()
        said = F.cross_entropy(logits, answers, reduction="none")
        weights = torch.where(torch.isin(answers, self.colours), _COLOUR_WEIGHT[self.role], 1.0)
        hits = (logits.argmax(-1) == answers).float().mean()
        figures = {"told": told.item(), "loss": said.mean().item(), "right": hits.item()}
        return (said * weights).sum() / weights.sum() + _PATCH_LOSS_WEIGHT * told, figures

    def update(self, loss: Tensor, progress: float, has_text: bool) -> None:
        """Take one optimizer step and move the running mean."""
        loss.backward()
        # Answers have a warm-up of their own.
        factor = lr_factor(self.talk_steps if has_text else self.step, progress)
        for one in self.optimizers:
            for group in one.param_groups:
                group["lr"] = group["full_lr"] * factor
            one.step()
            one.zero_grad(set_to_none=True)
        keep = min(0.99, self.step / (self.step + 10))
        with torch.no_grad():
            for name, tensor in self.training_model.state_dict().items():
                self.mean[name].lerp_(tensor, 1 - keep)
        self.step, self.talk_steps = self.step + 1, self.talk_steps + has_text


def train(run: Run, minutes: float, steps: int | None) -> None:
    """Train until the planned time or number of steps is over."""

    def progress_now() -> float:
        return min(1.0, run.step / steps if steps else run.elapsed_s / (60 * minutes))

    saved_at = time.monotonic()
    log = (run.folder / f"{run.role}.jsonl").open("a", encoding="utf-8")
    with log, ThreadPoolExecutor(1) as ahead, save_on_exit(run):
        pending = ahead.submit(run.draw, run.step, progress_now())
        while (progress := progress_now()) < 1.0:
            began = time.monotonic()
            rows = pending.result()
            pending = ahead.submit(run.draw, run.step + 1, progress)
            loss, figures = run.losses(rows)
            run.update(loss, progress, rows.has_text)
            run.pictures += len(rows.pixels)
            run.elapsed_s += time.monotonic() - began
            if run.step % 10 == 0:
                clock = {
                    "step": run.step,
                    "pictures": run.pictures,
                    "s": round(run.elapsed_s),
                    "progress": round(progress, 4),
                }
                line = json.dumps(clock | {name: round(value, 4) for name, value in figures.items()})
                print(line, file=log, flush=True)
                print(line, flush=True)
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
    parser.add_argument("--minutes", type=float, default=65.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--export", type=Path, help="write the running mean of the last checkpoint here, train nothing"
    )
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    run = Run(args.role, args.run, args.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.export:
        state = {
            name.removeprefix("model."): tensor
            for name, tensor in run.mean.items()
            if name.startswith("model.")
        }
        export(state, args.role, args.export, run.tokenizer)
    else:
        train(run, args.minutes, args.steps)


if __name__ == "__main__":
    main()
