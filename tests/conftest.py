"""Options of the test suite."""

import os

import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter; it decides so where a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The workers of the suite share few cores: threads that wait for each other would cost a hundred times what they give.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="every combination of settings in test_exact, not only pairs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        module = metafunc.module
        combinations = module.PRODUCT if metafunc.config.getoption("--full-product") else module.PAIRS
        metafunc.parametrize("combination", combinations, ids=module.name_of)
