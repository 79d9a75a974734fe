"""Keyed noise in Triton against published vectors and the reference."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.reference import sampling as reference
from foreword.kernels.triton.philox import noise, philox, random_words, uniform
from tests.kernels.test_sampling import KNOWN_ANSWERS
from tests.support.kernel_rows import same_bits
from tests.support.triton_sample_rows import DEVICE

KEYS = [(0, 0), (-(2**63), 2**32 - 1), (-1, 5), (2**63 - 1, 2**31), (0x299F31D0A4093822, 77)]


@triton.jit
def _answer(words, out):
    """words int64 [6]: counter and key; out int64 [4]."""
    zero = tl.zeros((1,), tl.uint32)
    w0, w1, w2, w3 = philox(
        zero + tl.load(words).to(tl.uint32),
        zero + tl.load(words + 1).to(tl.uint32),
        zero + tl.load(words + 2).to(tl.uint32),
        zero + tl.load(words + 3).to(tl.uint32),
        zero + tl.load(words + 4).to(tl.uint32),
        zero + tl.load(words + 5).to(tl.uint32),
    )
    tl.store(out + tl.arange(0, 1), w0.to(tl.int64))
    tl.store(out + 1 + tl.arange(0, 1), w1.to(tl.int64))
    tl.store(out + 2 + tl.arange(0, 1), w2.to(tl.int64))
    tl.store(out + 3 + tl.arange(0, 1), w3.to(tl.int64))


@triton.jit
def _words_and_coin(seed, position, words, coins, BLOCK: tl.constexpr):
    own = tl.load(seed + tl.program_id(0)), tl.load(position + tl.program_id(0))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + place, random_words(2, own[0], own[1], BLOCK).to(tl.int64))
    tl.store(coins + tl.program_id(0), uniform(own[0], own[1]))


@triton.jit
def _noise(words, out, N, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    found = noise(tl.load(words + place, mask=place < N, other=0).to(tl.uint32))
    tl.store(out + place, found, mask=place < N)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_published_answers(counter: str, key: str, result: str) -> None:
    words = torch.tensor([int(word, 16) for word in (counter + " " + key).split()], device=DEVICE)
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    _answer[(1,)](words, out)
    assert out.tolist() == [int(word, 16) for word in result.split()]


def test_words_and_coins_match_reference_at_extremes() -> None:
    """Blocks 2 to 9: ids 8 to 39."""
    seeds, positions = (torch.tensor(values) for values in zip(*KEYS, strict=True))
    words = torch.empty(len(KEYS), 32, dtype=torch.int64, device=DEVICE)
    coins = torch.empty(len(KEYS), dtype=torch.float64, device=DEVICE)
    _words_and_coin[(len(KEYS),)](seeds.to(DEVICE), positions.to(DEVICE), words, coins, BLOCK=32)
    assert same_bits(reference.noise(words.cpu()), reference.gumbel(seeds, positions, 40)[:, 8:])
    zero = torch.zeros_like(seeds)
    key = seeds & reference.WORD_MASK, seeds >> 32 & reference.WORD_MASK
    first = reference.philox((zero, positions, zero + reference.XTC_COIN, zero), key)[0]
    assert torch.equal(coins.cpu(), (first.double() + 0.5) * 2.0**-32)


def noisy_words() -> Tensor:
    ends = torch.arange(4000)
    powers = 1 << torch.arange(32)
    drawn = torch.randint(2**32, (40_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([ends, 2**32 - 1 - ends, powers - 1, powers, (2**32 - powers) % 2**32, drawn])


def test_noise_matches_reference() -> None:
    words = noisy_words()
    out = torch.empty(len(words), device=DEVICE)
    _noise[(1,)](words.to(DEVICE), out, len(words), BLOCK=triton.next_power_of_2(len(words)))
    assert same_bits(out.cpu(), reference.noise(words))
