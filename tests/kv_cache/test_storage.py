"""Memory of the KV cache."""

import pytest
import torch

from foreword.core.batch import KVShape
from foreword.kv_cache.storage import KVStorage


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_storage_has_a_scratch_block(dtype: str, size: int):
    kv = KVStorage(5, 8, [KVShape(2, 16), KVShape(1, 32)], dtype)
    layer = kv.layer(1)
    assert layer.k.shape == layer.v.shape == (6 * 8, 1, 32)
    assert layer.k.dtype == getattr(torch, dtype) and not layer.k.any()
    assert layer.k_scale is None and layer.v_scale is None
    assert kv.nbytes == 2 * 48 * (2 * 16 + 32) * size
    assert kv.layer(0).k.data_ptr() != kv.layer(0).v.data_ptr()


def test_int8_has_a_scale_per_slot_and_head():
    kv = KVStorage(5, 8, [KVShape(2, 16), KVShape(1, 32)], "int8")
    layer = kv.layer(0)
    assert layer.k.dtype == torch.int8
    assert layer.k_scale is not None and layer.v_scale is not None
    assert layer.k_scale.shape == layer.v_scale.shape == (48, 2)
    assert kv.nbytes == 2 * 48 * (2 * 16 + 32 + 4 * (2 + 1))


def test_fp8_has_a_scale_per_slot_and_head():
    layer = KVStorage(5, 8, [KVShape(2, 16)], "fp8").layer(0)
    assert layer.k.dtype == layer.v.dtype == torch.float8_e4m3fn and not layer.k.view(torch.uint8).any()
    assert (
        layer.k_scale is not None and layer.k_scale.shape == (48, 2) and layer.k_scale.dtype == torch.float32
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_layer_reads_k_and_v_of_an_earlier_layer(dtype: str):
    own = [KVShape(1, 64), KVShape(2, 16)]
    kv = KVStorage(5, 8, [*own, KVShape(1, 64, source=0), KVShape(2, 16, source=1)], dtype)
    assert kv.layer(2) is kv.layer(0) and kv.layer(3) is kv.layer(1)
    assert kv.nbytes == KVStorage(5, 8, own, dtype).nbytes
    assert [KVShape(2, 16, source).values_per_token for source in (None, 0)] == [64, 0]
