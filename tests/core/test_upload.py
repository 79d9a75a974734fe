"""upload(), with the fake GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.batch import upload
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU")


def test_upload_keeps_values_types_and_shapes() -> None:
    arrays = [
        np.array([1, -(1 << 63)]),
        np.array([True, False, True]),
        np.zeros(0, np.float32),
        np.array([[0.1, -np.inf]]),
        np.arange(5, dtype=np.int32),
    ]
    with FakeCuda() as gpu:
        there = upload(arrays, CUDA)
        assert gpu.counts == {"upload": 1}
        for array, tensor in zip(arrays, there, strict=True):
            assert tensor.device.type == "cuda" and tensor.storage_offset() * tensor.itemsize % 16 == 0
            expected = torch.from_numpy(array)
            assert tensor.dtype == expected.dtype and torch.equal(tensor.cpu(), expected)
        assert not gpu.refused


@given(shapes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=6))
def test_upload_aligns_tensors_without_overlap(shapes: list[list[int]]) -> None:
    """No overlap, and each tensor starts at an aligned address."""
    columns = [np.arange(int(np.prod(shape))).reshape(shape) + 100 * n for n, shape in enumerate(shapes)]
    with FakeCuda():
        views = upload(columns, CUDA)
        for view, column in zip(views, columns, strict=True):
            assert view.storage_offset() % 2 == 0
            assert np.array_equal(view.cpu().numpy(), column)
