"""Instruction sets compared without Python: of this processor, and of ARM under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foreword.kernels.cpu.library import load_library

ROOT = Path(__file__).parents[2]
EXTENSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"][0]
FLAGS = [*EXTENSION["extra-compile-args"], *(f"-I{folder}" for folder in EXTENSION["include-dirs"])]
SOURCES = sorted(str(path) for path in ROOT.glob("foreword/kernels/csrc/**/*.cpp"))
PROGRAM = "tests/kernels/compare_isas.cpp"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"

pytestmark = pytest.mark.full
needs_emulator = pytest.mark.skipif(
    not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {CROSS_COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


def digests(*command: str | Path) -> dict[str, str]:
    """The program's checks: the digest of the quantized products, or "unsupported", by instruction set."""
    return dict(line.split() for line in run(*command).splitlines())


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sources for ARM, without a warning, linked with the program."""
    folder = tmp_path_factory.mktemp("arm")

    def compile_source(source: str) -> Path:
        built = folder / f"{Path(source).stem}.o"
        run(CROSS_COMPILER, *FLAGS, "-Wall", "-Wextra", "-Werror", "-c", source, "-o", built)
        return built

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, [PROGRAM, *SOURCES]))
    run(CROSS_COMPILER, "-static", "-pthread", *objects, "-o", folder / "program")
    return folder / "program"


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of every instruction set of this processor."""
    library, reason = load_library()
    if library is None:
        pytest.skip(reason)
    program = tmp_path_factory.mktemp("host") / "program"
    run(os.environ.get("CXX", "g++"), *FLAGS, PROGRAM, library._name, "-o", program)
    (digest,) = set(digests(program).values()) - {"unsupported"}
    return digest


def test_rows_are_invariant_and_quantized_products_equal_portable(digest: str) -> None:
    assert int(digest, 16)


@needs_emulator
def test_products_on_arm_equal_those_of_this_processor(arm_program: Path, digest: str) -> None:
    arm = digests(EMULATOR, "-cpu", "cortex-a76", arm_program, "portable", "neon")
    assert set(arm.values()) == {digest}


@needs_emulator
def test_processor_without_dot_products_is_recognized(arm_program: Path) -> None:
    assert digests(EMULATOR, "-cpu", "cortex-a53", arm_program, "neon") == {"neon": "unsupported"}
