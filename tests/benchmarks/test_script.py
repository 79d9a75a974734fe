"""The frame of every script in benchmarks/."""

from pathlib import Path

import pytest

from benchmarks.script import require_concurrency, run_script
from foreword.bench.regime import RegimeError, require
from foreword.kernels.cpu import library


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


def test_script_with_a_broken_claim_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(lambda: None) == 0
    assert run_script(lambda: require("tokens", 1, 2)) == 1
    assert "not measured: tokens: 1, not 2" in capsys.readouterr().err
