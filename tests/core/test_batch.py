"""build_batch() and its row layout."""

import pytest
import torch

from foreword.core.batch import Chunk, build_batch, request_index_of


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


def test_prev_slots_are_those_of_the_tokens_before() -> None:
    chunks = [
        Chunk([11, 12, 13], start=3, blocks=[5, 2], num_sampled=0),
        Chunk([21, 22], start=0, blocks=[7], num_sampled=2),
        Chunk([31], start=4, blocks=[6, 1], num_sampled=1),
    ]
    batch = build_batch(chunks, block_size=4, row_tile=8, device="cpu", with_prev_slots=True)
    assert batch.prev_slots is not None
    assert batch.prev_slots.tolist() == [5 * 4 + 2, 5 * 4 + 3, 2 * 4, 0, 7 * 4, 6 * 4 + 3, 0, 0]


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
