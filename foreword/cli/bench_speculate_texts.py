"""What the prompts of `foreword bench speculate` are made of: words, records, code, and the installed standard library.

Everything is a function of the random source. The words are those that the bundled model knows; the standard
library's sources are text that nobody trained on together with the edits that are asked for.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

__all__ = ["fill", "functions", "library_functions", "json_lines", "record", "sentence", "sentences", "record_in_words"]

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo", "Mia", "Nora")
CITIES = ("Oslo", "Rome", "Paris", "Berlin", "Madrid", "Vienna", "Prague", "London", "Dublin", "Lisbon", "Athens", "Cairo")
JOBS = ("baker", "teacher", "doctor", "pilot", "farmer", "painter", "nurse", "lawyer", "singer", "driver")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
ANIMALS = ("cat", "dog", "fox", "bear", "mouse", "horse", "owl", "rabbit", "duck", "wolf")
THINGS = ("lamp", "book", "key", "stone", "cup", "ball", "hat", "coin", "map", "box", "bell", "clock", "basket", "mirror")
PLACES = ("forest", "village", "garden", "river", "mountain", "harbor", "castle", "market", "school", "valley")
ADJECTIVES = ("old", "small", "big", "bright", "quiet", "happy", "brave", "kind", "clever", "lazy")
VERBS = ("found", "sold", "moved", "saw", "lost", "painted", "carried", "opened")
VARIABLES = ("count", "total", "name", "price", "index", "value", "result", "limit", "start", "size")
MODULES = ("textwrap", "shlex", "heapq", "bisect", "fnmatch", "colorsys", "difflib", "statistics", "string", "configparser")
MIN_FUNCTION_LINES, MAX_FUNCTION_LINES = 6, 40  # lines of a function worth editing


def sentence(rng: Random) -> str:
    """A plain statement about somebody, something and a place."""
    name, verb, thing = rng.choice(NAMES), rng.choice(VERBS), rng.choice(THINGS)
    return rng.choice(
        (
            f"{name} {verb} a {rng.choice(COLORS)} {thing} in the {rng.choice(PLACES)}.",
            f"The {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} {verb} the {thing} of {name}.",
            f"There is a {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} near the {rng.choice(PLACES)}.",
            f"{name} lives in {rng.choice(CITIES)} and has a {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}.",
            f"On Monday we bought {rng.randint(2, 99)} apples near the {rng.choice(PLACES)}.",
        )
    )


def sentences(rng: Random) -> Iterator[str]:
    while True:
        yield sentence(rng)


def record(rng: Random) -> dict[str, str | int]:
    """A person or an item, field by field."""
    if rng.random() < 0.5:
        return {
            "name": rng.choice(NAMES),
            "age": rng.randint(18, 90),
            "city": rng.choice(CITIES),
            "job": rng.choice(JOBS),
        }
    return {
        "item": rng.choice(THINGS),
        "color": rng.choice(COLORS),
        "price": 5 * rng.randint(1, 100),
        "count": rng.randint(1, 20),
    }


def json_lines(rng: Random) -> Iterator[str]:
    """Records as JSON, one a line."""
    while True:
        yield json.dumps(record(rng))


def record_in_words(fields: dict[str, str | int]) -> str:
    """A record in words: "name=Paul, age=42"."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def functions(rng: Random, variable: str | None = None) -> Iterator[str]:
    """Small Python functions; `variable` stands in every one of them."""
    while True:
        a = variable or rng.choice(VARIABLES)
        b = rng.choice([name for name in VARIABLES if name != a])
        thing, number = rng.choice(THINGS), rng.randint(2, 20)
        yield rng.choice(
            (
                f"def {thing}_{b}({a}, items):\n    {b} = 0\n    for item in items:\n        {b} += item * {a}\n    return {b}\n",
                f"def check_{thing}({a}):\n    if {a} > {number}:\n        return {a} - {number}\n    return {a}\n",
                f"def show_{thing}({a}, {b}):\n    print({a}, {b})\n    {b} = {b} + {a}\n    return {b}\n",
            )
        )


def library_functions() -> tuple[str, ...]:
    """Functions of medium length out of the installed standard library, as they stand there; the same on each call."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [file.read_text(encoding="utf-8") for name in MODULES if (file := folder / f"{name}.py").is_file()]
    return tuple(text for source in sources for text in _functions_of(source))


def _functions_of(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) if isinstance(node, ast.FunctionDef) else None
        if text is not None and MIN_FUNCTION_LINES <= text.count("\n") <= MAX_FUNCTION_LINES:
            yield text


def fill(pieces: Iterator[str], characters: int, separator: str = "\n") -> str:
    """Pieces joined, at most so many characters; the first one is cut if it is too long by itself."""
    taken = next(pieces)[:characters]
    while len(longer := taken + separator + next(pieces)) <= characters:
        taken = longer
    return taken
