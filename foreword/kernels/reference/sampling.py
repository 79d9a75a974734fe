"""Sampling in plain torch: the specification of a token (docs: a token is a pure function).

Rows are float32 [R, V]; masked ids are -inf. A row is *finite* if it holds a finite value and neither NaN nor
+inf; filters leave other rows unchanged, so that `sample` still detects them. All sums are of integers, so no
result depends on the order of summation.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import upload
from foreword.kernels.portable_math import FRACTION_BITS, exp_fixed_point, log

WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORDS_PER_BLOCK = 4
WORD_BITS = 32
TOKEN_NOISE, XTC_COIN = 0, 1  # third counter word: purpose of the noise
HASH_MULTIPLIER, HASH_SHIFT = -0x61C8864680B583EB, 29  # the golden ratio in 64 bits; as in splitmix64
SIGMA_UNITS = 1024.0  # deviations are rounded to 1 / 1024, so that their sums are exact
SIGMA_MAX_DISTANCE = 1024.0

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class ReferenceSampling:
    """The operations of `Ops` on rows of logits."""

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R]; NaN for a row that is not finite."""
        top = logits.amax(dim=-1, keepdim=True).double()
        total = exp_fixed_point(logits.double() - top).sum(dim=-1)
        result = top[:, 0] + log(total.double() * 2.0**-FRACTION_BITS)
        return torch.where(_is_finite_row(logits), result, torch.nan).float()

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]; the lowest ids of a row that is not finite."""
        order = _sort_ids(logits)[:, :k]
        lowest = torch.arange(order.shape[1], device=logits.device)
        return torch.where(_is_finite_row(logits)[:, None], order, lowest)

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        clear = ((masks[:, :, None] >> bits & 1) == 0).flatten(1)[:, : logits.shape[1]]
        beyond = clear.new_ones(clear.shape[0], logits.shape[1] - clear.shape[1])
        logits.masked_fill_(torch.cat((clear, beyond), 1) & (logits < torch.inf), -torch.inf)

    def mask_ids(self, logits: Tensor, ids: Tensor) -> None:
        logits.index_fill_(1, ids, -torch.inf)

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        rows, inside = _rows_of_ids(logits, starts, ids)
        logits[rows, ids[inside]] += biases[inside]

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        rows, inside = _rows_of_ids(logits, starts, ids)
        places = rows, ids[inside]
        values, penalty = logits[places], penalties[rows]
        logits[places] = torch.where(values < 0, values * penalty, values / penalty)

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        logits.div_(temperatures[:, None])

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        top = logits.amax(dim=1, keepdim=True).double()
        below = logits.double() - top
        finite = below > -torch.inf
        steps = torch.where(finite, (below.clamp(min=-SIGMA_MAX_DISTANCE) * SIGMA_UNITS).round(), 0.0)
        steps = torch.where(_is_finite_row(logits)[:, None], steps, 0.0).long()
        count = finite.sum(dim=1).clamp(min=1).double()
        mean = steps.sum(dim=1).double() / count
        variance = (steps * steps).sum(dim=1).double() / count - mean * mean
        floor = -(n * (variance.clamp(min=0.0).sqrt() / SIGMA_UNITS))
        logits.masked_fill_(~(below >= floor[:, None]) & _is_finite_row(logits)[:, None], -torch.inf)

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        place = torch.arange(logits.shape[1], device=logits.device)
        _mask_all_but(logits, place < k[:, None], _sort_ids(logits))

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        order = _sort_ids(logits)
        values = logits.gather(1, order).double()
        weights = exp_fixed_point(values - values[:, :1])
        _mask_all_but(logits, _shortest_prefix(weights, p) | (p >= 1)[:, None], order)

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        below = logits.double() - logits.amax(dim=1, keepdim=True).double()
        weights = exp_fixed_point(below)
        share = torch.where(weights > 0, (weights.double() * below).round(), 0.0)
        share = torch.where(_is_finite_row(logits)[:, None], share, 0.0).long()
        mean = share.sum(dim=1).double() / weights.sum(dim=1).double()
        order = _sort_ids(-(below - mean[:, None]).abs().float())
        _mask_all_but(logits, _shortest_prefix(weights.gather(1, order), p) | (p >= 1)[:, None], order)

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        floor = torch.where(p > 0, log(p.clamp(min=torch.finfo(p.dtype).tiny)), -torch.inf)
        top = logits.amax(dim=1, keepdim=True).double()
        likely = logits.double() - top >= floor[:, None]
        logits.masked_fill_(~likely & _is_finite_row(logits)[:, None], -torch.inf)

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        zero = torch.zeros_like(seeds)
        words = philox((zero, positions, zero + XTC_COIN, zero), (seeds & WORD_MASK, seeds >> 32 & WORD_MASK))
        chosen = ((words[0].double() + 0.5) * 2.0**-32 < probabilities) & _is_finite_row(logits)
        order = _sort_ids(logits)
        values = logits.gather(1, order).double()
        weights = exp_fixed_point(values - values[:, :1])
        total = weights.sum(dim=1).double()
        reaching = (weights.double() >= (thresholds * total)[:, None]) & (values > -torch.inf)
        dropped = torch.arange(logits.shape[1], device=logits.device) < reaching.sum(dim=1, keepdim=True) - 1
        _mask_all_but(logits, ~(dropped & chosen[:, None]), order)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        scores = logits
        if not bool(greedy.all()):
            noise = gumbel(seeds, positions, logits.shape[1])
            scores = logits + torch.where(greedy[:, None], 0.0, noise)
        return torch.where(_is_finite_row(logits), scores.argmax(dim=1), -1)

    def sample_to_host(
        self, logits: Tensor, seeds: array[int], positions: array[int], greedy: array[int]
    ) -> list[int]:
        codes = (seeds, np.int64), (positions, np.int64), (greedy, np.bool_)
        params = upload([np.frombuffer(values, dtype) for values, dtype in codes], logits.device)
        token_ids: list[int] = self.sample(logits, *params).tolist()
        return token_ids


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise float32 [R, V]: seeds int64 [R] (bits of the unsigned seed), positions int64 [R]."""
    blocks = torch.arange(-(-vocab_size // WORDS_PER_BLOCK), device=seeds.device)[None]
    zero = torch.zeros_like(blocks)
    key = (seeds[:, None] & WORD_MASK, (seeds[:, None] >> 32) & WORD_MASK)
    words = philox((blocks, positions[:, None], zero + TOKEN_NOISE, zero), key)
    return noise(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def noise(x: Tensor) -> Tensor:
    """-log(-log u) of u = (x + 1/2) 2^-32, for uint32 in int64; u and 1 - u are exact: 33 bits."""
    u = (x.double() + 0.5) * 2.0**-32
    return (-log(-log(u))).float()


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10 (Salmon et al. 2011). Words are uint32 values in int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD_MASK, (k1 + WEYL[1]) & WORD_MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product, formed from halves that cannot overflow int64."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & WORD_MASK


def _sort_ids(logits: Tensor) -> Tensor:
    """Ids by (value descending, id ascending)."""
    return torch.sort(logits, dim=1, descending=True, stable=True).indices


def _shortest_prefix(weights: Tensor, p: Tensor) -> Tensor:
    """The shortest prefix of ordered weights int64 [R, V] whose share of their sum reaches p."""
    sums = weights.cumsum(dim=1)
    total = sums[:, -1]
    bound = (total.double() * p).ceil().long().clamp(max=total)
    return sums - weights < bound[:, None]


def _rows_of_ids(logits: Tensor, starts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the ids of the vocabulary, and the mask of those ids; starts[r] is the first id of row r."""
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1, device=logits.device), starts.diff())
    inside = (ids >= 0) & (ids < logits.shape[1])
    return rows[inside], inside


def _mask_all_but(logits: Tensor, kept: Tensor, order: Tensor) -> None:
    """Mask the ids order[r, j] where not kept[r, j], in finite rows."""
    by_id = torch.empty_like(kept).scatter_(1, order, kept)
    logits.masked_fill_(~by_id & _is_finite_row(logits)[:, None], -torch.inf)


def _is_finite_row(logits: Tensor) -> Tensor:
    return logits.amax(dim=1).isfinite()


def hash_logits(logits: Tensor) -> Tensor:
    """64-bit hashes of the rows of float32 [R, V], for test mode: int64 [R], computed on the device.

    A sum of each value's bits times an odd number of its column: one changed value always changes it.
    """
    columns = torch.arange(logits.shape[1], device=logits.device) * HASH_MULTIPLIER
    return (logits.contiguous().view(torch.int32) * ((columns ^ (columns >> HASH_SHIFT)) | 1)).sum(1)
