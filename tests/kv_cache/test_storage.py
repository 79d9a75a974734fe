"""Memory of the KV cache."""

import pytest
import torch

from foreword.core.batch import HybridLayer, HybridShape, KVLayer, KVShape
from foreword.core.states import StateShape, StateSizes
from foreword.kv_cache.storage import CacheImages, KVStorage


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


@pytest.mark.parametrize(
    "dtype, shapes",
    [
        ("float32", [KVShape(2, 16), KVShape(1, 32), KVShape(2, 16, source=0)]),
        ("bfloat16", [KVShape(2, 16)]),
        ("int8", [KVShape(2, 16), KVShape(1, 64)]),
        ("bfloat16", [KVShape(1, 48, latent_dim=32)]),
        ("int8", [KVShape(1, 48, latent_dim=32)]),
        ("float32", [KVShape(1, 48, latent_dim=48)]),
    ],
)
def test_block_image_holds_a_block_and_nothing_else(dtype: str, shapes: list[KVShape]):
    torch.manual_seed(0)
    source, target = (KVStorage(3, 8, shapes, dtype) for _ in range(2))
    for kv in (source, target):
        for layer in map(kv.layer, range(len(shapes))):
            for tensor in tensors_of(layer):
                tensor.copy_(torch.randint(-99, 99, tensor.shape))
    before = [[t.clone() for t in tensors_of(target.layer(i))] for i in range(len(shapes))]
    assert source.block_images().nbytes * 4 == source.nbytes
    copy_entry(source.block_images(), 2, target.block_images(), 1)
    for index in range(len(shapes)):
        for old, new, copied in zip(
            before[index], tensors_of(target.layer(index)), tensors_of(source.layer(index)), strict=True
        ):
            assert torch.equal(new[8:16], copied[16:24])
            assert torch.equal(new[:8], old[:8]) and torch.equal(new[16:], old[16:])


def copy_entry(source: CacheImages, index: int, target: CacheImages, to: int) -> None:
    image = source.new_image()
    source.read(index, image)
    target.write(to, image)


def tensors_of(layer: KVLayer) -> list[torch.Tensor]:
    return [each for each in (layer.k, layer.v, layer.k_scale, layer.v_scale) if each is not None]


def test_anchor_image_holds_the_states_of_all_layers():
    delta = StateShape(24, 4, key_heads=1, value_heads=2, key_dim=4, value_dim=8)
    shapes = [StateShape(8, 3), HybridShape(KVShape(1, 16), delta), HybridShape(None, None)]
    kv = KVStorage(3, 8, shapes, "float32", states=StateSizes(3, 5, 2))
    assert kv.anchor_images().nbytes == 4 * (2 * 8 + 3 * 24 + 2 * 4 * 8)
    assert kv.block_images().nbytes == 4 * 2 * 8 * 16
    layer = kv.layer(1)
    assert isinstance(layer, HybridLayer) and layer.state is not None
    layer.state.matrices[2], layer.state.tails[2] = 5.0, 6.0
    copy_entry(kv.anchor_images(), 2, kv.anchor_images(), 4)
    assert layer.state.matrices[4].eq(5).all() and layer.state.tails[4].eq(6).all()
    assert not layer.state.matrices[3].any()
