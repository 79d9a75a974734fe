"""Questions about a scene, and answers in several equally likely phrasings."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from training.vision.scenes import COLOURS, DIGITS, SHAPES, Scene, Thing

NUMBERS: Final[tuple[str, ...]] = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True)
class Truth:
    """Facts that an answer must state and those that it may; all others are wrong.

    paired    colours belong to the word after them: "red circle" is one fact, not two
    """

    must: frozenset[str]
    may: frozenset[str] = frozenset()
    paired: bool = False


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question with one of its right answers."""

    kind: str
    question: str
    answer: str
    truth: Truth


def ask(rng: Random, scene: Scene, kind: str | None = None) -> QuestionAnswer:
    """Return a random question that suits the scene."""
    kinds = [one for one in _SUIT[scene.kind] if kind in (None, one)]
    return _ASK[rng.choice(kinds)](rng, scene)


def kinds(scene: Scene) -> list[str]:
    """The kinds of question that suit the scene."""
    return sorted(set(_SUIT[scene.kind]))


def ask_pair(rng: Random, scene: Scene) -> QuestionAnswer:
    """Return a question about two things, mostly for the colour of one, which takes many examples."""
    return ask(rng, scene, rng.choice(_PAIR))


def ask_blind(rng: Random, scene: Scene) -> QuestionAnswer:
    """Return a question about a missing image."""
    return QuestionAnswer(
        "no picture", ask(rng, scene).question, rng.choice(_BLIND), Truth(frozenset({"nothing shown"}))
    )


def _truth(*must: str, may: tuple[str, ...] = (), paired: bool = False) -> Truth:
    return Truth(frozenset(must), frozenset(may), paired)


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeio8' else 'a'} {words}"


def _plural(name: str) -> str:
    return name + ("es" if name.endswith("s") else "s")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _pick(rng: Random, phrasings: tuple[str, ...], **words: str) -> str:
    """One of the phrasings, filled in, as a sentence."""
    return _capital(rng.choice(phrasings).format_map(words))


def _subject(scene: Scene, thing: Thing) -> str:
    """The name of a thing, or of several alike, without its colour."""
    if scene.kind == "digit":
        return "digit"
    return _plural(thing.name) if scene.kind == "many" else thing.name


def _what(rng: Random, scene: Scene) -> QuestionAnswer:
    question = rng.choice(_WHAT)
    first, count = scene.first, len(scene.things)
    if scene.kind == "many":
        words = f"{NUMBERS[count]} {first.colour} {_plural(first.name)}"
        answer = _pick(rng, _SHOWN_MANY, it=words)
        return QuestionAnswer("what", question, answer, _truth(first.colour, first.name, str(count)))
    if scene.kind == "digit":
        answer = _pick(
            rng,
            _SHOWN_DIGIT,
            digit=first.name,
            colour=first.colour,
            it=_article(f"{first.colour} {first.name}"),
        )
        return QuestionAnswer("what", question, answer, _truth(first.colour, first.name))
    answer = _pick(rng, _SHOWN, it=" and ".join(_article(f"{one.colour} {one.name}") for one in scene.things))
    if scene.kind == "one":
        return QuestionAnswer("what", question, answer, _truth(first.colour, first.name, may=("1",)))
    return QuestionAnswer(
        "what", question, answer, _truth(*(f"{one.colour} {one.name}" for one in scene.things), paired=True)
    )


def _colour(rng: Random, scene: Scene) -> QuestionAnswer:
    thing = rng.choice(scene.things)
    several, name = scene.kind == "many", _subject(scene, thing)
    question = _pick(
        rng, _COLOUR, name=name, verb="are" if several else "is", have="do" if several else "does"
    )
    answer = _pick(rng, _COLOURED_MANY if several else _COLOURED, name=name, colour=thing.colour)
    return QuestionAnswer(
        "colour", question, answer, _truth(thing.colour, may=(thing.name, str(len(scene.things))))
    )


def _shape(rng: Random, scene: Scene) -> QuestionAnswer:
    thing = rng.choice(scene.things)
    phrasings = _SHAPE_OF if scene.kind == "two" else _SHAPE + _SHAPE_OF
    several = scene.kind == "many"
    question = _pick(
        rng,
        phrasings,
        colour=thing.colour,
        thing="things" if several else "thing",
        verb="are" if several else "is",
    )
    words = _plural(thing.name) if several else _article(thing.name)
    answer = _pick(rng, _SHAPED_MANY if several else _SHAPED, it=words)
    return QuestionAnswer(
        "shape", question, answer, _truth(thing.name, may=(thing.colour, str(len(scene.things))))
    )


def _count(rng: Random, scene: Scene) -> QuestionAnswer:
    thing, count = rng.choice(scene.things), len(scene.things)
    if scene.kind == "two" or rng.random() < 0.3:
        question, counted = _pick(rng, _COUNT, names="shapes"), "shapes" if count > 1 else "shape"
    else:
        names = _plural(thing.name)
        question = _pick(rng, _COUNT, names=rng.choice((names, f"{thing.colour} {names}")))
        counted = names if count > 1 else thing.name
    number = NUMBERS[count]
    answer = _pick(
        rng, _COUNTED, number=number, digit=str(count), counted=counted, verb="are" if count > 1 else "is"
    )
    return QuestionAnswer("count", question, answer, _truth(str(count), may=(thing.colour, thing.name)))


def _digit(rng: Random, scene: Scene) -> QuestionAnswer:
    name = scene.first.name
    answer = _pick(rng, _READ, digit=name, it=_article(name))
    return QuestionAnswer("digit", rng.choice(_DIGIT), answer, _truth(name, may=(scene.first.colour,)))


def _yes_no(rng: Random, scene: Scene) -> QuestionAnswer:
    """Half of the answers are yes; half of the absent things share a colour or shape with a present one."""
    looks = {(one.colour, one.name) for one in scene.things}
    names = DIGITS if scene.kind == "digit" else SHAPES
    colour, name = rng.choice(sorted(looks))
    told = _pick_subject(rng, colour, name)
    there = rng.random() < 0.5
    if not there:
        while any(_fits(told, *look) for look in looks):
            change = rng.choice(("colour", "name", "both"))
            other = rng.choice(list(COLOURS)) if change != "name" else colour
            told = _pick_subject(rng, other, rng.choice(names) if change != "colour" else name)
    answer = _pick(rng, _YES if there else _NO, it=_called(told, "something" if there else "anything"))
    may = (*(fact for fact in told if fact is not None), "1")
    question = _pick(rng, _IS_THERE, it=_called(told, "anything"))
    return QuestionAnswer("yes or no", question, answer, _truth("yes" if there else "no", may=may))


def _pick_subject(rng: Random, colour: str, name: str) -> tuple[str | None, str | None]:
    """The subject of the question: a colour, a shape or digit, or both."""
    return rng.choice(((colour, name), (colour, name), (None, name), (colour, None)))


def _fits(told: tuple[str | None, str | None], colour: str, name: str) -> bool:
    return told[0] in (None, colour) and told[1] in (None, name)


def _called(told: tuple[str | None, str | None], thing: str) -> str:
    """thing: the phrase for something of which only the colour is known."""
    colour, name = told
    return _article(" ".join(word for word in told if word)) if name else f"{thing} {colour}"


_WHAT: Final = (
    "What is in the picture?",
    "What do you see?",
    "Describe the picture.",
    "What does the image show?",
    "What is this?",
    "What can you see in this image?",
)
_SHOWN: Final = (
    "{it}.",
    "There is {it}.",
    "I see {it}.",
    "The picture shows {it}.",
    "You can see {it}.",
    "This is {it}.",
)
_SHOWN_MANY: Final = (
    "{it}.",
    "There are {it}.",
    "I see {it}.",
    "The picture shows {it}.",
    "You can see {it}.",
    "These are {it}.",
)
_SHOWN_DIGIT: Final = (
    "{it}.",
    "There is {it}.",
    "I see {it}.",
    "The picture shows {it}.",
    "The digit {digit} in {colour}.",
    "This is {it}.",
)
_COLOUR: Final = (
    "What colour {verb} the {name}?",
    "What color {verb} the {name}?",
    "Which colour {have} the {name} have?",
    "Tell me the color of the {name}.",
    "Which colour {verb} the {name}?",
)
_COLOURED: Final = (
    "{colour}.",
    "It is {colour}.",
    "The {name} is {colour}.",
    "I would say {colour}.",
    "It looks {colour}.",
    "That is {colour}.",
)
_COLOURED_MANY: Final = (
    "{colour}.",
    "They are {colour}.",
    "The {name} are {colour}.",
    "I would say {colour}.",
    "They look {colour}.",
    "All are {colour}.",
)
_SHAPE: Final = ("Which shape is it?", "What shape do you see?", "Which shape is shown?", "Name the shape.")
_SHAPE_OF: Final = (
    "Which shape is {colour}?",
    "What shape {verb} the {colour} {thing}?",
    "Which shape {verb} the {colour} {thing}?",
)
_SHAPED: Final = (
    "{it}.",
    "It is {it}.",
    "The shape is {it}.",
    "I see {it}.",
    "That is {it}.",
    "It looks like {it}.",
)
_SHAPED_MANY: Final = (
    "{it}.",
    "They are {it}.",
    "The shapes are {it}.",
    "I see {it}.",
    "Those are {it}.",
    "They look like {it}.",
)
_COUNT: Final = (
    "How many {names} are there?",
    "How many {names} do you see?",
    "Count the {names}.",
    "How many {names} are in the picture?",
    "What is the number of {names}?",
)
_COUNTED: Final = (
    "{number}.",
    "{digit}.",
    "There {verb} {number}.",
    "I count {number}.",
    "I see {number} {counted}.",
    "{number} {counted}.",
)
_DIGIT: Final = (
    "Which digit is it?",
    "What digit do you see?",
    "Which number is shown?",
    "Read the digit.",
    "What number is this?",
)
_READ: Final = (
    "{digit}.",
    "It is {it}.",
    "The digit is {digit}.",
    "I see {it}.",
    "That is {it}.",
    "I read {it}.",
)
_IS_THERE: Final = (
    "Is there {it}?",
    "Is there {it} in the picture?",
    "Do you see {it}?",
    "Can you see {it}?",
    "Does the picture show {it}?",
)
_YES: Final = (
    "Yes.",
    "Yes, there is.",
    "Yes, I see {it}.",
    "Yes, there is {it}.",
    "Yes, I can see that.",
    "Indeed, there is.",
)
_NO: Final = (
    "No.",
    "No, there is not.",
    "No, I do not see {it}.",
    "No, there is not {it}.",
    "No, I cannot see that.",
    "I do not see {it}.",
)
_BLIND: Final = (
    "I see no picture.",
    "There is no picture.",
    "No picture was sent.",
    "I have no picture to look at.",
    "Please send a picture.",
    "Without a picture I cannot tell.",
)
_ASK: Final[dict[str, Callable[[Random, Scene], QuestionAnswer]]] = {
    "what": _what,
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "digit": _digit,
    "yes or no": _yes_no,
}
# Kinds that are harder to learn, or that say more, occur several times.
_SUIT: Final[dict[str, tuple[str, ...]]] = {
    "one": ("what", "colour", "shape", "count", *["yes or no"] * 2),
    "many": (*["what"] * 2, "colour", "shape", *["count"] * 3, *["yes or no"] * 2),
    "two": (*["what"] * 2, *["colour"] * 4, *["shape"] * 2, "count", *["yes or no"] * 3),
    "digit": (*["what"] * 2, "colour", *["digit"] * 2, *["yes or no"] * 2),
}
_PAIR: Final[tuple[str, ...]] = ("what", *["colour"] * 7, "shape", "yes or no")
