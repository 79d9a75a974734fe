"""The suite on machines without a GPU or optional packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.device import DEVICE, limit_memory_info, missing_package, num_workers
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
NEEDY = "import pytest\ndef test_here() -> None: pass\n"


def test_worker_has_its_share_of_a_gpu() -> None:
    gib = 1 << 30
    free_of_all, reserved = [100 * gib], [0]
    memory_info = limit_memory_info(lambda *device: (free_of_all[0], 100 * gib), lambda: reserved[0], 3)
    assert memory_info() == (30 * gib, 30 * gib)
    reserved[0] = 20 * gib
    assert memory_info(0) == (10 * gib, 30 * gib)
    free_of_all[0] = 5 * gib
    assert memory_info() == (5 * gib, 30 * gib)
    reserved[0] = 40 * gib
    assert memory_info()[0] == 0


def test_workers_are_those_of_xdist() -> None:
    assert (num_workers({}), num_workers({"PYTEST_XDIST_WORKER_COUNT": "4"})) == (1, 4)


def test_only_optional_packages_may_be_missing() -> None:
    def caused(name: str) -> Exception:
        error = RuntimeError("cannot be collected")
        error.__cause__ = ModuleNotFoundError("no", name=name)
        return error

    assert missing_package(caused("litellm.main")) == "litellm"
    assert missing_package(caused("foreword.nothing")) is None
    assert missing_package(ValueError()) is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("partial", "message"), [("1", "1 passed, 1 skipped, 1 error"), ("", "1 passed, 2 errors")]
)
def test_skipped_module_must_be_allowed(tmp_path: Path, partial: str, message: str) -> None:
    """Packages are hidden from a suite of three modules; one of them is optional."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    for package in ("litellm", "numbers_of_nobody"):
        hidden = f"import sys\nsys.modules[{package!r}] = None\nimport {package}\n{NEEDY}"
        (tmp_path / f"test_{package}.py").write_text(hidden)
    (tmp_path / "test_two.py").write_text(NEEDY)
    environment = os.environ | {"FOREWORD_TEST_PARTIAL": partial, "PYTHONPATH": str(ROOT)}
    options = ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert message in done.stdout


def test_engines_use_the_tests_device() -> None:
    from_probe = subprocess.run(
        [
            sys.executable,
            "-c",
            "from foreword.planning.hardware import probe_hardware as p; print(p().device)",
        ],
        capture_output=True,
        text=True,
    )
    assert from_probe.stdout.strip() == DEVICE
