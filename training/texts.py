"""Passages to be edited: sentences, random words, lists, settings, JSON objects."""

import json
import keyword
import re
from collections.abc import Callable
from random import Random

from training import page
from training import words as w


def sentence(rng: Random) -> str:
    """Return one simple sentence about known things."""
    who, verb, color, thing = (
        w.name(rng),
        rng.choice(w.VERBS_PAST),
        rng.choice(w.COLORS),
        rng.choice(w.THINGS),
    )
    place, adjective, animal = rng.choice(w.PLACES), rng.choice(w.ADJECTIVES), rng.choice(w.ANIMALS)
    return rng.choice(
        (
            f"{who} {verb} a {color} {thing} in the {place}.",
            f"The {adjective} {animal} {verb} the {thing} of {who}.",
            f"{who} lives in {w.city(rng)} and has a {adjective} {animal}.",
            f"On {rng.choice(w.DAYS)} we {verb} {w.number(rng)} {rng.choice(w.FOODS)} near the {place}.",
            f"My {rng.choice(w.JOBS)} {verb} the {color} {thing} {rng.choice(w.TIMES)}.",
            f"There is a {adjective} {thing} in the {color} {rng.choice(w.THINGS)}.",
            f"Please send the {rng.choice(w.TITLES)} to {who} at {w.number(rng)} by {rng.choice(w.DAYS)}.",
            f"The {thing} costs {w.number(rng)} coins and the {rng.choice(w.FOODS)} are {adjective}.",
            f"{who} and {w.name(rng)} {verb} {w.invented(rng)} {rng.choice(w.TIMES)}.",
        )
    )


def english(rng: Random) -> str:
    """Return common words in random order, with punctuation."""
    some = [
        rng.choice(w.COMMON) if rng.random() < 0.85 else w.any_word(rng) for _ in range(rng.randint(4, 14))
    ]
    marks = [rng.choice((",", ";", " -", ":")) if rng.random() < 0.1 else "" for _ in some[1:]]
    text = " ".join(word + mark for word, mark in zip(some, [*marks, ""], strict=True))
    return text[0].upper() + text[1:] + rng.choice("....!?")


def code(rng: Random) -> tuple[str, list[str]]:
    """Return a few lines of Python and the variables in them."""
    a, b, c, f = (
        w.invented(rng) if rng.random() < 0.4 else rng.choice(w.THINGS + w.ANIMALS + w.COMMON) for _ in "abcd"
    )
    if len({a, b, c, f}) < 4 or not {a, b, c, f}.isdisjoint(_KEYWORDS):
        return code(rng)
    n, m, op = w.number(rng), w.number(rng), rng.choice("+-*")
    snippet = rng.choice(
        (
            f"def {f}({a}, {b}):\n    {c} = {a} {op} {b}\n    return {c} {op} {n}",
            f"for {a} in {b}:\n    print({a}, {c})\n    {c} = {c} {op} {a}",
            f"{a} = {n}\n{b} = {m}\n{c} = {a} {op} {b}\nprint({c}, {a})",
            f"def {f}({a}):\n    if {a} > {n}:\n        return {m}\n"
            f"    {b} = [{c} for {c} in range({a})]\n    return {b}",
            f"while {a} < {n}:\n    {a} += {b}\n    if {a} == {c}:\n        {c} = {m}",
            f'{a} = {{"{b}": {n}}}\n{a}["{c}"] = {m}\nreturn {a}',
            f"with open({a}) as {b}:\n    {c} = {b}.read()\n    {f}({c}, {a})",
            f"class {f.capitalize()}:\n    def {a}(self, {b}):\n"
            f"        self.{c} = {b}\n        return {b} {op} {n}",
        )
    )
    return snippet, [one for one in (a, b, c) if one in re.findall(r"\w+", snippet)]


_KEYWORDS = frozenset(keyword.kwlist) | {"print", "range", "open", "read", "self"}


def salad(rng: Random, count: int) -> str:
    """Return `count` unrelated words, sometimes with commas."""
    comma = 0.15 if rng.random() < 0.3 else 0.0
    return " ".join(w.any_word(rng) + ("," if rng.random() < comma else "") for _ in range(count)).rstrip(",")


def settings(rng: Random, count: int) -> str:
    """Return `count` lines of the form `word = value`."""
    lines = []
    for _ in range(count):
        key = w.invented(rng) if rng.random() < 0.5 else rng.choice(w.THINGS)
        lines.append(f"{key} = {rng.choice((w.number, w.plain_word))(rng)}")
    return "\n".join(lines)


def passage(rng: Random, size: int) -> str:
    """Return prose, a word salad, code or settings; `size` is roughly its number of sentences."""
    kind = rng.random()
    if kind < 0.7:
        one = rng.choice(
            (sentence, sentence, sentence, english, english, lambda rng: rng.choice(page.sentences()))
        )
        return rng.choice((" ", " ", " ", "\n")).join(one(rng) for _ in range(size))
    if kind < 0.88:
        return salad(rng, rng.randint(3, 5 + 6 * size))
    if kind < 0.94:
        return "\n\n".join(code(rng)[0] for _ in range((size + 2) // 3))
    return settings(rng, rng.randint(2, 2 + size))


def items(rng: Random, count: int) -> list[str]:
    """Return `count` different list entries."""
    pool = rng.choice((w.FOODS, w.THINGS, w.ANIMALS, w.COLORS, w.CITIES, None))
    if pool is None:
        return list(dict.fromkeys(w.invented(rng) for _ in range(count)))
    return rng.sample(pool, min(count, len(pool)))


def _rarely(rng: Random, odd: Callable[[Random], str], usual: list[str]) -> str:
    """Mostly a known word: " Mira" in a description and "Mira in JSON are different tokens to memorize."""
    return odd(rng) if rng.random() < 0.08 else rng.choice(usual)


_FIELDS = {
    "name": lambda rng: _rarely(rng, w.name, w.NAMES),
    "age": lambda rng: rng.randrange(1, 99),
    "city": lambda rng: _rarely(rng, w.city, w.CITIES),
    "job": lambda rng: rng.choice(w.JOBS),
    "color": lambda rng: rng.choice(w.COLORS),
    "item": lambda rng: rng.choice(w.THINGS),
    "price": lambda rng: rng.randrange(1, 1000),
    "count": lambda rng: rng.randrange(1, 100),
    "animal": lambda rng: rng.choice(w.ANIMALS),
    "day": lambda rng: rng.choice(w.DAYS),
    "title": lambda rng: rng.choice(w.TITLES),
    "open": lambda rng: rng.random() < 0.5,
    "code": lambda rng: rng.choice("ABCDEFGHKLMNPRSTVWXZ") + w.number(rng),
    "size": lambda rng: rng.randrange(1, 50),
}

FIELD_NAMES = tuple(_FIELDS)


def value(rng: Random, field: str) -> str | int | bool:
    """Return a plausible value for a field."""
    return _FIELDS[field](rng)


def record(rng: Random, low: int = 2, high: int = 6) -> dict[str, str | int | bool]:
    """Return a flat object with `low` to `high` fields."""
    count = min(rng.randint(low, high), len(FIELD_NAMES) - 2)
    return {field: value(rng, field) for field in rng.sample(FIELD_NAMES, count)}


def as_json(fields: dict[str, str | int | bool], pretty: bool) -> str:
    """Write an object on one line, or indented by two blanks."""
    return json.dumps(fields, ensure_ascii=False, indent=2 if pretty else None)


def table(rng: Random, count: int) -> list[dict[str, str | int | bool]]:
    """Return `count` records with the same fields, the first of which names the record."""
    key = rng.choice(("name", "item", "animal", "city"))
    others = rng.sample([one for one in FIELD_NAMES if one != key], rng.randint(1, 3))
    pool = {"name": w.NAMES, "item": w.THINGS, "animal": w.ANIMALS, "city": w.CITIES}[key]
    names = rng.sample(pool, min(count, len(pool)))
    return [{key: one} | {field: value(rng, field) for field in others} for one in names]


def bare(value_: str | int | bool) -> str:
    """Write a value without quotes."""
    return value_ if isinstance(value_, str) else json.dumps(value_)
