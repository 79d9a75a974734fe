"""What one rendering of a foreign template may use: steps, time, and characters that it makes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.utils import Namespace

from foreword.text.growth import MAX_BITS

__all__ = ["TemplateBudget", "TemplateBudgetExceeded", "MeteredIterable", "check_int_size", "repeat_size", "mem_size"]

MAX_STEPS = 2_000_000
MAX_SECONDS = 2.0  # of this thread's processor time: a busy machine makes no template worse
MAX_CHARACTERS = 4_000_000  # made in all, beside what the input allows
CHARACTERS_PER_INPUT_CHARACTER = 32
MAX_INPUT_ALLOWANCE = 128_000_000
VALUES_PER_TIME_CHECK = 4096  # values
STEPS_PER_TIME_CHECK = 16  # steps between looks at the clock, which cost more than a step
ITEM_CHARACTERS = 16  # characters' worth of memory of an item of a list
OPAQUE_CHARACTERS = 100  # characters of what is written as its type's name


class TemplateBudgetExceeded(jinja2.TemplateRuntimeError):
    """The template takes more than it may."""


class TemplateBudget:
    """What one rendering may still use.

    characters  that it may still make, in all texts and lists together
    """

    __slots__ = ("_end_s", "_steps", "characters")

    def __init__(self, characters: int) -> None:
        self._steps = MAX_STEPS
        self._end_s = time.thread_time() + MAX_SECONDS
        self.characters = characters

    @classmethod
    def from_input(cls, value: object) -> TemplateBudget:
        """For a rendering of these messages and options: the more they are, the more it may do."""
        allowed = cls(MAX_INPUT_ALLOWANCE // CHARACTERS_PER_INPUT_CHARACTER)
        try:
            size = allowed.measure(value)
        except TemplateBudgetExceeded:
            size = allowed.characters
        return cls(MAX_CHARACTERS + CHARACTERS_PER_INPUT_CHARACTER * size)

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateBudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if self._steps % STEPS_PER_TIME_CHECK == 0:
            self.check_time()

    def check_time(self) -> None:
        """At the clock."""
        if time.thread_time() > self._end_s:
            raise TemplateBudgetExceeded(f"it takes more than {MAX_SECONDS:g} s")

    def check_size(self, characters: int) -> None:
        """Raises if so many are too many."""
        if characters > self.characters:
            raise TemplateBudgetExceeded("it makes too much text")

    def charge(self, value: object) -> None:
        """A value was made."""
        self.spend(mem_size(value))

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateBudgetExceeded("it makes too much text")

    def measure(self, value: Any) -> int:
        """Characters of a value that is written out. Raises if they are too many."""
        if isinstance(value, str):
            return len(value)
        size, waiting = 0, [value]
        for count in itertools.count(1):
            if not waiting:
                break
            one = waiting.pop()
            kind = type(one)
            if kind is str:
                size += len(one) + 2
            elif kind is dict:
                size += 2 * len(one) + 2
                waiting += one
                waiting += one.values()
            else:
                size += _repr_size(one)
                waiting += _children(one)
            if size > self.characters:
                raise TemplateBudgetExceeded("it uses a value that is too large")
            if count % VALUES_PER_TIME_CHECK == 0:
                self.check_time()
        return size


class MeteredIterable:
    """What a loop runs over: each turn is a step."""

    __slots__ = ("_budget", "_values")

    def __init__(self, values: Any, budget: TemplateBudget) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        step = self._budget.step
        for value in self._values:
            step()
            yield value


def check_int_size(operator: str, left: int, right: int) -> None:
    """Whole numbers of any size are a way to compute for hours."""
    bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > MAX_BITS:
        raise TemplateBudgetExceeded("it computes with numbers that are too large")


def repeat_size(left: Any, right: Any) -> int:
    """Weight of a text or a list repeated so many times; 0 for what is none."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            return mem_size(value) * max(count, 0)
    return 0


def mem_size(value: object) -> int:
    """Memory of a value itself, in characters; what its items take was counted when they were made."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return ITEM_CHARACTERS * len(value) if isinstance(value, list | tuple | dict | set) else 0


def _repr_size(value: object) -> int:
    """Characters of one value, without those of its parts."""
    if isinstance(value, list | tuple | str | bytes):
        return 2 * len(value) + 2
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, jinja2.Undefined):
        return 0
    if isinstance(value, Namespace):
        raise TemplateBudgetExceeded("it uses a namespace as a value")
    return 2 * len(value) + 2 if isinstance(value, Collection) and not isinstance(value, range) else OPAQUE_CHARACTERS


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, str | bytes | int | range | jinja2.Undefined) or not isinstance(value, Collection):
        return ()
    return value
