"""Training rows: one image and several conversations about it that do not see each other.

A row begins with the user's mark and the image's placeholders. Each conversation after them sees these
and itself, at the positions where it would stand alone, so that one pass over an image teaches many
questions. Some begin a prompt of their own, without an image.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from training.corpus import SPECIAL
from training.vision.draw import draw_image
from training.vision.questions import QuestionAnswer, ask, ask_blind, ask_pair
from training.vision.scenes import COLOURS, DIGITS, SHAPES, Scene, draw_scene

SIDE: Final[int] = 56  # pixels
PATCH: Final[int] = 8
GRID: Final[int] = SIDE // PATCH
NUM_PATCHES: Final[int] = GRID * GRID
LENGTH: Final[int] = 192  # tokens of a row
PREFIX: Final[int] = 1 + NUM_PATCHES
IMAGE: Final[str] = "<image>"
NAMES: Final[tuple[str, ...]] = (*SHAPES, *DIGITS)
_PAD, _END, _, _USER, _ASSISTANT = range(len(SPECIAL))
IMAGE_ID: Final[int] = 1536  # after the vocabulary of the text model
Ask = Callable[[Random, Scene], QuestionAnswer]
_BLIND, _NEXT_TURN = (
    0.04,
    0.25,
)  # shares of conversations without a picture, and of answers that another question follows


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows and their images.

    pixels     uint8 [B + more, 3, 56, 56]: those of the rows, then images without rows
    tokens     int64 [B, L]
    positions  int64 [B, L]
    talks      int32 [B, L]  0: seen by all after it but blind conversations; 1..: a conversation;
               below -1: a blind one; -1: padding
    labels     int64 [B, L]  the next token where it belongs to an answer, else -100
    patches    of all images, see PatchLabels
    """

    pixels: NDArray[np.uint8]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    conversation_ids: NDArray[np.int32]
    labels: NDArray[np.int64]
    patches: "PatchLabels"

    @property
    def has_text(self) -> bool:
        """Whether there is more than images."""
        return len(self.tokens) > 0


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """Content of each patch, which the vision encoder learns directly. int64 [B, P], -100: nothing.

    names    index into NAMES
    colours  index into COLOURS
    counts   number of things in the image, less one
    centres  1 where the middle of a thing lies, else 0; never -100
    """

    names: NDArray[np.int64]
    colours: NDArray[np.int64]
    counts: NDArray[np.int64]
    centres: NDArray[np.int64]


def resize(image: Image.Image) -> NDArray[np.uint8]:
    """uint8 [3, 56, 56], as the preprocessor does it."""
    return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def draw_rows(
    tokenizer: Tokenizer,
    rng: Random,
    count: int,
    num_extra_images: int = 0,
    pair_share: float = 0.0,
    num_placeholders: int = NUM_PATCHES,
) -> Rows:
    """Return rows, and images without rows.

    pairs         share of rows that mostly ask for the colour of one of two things
    placeholders  of an image; 0 for the text-only drafter
    """
    drilled = [rng.random() < pair_share for _ in range(count)]
    scenes = [draw_scene(rng, "two" if pair else None) for pair in drilled + [False] * num_extra_images]
    pixels = np.stack([resize(draw_image(scene)) for scene in scenes])
    tokens, positions = np.zeros((2, count, LENGTH), dtype=np.int64)
    talks, labels = (
        np.full((count, LENGTH), -1, dtype=np.int32),
        np.full((count, LENGTH), -100, dtype=np.int64),
    )
    for row, (scene, pair) in enumerate(zip(scenes, drilled, strict=False)):
        tokens[row, : 1 + num_placeholders] = [_USER, *[IMAGE_ID] * num_placeholders]
        positions[row, : 1 + num_placeholders], talks[row, : 1 + num_placeholders] = (
            np.arange(1 + num_placeholders),
            0,
        )
        about = ask_pair if pair else ask
        _fill(
            tokenizer,
            rng,
            scene,
            about,
            (tokens[row], positions[row], talks[row], labels[row]),
            1 + num_placeholders,
        )
    return Rows(pixels, tokens, positions, talks, labels, patch_labels(scenes))


def _fill(
    tokenizer: Tokenizer,
    rng: Random,
    scene: Scene,
    about: Ask,
    row: tuple[NDArray[np.integer], ...],
    prefix: int,
) -> None:
    """Write conversations after the image until one does not fit."""
    tokens, positions, talks, labels = row
    at, number = prefix, 1
    while True:
        blind = rng.random() < _BLIND
        ids, learned = conversation(tokenizer, rng, scene, ask_blind if blind else about)
        end = at + len(ids)
        if end > len(tokens):
            return
        tokens[at:end], talks[at:end] = ids, -1 - number if blind else number
        positions[at:end] = np.arange(len(ids)) + (0 if blind else prefix)
        labels[at : end - 1] = np.where(learned[1:], ids[1:], -100)
        at, number = end, number + 1


def conversation(tokenizer: Tokenizer, rng: Random, scene: Scene, about: Ask) -> tuple[list[int], list[bool]]:
    """Token ids after the image, and which belong to answers; a blind one begins with the user's mark."""
    ids, learned, blind = list[int](), list[bool](), about is ask_blind

    def add(some: list[int], answer: bool) -> None:
        ids.extend(some)
        learned.extend([answer] * len(some))

    while True:
        asked = about(rng, scene)
        mark = [_USER] if ids or blind else []
        add([*mark, *tokenizer.encode(asked.question).ids, _END, _ASSISTANT], False)
        add([*tokenizer.encode(asked.answer).ids, _END], True)
        if blind or rng.random() >= _NEXT_TURN:
            return ids, learned


def patch_labels(scenes: list[Scene]) -> PatchLabels:
    """Content of each patch: the thing with the nearest centre, if it reaches the patch."""
    shape = len(scenes), NUM_PATCHES
    names, colours, counts = (np.full(shape, -100, dtype=np.int64) for _ in range(3))
    centres = np.zeros(shape, dtype=np.int64)
    middle = (np.arange(GRID) + 0.5) / GRID
    for row, scene in enumerate(scenes):
        short = min(scene.width, scene.height)
        places = np.array([(thing.x, thing.y) for thing in scene.things])
        across = (middle[None, None, :] - places[:, 0, None, None]) * scene.width / short
        down = (middle[None, :, None] - places[:, 1, None, None]) * scene.height / short
        distance = np.hypot(across, down).reshape(len(places), -1)  # [things, P]
        nearest = distance.argmin(0)
        inside = distance.min(0) < scene.first.radius + 0.5 / GRID
        names[row] = np.where(
            inside, np.array([NAMES.index(one.name) for one in scene.things])[nearest], -100
        )
        colours[row] = np.where(
            inside, np.array([list(COLOURS).index(one.colour) for one in scene.things])[nearest], -100
        )
        counts[row] = np.where(inside, len(places) - 1, -100)
        centres[row, (places[:, 1] * GRID).astype(int) * GRID + (places[:, 0] * GRID).astype(int)] = 1
    return PatchLabels(names, colours, counts, centres)
