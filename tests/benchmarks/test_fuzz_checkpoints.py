"""Mutated files of whole checkpoints: refused, or computed with, by the native kernels."""

from pathlib import Path

import pytest

from benchmarks.fuzz_checkpoints import checkpoint_targets
from benchmarks.fuzz_worker import fuzz, run_target
from foreword.kernels.cpu.library import supported_isas

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")

INPUTS = 150
TARGETS = checkpoint_targets()


@pytest.mark.parametrize("name", TARGETS)
def test_sound_checkpoints_are_computed_with(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]()
    first_files = {seed.partition(b" ")[0]: seed for seed in target.seeds}
    results = {kind: run_target(target, seed, tmp_path) for kind, seed in first_files.items()}
    assert results == dict.fromkeys(first_files, "")


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files_are_refused_or_computed_with(name: str, tmp_path: Path) -> None:
    report, _ = fuzz(TARGETS[name](), INPUTS, 7, tmp_path)
    assert report.findings == {} and report.accepted and report.refused
