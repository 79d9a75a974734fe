"""Claims of benchmarks: what holds is silent, what does not is named and voids the figure."""

from pathlib import Path

import pytest

from foreword.bench import regime
from foreword.bench.regime import RegimeError, checked_share, require, shared_cache_bytes


def test_unequal_values_name_the_claim() -> None:
    require("rows verified", 4, 4)
    with pytest.raises(RegimeError, match="not measured: rows verified: 1, not 4"):
        require("rows verified", 1, 4)


def test_share_beyond_its_ceiling_is_refused() -> None:
    assert checked_share(1.04, 1.0) == 1.04, "a ceiling is measured, too"
    with pytest.raises(RegimeError, match="the ceiling is wrong: 200%"):
        checked_share(2.0, 1.0)


def test_cache_size_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "CPU_CACHE", tmp_path)
    assert shared_cache_bytes() == 0
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert shared_cache_bytes() == 32 << 20
