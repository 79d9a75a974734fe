"""The memory behind the block ids."""

import pytest
import torch

from foreword.cache.storage import KVStorage


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_blocks_beside_the_scratch_block(dtype: str, size: int):
    kv = KVStorage(5, 8, [(2, 16), (1, 32)], dtype)
    k, v = kv.layer(1)
    assert k.shape == v.shape == (6 * 8, 1, 32)
    assert k.dtype == getattr(torch, dtype) and not k.any()
    assert kv.nbytes == 2 * 48 * (2 * 16 + 32) * size
    assert kv.layer(0)[0].data_ptr() != kv.layer(0)[1].data_ptr()
