"""RoPE frequencies against transformers."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foreword.kernels.reference.backend import ReferenceOps
from foreword.layers.rope import NO_ROPE, ROPE_TYPES, Rope, RopeConfig, rope_frequencies

DIM, CONTEXT = 32, 4096
OURS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 1024},
    "yarn": {
        "factor": 4.0,
        "original_max_position": 1024,
        "beta_fast": 24.0,
        "beta_slow": 1.5,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position": 1024,
        "short_factor": tuple(1 + index / 20 for index in range(DIM // 2)),
        "long_factor": tuple(2 + index / 5 for index in range(DIM // 2)),
    },
}


def expected(rope_type: str, options: dict[str, Any], length: int | None) -> tuple[torch.Tensor, float]:
    names = {"original_max_position": "original_max_position_embeddings"}
    given = {
        names.get(key, key): list(value) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    rope = {"rope_type": rope_type, "rope_theta": 5000.0, **given}
    config = LlamaConfig(
        hidden_size=DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=rope,
        num_hidden_layers=1,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("rope_type", OURS)
@pytest.mark.parametrize("max_len", [512, 1024, 1025, 4096, 9000])
def test_frequencies_match_transformers_at_max_length(rope_type: str, max_len: int):
    options = OURS[rope_type]
    config = RopeConfig(rope_type, 5000.0, DIM, **{"original_max_position": CONTEXT, **options})
    ours, scale = rope_frequencies(config, max_len)
    theirs, their_scale = expected(rope_type, options, max_len)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert scale == pytest.approx(their_scale)


def test_mscales_are_the_factors_of_short_and_long_contexts():
    """Phi-3.5-MoE's; they replace what the factor implies."""
    plain = RopeConfig("longrope", 5000.0, DIM, **OURS["longrope"])
    scaled = replace(plain, mscales=(1.2, 1.4))
    for max_len, expected_scale in ((1024, 1.2), (1025, 1.4)):
        frequencies, scale = rope_frequencies(scaled, max_len)
        assert scale == expected_scale and torch.equal(frequencies, rope_frequencies(plain, max_len)[0])


def test_every_rope_type_is_compared():
    assert set(OURS) | {"default", "proportional"} == set(ROPE_TYPES)  # the last with Gemma 4


def test_cos_sin_rows():
    rope = Rope(RopeConfig("default", 100.0, 4), 50, "cpu")
    angles = torch.tensor([7.0, 0.7])
    torch.testing.assert_close(rope.cos_sin[0], torch.tensor([1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(rope.cos_sin[7], torch.cat((angles.cos(), angles.sin())))


def test_no_rope_changes_no_bit():
    rope = Rope(NO_ROPE, 50, "cpu")
    x = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ReferenceOps().rope(x, rope.cos_sin, torch.arange(50)), x)


def test_queries_are_scaled_from_the_original_context_on():
    config = RopeConfig("default", 100.0, 4, original_max_position=20, query_beta=0.5)
    short, long = (Rope(config, size, "cpu") for size in (20, 50))
    assert short.query_cos_sin is short.cos_sin
    assert torch.equal(long.query_cos_sin[:20], long.cos_sin[:20])
    for start, factor in ((20, 1 + 0.5 * math.log(2)), (40, 1 + 0.5 * math.log(3))):
        rows = slice(start, min(start + 20, 50))
        torch.testing.assert_close(long.query_cos_sin[rows], long.cos_sin[rows] * factor)


def test_longer_table_extends_the_shorter_one():
    """For RoPE types whose frequencies do not depend on the longest context."""
    short, long = (Rope(RopeConfig("default", 10000.0, 16), size, "cpu") for size in (10, 100))
    torch.testing.assert_close(long.cos_sin[:10], short.cos_sin, atol=1e-7, rtol=0)


@pytest.mark.parametrize("rope_type", ["default", *OURS])
def test_tables_of_equal_digests_have_equal_rows(rope_type: str) -> None:
    """Whatever their lengths, and the threads that computed them."""
    options = {"original_max_position": 1024} | OURS.get(rope_type, {})
    config = RopeConfig(rope_type, theta=5000.0, rotary_dim=DIM, **options)
    threads = torch.get_num_threads()
    ropes = [Rope(config, length, "cpu") for length in (1000, 1531, 4096, 5000, 70_001)]
    torch.set_num_threads(3)
    ropes.append(Rope(config, 70_001, "cpu"))
    torch.set_num_threads(threads)
    for one, other in itertools.combinations(ropes, 2):
        length = min(len(one.cos_sin), len(other.cos_sin))
        is_equal = torch.equal(one.cos_sin[:length], other.cos_sin[:length])
        assert (one.digest == other.digest) == is_equal
    assert ropes[-1].digest == ropes[-2].digest
    changes = len({each.digest for each in ropes}) > 1
    assert changes == (rope_type in ("dynamic", "longrope"))
