"""The table of docs/models.md is the plan of `foreword check`."""

from pathlib import Path

import pytest

from benchmarks.fitting_sizes import SHAPES, rows
from tests.support.budget import is_full

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_table_equals_the_plan() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    written = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert written.keys() >= SHAPES.keys()
    for row in rows(SHAPES if is_full() else ("LFM2-8B-A1B", "Qwen3.5-0.8B")):
        if written[row[0]] != f"| {' | '.join(row)} |":
            pytest.fail(f"docs/models.md should say: | {' | '.join(row)} |")
