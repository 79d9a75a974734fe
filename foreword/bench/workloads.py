"""The prompts of `foreword bench speculate` by category, generated and sized to the model's context, or read
from a file.

The same (category, number) gives the same conversation in every run on the same model. Words are those of
the bundled model's training; functions of the installed standard library are text that no model saw with
these edits.
"""

from __future__ import annotations

import ast
import itertools
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Protocol

# fmt: off
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo",
    "Mia", "Nora",
)
CITIES = (
    "Oslo", "Rome", "Paris", "Berlin", "Madrid", "Vienna", "Prague", "London", "Dublin", "Lisbon", "Athens",
    "Cairo",
)
JOBS = ("baker", "teacher", "doctor", "pilot", "farmer", "painter", "nurse", "lawyer", "singer", "driver")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
ANIMALS = ("cat", "dog", "fox", "bear", "mouse", "horse", "owl", "rabbit", "duck", "wolf")
THINGS = (
    "lamp", "book", "key", "stone", "cup", "ball", "hat", "coin", "map", "box", "bell", "clock", "basket",
    "mirror",
)
PLACES = (
    "forest", "village", "garden", "river", "mountain", "harbor", "castle", "market", "school", "valley",
)
ADJECTIVES = ("old", "small", "big", "bright", "quiet", "happy", "brave", "kind", "clever", "lazy")
VERBS = ("found", "sold", "moved", "saw", "lost", "painted", "carried", "opened")
VARIABLES = ("count", "total", "name", "price", "index", "value", "result", "limit", "start", "size")
MODULES = (
    "textwrap", "shlex", "heapq", "bisect", "fnmatch", "colorsys", "difflib", "statistics", "string",
    "configparser",
)
# fmt: on
MIN_FUNCTION_LINES, MAX_FUNCTION_LINES = 6, 40  # limits of an edited library function


def sentence(rng: Random) -> str:
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


def record(rng: Random) -> dict[str, str | int]:
    """Fields of a person or an item."""
    if rng.random() < 0.5:
        person: dict[str, str | int] = {"name": rng.choice(NAMES), "age": rng.randint(18, 90)}
        return person | {"city": rng.choice(CITIES), "job": rng.choice(JOBS)}
    item: dict[str, str | int] = {"item": rng.choice(THINGS), "color": rng.choice(COLORS)}
    return item | {"price": 5 * rng.randint(1, 100), "count": rng.randint(1, 20)}


def functions(rng: Random, variable: str | None = None) -> Iterator[str]:
    """Small Python functions; `variable` occurs in each."""
    while True:
        a = variable or rng.choice(VARIABLES)
        b = rng.choice([name for name in VARIABLES if name != a])
        thing, number = rng.choice(THINGS), rng.randint(2, 20)
        yield rng.choice(
            (
                f"def {thing}_{b}({a}, items):\n    {b} = 0\n    for item in items:\n"
                f"        {b} += item * {a}\n    return {b}\n",
                f"def check_{thing}({a}):\n    if {a} > {number}:\n"
                f"        return {a} - {number}\n    return {a}\n",
                f"def show_{thing}({a}, {b}):\n    print({a}, {b})\n    {b} = {b} + {a}\n    return {b}\n",
            )
        )


def library_functions() -> tuple[str, ...]:
    """Functions of medium length from the installed standard library, the same on each call."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for name in MODULES if (file := folder / f"{name}.py").is_file()]
    return tuple(text for file in files for text in _functions_of(file.read_text(encoding="utf-8")))


def _functions_of(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) if isinstance(node, ast.FunctionDef) else None
        if text is not None and MIN_FUNCTION_LINES <= text.count("\n") <= MAX_FUNCTION_LINES:
            yield text


def fill(pieces: Iterator[str], characters: int, separator: str = "\n") -> str:
    """Join pieces up to `characters`; the first is cut if it is longer."""
    taken = next(pieces)[:characters]
    while len(longer := taken + separator + next(pieces)) <= characters:
        taken = longer
    return taken


MIXED = "mixed"
ROLES = ("user", "assistant")
CODE_SAMPLE = "def check_lamp(count):\n    return count\n"
JSON_SAMPLE = '{"name": "Paul", "age": 42, "city": "Oslo", "job": "pilot"}'
PROSE_SAMPLE = "Anna found a red lamp in the forest. The clever fox moved the basket of Hugo."
CHAT_PROMPTS = (
    "What is speculative decoding?",
    "How can I turn off speculation?",
    "Does it run on a CPU?",
    "What is a draft model?",
    "Hello! What can you do for me?",
    "Why are the answers the same with and without speculation?",
    "What is the KV cache, and why does it matter?",
    "Which models can I serve?",
)
NUM_TURNS = 4  # turns of an agent conversation
VARIANT = 13_000  # conversations of a variant: a multiple of the number of categories
STORY_TEMPERATURE = 0.8
NOISE_TEMPERATURE = 100.0  # all tokens are about equally likely


class TokenSource(Protocol):
    """A model's tokenizer, here or behind a server."""

    def count(self, text: str) -> int:
        """Tokens of a text."""

    def plain_ids(self) -> Sequence[int]:
        """Ids of tokens without special meaning, for random prompts."""


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """Limits of a conversation."""

    prompt_tokens: int  # longest prompt
    answer_tokens: int  # longest ordinary answer
    code: float  # characters per token in code and JSON
    prose: float  # characters per token in sentences
    ids: Sequence[int]  # token ids of random prompts
    library: tuple[str, ...]  # functions of the standard library

    @classmethod
    def from_context(cls, max_len: int, answer_tokens: int, model: TokenSource) -> PromptBudget:
        """Limits within `max_len` tokens of prompt and answer."""
        code, json_, prose = (
            len(sample) / max(model.count(sample), 1) for sample in (CODE_SAMPLE, JSON_SAMPLE, PROSE_SAMPLE)
        )
        lengths = max_len // 2, min(answer_tokens, max_len // 4)
        return cls(*lengths, min(code, json_), prose, model.plain_ids(), library_functions())

    def num_chars(self, share: float, density: float) -> int:
        """Characters of a share of the prompt; one tenth is left for instructions and template."""
        return max(int(self.prompt_tokens * share * 0.9 * density), 16)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one client, each sent after the answer to the one before."""

    turns: tuple[str, ...] = ()  # user messages, or one text to continue (raw)
    history: tuple[tuple[str, str], ...] = ()  # (role, text) of messages before the first turn
    raw: bool = False
    prompt_ids: tuple[int, ...] = ()  # instead of turns
    prediction: str | None = None  # expected answer, as in the API
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    category: str = ""  # requested, which may be a mixture
    seed: int = 0  # first turn's seed; turn t has seed + t
    line: int = field(default=0, compare=False)  # number in a file of prompts, 1-based; 0: none

    @property
    def num_turns(self) -> int:
        return max(len(self.turns), 1)

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The request of the turn after `answers`."""
        pairs = [(ROLES[index % 2], text) for index, text in enumerate(interleave(self.turns, answers))]
        return [{"role": role, "content": text} for role, text in (*self.history, *pairs)]


def _chat(rng: Random, budget: PromptBudget) -> Conversation:
    """Short questions, half of them from a small fixed set."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    fresh = rng.choice(
        (
            f"Hello, I am {name}. Where can I buy a {thing}?",
            f"What did {name} do with the {thing} in the {place}?",
            f"Please explain to {name} why a {thing} is useful near the {place}.",
        )
    )
    return Conversation((rng.choice((fresh, rng.choice(CHAT_PROMPTS))),), max_tokens=budget.answer_tokens)


def _code_completion(rng: Random, budget: PromptBudget) -> Conversation:
    """Python that ends within a function like those before it."""
    text = fill(functions(rng, rng.choice(VARIABLES)), budget.num_chars(0.5, budget.code))
    return Conversation((text[: text.rindex("(") + 1],), raw=True, max_tokens=budget.answer_tokens)


def _code_edit(rng: Random, budget: PromptBudget) -> Conversation:
    old, new = rng.sample(VARIABLES, 2)
    text = fill(functions(rng, old), budget.num_chars(0.5, budget.code))
    return Conversation(
        (f"Rename the variable {old} to {new}:\n{text}",), max_tokens=_tokens_for(text, budget)
    )


def _json(rng: Random, budget: PromptBudget) -> Conversation:
    """Facts to be written as JSON."""
    records = [", ".join(f"{name}={value}" for name, value in record(rng).items()) for _ in range(2)]
    return Conversation((f"Turn this into JSON: {'; '.join(records)}",), max_tokens=budget.answer_tokens)


def _repeat(
    rng: Random, budget: PromptBudget, words: Sequence[str] = THINGS, share: float = 0.4, most: float = 0.5
) -> Conversation:
    """Sentences with one of the words replaced. share: of the prompt; most: as of _tokens_for()"""
    old, new = rng.sample(words, 2)
    text = fill(iter(partial(sentence, rng), None), budget.num_chars(share, budget.prose), " ")
    return Conversation(
        (f"Replace the word {old} with {new}:\n{text}",), max_tokens=_tokens_for(text, budget, most)
    )


def _predicted(rng: Random, budget: PromptBudget) -> Conversation:
    """_repeat with the unchanged text as `prediction`."""
    script = _repeat(rng, budget)
    return replace(script, prediction=script.turns[0].partition("\n")[2])


def _long_document(rng: Random, budget: PromptBudget) -> Conversation:
    text = fill(iter(partial(_json_record, rng), None), budget.num_chars(1.0, budget.code))
    question = rng.choice(("Which cities are named?", "What is the price of the lamp?", "Who is the oldest?"))
    return Conversation((f"{question}\n{text}",), max_tokens=budget.answer_tokens)


def _long_rewrite(rng: Random, budget: PromptBudget) -> Conversation:
    return _repeat(rng, budget, COLORS, share=0.8, most=1.0)


def _long_answer(rng: Random, budget: PromptBudget) -> Conversation:
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    prompt = f"Tell me a long story about {name}, a {thing} and the {place}."
    return Conversation(
        (prompt,),
        max_tokens=min(4 * budget.answer_tokens, budget.prompt_tokens),
        temperature=STORY_TEMPERATURE,
    )


def _agent(rng: Random, budget: PromptBudget) -> Conversation:
    """Each turn shows a file and asks for it with one more change; the history grows."""
    names = rng.sample(VARIABLES, NUM_TURNS + 1)
    text = fill(functions(rng, names[0]), budget.num_chars(0.6 / NUM_TURNS, budget.code))
    turns = tuple(
        f"Tool: {_json_record(rng)}\nRename {old} to {new} and show the file:\n{text.replace(names[0], old)}"
        for old, new in itertools.pairwise(names)
    )
    return Conversation(turns, max_tokens=min(_tokens_for(text, budget), budget.prompt_tokens // NUM_TURNS))


def _random(rng: Random, budget: PromptBudget) -> Conversation:
    """The adversary: random tokens in and out, with nothing to look up.

    A draft model still drafts well: its noise is the target's, and noise alone decides here.
    """
    ids = tuple(rng.choices(budget.ids, k=max(budget.prompt_tokens // 4, 1)))
    return Conversation(
        prompt_ids=ids, max_tokens=budget.answer_tokens, temperature=NOISE_TEMPERATURE, ignore_eos=True
    )


def _library_edit(rng: Random, budget: PromptBudget) -> Conversation:
    text = rng.choice(budget.library)[: budget.num_chars(0.6, budget.code)]
    words = sorted(
        {
            word
            for word in text.replace("(", " ").replace(",", " ").split()
            if word.isidentifier() and len(word) > 3
        }
    )
    return Conversation(
        (f"Rename {rng.choice(words)} to {rng.choice(THINGS)}:\n{text}",),
        max_tokens=_tokens_for(text, budget, most=1.0),
    )


def _library_continuation(rng: Random, budget: PromptBudget) -> Conversation:
    text = fill(_shuffle(rng, budget.library), budget.num_chars(0.8, budget.code), "\n\n\n")
    return Conversation((text[: -len(text) // 8],), raw=True, max_tokens=budget.answer_tokens)


CATEGORIES: Mapping[str, Callable[[Random, PromptBudget], Conversation]] = MappingProxyType(
    {
        "chat": _chat,
        "code completion": _code_completion,
        "code edit": _code_edit,
        "json": _json,
        "repeat": _repeat,
        "predicted": _predicted,
        "long document": _long_document,
        "long rewrite": _long_rewrite,
        "long answer": _long_answer,
        "agent": _agent,
        "random": _random,
        "library edit": _library_edit,
        "library continuation": _library_continuation,
    }
)
ALL_CATEGORIES = (*CATEGORIES, MIXED)
QUICK_CATEGORIES = ("chat", "code edit", "agent", "random")


ConversationFactory = Callable[[str, int, int], tuple[Conversation, ...]]  # (category, count, variant)


def make_conversations(
    category: str, count: int, variant: int, budget: PromptBudget
) -> tuple[Conversation, ...]:
    """The first `count` conversations of a category; every variant has others."""
    return tuple(make_conversation(category, variant * VARIANT + number, budget) for number in range(count))


def make_conversation(category: str, number: int, budget: PromptBudget) -> Conversation:
    """A mixture takes the categories in turn."""
    kind = tuple(CATEGORIES)[number % len(CATEGORIES)] if category == MIXED else category
    made = CATEGORIES[kind](Random(stable_seed(kind, number)), budget)
    return replace(made, category=category, seed=stable_seed(category, number))


def prompt_conversations(
    category: str, count: int, variant: int, examples: Sequence[Conversation], max_tokens: int
) -> tuple[Conversation, ...]:
    """Greedy conversations with prompts of a file; each variant takes the next `count` of the category."""
    own = [example for example in examples if example.category == category]
    numbers = range(variant * count, variant * count + count)
    return tuple(
        replace(own[number % len(own)], max_tokens=max_tokens, seed=stable_seed(category, number))
        for number in numbers
    )


def stable_seed(text: str, number: int) -> int:
    """The same in every process, unlike hash()."""
    return zlib.crc32(f"{text} {number}".encode())


def interleave(turns: Sequence[str], history: Sequence[str]) -> list[str]:
    """Turn, answer, turn, ... up to the next turn; `history` holds the answers so far."""
    parts = [part for pair in zip(turns, history, strict=False) for part in pair]
    return [*parts, turns[len(history)]]


def _tokens_for(text: str, budget: PromptBudget, most: float = 0.5) -> int:
    """Tokens of an answer that repeats a text, at most a share of the prompt's."""
    return max(
        min(int(1.2 * len(text) / min(budget.code, budget.prose)), int(most * budget.prompt_tokens)), 8
    )


def _shuffle(rng: Random, texts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(texts, len(texts))


def _json_record(rng: Random) -> str:
    return json.dumps(record(rng))
