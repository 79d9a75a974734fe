"""The cache of image features."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.engine.encoder_runner import EncoderCache, FeatureKey

KEYS: list[FeatureKey] = [("", bytes([number])) for number in range(6)]


def features(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 8)  # 32 bytes per row


def test_encoder_cache_evicts_least_recently_used() -> None:
    cache = EncoderCache(96)
    for key in KEYS[:3]:
        cache.put(key, features(1))
    assert cache[KEYS[0]].shape == (1, 8)
    cache.put(KEYS[3], features(1))
    cache.evict(())
    assert [key in cache for key in KEYS[:4]] == [True, False, True, True]


def test_encoder_cache_keeps_needed_features() -> None:
    cache = EncoderCache(32)
    for key in KEYS[:3]:
        cache.put(key, features(1))
    cache.evict({KEYS[0], KEYS[2]})
    assert KEYS[1] not in cache and cache.num_bytes == cache.needed_bytes({KEYS[0], KEYS[2]}) == 64
    cache.evict({KEYS[2]}, cache.max_bytes)
    assert KEYS[0] not in cache and KEYS[2] in cache


def test_encoder_cache_makes_room() -> None:
    cache = EncoderCache(96)
    for key in KEYS[:3]:
        cache.put(key, features(1))
    cache.evict((), room_bytes=64)
    assert cache.num_bytes == 32 and KEYS[2] in cache


@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS), st.integers(1, 4), st.sets(st.sampled_from(KEYS))), max_size=30
    ),
    st.integers(0, 300),
)
def test_encoder_cache_counts_bytes(
    moves: list[tuple[FeatureKey, int, set[FeatureKey]]], max_bytes: int
) -> None:
    cache = EncoderCache(max_bytes)
    for key, rows, needed in moves:
        if key not in cache:
            cache.put(key, features(rows))
        before = {key for key in KEYS if key in cache}
        cache.evict(needed)
        cache.check()
        assert all(key in cache for key in before & needed)
        assert cache.num_bytes <= max_bytes or all(key in needed for key in KEYS if key in cache)
