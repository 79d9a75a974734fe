"""Build and lookup of the compiled library."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from foreword.kernels.cpu.library import ISAS, library_digest, load_library, supported_isas

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "foreword/kernels/csrc"


def extension() -> dict[str, Any]:
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert isinstance(extension, dict)
    return extension


def test_makefile_flags_match_the_package() -> None:
    assert " ".join(extension()["extra-compile-args"]) in (ROOT / "Makefile").read_text()


def test_library_is_not_older_than_its_sources() -> None:
    """Otherwise the other tests would run an old build; `make native` rebuilds it."""
    library, reason = load_library()
    if library is None:
        pytest.skip(reason)
    assert Path(library._name).stat().st_mtime >= max(path.stat().st_mtime for path in CSRC.rglob("*.*"))


def test_missing_or_broken_library_is_explained(tmp_path: Path) -> None:
    library, reason = load_library(tmp_path)
    assert library is None
    assert reason.startswith("the native kernels were not built")
    assert "install g++ and run the same `make` or `pip install` again" in reason
    (tmp_path / "_native.so").write_bytes(b"not a library")
    library, reason = load_library(tmp_path)
    assert library is None
    assert reason.startswith("_native.so cannot be loaded")


def test_library_path_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.so"
    monkeypatch.setenv("FOREWORD_NATIVE", str(other))
    assert load_library()[1].startswith("other.so cannot be loaded") and library_digest() == ""
    other.write_bytes(b"not a library")
    assert load_library()[1].startswith("other.so cannot be loaded") and library_digest() != ""


def test_isas_are_ordered() -> None:
    assert supported_isas() == tuple(isa for isa in ISAS if isa in supported_isas())
    assert not supported_isas() or supported_isas()[0] == "portable"
