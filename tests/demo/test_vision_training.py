"""Training data of the vision model: images, questions, judge, packed rows."""

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from foreword import demo
from training.vision.cases import case, cases
from training.vision.draw import draw_image
from training.vision.judge import is_right
from training.vision.model import VisionTrainingModel, with_image_token
from training.vision.questions import Truth, ask, ask_blind
from training.vision.rows import (
    GRID,
    IMAGE_ID,
    NAMES,
    NUM_PATCHES,
    PREFIX,
    SIDE,
    Rows,
    draw_rows,
    patch_labels,
    resize,
)
from training.vision.scenes import COLOURS, DIGITS, KINDS, MAX_COUNT, SHAPES, draw_scene, held_out
from training.vision.train import attention_mask

TOKENIZER = with_image_token(Tokenizer.from_file(str(demo.MODEL / "tokenizer.json")))
RED_CIRCLE = Truth(frozenset({"red", "circle"}), frozenset({"1"}))


def test_images_are_deterministic() -> None:
    one, same, other = (draw_image(draw_scene(Random(seed))) for seed in (3, 3, 4))
    assert one.mode == "RGB" and one.tobytes() == same.tobytes() and one.tobytes() != other.tobytes()
    assert case(7) == case(7) and case(7).png() == case(7).png() and case(7) != case(8)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_inside_and_disjoint(kind: str) -> None:
    for seed in range(40):
        scene = draw_scene(Random(seed), kind)
        short = min(scene.width, scene.height)
        places = [(thing.x * scene.width / short, thing.y * scene.height / short) for thing in scene.things]
        for (x, y), thing in zip(places, scene.things, strict=True):
            assert thing.radius <= x <= scene.width / short - thing.radius
            assert thing.radius <= y <= scene.height / short - thing.radius
        apart = [np.hypot(x - a, y - b) for at, (x, y) in enumerate(places) for a, b in places[:at]]
        assert all(distance > 2 * scene.first.radius for distance in apart)


def test_pixels_have_the_colour() -> None:
    for seed in range(20):
        scene = draw_scene(Random(seed), "one")
        thing = scene.first
        centre = np.asarray(draw_image(scene), dtype=float)[
            int(thing.y * scene.height), int(thing.x * scene.width)
        ]
        nearest = min(COLOURS, key=lambda name: float(np.abs(centre - COLOURS[name]).sum()))
        assert nearest == thing.colour or thing.name == "ring"


def test_held_out_combinations_are_not_trained() -> None:
    assert sum(held_out("many", colour, name) for colour in COLOURS for name in SHAPES) == 6
    assert sum(held_out("digit", colour, name) for colour in COLOURS for name in DIGITS) == 6
    rng = Random(0)
    for unseen in (False, True):
        looks = {(kind, *_look(rng, kind, unseen)) for kind in ("many", "digit") for _ in range(300)}
        assert {held_out(*look) for look in looks} == {unseen}


def _look(rng: Random, kind: str, unseen: bool) -> tuple[str, str]:
    thing = draw_scene(rng, kind, unseen).first
    return thing.colour, thing.name


def test_half_of_the_cases_may_be_held_out() -> None:
    found = Counter((one.scene.kind, one.unseen) for one in cases(100))
    assert found["many", True] >= 8 and found["many", False] >= 8 and not found["one", True]


def test_judge_tells_right_from_wrong_answers() -> None:
    rng = Random(1)
    for number in range(600):
        scene = draw_scene(rng, unseen=number % 2 == 0)
        asked = ask_blind(rng, scene) if number % 20 == 0 else ask(rng, scene)
        other = ask(rng, draw_scene(rng))
        assert is_right(asked.answer, asked.truth), asked
        assert (
            not is_right(other.answer, asked.truth)
            or other.truth.must == asked.truth.must
            or other.kind != asked.kind
        )


@pytest.mark.parametrize(
    "answer",
    [
        "A red circle.",
        "red circle",
        "I can see one red circle here",
        "The circle is RED!",
        "It is a circle, and it is red.",
    ],
)
def test_judge_accepts_any_phrasing(answer: str) -> None:
    assert is_right(answer, RED_CIRCLE)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "A circle.",
        "Red.",
        "A red ring.",
        "A red or blue circle.",
        "Two red circles.",
        "A red circle, no?",
        "red circle " * 9,
    ],
)
def test_judge_rejects_wrong_answers(answer: str) -> None:
    assert not is_right(answer, RED_CIRCLE)


def test_colour_belongs_to_the_next_shape() -> None:
    truth = Truth(frozenset({"red circle", "blue star"}), paired=True)
    assert is_right("You can see a blue star and a red circle.", truth)
    assert not is_right("A red star and a blue circle.", truth)
    assert not is_right("A red circle and a star.", truth)


def test_judge_tells_yes_from_no() -> None:
    no = Truth(frozenset({"no"}), frozenset({"red", "star"}))
    assert (
        is_right("No, I do not see a red star.", no)
        and not is_right("Yes, there is.", no)
        and not is_right("Yes, no.", no)
    )
    assert not is_right("No, it is a blue star.", no)


def test_rows_are_deterministic() -> None:
    one, same, other = (draw_rows(TOKENIZER, Random(seed), 2) for seed in (1, 1, 2))
    assert np.array_equal(one.tokens, same.tokens) and np.array_equal(one.pixels, same.pixels)
    assert not np.array_equal(one.tokens, other.tokens)


def test_patches_have_the_images_content() -> None:
    for seed in range(10):
        scene = draw_scene(Random(seed), "many")
        found = patch_labels([scene])
        for thing in scene.things:
            at = int(thing.y * GRID) * GRID + int(thing.x * GRID)
            assert (
                NAMES[found.names[0, at]] == thing.name
                and list(COLOURS)[found.colours[0, at]] == thing.colour
            )
            assert found.counts[0, at] == len(scene.things) - 1 < MAX_COUNT and found.centres[0, at] == 1
    assert resize(draw_image(scene)).shape == (3, SIDE, SIDE)


def test_packed_conversation_is_independent() -> None:
    torch.manual_seed(0)
    rows, seer = draw_rows(TOKENIZER, Random(4), 1), VisionTrainingModel("target").eval()
    with torch.inference_mode():
        seen = seer.encode_image(torch.from_numpy(rows.pixels))
        packed = seer.hidden(*_tensors(rows), seen)[0]
        for number in sorted(set(rows.conversation_ids[0].tolist()) - {0, -1}):
            within = np.flatnonzero(rows.conversation_ids[0] == number)
            head = [] if number < 0 else list(range(PREFIX))
            ids = torch.from_numpy(rows.tokens[:, head + within.tolist()])
            seer_of = seer.model(
                input_ids=ids,
                **({} if number < 0 else {"pixel_values": _normal(rows)}),
                output_hidden_states=True,
            )
            alone = seer_of.hidden_states[-1][0, len(head) :]
            torch.testing.assert_close(packed[within], alone, atol=1e-4, rtol=1e-4)


def _tensors(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(rows.tokens),
        torch.from_numpy(rows.positions),
        attention_mask(torch.from_numpy(rows.conversation_ids)),
    )


def _normal(rows: Rows) -> torch.Tensor:
    return torch.from_numpy(rows.pixels).float() / 127.5 - 1


def test_labels_are_answers_only() -> None:
    rows = draw_rows(TOKENIZER, Random(6), 2)
    learned = rows.labels >= 0
    assert np.array_equal(rows.labels[:, :-1][learned[:, :-1]], rows.tokens[:, 1:][learned[:, :-1]])
    assert not (rows.labels == IMAGE_ID).any() and not learned[:, :PREFIX].any()
    assert (rows.tokens == IMAGE_ID).sum() == 2 * NUM_PATCHES


def test_share_of_pair_rows_is_configurable() -> None:
    most = [
        draw_rows(TOKENIZER, Random(8), 40, pair_share=share).patches.counts.max(1)
        for share in (0.0, 0.5, 1.0)
    ]
    assert (most[0] != 1).sum() > (most[1] != 1).sum() > 0 == (most[2] != 1).sum()
