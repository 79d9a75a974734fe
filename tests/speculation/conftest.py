"""Fixtures of drafters."""

import ctypes

import pytest

from foreword.kernels.cpu.library import load_library


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    library, reason = load_library()
    return library or pytest.skip(reason)
