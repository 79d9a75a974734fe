"""C++ sampling has the bits of the reference, on rows of every kind and around its chunk sizes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.reference.sampling import ReferenceSampling, noise
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.kernel_rows import NON_FINITE_KINDS, ROW_KINDS, make_row, random_rows

REFERENCE = ReferenceSampling()
WIDTHS = (1, 3, 4, 63, 64, 65, 255, 256, 257, 511, 512, 513, 5000)


@pytest.fixture(scope="module", params=[1, 3])
def native(library: ctypes.CDLL, request: pytest.FixtureRequest) -> NativeSampling:
    return NativeSampling(library, threads=request.param)


Call = tuple[str, tuple[Tensor, ...]]


def masks_of(logits: Tensor, seed: int) -> Iterator[Call]:
    """Masks with fewer, as many and more words than the ids need."""
    for words in (1, -(-logits.shape[1] // 32), -(-logits.shape[1] // 32) + 1):
        masks = torch.randint(
            -(2**31), 2**31, (len(logits), words), generator=torch.Generator().manual_seed(seed)
        ).int()
        masks[:, ::3] = seed % 2 - 1
        yield "apply_mask", (masks,)


def changes_of(logits: Tensor, seed: int) -> Iterator[Call]:
    """Some ids of each row, some of them outside of the vocabulary."""
    count, width = logits.shape
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randperm(width + 4, generator=generator)[: (r * seed) % (width + 4)] - 2 for r in range(count)
    ]
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0)
    amounts = torch.randn(int(starts[-1]), generator=generator)
    yield "add_bias", (starts, torch.cat(ids), amounts)
    yield "apply_repetition_penalty", (starts, torch.cat(ids), torch.rand(count, generator=generator) + 0.5)


def coins_of(logits: Tensor, p: float, seed: int, position: int) -> Iterator[Call]:
    count = len(logits)
    keys = torch.arange(count) + seed, torch.full((count,), position)
    for chance, threshold in ((1.0, p), (p, 0.1), (1.0, 0.0), (0.5, 1e-3)):
        yield (
            "apply_xtc",
            (*keys, torch.full((count,), chance).double(), torch.full((count,), threshold).double()),
        )


def assert_equal(native: NativeSampling, logits: Tensor, k: int, p: float, seed: int, position: int) -> None:
    """Compare every operation on these rows."""
    count, width = logits.shape
    for operation, bound in (
        ("mask_ids", torch.arange(0, width, k)),
        ("apply_temperature", torch.full((count,), 2 * p)),
        ("apply_top_k", torch.full((count,), k)),
        ("apply_top_p", torch.full((count,), p, dtype=torch.float64)),
        ("apply_min_p", torch.full((count,), 1 - p, dtype=torch.float64)),
        ("apply_typical_p", torch.full((count,), p, dtype=torch.float64)),
        ("apply_top_n_sigma", torch.full((count,), 3 * p, dtype=torch.float64)),
    ):
        ours, theirs = logits.clone(), logits.clone()
        getattr(native, operation)(ours, bound)
        getattr(REFERENCE, operation)(theirs, bound)
        assert same_bits(ours, theirs), operation
    for operation, arguments in (
        *masks_of(logits, k),
        *changes_of(logits, k),
        *coins_of(logits, p, seed, position),
    ):
        ours, theirs = logits.clone(), logits.clone()
        getattr(native, operation)(ours, *arguments)
        getattr(REFERENCE, operation)(theirs, *arguments)
        assert same_bits(ours, theirs), operation
    assert same_bits(native.log_sum_exp(logits), REFERENCE.log_sum_exp(logits))
    assert torch.equal(native.top_ids(logits, min(k, width)), REFERENCE.top_ids(logits, min(k, width)))
    seeds, positions = torch.arange(count) + seed, torch.full((count,), position)
    for greedy in (torch.zeros(count).bool(), torch.arange(count) % 2 == 0):
        expected = REFERENCE.sample(logits, seeds, positions, greedy)
        assert torch.equal(native.sample(logits, seeds, positions, greedy), expected)
        bits = array("Q", [seed % 2**64 for seed in seeds.tolist()])
        params = bits, array("q", positions.tolist()), array("B", greedy.tolist())
        for ops in (native, REFERENCE):
            assert ops.sample_to_host(logits, *params) == expected.tolist()


@given(
    logits=random_rows(),
    k=st.integers(1, 700),
    p=st.floats(1e-9, 1.0),
    seed=st.integers(-(2**63), 2**63 - 7),
    position=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(150))
def test_native_sampling_equals_reference(
    native: NativeSampling, logits: Tensor, k: int, p: float, seed: int, position: int
) -> None:
    assert_equal(native, logits, k, p, seed, position)


def test_native_sampling_equals_reference_at_chunk_edges(native: NativeSampling) -> None:
    for width in WIDTHS:
        logits = torch.stack([make_row(kind, width, width) for kind in ROW_KINDS + NON_FINITE_KINDS])
        for k, p in ((1, 0.1), (40, 0.9), (width, 1.0)):
            assert_equal(native, logits, k, p, -1, width)


def test_native_sampling_equals_reference_for_large_vocab(native: NativeSampling) -> None:
    assert_equal(
        native, torch.stack([make_row(kind, 150_001, 5) for kind in ("plain", "ties")]), 50, 0.9, 11, 99
    )


def test_unlikely_tokens_are_not_skipped(native: NativeSampling) -> None:
    """Of 150,000 ids 13 below the maximum one wins in a third of the rows: skipping must allow it."""
    row = torch.full((150_000,), -13.0).index_fill(0, torch.tensor([70_000]), 0.0)
    logits, zero = row.expand(12, -1).contiguous(), torch.zeros(12, dtype=torch.int64)
    drawn = native.sample(logits, zero, torch.arange(12), zero.bool())
    assert torch.equal(drawn, REFERENCE.sample(logits, zero, torch.arange(12), zero.bool()))
    assert (drawn != 70_000).any()


def test_noise_has_reference_bits_and_an_upper_bound(library: ctypes.CDLL) -> None:
    ends = np.arange(50_000, dtype=np.uint64)
    powers = np.uint64(1) << np.arange(32, dtype=np.uint64)
    drawn = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint64)
    words = np.concatenate([ends, 2**32 - 1 - ends, powers - 1, powers, 2**32 - powers, drawn]).astype(
        np.uint32
    )
    exact, bound = np.empty(len(words), np.float32), np.empty(len(words), np.float32)
    library.foreword_noise(words.ctypes.data, len(words), exact.ctypes.data, bound.ctypes.data)
    assert same_bits(torch.from_numpy(exact), noise(torch.from_numpy(words.astype(np.int64))))
    assert (bound > exact).all()
    assert (bound - exact)[exact > 3].max() < 0.1
    assert exact.max() < 22.88, "NOISE_MAX in noise.h"


def test_wrong_parameter_dtype_is_an_assertion(native: NativeSampling) -> None:
    with pytest.raises(AssertionError, match=r"torch.int64 \[2\]"):
        native.apply_top_k(torch.zeros(2, 9), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("logits", [torch.zeros(2, 18)[:, ::2], torch.zeros(2, 9, dtype=torch.float64)])
def test_logits_of_another_layout_or_dtype_are_an_assertion(native: NativeSampling, logits: Tensor) -> None:
    with pytest.raises(AssertionError):
        native.top_ids(logits, 5)


def test_foreign_ids_are_not_masked(native: NativeSampling) -> None:
    """Such as ids of a config.json whose vocabulary is not the model's; the values beside the row stay."""
    buffer = torch.zeros(3, 8)
    native.mask_ids(buffer[1:2], torch.tensor([-8, -1, 3, 8, 15, 1 << 40]))
    assert buffer.isinf().nonzero().tolist() == [[1, 3]]
