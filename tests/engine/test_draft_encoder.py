"""The vision encoder of a draft model: budget, shared memory, and failures without effect on outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.engine.engine import Engine
from tests.engine.test_encoder_runner import alone, check_answers, engine_of, image_request, text_request
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import run, token_hashes
from tests.support.vision_checkpoints import write_vision_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("guide") / "model", "llava", seed=5)


def engine_with_drafts(checkpoint: Path, drafter: Path, **options: Any) -> Engine:
    return engine_of(checkpoint, speculate="draft", draft_model=str(drafter), **options)


def num_drafted(engine: Engine) -> int:
    return sum(
        length * count
        for counts in engine.proposer.stats().draft_length_counts.values()
        for length, count in counts.items()
    )


def test_draft_encoder_encodes_once_for_all_choices(checkpoint: Path) -> None:
    engine = engine_with_drafts(checkpoint, checkpoint)
    first = image_request(checkpoint, "0", [1, 2], temperature=0.7, max_tokens=20)
    check_answers(engine, checkpoint, [replace(first, id=f"{n}", seed=n) for n in range(4)])
    assert (
        engine.draft_encoder is not None
        and engine.draft_encoder.num_encoded == engine.encoder.num_encoded == 2
    )
    assert num_drafted(engine) > 40


@pytest.mark.parametrize("memory", ["0", "6kb"])
def test_both_encoders_share_the_cache_memory(checkpoint: Path, memory: str) -> None:
    """An image has 16 features of 256 bytes in both models."""
    engine = engine_with_drafts(checkpoint, checkpoint, image_cache_memory=memory, max_num_seqs=2)
    bound = engine.info.resolved.image_cache_bytes
    assert engine.draft_encoder is not None
    check_answers(
        engine,
        checkpoint,
        [image_request(checkpoint, f"{n}", [n, n + 1], max_tokens=15) for n in range(1, 5)],
    )
    assert engine.encoder.cache.num_bytes + engine.draft_encoder.cache.num_bytes <= bound


def test_draft_encoder_gets_the_remaining_rows(checkpoint: Path) -> None:
    """It waits while the target's encoder uses the budget, and its own rows count too."""
    engine = engine_with_drafts(checkpoint, checkpoint, max_num_batched_tokens=16)
    max_rows = engine.info.resolved.max_num_batched_tokens // 2
    for number in (1, 2, 3):
        engine.submit(image_request(checkpoint, f"{number}", [number], max_tokens=12))
    used_rows: list[tuple[int, int]] = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda rows=0: (
        used_rows.append((rows, engine.encoder.cost_rows)) or schedule(rows)
    )  # type: ignore
    draft_encoder = engine.draft_encoder
    assert draft_encoder is not None
    while not engine.idle:
        engine.step()
        assert used_rows[-1][0] == engine.encoder.cost_rows + draft_encoder.cost_rows
        assert draft_encoder.cost_rows == 0 or engine.encoder.cost_rows < max_rows
        engine.check()
    assert any(rows > target_rows for rows, target_rows in used_rows)


def test_failing_draft_encoder_disables_the_draft_model(checkpoint: Path, tmp_path: Path) -> None:
    """Only requests with images lose their drafts, and none fails."""
    broken = write_vision_checkpoint(tmp_path / "broken", "llava", seed=5)
    weights = load_file(broken / "model.safetensors")
    weights["multi_modal_projector.linear_2.bias"] *= torch.nan
    save_file(weights, broken / "model.safetensors")
    engine = engine_with_drafts(checkpoint, broken)
    check_answers(
        engine,
        checkpoint,
        [image_request(checkpoint, "a", max_tokens=20), image_request(checkpoint, "b", [2])],
    )
    assert (num_drafted(engine), engine.proposer.errors) == (0, {"draft": 2})
    check_answers(engine, checkpoint, [text_request("t", max_tokens=20)])
    assert num_drafted(engine) > 10


def test_abort_stops_the_draft_encoder(checkpoint: Path) -> None:
    engine = engine_with_drafts(checkpoint, checkpoint, max_num_batched_tokens=8)
    draft_encoder = engine.draft_encoder
    assert draft_encoder is not None
    engine.submit(image_request(checkpoint, "a", [1, 2], max_tokens=40))
    while draft_encoder._job is None:
        engine.step()
    engine.remove("a")
    assert draft_encoder._job is None and engine.idle
    engine.check()


def test_draft_encoder_skips_requests_without_speculation(checkpoint: Path) -> None:
    engine = engine_with_drafts(checkpoint, checkpoint)
    plain = image_request(checkpoint, "a", max_tokens=20)
    off = replace(
        plain, params=replace(plain.params, speculation=replace(plain.params.speculation, method="off"))
    )
    assert token_hashes(run(engine, [off])["a"]) == alone(checkpoint, plain)
    assert engine.draft_encoder is not None and engine.draft_encoder.num_encoded == 0


def test_text_draft_model_has_no_encoder(checkpoint: Path, tmp_path: Path) -> None:
    engine = engine_with_drafts(checkpoint, write_checkpoint(tmp_path / "reads", "llama", seed=5))
    assert engine.draft_encoder is None
    check_answers(engine, checkpoint, [image_request(checkpoint, "a", max_tokens=20), text_request("t")])
    assert num_drafted(engine) > 0 and not engine.proposer.errors
