"""The content of an image before it is drawn: coloured shapes or a digit, their places and the background.

Four kinds: `one` shape, `many` (2 to 6 of one shape and colour), `two` shapes that differ in both, and a
`digit`.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Final

RGB = tuple[int, int, int]
COLOURS: Final[dict[str, RGB]] = {
    "red": (215, 35, 40),
    "orange": (245, 140, 25),
    "yellow": (250, 225, 60),
    "green": (45, 160, 70),
    "blue": (45, 90, 215),
    "purple": (140, 55, 175),
}
SHAPES: Final[tuple[str, ...]] = ("circle", "square", "triangle", "star", "cross", "ring")
DIGITS: Final[tuple[str, ...]] = tuple("0123456789")
KINDS: Final[dict[str, float]] = {"one": 0.2, "many": 0.35, "two": 0.2, "digit": 0.25}  # shares
MAX_COUNT: Final[int] = 6
_GAP = 0.045  # between two shapes, as a share of the shorter side
_JITTER = 16  # of a colour, either way, each channel


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a digit. Lengths are shares of the shorter side, places shares of width and height.

    radius  of the circumscribed circle
    turn    degrees
    weight  stroke width of a digit as a share of its height
    """

    colour: str
    name: str
    x: float
    y: float
    radius: float
    turn: float
    rgb: RGB
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """All parameters of an image. noise: standard deviation of a channel, 0..255; seed: of the noise."""

    kind: str
    things: tuple[Thing, ...]
    width: int
    height: int
    background: RGB
    noise: float
    seed: int

    @property
    def first(self) -> Thing:
        """The leftmost of two things."""
        return self.things[0]


def held_out(kind: str, colour: str, name: str) -> bool:
    """Whether this combination is never trained: 6 of 36 coloured shapes, 6 of 60 coloured digits."""
    place = list(COLOURS).index(colour)
    if kind == "many":
        return SHAPES.index(name) == (place + 2) % len(SHAPES)
    return kind == "digit" and int(name) == (3 * place + 1) % len(DIGITS)


def draw_scene(rng: Random, kind: str | None = None, unseen: bool = False) -> Scene:
    """Return a random scene; `unseen`: only held-out combinations, else none."""
    kind = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
    width, height = _size(rng)
    things = _things(rng, kind, unseen, min(width, height) / width, min(width, height) / height)
    return Scene(kind, things, width, height, _background(rng), rng.uniform(0, 10), rng.getrandbits(32))


def _things(rng: Random, kind: str, unseen: bool, across: float, down: float) -> tuple[Thing, ...]:
    """across, down: the shorter side as a share of the width and of the height."""
    looks = _looks(rng, kind, unseen)
    radii = {"one": (0.16, 0.38), "many": (0.1, 0.13), "two": (0.13, 0.21), "digit": (0.27, 0.44)}[kind]
    while True:
        size = rng.uniform(*radii)
        places = _places(rng, len(looks), size, across, down)
        if places is not None:
            break
    shades = {colour: _shade(rng, COLOURS[colour]) for colour, _ in looks}
    weight = rng.uniform(0.11, 0.18) if kind == "digit" else 0.0
    things = [
        Thing(colour, name, x, y, size, rng.uniform(-12, 12), shades[colour], weight)
        for (colour, name), (x, y) in zip(looks, places, strict=True)
    ]
    return tuple(sorted(things, key=lambda thing: thing.x))


def _looks(rng: Random, kind: str, unseen: bool) -> list[tuple[str, str]]:
    """Colour and name of each thing."""
    if kind == "two":
        return list(zip(rng.sample(list(COLOURS), 2), rng.sample(SHAPES, 2), strict=True))
    while True:
        look = rng.choice(list(COLOURS)), rng.choice(DIGITS if kind == "digit" else SHAPES)
        if kind == "one" or held_out(kind, *look) == unseen:
            return [look] * (rng.randint(2, MAX_COUNT) if kind == "many" else 1)


def _places(
    rng: Random, count: int, size: float, across: float, down: float
) -> list[tuple[float, float]] | None:
    """Centres apart from each other and inside; None after too many attempts.

    Two are clearly side by side.
    """
    centres: list[tuple[float, float]] = []
    for _ in range(60):
        x, y = (rng.uniform(size * share + 0.01, 0.99 - size * share) for share in (across, down))
        apart = all(math.hypot((x - a) / across, (y - b) / down) > 2 * size + _GAP for a, b in centres)
        if apart and not (count == 2 and centres and abs(x - centres[0][0]) < 0.08):
            centres.append((x, y))
        if len(centres) == count:
            return centres
    return None


def _size(rng: Random) -> tuple[int, int]:
    """Width and height in pixels, one at most a third longer than the other."""
    short = rng.randint(64, 120)
    long = short if rng.random() < 0.4 else round(short * rng.uniform(1, 4 / 3))
    return (long, short) if rng.random() < 0.5 else (short, long)


def _background(rng: Random) -> RGB:
    """A light or a dark grey with a slight tint."""
    level = rng.randint(215, 250) if rng.random() < 0.65 else rng.randint(15, 60)
    return _clipped(level + rng.randint(-8, 8), level + rng.randint(-8, 8), level + rng.randint(-8, 8))


def _shade(rng: Random, rgb: RGB) -> RGB:
    red, green, blue = (channel + rng.randint(-_JITTER, _JITTER) for channel in rgb)
    return _clipped(red, green, blue)


def _clipped(red: int, green: int, blue: int) -> RGB:
    return min(255, max(0, red)), min(255, max(0, green)), min(255, max(0, blue))
