"""The same tokens with an MTP head and without speculation, for the families whose checkpoints bring one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM
from foreword.errors import ConfigError
from tests.support.budget import is_full, some_of
from tests.support.checkpoints import write_checkpoint
from tests.support.mtp_checkpoints import MTP_FAMILIES, train_mtp, write_mtp_checkpoint
from tests.test_exact import CROWDED, PLAIN, SEEDS, acceptance, answers, differing, recorded

COMBINATIONS: tuple[dict[str, Any], ...] = (
    CROWDED | {"speculate": "mtp"},
    CROWDED | {"speculate": "auto", "draft_length": "adaptive"},
    PLAIN | {"speculate": "mtp", "num_speculative_tokens": 16, "prefix_caching": True},
    PLAIN | {"speculate": "suffix,mtp", "concurrent": 16, "chunk": 24, "num_speculative_tokens": 1},
)
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "mtp_vocab_size": 200},
    {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
)


@dataclass(frozen=True)
class Bed:
    """A checkpoint whose head predicts some of its plain answers."""

    model: Path
    plain: list[dict[str, Any]]


@pytest.fixture(scope="module", params=MTP_FAMILIES if is_full() else ("qwen3_5_text", "deepseek_v3"))
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    path = tmp_path_factory.mktemp("mtp")
    seed = SEEDS.get(request.param, 1)
    model = write_mtp_checkpoint(path / "model", request.param, seed)
    _, plain = answers(model, model, None, PLAIN)
    texts = [[*line["prompt_token_ids"], *line["token_ids"]] for line in recorded(plain)]
    train_mtp(model, path / "scratch", texts, steps=120)
    yield Bed(model, plain)


@pytest.mark.parametrize("number", some_of(range(len(COMBINATIONS)), 3))
def test_equal_under_some_settings(bed: Bed, number: int) -> None:
    combination = COMBINATIONS[number]
    llm, actual = answers(bed.model, None, None, combination)
    assert differing(bed.plain, actual) == []
    if combination["draft_length"] == "fixed":
        assert 0.0 < acceptance(llm) < 1.0
    llm.check()


@pytest.mark.parametrize("number", some_of(range(len(PRECISIONS)), 2))
def test_equal_in_other_precisions(bed: Bed, number: int) -> None:
    _, plain = answers(bed.model, None, None, PLAIN, **PRECISIONS[number])
    _, actual = answers(bed.model, None, None, CROWDED | {"speculate": "mtp"}, **PRECISIONS[number])
    assert differing(plain, actual) == []


def test_auto_takes_the_head_that_the_checkpoint_brings(bed: Bed, tmp_path: Path) -> None:
    llm = LLM(str(bed.model), max_model_len=100)
    assert "mtp" in llm.info.resolved.drafters and llm.info.draft_model is not None
    assert "mtp" not in LLM(str(bed.model), max_model_len=100, speculate="suffix").info.resolved.drafters
    plain = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=r"`mtp`: .* has no MTP head that runs here"):
        LLM(str(plain), speculate="mtp")
    with pytest.raises(ConfigError, match="mtp"):
        LLM(str(bed.model), speculate="mtp", draft_model=str(plain))
