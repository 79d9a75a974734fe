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
from foreword.cli.bench_speculate_prompts import Room, Script, scripts_of, seed_of
from foreword.cli.bench_speculate_round import OFF
from foreword.errors import ConfigError

__all__ = ["SPREAD", "acceptances", "categories_of", "record", "replay_scripts"]

PREFIX = "replay "
SPREAD = PREFIX + "mixed"
RANDOM = "random"


def acceptances(text: str) -> tuple[float, ...]:
    """ "0,0.3,0.9" as numbers. Raises ConfigError."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--replay-acceptance must be numbers from 0 to 1 joined by commas, got {text!r}")
    return rates


def categories_of(rates: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{PREFIX}{rate:g}" for rate in rates), *((SPREAD,) if len(rates) > 1 else ()))


def replay_scripts(category: str, count: int, variant: int, base: Sequence[str], room: Room) -> tuple[Script, ...]:
    """Scripts of the base categories in turn, under seeds of their own: a recording is found by prompt and seed."""
    each = [scripts_of(name, count, variant, room) for name in base if name != RANDOM]
    return tuple(
        replace(each[number % len(each)][number], category=category, seed=seed_of(category, number)) for number in range(count)
    )


def record(
    engine: LocalEngine, groups: Sequence[tuple[Script, ...]], rates: Sequence[float], concurrency: int, path: Path
) -> None:
    """Answer everything once without speculation and write what the drafter `replay` reads."""
    with path.open("w", encoding="utf-8") as file:
        for scripts in groups:
            for line in _lines(engine, scripts, rates, concurrency):
                file.write(json.dumps(line) + "\n")


def _lines(
    engine: LocalEngine, scripts: tuple[Script, ...], rates: Sequence[float], concurrency: int
) -> Iterator[dict[str, object]]:
    for call in engine.run(scripts, OFF, concurrency, "recording").calls:
        yield {
            "prompt_token_ids": call.prompt_ids,
            "token_ids": call.output,
            "seed": call.seed,
            "error_rate": 1.0 - _rate(scripts[call.script], call.script, rates),
        }


def _rate(script: Script, number: int, rates: Sequence[float]) -> float:
    if script.category == SPREAD:
        return rates[number % len(rates)]
    return float(script.category.removeprefix(PREFIX))
