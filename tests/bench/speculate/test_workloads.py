"""The prompts: the same every time, sized to the model, and what their category promises."""

import pytest

from foreword.bench.speculate.workloads import (
    ALL_CATEGORIES,
    CATEGORIES,
    MIXED,
    PromptBudget,
    interleave,
    library_functions,
    make_conversations,
)
from foreword.demo import MODEL
from foreword.tokenizer.tokenizer import Tokenizer

REACH = 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


@pytest.fixture(scope="module")
def room(tokenizer: Tokenizer) -> PromptBudget:
    return PromptBudget.from_context(
        REACH, 128, lambda text: len(tokenizer.encode(text)), range(10, 1000), library_functions()
    )


@pytest.mark.parametrize("category", ALL_CATEGORIES)
def test_scripts_are_the_same_every_time_and_other_in_other_variants(
    category: str, room: PromptBudget
) -> None:
    first = make_conversations(category, 6, 0, room)
    assert make_conversations(category, 9, 0, room)[:6] == first
    assert make_conversations(category, 6, 1, room) != first
    assert len({script.seed for script in first}) == 6
    assert {script.category for script in first} == {category}


@pytest.mark.parametrize("category", CATEGORIES)
def test_prompt_and_answer_fit(category: str, room: PromptBudget, tokenizer: Tokenizer) -> None:
    for script in make_conversations(category, 20, 0, room):
        prompt = len(script.prompt_ids) or len(tokenizer.encode("\n\n".join(script.turns)))
        assert 0 < prompt <= 1.1 * room.prompt_tokens
        assert 8 <= script.max_tokens <= REACH - prompt


def test_a_long_document_is_long(room: PromptBudget, tokenizer: Tokenizer) -> None:
    script = make_conversations("long document", 1, 0, room)[0]
    assert len(tokenizer.encode(script.turns[0])) > 0.7 * room.prompt_tokens


def test_a_mixture_has_one_of_each(room: PromptBudget) -> None:
    count = len(CATEGORIES)
    mixed = make_conversations(MIXED, count, 0, room)
    assert (
        len({(script.raw, script.num_turns, script.temperature, script.turns[:1]) for script in mixed})
        == count
    )
    assert any(script.prompt_ids for script in mixed)


def test_what_categories_promise(room: PromptBudget) -> None:
    predicted = make_conversations("predicted", 1, 0, room)[0]
    assert predicted.prediction is not None and predicted.turns[0].endswith(predicted.prediction)
    agent = make_conversations("agent", 1, 0, room)[0]
    assert agent.num_turns > 1
    noise = make_conversations("random", 1, 0, room)[0]
    assert noise.ignore_eos and noise.temperature > 1
    edit = make_conversations("library edit", 1, 0, room)[0]
    assert edit.turns[0].partition("\n")[2].startswith("def ")


def test_a_conversation_is_woven() -> None:
    assert interleave(("a", "b", "c"), ()) == ["a"]
    assert interleave(("a", "b", "c"), ("x", "y")) == ["a", "x", "b", "y", "c"]
