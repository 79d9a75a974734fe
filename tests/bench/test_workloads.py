"""Prompts of `foreword bench speculate`: deterministic, sized to the model, true to their category."""

import pytest

from foreword.bench.workloads import (
    ALL_CATEGORIES,
    CATEGORIES,
    PromptBudget,
    interleave,
    make_conversations,
)
from foreword.demo import MODEL
from foreword.tokenizer.tokenizer import Tokenizer

CONTEXT = 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


class FakeModel:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def plain_ids(self) -> range:
        return range(10, 1000)


@pytest.fixture(scope="module")
def budget(tokenizer: Tokenizer) -> PromptBudget:
    return PromptBudget.from_context(CONTEXT, 128, FakeModel(tokenizer))


@pytest.mark.parametrize("category", ALL_CATEGORIES)
def test_conversations_depend_on_category_number_and_variant(category: str, budget: PromptBudget) -> None:
    first = make_conversations(category, 6, 0, budget)
    assert make_conversations(category, 9, 0, budget)[:6] == first
    assert make_conversations(category, 6, 1, budget) != first
    assert len({conversation.seed for conversation in first}) == 6
    assert {conversation.category for conversation in first} == {category}


@pytest.mark.parametrize("category", CATEGORIES)
def test_prompt_and_answer_fit_the_context(category: str, budget: PromptBudget, tokenizer: Tokenizer) -> None:
    for conversation in make_conversations(category, 20, 0, budget):
        prompt = len(conversation.prompt_ids) or len(tokenizer.encode("\n\n".join(conversation.turns)))
        assert 0 < prompt <= 1.1 * budget.prompt_tokens
        assert 8 <= conversation.max_tokens <= CONTEXT - prompt


def test_categories_have_their_features(budget: PromptBudget) -> None:
    predicted = make_conversations("predicted", 1, 0, budget)[0]
    assert predicted.prediction is not None and predicted.turns[0].endswith(predicted.prediction)
    agent = make_conversations("agent", 1, 0, budget)[0]
    assert agent.num_turns > 1
    noise = make_conversations("random", 1, 0, budget)[0]
    assert noise.ignore_eos and noise.temperature > 1
    edit = make_conversations("library edit", 1, 0, budget)[0]
    assert edit.turns[0].partition("\n")[2].startswith("def ")


def test_interleave_ends_with_the_next_turn() -> None:
    assert interleave(("a", "b", "c"), ()) == ["a"]
    assert interleave(("a", "b", "c"), ("x", "y")) == ["a", "x", "b", "y", "c"]
