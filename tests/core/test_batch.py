"""build_batch() and its row layout; upload()."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.batch import Chunk, build_batch, request_index_of, upload
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda

CUDA = torch.device("cuda")
on_fake_gpu = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU")


def test_build_batch_lays_out_chunks() -> None:
    chunks = [
        Chunk([11, 12, 13], start=3, blocks=[5, 2], num_sampled=0),
        Chunk([21, 22], start=0, blocks=[7], num_sampled=2),
    ]
    batch = build_batch(chunks, block_size=4, row_tile=8, device="cpu")
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert batch.positions.tolist() == [3, 4, 5, 0, 1, 0, 0, 0]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 7 * 4, 7 * 4 + 1, 0, 0, 0]
    assert batch.block_tables.tolist() == [[5, 2], [7, 0], [0, 0]]
    assert batch.query_start_loc == (0, 3, 5) and batch.seq_lens == (6, 2)
    assert batch.sample_rows.tolist() == [3, 4]


def test_row_without_a_slot_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="slot"):
        build_batch(
            [Chunk([1, 2], start=7, blocks=[1, 2], num_sampled=0)], block_size=4, row_tile=1, device="cpu"
        )


@pytest.mark.parametrize("row_tile", [1, 8])
def test_request_index_of_each_row(row_tile: int) -> None:
    chunks = [Chunk([1] * rows, 0, [1, 2], rows) for rows in (3, 1, 2)]
    batch = build_batch(chunks, 4, row_tile, "cpu", mrope=True, with_request_index=True)
    assert batch.request_index is not None and batch.mrope_positions is not None
    assert batch.request_index.tolist() == [0, 0, 0, 1, 2, 2] + [3] * (row_tile == 8) * 2
    assert torch.equal(request_index_of(build_batch(chunks, 4, row_tile, "cpu")), batch.request_index)
    assert batch.mrope_positions.shape == (len(batch.token_ids), 3)


@on_fake_gpu
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


@on_fake_gpu
@given(shapes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=6))
def test_upload_aligns_tensors_without_overlap(shapes: list[list[int]]) -> None:
    """No overlap, and each tensor starts at an aligned address."""
    columns = [np.arange(int(np.prod(shape))).reshape(shape) + 100 * n for n, shape in enumerate(shapes)]
    with FakeCuda():
        views = upload(columns, CUDA)
        for view, column in zip(views, columns, strict=True):
            assert view.storage_offset() % 2 == 0
            assert np.array_equal(view.cpu().numpy(), column)
