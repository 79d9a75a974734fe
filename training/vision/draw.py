"""Scenes as pixels. Digits are strokes, so that no font is needed."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from training.vision.scenes import Scene, Thing

Point = tuple[float, float]
_FINE = 3  # pixels are drawn as so many by so many, then averaged
_ARM = 0.34  # half the width of a cross's arms, of its radius
_WAIST = 0.42  # inner corners of a star, of its radius
_HOLE = 0.5  # of a ring, of its radius


def draw_image(scene: Scene) -> Image.Image:
    """Return the image, RGB, in the size of the scene."""
    fine = Image.new("RGB", (scene.width * _FINE, scene.height * _FINE), scene.background)
    pen = ImageDraw.Draw(fine)
    for thing in scene.things:
        _draw(pen, thing, scene)
    values = np.asarray(fine.reduce(_FINE), dtype=np.float32)
    noise = np.random.default_rng(scene.seed).normal(0, scene.noise, values.shape)
    return Image.fromarray(np.clip(np.rint(values + noise), 0, 255).astype(np.uint8))


def _draw(pen: ImageDraw.ImageDraw, thing: Thing, scene: Scene) -> None:
    radius = thing.radius * min(scene.width, scene.height) * _FINE
    centre = thing.x * scene.width * _FINE, thing.y * scene.height * _FINE
    cosine, sine = math.cos(math.radians(thing.turn)), math.sin(math.radians(thing.turn))

    def placed(points: Sequence[Point]) -> list[Point]:
        return [
            (centre[0] + radius * (x * cosine - y * sine), centre[1] + radius * (x * sine + y * cosine))
            for x, y in points
        ]

    if thing.name.isdigit():
        _strokes(
            pen, [placed(stroke) for stroke in _DIGITS[thing.name]], 2 * radius * thing.weight, thing.rgb
        )
        return
    pen.polygon(placed(_SHAPES[thing.name]()), fill=thing.rgb)
    if thing.name == "ring":
        pen.polygon(placed([(_HOLE * x, _HOLE * y) for x, y in _round()]), fill=scene.background)


def _strokes(
    pen: ImageDraw.ImageDraw, strokes: list[list[Point]], width: float, rgb: tuple[int, int, int]
) -> None:
    """Lines with round ends and corners."""
    half = width / 2
    for stroke in strokes:
        pen.line(stroke, fill=rgb, width=round(width))
        for x, y in stroke:
            pen.ellipse((x - half, y - half, x + half, y + half), fill=rgb)


def _arc(x: float, y: float, across: float, down: float, start: float = 0, end: float = 360) -> list[Point]:
    """Points on an ellipse, from one angle to another; 0 is right, 90 is down."""
    angles = [math.radians(start + (end - start) * step / 20) for step in range(21)]
    return [(x + across * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


@cache
def _round() -> list[Point]:
    return _arc(0, 0, 1, 1)


def _star() -> list[Point]:
    """Five corners, the first up."""
    angles = [math.radians(36 * corner - 90) for corner in range(10)]
    radii = [1.0, _WAIST] * 5
    return [
        (radius * math.cos(angle), radius * math.sin(angle))
        for radius, angle in zip(radii, angles, strict=True)
    ]


def _cross() -> list[Point]:
    quarter = [
        (_ARM, -_ARM),
        (1.0, -_ARM),
        (1.0, _ARM),
    ]  # the right arm, clockwise; the others are this one turned
    turns: list[Callable[[float, float], Point]] = [
        lambda x, y: (x, y),
        lambda x, y: (-y, x),
        lambda x, y: (-x, -y),
        lambda x, y: (y, -x),
    ]
    return [turn(x, y) for turn in turns for x, y in quarter]


# Within the unit circle, y downwards.
_SHAPES: Final[dict[str, Callable[[], list[Point]]]] = {
    "circle": _round,
    "ring": _round,
    "square": lambda: [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": lambda: [(0, -1), (0.92, 0.72), (-0.92, 0.72)],
    "star": _star,
    "cross": _cross,
}
_DIGITS: Final[dict[str, list[list[Point]]]] = {
    "0": [_arc(0, 0, 0.5, 0.86)],
    "1": [[(-0.35, -0.5), (0.05, -0.86), (0.05, 0.86)]],
    "2": [[*_arc(0, -0.38, 0.48, 0.48, -190, 20), (-0.5, 0.86), (0.52, 0.86)]],
    "3": [[*_arc(-0.05, -0.43, 0.45, 0.43, -200, 85), *_arc(-0.05, 0.43, 0.5, 0.43, -85, 200)]],
    "4": [[(0.25, 0.86), (0.25, -0.86), (-0.55, 0.35), (0.6, 0.35)]],
    "5": [[(0.45, -0.86), (-0.38, -0.86), (-0.42, -0.1), *_arc(-0.02, 0.32, 0.5, 0.54, -130, 150)]],
    "6": [[(0.35, -0.86), (-0.2, -0.35), *_arc(0, 0.36, 0.5, 0.5, 190, 550)]],
    "7": [[(-0.5, -0.86), (0.5, -0.86), (-0.1, 0.86)]],
    "8": [_arc(0, -0.44, 0.4, 0.42), _arc(0, 0.42, 0.5, 0.44)],
    "9": [[(-0.35, 0.86), (0.2, 0.35), *_arc(0, -0.36, 0.5, 0.5, 10, 370)]],
}
