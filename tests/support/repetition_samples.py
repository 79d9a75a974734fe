"""Seeded samples of legitimate repetitive texts, which repetition detection must not report.

No text repeats one pattern for more than MAX_ITEMS characters, slightly fewer than the lowest limit in
tokens, so no tokenizer reaches it: for example a ruler of 240 characters or a row of 80 zeros.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping

MAX_ITEMS = 240  # characters

WORDS = tuple(
    word
    for line in (
        "river stone lantern harbor meadow signal copper window garden market winter bridge silver forest",
        "engine letter number planet coffee button morning shadow island ticket pillow castle thread marble",
        "pocket ribbon",
    )
    for word in line.split()
)


def _words(chance: random.Random, low: int, high: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(low, high)))


def table(chance: random.Random) -> str:
    columns = chance.randint(2, 7)
    rows = [[_words(chance, 1, 2) for _ in range(columns)], ["---"] * columns]
    same = [chance.choice(("yes", "0", "n/a", "ok")) for _ in range(columns - 1)]
    rows += [[str(number), *same] for number in range(chance.randint(20, 120))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def equal_values(chance: random.Random) -> str:
    value = chance.choice((0, 1, 0.0, None, True, -1))
    return json.dumps([value] * min(chance.randint(8, 80), MAX_ITEMS // (len(json.dumps(value)) + 2)))


def equal_objects(chance: random.Random) -> str:
    item = {name: chance.choice((0, 1, False)) for name in "xyz"[: chance.randint(1, 3)]}
    return json.dumps({"points": [item] * (MAX_ITEMS // (len(json.dumps(item)) + 2))})


def matrix(chance: random.Random) -> str:
    """An identity matrix: each row is the previous one, shifted."""
    size = chance.randint(4, 30)
    return json.dumps([[int(row == column) for column in range(size)] for row in range(size)])


def records(chance: random.Random) -> str:
    rows = [
        {"id": number, "type": "item", "active": True, "tags": [], "parent": None}
        for number in range(chance.randint(10, 80))
    ]
    return json.dumps(rows, indent=chance.choice((None, 2)))


def getters(chance: random.Random) -> str:
    names = [f"{chance.choice(WORDS)}{number}" for number in range(chance.randint(8, 40))]
    methods = [f"    def get_{name}(self):\n        return self._{name}\n" for name in names]
    return "class Record:\n" + "\n".join(methods)


def cases(chance: random.Random) -> str:
    lines = [
        f"        case {number}:\n            return 0;\n            break;"
        for number in range(chance.randint(10, 60))
    ]
    return "    switch (code) {\n" + "\n".join(lines) + "\n    }"


def calls(chance: random.Random) -> str:
    """One repeated statement, as in unrolled loops."""
    line = chance.choice(("    step();\n", "    x = x * 2;\n", "nop\n", "<td></td>\n", "    pass\n"))
    return f"begin {_words(chance, 3, 9)}\n" + line * (MAX_ITEMS // len(line)) + "end"


def base64_dump(chance: random.Random) -> str:
    raw = (
        chance.randbytes(chance.randint(60, 700))
        + bytes(chance.randint(0, MAX_ITEMS * 3 // 4))
        + chance.randbytes(90)
    )
    return base64.encodebytes(raw).decode() if chance.random() < 0.5 else base64.b64encode(raw).decode()


def hex_dump(chance: random.Random) -> str:
    """Lines of zeros between others, with addresses."""
    lines = []
    for number in range(chance.randint(10, 60)):
        row = bytes(16) if chance.random() < 0.7 else chance.randbytes(16)
        lines.append(f"{16 * number:08x}: {row.hex(' ', 2)}  {'.' * 16}")
    return "\n".join(lines)


def log(chance: random.Random) -> str:
    text, start, step = _words(chance, 4, 12), chance.randrange(80_000), chance.randint(1, 90)
    times = [start + number * step for number in range(chance.randint(20, 90))]
    return "\n".join(f"{t // 3600:02}:{t // 60 % 60:02}:{t % 60:02} INFO worker: {text}" for t in times)


def csv(chance: random.Random) -> str:
    rest = ",".join(chance.choice(("0", "", "EUR", "true")) for _ in range(chance.randint(3, 9)))
    return "\n".join(f"{number},{rest}" for number in range(1000, 1000 + chance.randint(20, 150)))


def poem(chance: random.Random) -> str:
    refrain = f"\nO {_words(chance, 5, 8)},\nO {_words(chance, 5, 8)}!\n\n"
    return refrain.join(
        "\n".join(_words(chance, 4, 7) for _ in range(4)) for _ in range(chance.randint(3, 9))
    )


def chorus(chance: random.Random) -> str:
    """One repeated line, as in a song."""
    line = _words(chance, 4, 8) + "\n"
    return _words(chance, 9, 20) + "\n" + line * (MAX_ITEMS // len(line)) + _words(chance, 9, 20)


def bottles(chance: random.Random) -> str:
    thing = chance.choice(WORDS)
    return "\n".join(
        f"{n} green {thing}s on the wall, {n} green {thing}s. "
        f"Take one down, {n - 1} green {thing}s on the wall."
        for n in range(chance.randint(20, 60), 1, -1)
    )


def triangle(chance: random.Random) -> str:
    mark = chance.choice("*#+o")
    return "\n".join(" " * (40 - row) + mark * (2 * row + 1) for row in range(chance.randint(5, 40)))


def box(chance: random.Random) -> str:
    width = chance.randint(10, 60)
    return (
        "+"
        + "-" * width
        + "+\n"
        + ("|" + " " * width + "|\n") * (MAX_ITEMS // (width + 3))
        + "+"
        + "-" * width
        + "+"
    )


def rulers(chance: random.Random) -> str:
    mark = chance.choice(("-", "=", "*", "_", "-=", ". ", "~"))
    line = mark * (chance.randint(40, MAX_ITEMS) // len(mark))
    return "\n".join(
        f"{line}\nChapter {number}: {_words(chance, 2, 5)}" for number in range(chance.randint(3, 12))
    )


def numbers(chance: random.Random) -> str:
    start, step = chance.randrange(1000), chance.randint(1, 12)
    return chance.choice((", ", "\n", " ")).join(
        str(start + step * number) for number in range(chance.randint(60, 300))
    )


def diff(chance: random.Random) -> str:
    """One word replaced throughout a file."""
    old, new, text = chance.choice(WORDS), chance.choice(WORDS), _words(chance, 2, 5)
    hunks = [
        f"@@ -{line},3 +{line},3 @@\n-  {old}({text})\n+  {new}({text})\n   return 0"
        for line in range(10, 10 + 7 * chance.randint(8, 40), 7)
    ]
    return "\n".join(hunks)


SAMPLE_KINDS: Mapping[str, Callable[[random.Random], str]] = {
    maker.__name__: maker
    for maker in (
        table, equal_values, equal_objects, matrix, records, getters, cases, calls, base64_dump, hex_dump,
        log, csv, poem, chorus, bottles, triangle, box, rulers, numbers, diff,
    )
}  # fmt: skip


def sample(number: int) -> tuple[str, str]:
    """(kind, text) of sample `number`; kinds alternate."""
    kind = list(SAMPLE_KINDS)[number % len(SAMPLE_KINDS)]
    return kind, SAMPLE_KINDS[kind](random.Random(number))
