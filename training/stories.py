"""Templated stories: a person, an animal, a thing and a place, found, lost and brought home."""

import re
from itertools import product
from random import Random

from training import words as w


def _prompt(rng: Random, who: str, animal: str, thing: str, place: str, long: bool) -> str:
    if long:
        return rng.choice(
            (
                f"Tell me a long story about {who}, a {animal} and a {thing} in the {place}.",
                f"Write a long story about {who}, a {animal}, a {thing} and the {place}.",
            )
        )
    return rng.choice(
        (
            f"Tell me a story about {who}, a {animal} and a {thing} in the {place}.",
            f"Write a short story about {who}, a {animal}, a {thing} and the {place}.",
            f"A story with {who}, a {animal} and a {thing} in the {place}, please.",
            f"Please tell a story about {who}. There should be a {animal}, a {thing} and a {place}.",
        )
    )


def _beginning(rng: Random, who: str, place: str) -> str:
    return w.choose_skewed(
        rng,
        (
            f"Once upon a time {who} lived near the {place}.",
            f"There once was a child named {who} who loved the {place}.",
            f"One day {who} went to the {place}.",
        ),
    )


def _meeting(rng: Random, who: str, animal: str, place: str) -> str:
    adjective = w.choose_skewed(rng, ("small", "old", "clever", "happy"))
    return w.choose_skewed(
        rng,
        (
            f"In the {place} {who} met a {adjective} {animal}.",
            f"A {adjective} {animal} sat in the {place} and looked at {who}.",
            f"There {who} saw a {adjective} {animal}.",
        ),
    )


def _trouble(rng: Random, animal: str, thing: str, place: str) -> str:
    return w.choose_skewed(
        rng,
        (
            f'"I have lost my {thing}," said the {animal}. "Can you help me?"',
            f"The {animal} was sad, because the {thing} was gone.",
            f"The {animal} had a {thing}, but it fell into the river by the {place}.",
        ),
    )


def _journey(rng: Random, who: str, animal: str, thing: str, place: str) -> str:
    """Return the middle of a long story, six sentences."""
    weather = w.choose_skewed(rng, ("The sun was warm", "It began to rain", "The wind was cold"))
    food = w.choose_skewed(rng, ("bread", "apples", "cheese", "soup"))
    day = w.choose_skewed(rng, ("the next morning", "after a long rest", "at night"))
    choices = (
        (
            f'"Do not worry," said {who}. "We will find the {thing} together."',
            f'"Come with me," said {who} to the {animal}.',
        ),
        (f"{weather}, and they walked a long way through the {place}.",),
        (
            f"First they asked an old farmer, but he had not seen the {thing}.",
            f"First they looked behind every tree, but there was no {thing}.",
        ),
        (
            f"Then they were hungry, so {who} shared some {food} with the {animal}.",
            f"Then the {animal} was tired, and {who} gave it some {food}.",
        ),
        (f"But {day} they went on, and {who} sang a song.", f"But {day} the {animal} heard a strange sound."),
        (
            f"They were close to the {thing} now, and {who} was not afraid.",
            f"The {animal} ran ahead, and {who} followed as fast as possible.",
        ),
    )
    return " ".join(w.choose_skewed(rng, one) for one in choices)


def _search(rng: Random, who: str, animal: str, thing: str) -> str:
    colour = w.choose_skewed(rng, ("red", "green", "white", "old"))
    return w.choose_skewed(
        rng,
        (
            f"{who} and the {animal} looked everywhere, "
            f"and at last they found the {thing} under a {colour} stone.",
            f"They searched all day. In the evening {who} saw the {thing} behind a {colour} door.",
            f"{who} called a friend, and together they pulled the {thing} out of a {colour} box.",
        ),
    )


def _ending(rng: Random, who: str, animal: str, thing: str) -> str:
    return w.choose_skewed(
        rng,
        (
            f"The {animal} thanked {who}, and they were friends from then on.",
            f'"Thank you, {who}," said the {animal}, and they shared some bread and honey.',
            f"{who} gave the {thing} to the {animal} and went home happy.",
        ),
    )


def story(rng: Random, long: bool) -> tuple[str, str, bool]:
    """Return prompt, story, and whether it is a chat; a plain completion has the first sentence as prompt."""
    who, animal = w.name(rng), rng.choice(w.ANIMALS)
    thing, place = rng.choice(w.THINGS), rng.choice(w.PLACES)
    first = _beginning(rng, who, place)
    rest = " ".join(
        (
            _meeting(rng, who, animal, place),
            _trouble(rng, animal, thing, place),
            *((_journey(rng, who, animal, thing, place),) if long else ()),
            _search(rng, who, animal, thing),
            _ending(rng, who, animal, thing),
        )
    )
    if not long and rng.random() < 0.3:
        return first, " " + rest, False
    return _prompt(rng, who, animal, thing, place, long), f"{first} {rest}", True


def _matches_parts(parts: list[set[str]], text: str) -> bool:
    """Whether the text is one option of each part, in order."""
    if not parts:
        return not text
    return any(
        _matches_parts(parts[1:], text[len(one) :].removeprefix(" "))
        for one in parts[0]
        if text.startswith(one)
    )


def is_story(prompt: str, text: str) -> bool:
    """Whether a text is a story of this grammar with the person, animal, thing and place of its prompt.

    Animal and thing that a plain prompt leaves open may be any that the text keeps to.
    """
    names = [one for one in re.findall(r"[A-Z]\w+", prompt) if one not in _NO_NAMES]
    options = []
    for pool in (w.ANIMALS, w.THINGS, w.PLACES):
        source = prompt if contains_any(prompt, pool) else text
        options.append([word for word in pool if word in source])
    casts = product(names, *options)
    whole = text if contains_any(prompt, w.ANIMALS) else prompt + text
    return any(_fits("long story" in prompt, whole, *cast) for cast in casts)


_NO_NAMES = frozenset(("Tell", "Write", "A", "Please", "There", "Once", "One", "In"))


def contains_any(text: str, pool: list[str]) -> bool:
    """Whether the text contains a word of the pool."""
    return not set(re.findall(r"\w+", text)).isdisjoint(pool)


def _fits(long: bool, text: str, who: str, animal: str, thing: str, place: str) -> bool:
    rng, draws = Random(0), range(1200)  # the rarest option has a chance of 1 in 105
    parts = [
        {_beginning(rng, who, place) for _ in draws},
        {_meeting(rng, who, animal, place) for _ in draws},
        {_trouble(rng, animal, thing, place) for _ in draws},
        *([{_journey(rng, who, animal, thing, place) for _ in range(20_000)}] if long else []),
        {_search(rng, who, animal, thing) for _ in draws},
        {_ending(rng, who, animal, thing) for _ in draws},
    ]
    return _matches_parts(parts, text)
