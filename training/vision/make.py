"""Make the bundled vision model: target, drafter, example image, export, curve, evaluation. Repeat to resume.

python -m training.vision.make RUN [--minutes 65] [--drafter-minutes 3]
"""

import argparse
from pathlib import Path

from foreword import demo
from training.make import step
from training.vision.draw import draw_image
from training.vision.scenes import COLOURS, Scene, Thing

EXAMPLE = Scene(
    "many",
    tuple(
        Thing("red", "circle", x, y, radius=0.13, turn=0.0, rgb=COLOURS["red"])
        for x, y in ((0.2, 0.65), (0.48, 0.28), (0.77, 0.6))
    ),
    width=128,
    height=96,
    background=(244, 242, 236),
    noise=2.0,
    seed=0,
)


def main() -> None:
    """Run all steps in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder for checkpoints and logs")
    parser.add_argument("--minutes", default="65")
    parser.add_argument("--drafter-minutes", default="3")
    args = parser.parse_args()
    step("vision.train", "target", args.run, "--minutes", args.minutes)
    step("vision.train", "drafter", args.run, "--minutes", args.drafter_minutes)
    step("vision.train", "target", args.run, "--export", demo.VISION_MODEL)
    step("vision.train", "drafter", args.run, "--export", demo.VISION_DRAFTER)
    draw_image(EXAMPLE).save(demo.PICTURE, "PNG")
    step("vision.plot", args.run, Path("docs/lab/vision-demo.png"))
    step("vision.evaluate")


if __name__ == "__main__":
    main()
