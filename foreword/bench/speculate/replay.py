"""Replay of recorded answers with set acceptance.

It measures random weights of any size, and the machinery apart from draft quality. In the category
"replay 0.6" each draft token is right with probability 0.6; "replay mixed" has requests of all rates
together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foreword.bench.engine import LocalEngine
from foreword.bench.measurement import OFF, REPLAY
from foreword.bench.workloads import Conversation, ConversationFactory, stable_seed
from foreword.errors import ConfigError

MIXED_REPLAY = REPLAY + "mixed"
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
    return (*(f"{REPLAY}{rate:g}" for rate in rates), *((MIXED_REPLAY,) if len(rates) > 1 else ()))


def make_replay_conversations(
    category: str, count: int, variant: int, base: Sequence[str], make: ConversationFactory
) -> tuple[Conversation, ...]:
    """Conversations of the base categories in turn, under seeds of their own."""
    columns = [make(name, count, variant) for name in base if name != RANDOM]
    return tuple(
        replace(columns[number % len(columns)][number], category=category, seed=stable_seed(category, number))
        for number in range(count)
    )


def record_outputs(
    engine: LocalEngine,
    groups: Sequence[tuple[Conversation, ...]],
    rates: Sequence[float],
    concurrency: int,
    path: Path,
) -> None:
    """Answer everything once without speculation and write the replay file."""
    lines = []
    for conversations in groups:
        for result in engine.run(conversations, OFF, concurrency, "recording").results:
            category = conversations[result.conversation].category
            rate = (
                rates[result.conversation % len(rates)]
                if category == MIXED_REPLAY
                else float(category.removeprefix(REPLAY))
            )
            line = {"prompt_token_ids": result.prompt_ids, "token_ids": result.output}
            lines.append({**line, "seed": result.seed, "error_rate": 1.0 - rate})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
