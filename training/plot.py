"""Draw the loss curve of one or two runs.

python -m training.plot RUN docs/lab/demo-model-loss.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_WINDOW = 10  # log lines, each of ten steps


def read(path: Path) -> list[dict[str, float]]:
    """Return the log lines of a run; where a resumed run repeats a step, the later line counts."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({line["step"]: line for line in lines}.values(), key=lambda line: line["step"])


def draw(run: Path, target: Path) -> None:
    """Plot loss and token accuracy over the tokens read, smoothed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for role in ("target", "drafter"):
        if not (run / f"{role}.jsonl").exists():
            continue
        lines = read(run / f"{role}.jsonl")
        millions = [line["tokens"] / 1e6 for line in lines]
        for axes, field in ((left, "loss"), (right, "right")):
            values = [line[field] for line in lines]
            smooth = [
                sum(values[max(0, i - _WINDOW) : i + 1]) / len(values[max(0, i - _WINDOW) : i + 1])
                for i in range(len(values))
            ]
            axes.plot(millions, smooth, label=role)
    left.set(xlabel="tokens read, millions", ylabel="training loss (drafter: distillation)", yscale="log")
    right.set(xlabel="tokens read, millions", ylabel="right answer tokens, share", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="center right")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(args.run, args.png)
