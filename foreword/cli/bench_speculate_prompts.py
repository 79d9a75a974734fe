"""The categories of `foreword bench speculate`: what users ask, generated, sized to the model's context.

A category is a function of a random source and of the room there is. Requests are greedy, except long answers and those
of the adversary. The same (category, number) is the same script in every run on the same model.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from foreword.cli.bench_speculate_texts import (
    COLORS,
    NAMES,
    PLACES,
    THINGS,
    VARIABLES,
    fill,
    functions,
    lines,
    record,
    sentences,
    spoken,
)

__all__ = ["ALL", "CATEGORIES", "MIXED", "QUICK", "Category", "Room", "Script", "script_of", "scripts_of", "seed_of", "woven"]

MIXED = "mixed"
CODE = "def check_lamp(count):\n    return count\n"
JSON = '{"name": "Paul", "age": 42, "city": "Oslo", "job": "pilot"}'
PROSE = "Anna found a red lamp in the forest. The clever fox moved the basket of Hugo."
CHAT = (
    "What is speculative decoding?",
    "How can I turn off speculation?",
    "Does it run on a CPU?",
    "What is a draft model?",
    "Hello! What can you do for me?",
    "Why are the answers the same with and without speculation?",
    "What is the KV cache, and why does it matter?",
    "Which models can I serve?",
)
TURNS = 4  # of an agent's loop
VARIANT = 13_000  # scripts before the next variant begins: a multiple of the number of categories
STORY = 0.8  # temperature of long answers
NOISE = 100.0  # temperature at which every token is about as likely as any other


@dataclass(frozen=True, slots=True)
class Room:
    """What a script may fill.

    prompt_tokens  of one request, at most
    answer_tokens  of an ordinary answer, at most
    code           characters of a token in code and JSON
    prose          characters of a token in plain sentences
    ids            token ids that a random prompt is drawn from
    library        functions of the standard library
    """

    prompt_tokens: int
    answer_tokens: int
    code: float
    prose: float
    ids: Sequence[int]
    library: tuple[str, ...]

    @classmethod
    def of(
        cls, reach: int, answer_tokens: int, count: Callable[[str], int], ids: Sequence[int], library: tuple[str, ...]
    ) -> Room:
        """`reach` tokens for a prompt and its answer together, as `count` counts them."""
        code, json_, prose = (len(sample) / max(count(sample), 1) for sample in (CODE, JSON, PROSE))
        return cls(reach // 2, min(answer_tokens, reach // 4), min(code, json_), prose, ids, library)

    def part(self, share: float, density: float) -> int:
        """Characters of a part of the prompt; one tenth stays for instructions and the template."""
        return max(int(self.prompt_tokens * share * 0.9 * density), 16)


@dataclass(frozen=True, slots=True)
class Script:
    """What one client asks, turn by turn; a later turn is asked when the answer before it is there.

    turns       user messages, or one text to go on with (raw)
    prompt_ids  the prompt itself, instead of turns
    prediction  what the caller expects the answer to be, or None
    category    what was asked for, not what a mixture took
    seed        of its first turn; turn t has seed + t
    """

    turns: tuple[str, ...] = ()
    raw: bool = False
    prompt_ids: tuple[int, ...] = ()
    prediction: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    category: str = ""
    seed: int = 0

    @property
    def num_turns(self) -> int:
        return max(len(self.turns), 1)


@dataclass(frozen=True, slots=True)
class Category:
    """What it stands for, and how one script of it is made."""

    help: str
    make: Callable[[Random, Room], Script]


def _chat(rng: Random, room: Room) -> Script:
    """Half of them are asked again and again, as in a shop."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    fresh = rng.choice(
        (
            f"Hello, I am {name}. Where can I buy a {thing}?",
            f"What did {name} do with the {thing} in the {place}?",
            f"Please explain to {name} why a {thing} is useful near the {place}.",
        )
    )
    return Script((rng.choice((fresh, rng.choice(CHAT))),), max_tokens=room.answer_tokens)


def _code_completion(rng: Random, room: Room) -> Script:
    """Ends in the middle of a function like those before it."""
    text = fill(functions(rng, rng.choice(VARIABLES)), room.part(0.5, room.code))
    return Script((text[: text.rindex("(") + 1],), raw=True, max_tokens=room.answer_tokens)


def _code_edit(rng: Random, room: Room) -> Script:
    old, new = rng.sample(VARIABLES, 2)
    text = fill(functions(rng, old), room.part(0.5, room.code))
    return Script((f"Rename the variable {old} to {new}:\n{text}",), max_tokens=_as_long_as(text, room))


def _json(rng: Random, room: Room) -> Script:
    asked = "; ".join(spoken(record(rng)) for _ in range(2))
    return Script((f"Turn this into JSON: {asked}",), max_tokens=room.answer_tokens)


def _repeat(rng: Random, room: Room) -> Script:
    old, new = rng.sample(THINGS, 2)
    text = fill(sentences(rng), room.part(0.4, room.prose), " ")
    return Script((f"Replace the word {old} with {new}:\n{text}",), max_tokens=_as_long_as(text, room))


def _predicted(rng: Random, room: Room) -> Script:
    """The same, and the caller sends the text before the change as the expected answer."""
    script = _repeat(rng, room)
    return Script(script.turns, prediction=script.turns[0].partition("\n")[2], max_tokens=script.max_tokens)


def _long_document(rng: Random, room: Room) -> Script:
    text = fill(lines(rng), room.part(1.0, room.code))
    asked = rng.choice(("Which cities are named?", "What is the price of the lamp?", "Who is the oldest?"))
    return Script((f"{asked}\n{text}",), max_tokens=room.answer_tokens)


def _long_rewrite(rng: Random, room: Room) -> Script:
    old, new = rng.sample(COLORS, 2)
    text = fill(sentences(rng), room.part(0.8, room.prose), " ")
    return Script((f"Replace the word {old} with {new}:\n{text}",), max_tokens=_as_long_as(text, room, most=1.0))


def _long_answer(rng: Random, room: Room) -> Script:
    asked = f"Tell me a long story about {rng.choice(NAMES)}, a {rng.choice(THINGS)} and the {rng.choice(PLACES)}."
    return Script((asked,), max_tokens=min(4 * room.answer_tokens, room.prompt_tokens), temperature=STORY)


def _agent(rng: Random, room: Room) -> Script:
    """Each turn shows the file as it stands and wants it back with one more change: the history holds all of them."""
    names = rng.sample(VARIABLES, TURNS + 1)
    text = fill(functions(rng, names[0]), room.part(0.6 / TURNS, room.code))
    turns = tuple(
        f"Tool: {json.dumps(record(rng))}\nRename {old} to {new} and show the file:\n{text.replace(names[0], old)}"
        for old, new in itertools.pairwise(names)
    )
    return Script(turns, max_tokens=min(_as_long_as(text, room), room.prompt_tokens // TURNS))


def _random(rng: Random, room: Room) -> Script:
    """Nothing in it can be looked up: every token of prompt and answer is about as likely as any other.

    A draft model has the same noise as the model, and noise is all that counts here: it guesses even this.
    """
    ids = tuple(rng.choices(room.ids, k=max(room.prompt_tokens // 4, 1)))
    return Script(prompt_ids=ids, max_tokens=room.answer_tokens, temperature=NOISE, ignore_eos=True)


def _library_edit(rng: Random, room: Room) -> Script:
    text = rng.choice(room.library)[: room.part(0.6, room.code)]
    words = sorted({word for word in text.replace("(", " ").replace(",", " ").split() if word.isidentifier() and len(word) > 3})
    return Script((f"Rename {rng.choice(words)} to {rng.choice(THINGS)}:\n{text}",), max_tokens=_as_long_as(text, room, most=1.0))


def _library_continuation(rng: Random, room: Room) -> Script:
    text = fill(_shuffled(rng, room.library), room.part(0.8, room.code), "\n\n\n")
    return Script((text[: -len(text) // 8],), raw=True, max_tokens=room.answer_tokens)


CATEGORIES: Mapping[str, Category] = MappingProxyType(
    {
        "chat": Category("short questions", _chat),
        "code completion": Category("Python that goes on like what stands above it", _code_completion),
        "code edit": Category("a variable gets another name", _code_edit),
        "json": Category("facts from a sentence, as JSON", _json),
        "repeat": Category("a text again, with one word replaced", _repeat),
        "predicted": Category("the same, with the text as `prediction`", _predicted),
        "long document": Category("a question on a long document", _long_document),
        "long rewrite": Category("long input, long output: a long text with changes", _long_rewrite),
        "long answer": Category("a short prompt with a long answer", _long_answer),
        "agent": Category(f"{TURNS} turns, each with everything before it", _agent),
        "random": Category("the adversary: random tokens in, random tokens out", _random),
        "library edit": Category("a name changed in functions of the installed standard library", _library_edit),
        "library continuation": Category("functions of the installed standard library, continued", _library_continuation),
    }
)
ALL = (*CATEGORIES, MIXED)
QUICK = ("chat", "code edit", "agent", "random")


def scripts_of(category: str, count: int, variant: int, room: Room) -> tuple[Script, ...]:
    """The first `count` scripts of a category, or of one after the other; other variants are other scripts."""
    return tuple(script_of(category, variant * VARIANT + number, room) for number in range(count))


def script_of(category: str, number: int, room: Room) -> Script:
    """One script; a mixture takes the categories in turn."""
    kind = tuple(CATEGORIES)[number % len(CATEGORIES)] if category == MIXED else category
    made = CATEGORIES[kind].make(Random(seed_of(kind, number)), room)
    return replace(made, category=category, seed=seed_of(category, number))


def seed_of(text: str, number: int) -> int:
    """The same in every process, unlike hash()."""
    return zlib.crc32(f"{text} {number}".encode())


def woven(turns: Sequence[str], history: Sequence[str]) -> list[str]:
    """Turn, answer, turn, ... up to the turn that is asked next; `history` holds the answers to those before."""
    parts = [part for pair in zip(turns, history, strict=False) for part in pair]
    return [*parts, turns[len(history)]]


def _as_long_as(text: str, room: Room, most: float = 0.5) -> int:
    """Tokens of an answer that gives a text back, with a little to spare; at most a share of what a prompt may have."""
    return max(min(int(1.2 * len(text) / min(room.code, room.prose)), int(most * room.prompt_tokens)), 8)


def _shuffled(rng: Random, texts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(texts, len(texts))
