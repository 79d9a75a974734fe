"""From what was asked for to what is chosen."""

from dataclasses import replace
from typing import Any

import pytest

from foreword.config import Config
from foreword.errors import ConfigError
from foreword.resolve import Machine, ModelFacts, resolve

GIB = 1 << 30
CPU = Machine("cpu", cores=8, free_bytes=16 * GIB, bfloat16=True)
GPU = Machine("cuda", cores=8, free_bytes=80 * GIB, bfloat16=True)
MODEL = ModelFacts("llama", context=4096, dtype="bfloat16", parameters=500_000_000, vocab_size=1000, kv_values_per_token=4096)


@pytest.mark.parametrize(
    ("options", "bound", "corpus"),
    [
        ({}, 32, 64 << 20),
        ({"draft_length": "fixed"}, 4, 64 << 20),
        ({"num_speculative_tokens": 3, "suffix_corpus_memory": "0"}, 3, 0),
        ({"draft_length": "fixed", "num_speculative_tokens": 7, "suffix_corpus_memory": "1MiB"}, 7, 1 << 20),
    ],
)
def test_the_bound_of_drafts_and_the_corpus(options: dict[str, Any], bound: int, corpus: int) -> None:
    resolved = resolve(Config(**options), CPU, MODEL)
    assert (resolved.num_speculative_tokens, resolved.suffix_corpus_bytes) == (bound, corpus)


def test_a_cpu_gets_what_it_can_use() -> None:
    resolved = resolve(Config(), CPU, MODEL)
    assert (resolved.device, resolved.dtype, resolved.threads) == ("cpu", "bfloat16", 8)
    assert resolved.max_model_len == 4096
    assert resolved.kv_bytes <= 64 * 4096 * 4096 * 2
    assert resolved.kv_bytes <= 4 * GIB
    assert resolved.weight_bytes == 1_000_000_000


def test_small_models_run_on_one_thread() -> None:
    small = ModelFacts("llama", 1024, "bfloat16", 5_000_000, 1000, 100)
    assert resolve(Config(), CPU, small).threads == 1
    assert resolve(Config(threads=3), CPU, small).threads == 3


@pytest.mark.parametrize(
    ("machine", "stored", "asked", "dtypes"),
    [
        (CPU, "float16", "auto", ("float32", "float16")),
        (CPU, "bfloat16", "float16", ("float32", "float16")),
        (CPU, "float16", "float32", ("float32", "float32")),
        (CPU, "float32", "auto", ("float32", "float32")),
        (CPU, "float32", "bfloat16", ("bfloat16", "bfloat16")),
        (Machine("cpu", 8, 16 * GIB, bfloat16=False), "bfloat16", "auto", ("float32", "float32")),
        (GPU, "bfloat16", "auto", ("bfloat16", "bfloat16")),
        (GPU, "float16", "auto", ("float16", "float16")),
        (Machine("cuda", 8, 16 * GIB, bfloat16=False), "bfloat16", "auto", ("float16", "float16")),
    ],
)
def test_dtypes_of_activations_and_weights(machine: Machine, stored: str, asked: str, dtypes: tuple[str, str]) -> None:
    model = ModelFacts("llama", 1024, stored, 1000, 1000, 100)
    resolved = resolve(Config(dtype=asked), machine, model)
    assert (resolved.dtype, resolved.weight_dtype) == dtypes
    assert resolved.kv_cache_dtype == resolved.dtype


SHAPED = replace(MODEL, embedding_parameters=100_000_000, kv_vectors_per_token=64)


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"), [(None, 1_000_000_000), ("int8", 500_000_000), ("int4", 225_000_000 + 100_000_000)]
)
def test_quantized_weights_are_estimated_with_the_embedding_in_8_bits(quantization: str | None, weight_bytes: int) -> None:
    resolved = resolve(Config(quantization=quantization), CPU, SHAPED)
    assert (resolved.quantization, resolved.weight_bytes) == (quantization, weight_bytes)


@pytest.mark.parametrize(
    ("options", "rest"),
    [({}, 80_000_000), ({"dtype": "float32"}, 160_000_000), ({"quantization": "int4"}, 22_500_000 // 2 + 20_000_000)],
)
def test_weights_that_keep_their_form_weigh_what_they_weigh(options: dict[str, Any], rest: int) -> None:
    """Beside them 20 million parameters of the layers, and as many of the embedding, become what was asked for."""
    kept = replace(SHAPED, weight_bytes=77, kept_parameters=460_000_000, kept_embedding_parameters=80_000_000)
    resolved = resolve(Config(**options), CPU, kept)
    assert (resolved.weight_bytes, resolved.weight_format) == (77 + rest, "the file's types")


@pytest.mark.parametrize(("native", "quantized"), [(True, 1), (False, 4 + 2)])
def test_a_tower_is_not_quantized(native: bool, quantized: int) -> None:
    machine, seeing = replace(CPU, native=native), replace(SHAPED, tower_parameters=50_000_000)
    plain, rounded = (resolve(Config(quantization=kind), machine, seeing) for kind in (None, "int8"))
    assert plain.weight_bytes == seeing.parameters * 2
    assert rounded.weight_bytes == 50_000_000 * 2 + (seeing.parameters - 50_000_000) * quantized


def test_an_int8_cache_has_a_scale_for_each_vector() -> None:
    resolved = resolve(Config(kv_cache_dtype="int8"), CPU, SHAPED)
    assert resolved.kv_cache_dtype == "int8"
    assert resolved.kv_bytes == resolved.num_blocks * 16 * (4096 + 64 * 4)


def test_the_cache_bounds_the_context() -> None:
    resolved = resolve(Config(kv_cache_memory="1000tokens"), CPU, MODEL)
    assert resolved.num_blocks == 63 and resolved.max_model_len == 1008
    with pytest.raises(ConfigError, match="2000 does not fit into a KV cache of 1008"):
        resolve(Config(kv_cache_memory="1000tokens", max_model_len=2000), CPU, MODEL)


def test_the_context_is_not_stretched() -> None:
    with pytest.raises(ConfigError, match="4096"):
        resolve(Config(max_model_len=5000), CPU, MODEL)


def test_the_draft_model_is_in_the_estimate() -> None:
    drafter = ModelFacts("llama", 2048, "bfloat16", 50_000_000, 1000, 512)
    alone, both = resolve(Config(), CPU, MODEL), resolve(Config(draft_model="d"), CPU, MODEL, drafter)
    assert both.weight_bytes - alone.weight_bytes == 100_000_000
    assert both.kv_bytes // both.num_blocks == 16 * 2 * (4096 + 512)


def test_what_does_not_fit_is_refused_with_the_estimate() -> None:
    with pytest.raises(ConfigError, match=r"weights need 0.93 GiB and 50% of the free memory is 0.50 GiB"):
        resolve(Config(), Machine("cpu", 8, GIB, True), MODEL)


def test_every_running_request_has_a_row_a_step() -> None:
    fewer = resolve(Config(max_num_batched_tokens=10), CPU, MODEL)
    assert (fewer.max_num_seqs, fewer.max_num_batched_tokens) == (10, 10)
    more = resolve(Config(max_num_seqs=1000), CPU, MODEL)
    assert (more.max_num_seqs, more.max_num_batched_tokens) == (1000, 1000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 10 is below max_num_seqs 100"):
        Config(max_num_seqs=100, max_num_batched_tokens=10)


def test_a_cache_beyond_memory_is_refused_with_the_estimate() -> None:
    with pytest.raises(ConfigError, match=r"needs 1000.00 GiB beside 0.93 GiB of weights; 16.00 GiB are free"):
        resolve(Config(kv_cache_memory="1000GiB"), CPU, MODEL)
    with pytest.raises(ConfigError, match="holds no block"):
        resolve(Config(kv_cache_memory="0"), CPU, MODEL)


def test_torch_holds_quantized_weights_as_numbers_too() -> None:
    """Without the kernels int8 saves no memory: float32 values, and the same in the activations' type."""
    slow = replace(CPU, native=False)
    plain, rounded = (resolve(Config(quantization=kind), slow, SHAPED) for kind in (None, "int8"))
    assert plain.weight_bytes == SHAPED.parameters * 2
    assert rounded.weight_bytes == SHAPED.parameters * (4 + 2)
    kept = replace(SHAPED, weight_bytes=77, kept_parameters=400_000_000)
    assert resolve(Config(), slow, kept).weight_bytes == 400_000_000 * 6 + (SHAPED.parameters - 400_000_000) * 2
