"""The lexicon of the generated text, and invented words.

Closed lists suit a few million parameters; invented words make the model copy, since they cannot be
memorized.
"""

import re
from pathlib import Path
from random import Random

_TEXT = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8")
LISTS = {title: words.split() for title, words in re.findall(r"\[(\w+)\]\n([^\[]+)", _TEXT)}

NAMES = LISTS["names"]
CITIES = LISTS["cities"]
JOBS = LISTS["jobs"]
COLORS = LISTS["colors"]
ANIMALS = LISTS["animals"]
THINGS = LISTS["things"]
FOODS = LISTS["foods"]
PLACES = LISTS["places"]
ADJECTIVES = LISTS["adjectives"]
VERBS_PAST = LISTS["verbs_past"]
TIMES = LISTS["times"]
DAYS = LISTS["days"]
TITLES = LISTS["titles"]
COMMON = LISTS["common"]

UPPER_WORDS = tuple(ANIMALS + COLORS + THINGS + PLACES + FOODS + ADJECTIVES + VERBS_PAST)
_ONSETS = LISTS["onsets"]
_VOWELS = LISTS["vowels"]
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k"]
_FOREIGN = LISTS["foreign"]


def invented(rng: Random) -> str:
    """Return a pronounceable lower-case word of one to three syllables."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def number(rng: Random) -> str:
    """Return a decimal number of one to four digits."""
    return str(rng.randrange(10 ** rng.choice((1, 2, 2, 2, 3, 4))))


def name(rng: Random) -> str:
    """Return a first name, one in four of them invented."""
    return invented(rng).capitalize() if rng.random() < 0.25 else rng.choice(NAMES)


def city(rng: Random) -> str:
    """Return a city, one in five of them invented."""
    return invented(rng).capitalize() if rng.random() < 0.2 else rng.choice(CITIES)


def plain_word(rng: Random) -> str:
    """Return a lower-case word of the lexicon."""
    return rng.choice(rng.choice((ANIMALS, COLORS, THINGS, PLACES, FOODS, ADJECTIVES, JOBS, VERBS_PAST)))


def odd_word(rng: Random) -> str:
    """Return a token that is no word: a price, date, time, address, path, code, camel-case name."""
    a, b, n = invented(rng), rng.choice((invented, plain_word))(rng), number(rng)
    letters = "".join(
        rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(6)
    )
    return rng.choice(
        (
            f"${n}.{rng.randrange(100):02}",
            f"20{rng.randrange(10, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
            f"{rng.randrange(24)}:{rng.randrange(60):02}",
            f"{a}@{b}.org",
            f"/{a}/{b}.txt",
            f"{a}-{b}",
            f"{a}_{b}",
            f"{a}{b.capitalize()}",
            f"{a}.{b}()",
            a.upper(),
            f"({b})",
            f'"{b}"',
            f"{b}'s",
            f"{n}%",
            f"#{n}",
            letters,
        )
    )


def any_word(rng: Random) -> str:
    """Return a word of any kind: known, invented, capitalised, a number, rarely foreign script."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice((plain_word(rng), rng.choice(COMMON)))
    if kind < 0.75:
        return invented(rng)
    if kind < 0.84:
        return name(rng)
    if kind < 0.98:
        return rng.choice((number, odd_word))(rng)
    return rng.choice(_FOREIGN)


def choose_skewed(rng: Random, options: tuple[str, ...]) -> str:
    """Choose with falling weights (1, 1/2, 1/4 ...).

    A skewed choice makes the greedy answer well defined; two models would disagree on equally likely words.
    """
    return rng.choices(options, weights=[0.5**i for i in range(len(options))])[0]
