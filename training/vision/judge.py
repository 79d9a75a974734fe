"""Judge an answer by the facts that it states, not by its phrasing."""

import re
from typing import Final

from training.vision.questions import NUMBERS, Truth
from training.vision.scenes import COLOURS, SHAPES

MAX_WORDS: Final[int] = 16
_YES: Final = frozenset({"yes", "indeed"})
_NO: Final = frozenset({"no", "not", "cannot", "none", "nothing"})
_PICTURE: Final = frozenset({"picture", "image"})
_PLURALS: Final[dict[str, str]] = {name + ("es" if name.endswith("s") else "s"): name for name in SHAPES}
_NUMBERS: Final[dict[str, str]] = {word: str(number) for number, word in enumerate(NUMBERS)}


def is_right(answer: str, truth: Truth) -> bool:
    """Whether the answer states all required facts and no wrong one."""
    words = re.findall(r"[a-z]+|\d+", answer.lower())
    if not 0 < len(words) <= MAX_WORDS:
        return False
    stated = extract_facts(words, truth.paired)
    return truth.must <= stated <= truth.must | truth.may


def extract_facts(words: list[str], paired: bool = False) -> frozenset[str]:
    """Facts in the words: colours, shapes, numbers, digits, yes or no, or a missing image.

    paired  a colour and the shape or digit right after it are one fact
    """
    if _PICTURE & set(words) and ({"please", "without"} | _NO) & set(words):
        return frozenset({"nothing shown"})
    found, place = set[str](), 0
    while place < len(words):
        both = _fact(words[place]), _fact(words[place + 1]) if place + 1 < len(words) else None
        if paired and both[0] in COLOURS and both[1] is not None and both[1] not in COLOURS:
            found.add(f"{both[0]} {both[1]}")
            place += 2
            continue
        if both[0] is not None:
            found.add(both[0])
        place += 1
    return frozenset(found)


def _fact(word: str) -> str | None:
    """The fact of a single word, if any."""
    if word in COLOURS or word in SHAPES or word.isdigit():
        return word
    if word in _YES or word in _NO:
        return "yes" if word in _YES else "no"
    return _PLURALS.get(word) or _NUMBERS.get(word)
