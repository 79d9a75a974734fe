"""Draw the curves of a run.

python -m training.vision.plot RUN docs/lab/vision-demo.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from training.plot import read

_WINDOW = 8  # log lines, each of ten steps


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and some before it."""
    windows = (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def draw(run: Path, target: Path) -> None:
    """Plot the encoder's patch loss and the answer loss over the images seen."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for axes, role, field in (
        (left, "target", "told"),
        (right, "target", "loss"),
        (right, "drafter", "loss"),
    ):
        lines = [line for line in read(run / f"{role}.jsonl") if field in line]
        thousands = [line["pictures"] / 1e3 for line in lines]
        axes.plot(thousands, smooth([line[field] for line in lines]), label=role)
    left.set(xlabel="pictures, thousands", ylabel="loss of the patches", yscale="log")
    right.set(xlabel="pictures, thousands", ylabel="loss of the answers", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(args.run, args.png)
