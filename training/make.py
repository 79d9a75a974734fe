"""Make the bundled model anew: target, drafter, export, loss curve, evaluation. Repeat the command to resume.

python -m training.make RUN [--minutes 74] [--drafter-minutes 14]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from foreword import demo


def step(module: str, *arguments: str | Path) -> None:
    """Run one of the scripts, and stop if it fails."""
    subprocess.run([sys.executable, "-m", f"training.{module}", *map(str, arguments)], check=True)


def main() -> None:
    """Run all steps in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder for checkpoints and logs")
    parser.add_argument("--minutes", default="74")
    parser.add_argument("--drafter-minutes", default="14")
    args = parser.parse_args()
    step("train", "target", args.run, "--minutes", args.minutes)
    step("train", "drafter", args.run, "--minutes", args.drafter_minutes)
    step("train", "target", args.run, "--export", demo.MODEL)
    step("train", "drafter", args.run, "--export", demo.DRAFTER)
    step("plot", args.run, Path("docs/lab/demo-model-loss.png"))
    step("evaluate")


if __name__ == "__main__":
    main()
