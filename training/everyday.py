"""Everyday questions, which so small a model cannot answer: everyday.txt, with words for its slots."""

import re
from collections.abc import Callable
from functools import cache
from random import Random

from training import page
from training import words as w


def _any_of(words: list[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words)


_SLOTS: dict[str, Callable[[Random], str]] = {
    "adjective": _any_of(w.ADJECTIVES),
    "animal": _any_of(w.ANIMALS),
    "city": w.city,
    "color": _any_of(w.COLORS),
    "common": _any_of(w.COMMON),
    "country": lambda rng: w.city(rng) if rng.random() < 0.2 else rng.choice(w.LISTS["countries"]),
    "day": _any_of(w.DAYS),
    "food": _any_of(w.FOODS),
    "foreign": _any_of(w.LISTS["foreign"]),
    "invented": w.invented,
    "job": _any_of(w.JOBS),
    "language": _any_of(w.LISTS["languages"]),
    "n": w.number,
    "name": w.name,
    "pick": _any_of(["color", "animal", "food", "city", "book", "movie", "number"]),
    "place": _any_of(w.PLACES),
    "thing": _any_of(w.THINGS),
    "time": _any_of(w.TIMES),
    "title": _any_of(w.TITLES),
    "topic": lambda rng: w.any_word(rng) if rng.random() < 0.2 else rng.choice(w.LISTS["topics"]),
    "word": lambda rng: rng.choice((w.plain_word, w.any_word, w.invented))(rng),
}


@cache
def _lines(mark: str) -> tuple[str, ...]:
    text = (page.FOLDER / "everyday.txt").read_text(encoding="utf-8")
    return tuple(line[2:] for line in text.splitlines() if line.startswith(mark))


def held_out() -> tuple[str, ...]:
    """Return the questions for the test."""
    return _lines("? ")


def _letters(text: str) -> str:
    return "".join(text.casefold().split()).rstrip("?.!")


@cache
def _forbidden() -> frozenset[str]:
    return frozenset(_letters(one) for one in held_out())


def is_held_out(question: str) -> bool:
    """Whether the question is one of the test, however it is spaced and punctuated."""
    return _letters(question) in _forbidden()


def question(rng: Random) -> str:
    """Return one of the trained questions."""
    return re.sub(r"{(\w+)}", lambda slot: _SLOTS[slot[1]](rng), rng.choice(_lines("- ")))
