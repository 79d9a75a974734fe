"""The prompts: the same every time, sized to the model, and what their category promises."""

import pytest

from foreword.cli.bench_speculate_prompts import ALL, CATEGORIES, MIXED, Room, scripts_of, woven
from foreword.cli.bench_speculate_texts import library_functions
from foreword.demo import MODEL
from foreword.text.tokenizer import Tokenizer

REACH = 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


@pytest.fixture(scope="module")
def room(tokenizer: Tokenizer) -> Room:
    return Room.of(REACH, 128, lambda text: len(tokenizer.encode(text)), range(10, 1000), library_functions())


@pytest.mark.parametrize("category", ALL)
def test_scripts_are_the_same_every_time_and_other_in_other_variants(category: str, room: Room) -> None:
    first = scripts_of(category, 6, 0, room)
    assert scripts_of(category, 9, 0, room)[:6] == first
    assert scripts_of(category, 6, 1, room) != first
    assert len({script.seed for script in first}) == 6
    assert {script.category for script in first} == {category}


@pytest.mark.parametrize("category", CATEGORIES)
def test_prompt_and_answer_fit(category: str, room: Room, tokenizer: Tokenizer) -> None:
    for script in scripts_of(category, 20, 0, room):
        prompt = len(script.prompt_ids) or len(tokenizer.encode("\n\n".join(script.turns)))
        assert 0 < prompt <= 1.1 * room.prompt_tokens
        assert 8 <= script.max_tokens <= REACH - prompt


def test_a_long_document_is_long(room: Room, tokenizer: Tokenizer) -> None:
    script = scripts_of("long document", 1, 0, room)[0]
    assert len(tokenizer.encode(script.turns[0])) > 0.7 * room.prompt_tokens


def test_a_mixture_has_one_of_each(room: Room) -> None:
    count = len(CATEGORIES)
    mixed = scripts_of(MIXED, count, 0, room)
    assert len({(script.raw, script.num_turns, script.temperature, script.turns[:1]) for script in mixed}) == count
    assert any(script.prompt_ids for script in mixed)


def test_what_categories_promise(room: Room) -> None:
    predicted = scripts_of("predicted", 1, 0, room)[0]
    assert predicted.prediction is not None and predicted.turns[0].endswith(predicted.prediction)
    agent = scripts_of("agent", 1, 0, room)[0]
    assert agent.num_turns > 1
    noise = scripts_of("random", 1, 0, room)[0]
    assert noise.ignore_eos and noise.temperature > 1
    edit = scripts_of("library edit", 1, 0, room)[0]
    assert edit.turns[0].partition("\n")[2].startswith("def ")


def test_a_conversation_is_woven() -> None:
    assert woven(("a", "b", "c"), ()) == ["a"]
    assert woven(("a", "b", "c"), ("x", "y")) == ["a", "x", "b", "y", "c"]
