"""The categories of `foreword bench speculate`: what users ask, generated, sized to the model's context.

A category is a function of a random source and of the room there is. Requests are greedy, except long answers and those
of the adversary. The same (category, number) is the same script in every run on the same model.

What the prompts of `foreword bench speculate` are made of: words, records, code, and the installed standard library.

Everything is a function of the random source. The words are those that the bundled model knows; the standard
library's sources are text that nobody trained on together with the edits that are asked for.
"""

from __future__ import annotations

import ast
import itertools
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import MappingProxyType

__all__ = [
    "ALL_CATEGORIES",
    "CATEGORIES",
    "MIXED",
    "QUICK_CATEGORIES",
    "Conversation",
    "PromptBudget",
    "PromptCategory",
    "fill",
    "functions",
    "interleave",
    "json_lines",
    "library_functions",
    "make_conversation",
    "make_conversations",
    "record",
    "record_in_words",
    "sentence",
    "sentences",
    "stable_seed",
]

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karla",
    "Leo",
    "Mia",
    "Nora",
)
CITIES = (
    "Oslo",
    "Rome",
    "Paris",
    "Berlin",
    "Madrid",
    "Vienna",
    "Prague",
    "London",
    "Dublin",
    "Lisbon",
    "Athens",
    "Cairo",
)
JOBS = ("baker", "teacher", "doctor", "pilot", "farmer", "painter", "nurse", "lawyer", "singer", "driver")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
ANIMALS = ("cat", "dog", "fox", "bear", "mouse", "horse", "owl", "rabbit", "duck", "wolf")
THINGS = (
    "lamp",
    "book",
    "key",
    "stone",
    "cup",
    "ball",
    "hat",
    "coin",
    "map",
    "box",
    "bell",
    "clock",
    "basket",
    "mirror",
)
PLACES = (
    "forest",
    "village",
    "garden",
    "river",
    "mountain",
    "harbor",
    "castle",
    "market",
    "school",
    "valley",
)
ADJECTIVES = ("old", "small", "big", "bright", "quiet", "happy", "brave", "kind", "clever", "lazy")
VERBS = ("found", "sold", "moved", "saw", "lost", "painted", "carried", "opened")
VARIABLES = ("count", "total", "name", "price", "index", "value", "result", "limit", "start", "size")
MODULES = (
    "textwrap",
    "shlex",
    "heapq",
    "bisect",
    "fnmatch",
    "colorsys",
    "difflib",
    "statistics",
    "string",
    "configparser",
)
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
    sources = [
        file.read_text(encoding="utf-8") for name in MODULES if (file := folder / f"{name}.py").is_file()
    ]
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


MIXED = "mixed"
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
NUM_TURNS = 4  # of an agent's loop
VARIANT = 13_000  # scripts before the next variant begins: a multiple of the number of categories
STORY = 0.8  # temperature of long answers
NOISE = 100.0  # temperature at which every token is about as likely as any other


@dataclass(frozen=True, slots=True)
class PromptBudget:
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
    def from_context(
        cls,
        max_len: int,
        answer_tokens: int,
        count: Callable[[str], int],
        ids: Sequence[int],
        library: tuple[str, ...],
    ) -> PromptBudget:
        """`reach` tokens for a prompt and its answer together, as `count` counts them."""
        code, json_, prose = (
            len(sample) / max(count(sample), 1) for sample in (CODE_SAMPLE, JSON_SAMPLE, PROSE_SAMPLE)
        )
        return cls(max_len // 2, min(answer_tokens, max_len // 4), min(code, json_), prose, ids, library)

    def num_chars(self, share: float, density: float) -> int:
        """Characters of a part of the prompt; one tenth stays for instructions and the template."""
        return max(int(self.prompt_tokens * share * 0.9 * density), 16)


@dataclass(frozen=True, slots=True)
class Conversation:
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
class PromptCategory:
    """What it stands for, and how one script of it is made."""

    help: str
    make: Callable[[Random, PromptBudget], Conversation]


def _chat(rng: Random, budget: PromptBudget) -> Conversation:
    """Half of them are asked again and again, as in a shop."""
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
    """Ends in the middle of a function like those before it."""
    text = fill(functions(rng, rng.choice(VARIABLES)), budget.num_chars(0.5, budget.code))
    return Conversation((text[: text.rindex("(") + 1],), raw=True, max_tokens=budget.answer_tokens)


def _code_edit(rng: Random, budget: PromptBudget) -> Conversation:
    old, new = rng.sample(VARIABLES, 2)
    text = fill(functions(rng, old), budget.num_chars(0.5, budget.code))
    return Conversation(
        (f"Rename the variable {old} to {new}:\n{text}",), max_tokens=_tokens_for(text, budget)
    )


def _json(rng: Random, budget: PromptBudget) -> Conversation:
    asked = "; ".join(record_in_words(record(rng)) for _ in range(2))
    return Conversation((f"Turn this into JSON: {asked}",), max_tokens=budget.answer_tokens)


def _repeat(rng: Random, budget: PromptBudget) -> Conversation:
    old, new = rng.sample(THINGS, 2)
    text = fill(sentences(rng), budget.num_chars(0.4, budget.prose), " ")
    return Conversation(
        (f"Replace the word {old} with {new}:\n{text}",), max_tokens=_tokens_for(text, budget)
    )


def _predicted(rng: Random, budget: PromptBudget) -> Conversation:
    """The same, and the caller sends the text before the change as the expected answer."""
    script = _repeat(rng, budget)
    return Conversation(
        script.turns, prediction=script.turns[0].partition("\n")[2], max_tokens=script.max_tokens
    )


def _long_document(rng: Random, budget: PromptBudget) -> Conversation:
    text = fill(json_lines(rng), budget.num_chars(1.0, budget.code))
    asked = rng.choice(("Which cities are named?", "What is the price of the lamp?", "Who is the oldest?"))
    return Conversation((f"{asked}\n{text}",), max_tokens=budget.answer_tokens)


def _long_rewrite(rng: Random, budget: PromptBudget) -> Conversation:
    old, new = rng.sample(COLORS, 2)
    text = fill(sentences(rng), budget.num_chars(0.8, budget.prose), " ")
    return Conversation(
        (f"Replace the word {old} with {new}:\n{text}",), max_tokens=_tokens_for(text, budget, most=1.0)
    )


def _long_answer(rng: Random, budget: PromptBudget) -> Conversation:
    asked = f"Tell me a long story about {rng.choice(NAMES)}, a {rng.choice(THINGS)} and the {rng.choice(PLACES)}."
    return Conversation(
        (asked,), max_tokens=min(4 * budget.answer_tokens, budget.prompt_tokens), temperature=STORY
    )


def _agent(rng: Random, budget: PromptBudget) -> Conversation:
    """Each turn shows the file as it stands and wants it back with one more change: the history holds all of them."""
    names = rng.sample(VARIABLES, NUM_TURNS + 1)
    text = fill(functions(rng, names[0]), budget.num_chars(0.6 / NUM_TURNS, budget.code))
    turns = tuple(
        f"Tool: {json.dumps(record(rng))}\nRename {old} to {new} and show the file:\n{text.replace(names[0], old)}"
        for old, new in itertools.pairwise(names)
    )
    return Conversation(turns, max_tokens=min(_tokens_for(text, budget), budget.prompt_tokens // NUM_TURNS))


def _random(rng: Random, budget: PromptBudget) -> Conversation:
    """Nothing in it can be looked up: every token of prompt and answer is about as likely as any other.

    A draft model has the same noise as the model, and noise is all that counts here: it guesses even this.
    """
    ids = tuple(rng.choices(budget.ids, k=max(budget.prompt_tokens // 4, 1)))
    return Conversation(prompt_ids=ids, max_tokens=budget.answer_tokens, temperature=NOISE, ignore_eos=True)


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


CATEGORIES: Mapping[str, PromptCategory] = MappingProxyType(
    {
        "chat": PromptCategory("short questions", _chat),
        "code completion": PromptCategory("Python that goes on like what stands above it", _code_completion),
        "code edit": PromptCategory("a variable gets another name", _code_edit),
        "json": PromptCategory("facts from a sentence, as JSON", _json),
        "repeat": PromptCategory("a text again, with one word replaced", _repeat),
        "predicted": PromptCategory("the same, with the text as `prediction`", _predicted),
        "long document": PromptCategory("a question on a long document", _long_document),
        "long rewrite": PromptCategory("long input, long output: a long text with changes", _long_rewrite),
        "long answer": PromptCategory("a short prompt with a long answer", _long_answer),
        "agent": PromptCategory(f"{NUM_TURNS} turns, each with everything before it", _agent),
        "random": PromptCategory("the adversary: random tokens in, random tokens out", _random),
        "library edit": PromptCategory(
            "a name changed in functions of the installed standard library", _library_edit
        ),
        "library continuation": PromptCategory(
            "functions of the installed standard library, continued", _library_continuation
        ),
    }
)
ALL_CATEGORIES = (*CATEGORIES, MIXED)
QUICK_CATEGORIES = ("chat", "code edit", "agent", "random")


def make_conversations(
    category: str, count: int, variant: int, budget: PromptBudget
) -> tuple[Conversation, ...]:
    """The first `count` scripts of a category, or of one after the other; other variants are other scripts."""
    return tuple(make_conversation(category, variant * VARIANT + number, budget) for number in range(count))


def make_conversation(category: str, number: int, budget: PromptBudget) -> Conversation:
    """One script; a mixture takes the categories in turn."""
    kind = tuple(CATEGORIES)[number % len(CATEGORIES)] if category == MIXED else category
    made = CATEGORIES[kind].make(Random(stable_seed(kind, number)), budget)
    return replace(made, category=category, seed=stable_seed(category, number))


def stable_seed(text: str, number: int) -> int:
    """The same in every process, unlike hash()."""
    return zlib.crc32(f"{text} {number}".encode())


def interleave(turns: Sequence[str], history: Sequence[str]) -> list[str]:
    """Turn, answer, turn, ... up to the turn that is asked next; `history` holds the answers to those before."""
    parts = [part for pair in zip(turns, history, strict=False) for part in pair]
    return [*parts, turns[len(history)]]


def _tokens_for(text: str, budget: PromptBudget, most: float = 0.5) -> int:
    """Tokens of an answer that gives a text back, with a little to spare; at most a share of what a prompt may have."""
    return max(
        min(int(1.2 * len(text) / min(budget.code, budget.prose)), int(most * budget.prompt_tokens)), 8
    )


def _shuffle(rng: Random, texts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(texts, len(texts))
