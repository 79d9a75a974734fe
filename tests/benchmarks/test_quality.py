"""benchmarks/quality.py end to end with few samples."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import quality


def test_quality_reports_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "quality",
        "--model",
        "tiny",
        "--files",
        str(tmp_path),
        "--samples",
        "1",
        "--cpu-isa",
        "reference",
    ]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(quality, "MODES", (quality.FLOAT32_MODE, quality.MODES[1], quality.MODES[-1]))
    monkeypatch.setattr(quality.corpus, "KINDS", {"faq": quality.corpus.KINDS["faq"]})
    assert quality.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["perplexity"]) == {"float32", "bfloat16", "int4"}
    assert 1.0 < result["perplexity"]["bfloat16"] < 1.5
    assert result["logits"]["bfloat16"]["relative_rms"] < 0.02 < result["logits"]["int4"]["relative_rms"]


def test_logit_errors_are_relative_to_the_spread() -> None:
    exact = torch.tensor([[1.0, 3.0], [2.0, 0.0]], dtype=torch.double)
    shifted = quality._error(exact + 1, exact)
    assert shifted["relative_rms"] == pytest.approx(1.0)
    assert (shifted["same_token"], shifted["kl"]) == (1.0, pytest.approx(0.0, abs=1e-12))
    assert quality._error(exact.flip(1), exact)["same_token"] == 0.0
