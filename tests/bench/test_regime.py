"""Claims of benchmarks: what holds is silent, what does not is named and voids the figure."""

from pathlib import Path

import pytest

from foreword.bench import regime
from foreword.bench.regime import (
    RegimeError,
    checked_share,
    require,
    require_concurrency,
    run_script,
    shared_cache_bytes,
)
from foreword.kernels.cpu import library


def test_unequal_values_name_the_claim() -> None:
    require("rows verified", 4, 4)
    with pytest.raises(RegimeError, match="not measured: rows verified: 1, not 4"):
        require("rows verified", 1, 4)


def test_share_beyond_its_ceiling_is_refused() -> None:
    assert checked_share(1.04, 1.0) == 1.04, "a ceiling is measured, too"
    with pytest.raises(RegimeError, match="the ceiling is wrong: 200%"):
        checked_share(2.0, 1.0)


def test_concurrency_is_that_of_one_moment() -> None:
    require_concurrency([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)], 2)
    with pytest.raises(RegimeError, match="requests at once: 1, not 2"):
        require_concurrency([(0.0, 1.0), (1.0, 2.0)], 2)


def test_tree_without_kernels_is_named_where_the_installed_package_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, installed = tmp_path / "tree/foreword/kernels", tmp_path / "site-packages/foreword/kernels"
    for folder in (tree, installed):
        folder.mkdir(parents=True)
    monkeypatch.delenv("FOREWORD_NATIVE", raising=False)
    monkeypatch.setattr(library, "PACKAGE_DIR", tree)
    monkeypatch.setattr("sys.path", [str(tmp_path / "tree"), str(tmp_path / "site-packages")])
    assert run_script(lambda: 0) == 0, "computed in torch everywhere"
    (installed / "_native.so").touch()
    assert run_script(lambda: 0) == 1
    error = capsys.readouterr().err
    assert (
        f"{tree.parent} has no native kernels and hides the installed package in {installed.parent}" in error
    )
    assert "make native" in error and error == f"not measured: {library.load_library()[1]}\n"
    (tree / "_native.so").touch()
    assert run_script(lambda: 0) == 0


def test_cache_size_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "CPU_CACHE", tmp_path)
    assert shared_cache_bytes() == 0
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert shared_cache_bytes() == 32 << 20


def test_script_with_a_broken_claim_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(lambda: None) == 0
    assert run_script(lambda: require("tokens", 1, 2)) == 1
    assert "not measured: tokens: 1, not 2" in capsys.readouterr().err
