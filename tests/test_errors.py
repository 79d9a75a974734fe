"""Values in messages."""

import re
from pathlib import Path
from typing import Any

from foreword.errors import MAX_SHOWN_CHARS, shown
from tests.support.counted_work import count_calls

ROOT = Path(__file__).parent.parent / "foreword"
OF_OPERATORS = {
    "bench",
    "cli",
    "config",
    "lora",
    "metrics",
    "models",
    "planning",
    "training",
    "weights",
    "checkpoint",
}


def test_shown_value_is_the_start_of_its_repr() -> None:
    for value in [
        None,
        "it's",
        'a"\n\ud800',
        -1.5,
        {},
        [],
        {"a": [1, [], {"b": None}], "c": True},
        [["x"], {1: (2,)}],
        b"\x00",
        range(5),
        "x" * 1000,
        ["ab"] * 1000,
        {"a": {str(i): [i] for i in range(1000)}},
    ]:
        for max_chars in [20, MAX_SHOWN_CHARS]:
            assert shown(value, max_chars) == repr(value)[:max_chars]


def test_work_to_show_a_value_does_not_grow_with_it() -> None:
    """The whole repr of 32 MB of numbers held the interpreter's lock for 2.8 s."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * MAX_SHOWN_CHARS
    small, large = [0.1] * 1000, [0.1] * 100_000
    assert count_calls(lambda: shown(small)) == count_calls(lambda: shown(large)) < 500
    while deep:  # its destructor would go as deep
        deep = deep.pop()


def test_values_of_requests_are_not_formatted_whole() -> None:
    """`{value!r:.80}` makes all of it and then cuts: shown() is used instead."""
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0].removesuffix(".py") not in OF_OPERATORS
        and re.search(r"!r:\.", path.read_text())
    ]
    assert wrong == []
