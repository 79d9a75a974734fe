"""The tower of a draft model in a whole engine: it sees late, within bounds, and nobody depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.core.request import Request
from foreword.engine.engine import Engine
from tests.engine.test_encoder_runner import alone, engine_of, hear, reading, seeing, told
from tests.support.checkpoints import write_checkpoint
from tests.support.vision_checkpoints import write_vision_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("guide") / "model", "llava", seed=5)


def guided(checkpoint: Path, drafter: Path, **options: Any) -> Engine:
    return engine_of(checkpoint, speculate="draft", draft_model=str(drafter), **options)


def check_answers(engine: Engine, checkpoint: Path, requests: Sequence[Request]) -> None:
    heard = hear(engine, requests, apart=2)
    assert {name: told(events) for name, events in heard.items()} == {
        one.id: alone(checkpoint, one) for one in requests
    }


def drafted(engine: Engine) -> int:
    return sum(
        length * count
        for counts in engine.proposer.stats().draft_length_counts.values()
        for length, count in counts.items()
    )


def test_a_picture_is_seen_once_for_all_choices(checkpoint: Path) -> None:
    engine = guided(checkpoint, checkpoint)
    first = seeing(checkpoint, "0", [1, 2], temperature=0.7, max_tokens=20)
    check_answers(engine, checkpoint, [replace(first, id=f"{n}", seed=n) for n in range(4)])
    assert (
        engine.draft_encoder is not None
        and engine.draft_encoder.num_encoded == engine.encoder.num_encoded == 2
    )
    assert drafted(engine) > 40


@pytest.mark.parametrize("memory", ["0", "6kb"])
def test_both_towers_share_the_memory(checkpoint: Path, memory: str) -> None:
    """A picture has 16 features of 256 bytes, in both."""
    engine = guided(checkpoint, checkpoint, image_cache_memory=memory, max_num_seqs=2)
    bound = engine.info.resolved.image_cache_bytes
    assert engine.draft_encoder is not None
    check_answers(
        engine, checkpoint, [seeing(checkpoint, f"{n}", [n, n + 1], max_tokens=15) for n in range(1, 5)]
    )
    assert engine.encoder.cache.num_bytes + engine.draft_encoder.cache.num_bytes <= bound


def test_it_gets_the_rows_that_are_left(checkpoint: Path) -> None:
    """In a step whose share went to the model's own tower it waits; it costs rows as the other does."""
    engine = guided(checkpoint, checkpoint, max_num_batched_tokens=16)
    share = engine.info.resolved.max_num_batched_tokens // 2
    for number in (1, 2, 3):
        engine.submit(seeing(checkpoint, f"{number}", [number], max_tokens=12))
    taken: list[tuple[int, int]] = []
    plan = engine.scheduler.schedule
    engine.scheduler.schedule = lambda rows=0: taken.append((rows, engine.encoder.cost_rows)) or plan(rows)  # type: ignore
    guide = engine.draft_encoder
    assert guide is not None
    while not engine.idle:
        engine.step()
        assert taken[-1][0] == engine.encoder.cost_rows + guide.cost_rows
        assert guide.cost_rows == 0 or engine.encoder.cost_rows < share
        engine.check()
    assert any(rows > own for rows, own in taken)


def test_a_tower_that_says_nothing_of_use_costs_drafts(checkpoint: Path, tmp_path: Path) -> None:
    """Of those who show pictures, and nobody ends for it."""
    broken = write_vision_checkpoint(tmp_path / "broken", "llava", seed=5)
    weights = load_file(broken / "model.safetensors")
    weights["multi_modal_projector.linear_2.bias"] *= torch.nan
    save_file(weights, broken / "model.safetensors")
    engine = guided(checkpoint, broken)
    check_answers(engine, checkpoint, [seeing(checkpoint, "a", max_tokens=20), seeing(checkpoint, "b", [2])])
    assert (drafted(engine), engine.proposer.errors) == (0, {"draft": 2})
    check_answers(engine, checkpoint, [reading("t", max_tokens=20)])
    assert drafted(engine) > 10


def test_a_picture_that_nobody_waits_for_is_put_away(checkpoint: Path) -> None:
    engine = guided(checkpoint, checkpoint, max_num_batched_tokens=8)
    guide = engine.draft_encoder
    assert guide is not None
    engine.submit(seeing(checkpoint, "a", [1, 2], max_tokens=40))
    while guide._job is None:
        engine.step()
    engine.remove("a")
    assert guide._job is None and engine.idle
    engine.check()


def test_whoever_wants_no_drafts_of_it_is_not_shown(checkpoint: Path) -> None:
    engine = guided(checkpoint, checkpoint)
    plain = seeing(checkpoint, "a", max_tokens=20)
    off = replace(
        plain, params=replace(plain.params, speculation=replace(plain.params.speculation, method="off"))
    )
    assert told(hear(engine, [off])["a"]) == alone(checkpoint, plain)
    assert engine.draft_encoder is not None and engine.draft_encoder.num_encoded == 0


def test_a_draft_model_that_reads_has_no_guide(checkpoint: Path, tmp_path: Path) -> None:
    engine = guided(checkpoint, write_checkpoint(tmp_path / "reads", "llama", seed=5))
    assert engine.draft_encoder is None
    check_answers(engine, checkpoint, [seeing(checkpoint, "a", max_tokens=20), reading("t")])
    assert drafted(engine) > 0 and not engine.proposer.errors
