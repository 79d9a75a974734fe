"""Acceptance as asked for: recorded answers are drafted, with so many tokens made wrong.

Random weights of any size can be measured so, and the machinery apart from the guessing. The category "replay 0.6"
has drafts whose tokens are right with probability 0.6 each; "replay mixed" has requests of all rates together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from foreword.cli.bench_speculate_local import LocalEngine
from foreword.cli.bench_speculate_prompts import PromptBudget, Conversation, make_conversations, stable_seed
from foreword.cli.bench_speculate_round import OFF
from foreword.errors import ConfigError

__all__ = ["MIXED_REPLAY", "parse_acceptance_rates", "replay_categories", "record_outputs", "make_replay_conversations"]

PREFIX = "replay "
MIXED_REPLAY = PREFIX + "mixed"
RANDOM = "random"


def parse_acceptance_rates(text: str) -> tuple[float, ...]:
    """ "0,0.3,0.9" as numbers. Raises ConfigError."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--replay-acceptance must be numbers from 0 to 1 joined by commas, got {text!r}")
    return rates


def replay_categories(rates: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{PREFIX}{rate:g}" for rate in rates), *((MIXED_REPLAY,) if len(rates) > 1 else ()))


def make_replay_conversations(category: str, count: int, variant: int, base: Sequence[str], budget: PromptBudget) -> tuple[Conversation, ...]:
    """Scripts of the base categories in turn, under seeds of their own: a recording is found by prompt and seed."""
    each = [make_conversations(name, count, variant, budget) for name in base if name != RANDOM]
    return tuple(
        replace(each[number % len(each)][number], category=category, seed=stable_seed(category, number)) for number in range(count)
    )


def record_outputs(
    engine: LocalEngine, groups: Sequence[tuple[Conversation, ...]], rates: Sequence[float], concurrency: int, path: Path
) -> None:
    """Answer everything once without speculation and write what the drafter `replay` reads."""
    with path.open("w", encoding="utf-8") as file:
        for scripts in groups:
            for line in _lines(engine, scripts, rates, concurrency):
                file.write(json.dumps(line) + "\n")


def _lines(
    engine: LocalEngine, conversations: tuple[Conversation, ...], rates: Sequence[float], concurrency: int
) -> Iterator[dict[str, object]]:
    for call in engine.run(conversations, OFF, concurrency, "recording").results:
        yield {
            "prompt_token_ids": call.prompt_ids,
            "token_ids": call.output,
            "seed": call.seed,
            "error_rate": 1.0 - _rate(conversations[call.conversation], call.conversation, rates),
        }


def _rate(conversation: Conversation, number: int, rates: Sequence[float]) -> float:
    if conversation.category == MIXED_REPLAY:
        return rates[number % len(rates)]
    return float(conversation.category.removeprefix(PREFIX))
