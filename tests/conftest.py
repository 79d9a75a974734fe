"""Options of the test suite, and what it does on machines that differ: docs/development.md."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.device import DEVICE, PARTIAL, limit_memory_info, missing_package, num_workers

# Without a GPU, Triton's kernels run in its interpreter; it decides so where a kernel is defined.
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The workers of the suite share few cores: threads that wait for each other would cost a hundred times what they give.
torch.set_num_threads(1)

# A kernel is compiled when it is first called: no deadline of an example holds there.
settings.register_profile("cuda", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist share one GPU: each sees, and may take, its part of the memory; so do servers that it starts."""
    if DEVICE == "cpu":
        return
    settings.load_profile("cuda")
    count = num_workers()
    if count > 1:
        torch.cuda.set_per_process_memory_fraction(0.9 / count)
        torch.cuda.mem_get_info = limit_memory_info(
            torch.cuda.mem_get_info, torch.cuda.memory_reserved, count
        )
        os.environ.setdefault("FOREWORD_GPU_MEMORY_UTILIZATION", f"{0.9 / count:.3f}")


class PartialModule(pytest.Module):
    """A module of tests that is skipped where a package is not installed that it needs."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            name = missing_package(error)
            if name is None:
                raise
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return PartialModule.from_parent(parent, path=module_path) if PARTIAL else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-product",
        action="store_true",
        help="every combination of settings in test_exact, not only pairs",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        module = metafunc.module
        combinations = module.PRODUCT if metafunc.config.getoption("--full-product") else module.PAIRS
        metafunc.parametrize("combination", combinations, ids=module.name_of)
