"""What the operator is told when a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from foreword.config import Config
from foreword.engine import load as module
from foreword.engine.load import load
from tests.checkpoints import write_checkpoint
from tests.gguf_files import write_gguf


def warnings(path: Path, **options: str) -> tuple[str, ...]:
    return load(Config(model=str(path), kv_cache_memory="400tokens", threads=1, **options), ()).info.warnings


def test_nothing_to_say(tmp_path: Path) -> None:
    assert warnings(write_checkpoint(tmp_path / "model", "llama", seed=1), quantization="int8", cpu_isa="reference") == ()


def test_missing_kernels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    monkeypatch.setattr(module, "why_not_native", lambda device: f"no compiler for the {device}")
    assert warnings(path) == ("no compiler for the cpu",)


def test_quantization_that_has_no_effect_is_told(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama", seed=1)
    (warning,) = warnings(write_gguf(checkpoint, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0), quantization="int4")
    assert warning == "--quantization int4 leaves blocks that are quantized in the file as they are"


def test_what_was_timed_once_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)), kv_cache_memory="400tokens", threads=1)
    first = load(config, ())
    monkeypatch.delattr(module, "Calibrator")
    again = load(config, (), first.info.resolved, timings=first.drafting.timings)
    assert first.drafting.timings is not None and again.drafting.timings is first.drafting.timings
