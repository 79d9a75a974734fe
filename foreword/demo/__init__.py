"""Bundled demo models, their draft models, and example prompts. Only paths and strings."""

from pathlib import Path
from typing import Final

MODEL: Final[Path] = Path(__file__).parent / "model"
DRAFTER: Final[Path] = Path(__file__).parent / "drafter"
HEAD: Final[Path] = Path(__file__).parent / "head"  # EAGLE-3 head of MODEL, made by `foreword train-head`

# Vision-language model of coloured shapes and digits, its text-only draft model, an image of 3 red circles.
VISION_MODEL: Final[Path] = Path(__file__).parent / "vision"
VISION_DRAFTER: Final[Path] = Path(__file__).parent / "vision_drafter"
PICTURE: Final[Path] = Path(__file__).parent / "picture.png"

# (model, draft model) by name, for --model and --draft-model.
BUNDLED: Final[dict[str, tuple[Path, Path]]] = {
    "demo": (MODEL, DRAFTER),
    "demo-vision": (VISION_MODEL, VISION_DRAFTER),
}

DEFAULT_MODEL: Final = "demo"

# (workload of `foreword bench latency`, user message).
EXAMPLES: Final[tuple[tuple[str, str], ...]] = (
    ("faq", "What is speculative decoding?"),
    ("faq", "How can I turn off speculation?"),
    ("faq", "Does it run on a CPU?"),
    (
        "edit",
        "Replace the word lamp with mirror:\nAnna found a red lamp in the forest. "
        "My baker sold the lamp yesterday. "
        "The clever fox moved the basket of Hugo. There is a quiet owl near the garden.",
    ),
    (
        "edit",
        "Repeat this text:\nOn Monday we bought 12 apples near the river. "
        "Felix lives in Vienna and has a brave dog. Please send the report to Nora at 17 by Friday.",
    ),
    ("edit", "Remove milk from the list:\n- bread\n- cheese\n- milk\n- honey\n- carrots\n- soup"),
    (
        "edit",
        'Change city to Oslo:\n{"name": "Clara", "age": 31, "city": "Rome", "job": "teacher", '
        '"open": true, "count": 4}',
    ),
    ("json", "Write JSON: name=Paul, age=42, city=Lisbon, job=pilot"),
    ("json", "Turn this into JSON: item lamp, color green, price 125, count 8"),
    ("json", 'What is the price?\n{"item": "clock", "color": "white", "price": 480, "count": 2}'),
    ("story", "Tell me a story about Mia, a fox and a key in the forest."),
    ("story", "Write a short story about Viktor, a bear, a drum and the castle."),
)

# Questions about PICTURE.
PICTURE_QUESTIONS: Final[tuple[str, ...]] = (
    "What is in the picture?",
    "How many circles are there?",
    "What color are the circles?",
    "Which shape is it?",
    "Is there a blue star?",
)
