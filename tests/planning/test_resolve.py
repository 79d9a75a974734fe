"""resolve(): from Config to ResolvedConfig."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.options import Config
from foreword.core.states import StateShape
from foreword.errors import ConfigError
from foreword.planning.fit_hints import fitting_options
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import ModelInfo, cpu_reserve, min_free_bytes
from foreword.planning.memory_plan import plan_memory
from foreword.planning.resolve import draft_size_warning, fits, resolve

GIB = 1 << 30
CPU = HardwareInfo("cpu", cores=8, free_bytes=16 * GIB, supports_bfloat16=True)
GPU = HardwareInfo(
    "cuda",
    8,
    80 * GIB,
    supports_bfloat16=True,
    kernel_backend="triton",
    total_bytes=80 * GIB,
    gpu="NVIDIA X",
    capability=(9, 0),
)
TURING = replace(
    GPU, supports_bfloat16=False, free_bytes=16 * GIB, total_bytes=16 * GIB, gpu="Tesla T4", capability=(7, 5)
)
MODEL = ModelInfo(
    "llama",
    context_len=4096,
    dtype="bfloat16",
    parameters=500_000_000,
    vocab_size=1000,
    kv_values_per_token=4096,
)


@pytest.mark.parametrize(
    ("options", "bound", "corpus"),
    [
        ({}, 32, 64 << 20),
        ({"draft_length": "fixed"}, 4, 64 << 20),
        ({"num_speculative_tokens": 3, "suffix_corpus_memory": "0"}, 3, 0),
        ({"draft_length": "fixed", "num_speculative_tokens": 7, "suffix_corpus_memory": "1MiB"}, 7, 1 << 20),
    ],
)
def test_draft_limit_and_corpus_size(options: dict[str, Any], bound: int, corpus: int) -> None:
    resolved = resolve(Config(**options), CPU, MODEL)
    assert (resolved.num_speculative_tokens, resolved.suffix_corpus_bytes) == (bound, corpus)


WITHOUT_LIBRARY = replace(CPU, kernel_backend="torch", native_library_error="it was not built")


def test_auto_replaces_suffix_without_the_native_library() -> None:
    resolved = resolve(Config(), WITHOUT_LIBRARY, MODEL)
    assert resolved.drafters == ("grammar", "prediction", "ngram")
    assert any("ngram replaces suffix and text" in note for note in resolved.notes)
    assert resolve(Config(), CPU, MODEL).drafters == ("grammar", "prediction", "suffix", "text")
    assert resolve(Config(speculate="auto,ngram"), WITHOUT_LIBRARY, MODEL).drafters == resolved.drafters
    assert resolve(Config(speculate="ngram"), WITHOUT_LIBRARY, MODEL).notes == ()


def test_explicit_suffix_needs_the_native_library() -> None:
    with pytest.raises(
        ConfigError, match=r"suffix needs the native library .*not built.*use ngram"
    ) as caught:
        resolve(Config(speculate="grammar,suffix"), WITHOUT_LIBRARY, MODEL)
    assert caught.value.param == "speculate"


def test_cpu_defaults() -> None:
    resolved = resolve(Config(), CPU, MODEL)
    assert (resolved.device, resolved.dtype, resolved.threads) == ("cpu", "bfloat16", 8)
    assert resolved.max_model_len == 4096
    assert resolved.kv_bytes <= 64 * 4096 * 4096 * 2
    assert resolved.kv_bytes <= 4 * GIB
    assert resolved.weight_bytes == 1_000_000_000


def test_small_models_use_one_thread() -> None:
    small = ModelInfo("llama", 1024, "bfloat16", 5_000_000, 1000, 100)
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
        (
            HardwareInfo("cpu", 8, 16 * GIB, supports_bfloat16=False),
            "bfloat16",
            "auto",
            ("float32", "float32"),
        ),
        (GPU, "bfloat16", "auto", ("bfloat16", "bfloat16")),
        (GPU, "float16", "auto", ("float16", "float16")),
        (TURING, "bfloat16", "auto", ("float16", "float16")),
        (TURING, "bfloat16", "float32", ("float32", "float32")),
        (GPU, "bfloat16", "half", ("float16", "float16")),
        (GPU, "bfloat16", "float", ("float32", "float32")),
    ],
)
def test_activation_and_weight_dtypes(
    machine: HardwareInfo, stored: str, asked: str, dtypes: tuple[str, str]
) -> None:
    model = ModelInfo("llama", 1024, stored, 1000, 1000, 100)
    resolved = resolve(Config(dtype=asked), machine, model)
    assert (resolved.dtype, resolved.weight_dtype) == dtypes
    assert resolved.kv_cache_dtype == resolved.dtype


SHAPED = replace(MODEL, embedding_parameters=100_000_000, kv_vectors_per_token=64)


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [(None, 1_000_000_000), ("int8", 500_000_000), ("int4", 225_000_000 + 100_000_000)],
)
def test_quantized_embedding_is_estimated_in_8_bits(quantization: str | None, weight_bytes: int) -> None:
    resolved = resolve(Config(quantization=quantization), CPU, SHAPED)
    assert (resolved.quantization, resolved.weight_bytes) == (quantization, weight_bytes)


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ({}, 80_000_000),
        ({"dtype": "float32"}, 160_000_000),
        ({"quantization": "int4"}, 22_500_000 // 2 + 20_000_000),
    ],
)
def test_packed_weights_keep_their_size(options: dict[str, Any], rest: int) -> None:
    """20 million other parameters of the layers and as many of the embedding are converted."""
    kept = replace(
        SHAPED, packed_bytes=77, packed_parameters=460_000_000, packed_embedding_parameters=80_000_000
    )
    resolved = resolve(Config(**options), CPU, kept)
    assert (resolved.weight_bytes, resolved.weight_format) == (77 + rest, "the file's types")


@pytest.mark.parametrize(("kernels", "quantized"), [("native", 1), ("triton", 1), ("torch", 4 + 2)])
def test_vision_encoder_is_not_quantized(kernels: str, quantized: int) -> None:
    machine, seeing = replace(CPU, kernel_backend=kernels), replace(SHAPED, vision_parameters=50_000_000)
    plain, rounded = (resolve(Config(quantization=kind), machine, seeing) for kind in (None, "int8"))
    assert plain.weight_bytes == seeing.parameters * 2
    assert rounded.weight_bytes == 50_000_000 * 2 + (seeing.parameters - 50_000_000) * quantized


def test_int8_cache_has_one_scale_per_vector() -> None:
    resolved = resolve(Config(kv_cache_dtype="int8"), CPU, SHAPED)
    assert resolved.kv_cache_dtype == "int8"
    assert resolved.kv_bytes == resolved.num_blocks * 16 * (4096 + 64 * 4)


def test_cache_limits_the_context() -> None:
    resolved = resolve(Config(kv_cache_memory="1000tokens"), CPU, MODEL)
    assert resolved.num_blocks == 63 and resolved.max_model_len == 1008
    with pytest.raises(ConfigError, match="2000 does not fit into a KV cache of 1008"):
        resolve(Config(kv_cache_memory="1000tokens", max_model_len=2000), CPU, MODEL)


def test_context_is_limited_by_the_checkpoint() -> None:
    with pytest.raises(ConfigError, match="4096"):
        resolve(Config(max_model_len=5000), CPU, MODEL)


def test_estimate_includes_the_draft_model() -> None:
    drafter = ModelInfo("llama", 2048, "bfloat16", 50_000_000, 1000, 512)
    alone, both = resolve(Config(), CPU, MODEL), resolve(Config(draft_model="d"), CPU, MODEL, drafter)
    assert both.weight_bytes - alone.weight_bytes == 100_000_000
    assert both.kv_bytes // both.num_blocks == 16 * 2 * (4096 + 512)


def test_weights_may_take_all_memory_but_the_reserve() -> None:
    """The share of free memory bounds the cache alone."""
    machine = replace(CPU, free_bytes=int(13.9 * GIB))
    resolved = resolve(Config(), machine, replace(MODEL, parameters=int(7.5 * GIB) // 2))
    assert resolved.kv_bytes == 64 * 4096 * 8192 and resolved.max_model_len == 4096
    crowded = resolve(Config(), machine, replace(MODEL, parameters=int(12.4 * GIB) // 2, context_len=131072))
    assert crowded.weight_bytes + crowded.kv_bytes <= machine.free_bytes - cpu_reserve(machine.free_bytes)
    assert crowded.max_model_len == crowded.num_blocks * 16 < 131072


def test_cache_exceeds_its_share_for_the_requested_context() -> None:
    long = replace(MODEL, context_len=1 << 20)
    assert resolve(Config(), CPU, long).kv_bytes == 4 * GIB
    assert resolve(Config(max_model_len=800_000), CPU, long).max_model_len == 800_000


@pytest.mark.parametrize(
    ("free", "reserve"),
    [(100, 50), (GIB, GIB // 2), (4 * GIB, GIB), (10 * GIB, GIB), (64 * GIB, int(6.4 * GIB))],
)
def test_cpu_reserve(free: int, reserve: int) -> None:
    assert cpu_reserve(free) == reserve


@given(used=st.integers(1, 1 << 45))
def test_sufficient_memory_holds_what_is_used_and_the_reserve(used: int) -> None:
    free = min_free_bytes(used)
    assert used <= free - cpu_reserve(free) <= used + used // 100 + 2


def test_cpu_out_of_memory_error_names_what_fits() -> None:
    expected = (
        "the model does not fit: weights need 7.45 GiB and the KV cache of 512 tokens 0.06 GiB; of 8.00 GiB "
        "of free memory 7.00 GiB may be used. What would help: --kv-cache-memory 512tokens, "
        "--quantization int8, --quantization int4, 8.52 GiB of free memory"
    )
    model = replace(MODEL, parameters=4_000_000_000, kv_values_per_token=65536)
    with pytest.raises(ConfigError) as refused:
        resolve(Config(), replace(CPU, free_bytes=8 * GIB), model)
    assert refused.value.message == expected and refused.value.param == "model"


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory": "9GiB"}])
def test_cpu_out_of_memory_error_names_the_limit_that_applies(options: dict[str, str]) -> None:
    model, free = replace(MODEL, parameters=4_000_000_000), replace(CPU, free_bytes=2 * GIB)
    note = r" \(the container or cgroup may use 3\.00 GiB\)"
    with pytest.raises(ConfigError, match=f"2.00 GiB (of free memory|are free){note}"):
        resolve(Config(**options), replace(free, cgroup_limit=3 * GIB), model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"2.00 GiB (of free memory [\d.]+ GiB may|are free\.)"):
        resolve(Config(**options), free, model)  # type: ignore[arg-type]


def test_refused_context_names_the_largest() -> None:
    model = replace(MODEL, parameters=4_000_000_000, kv_values_per_token=65536, context_len=131072)
    machine = replace(CPU, free_bytes=9 * GIB)
    with pytest.raises(ConfigError, match=r"--max-model-len 4496, .*--quantization int8") as refused:
        resolve(Config(max_model_len=20_000), machine, model)
    assert refused.value.param == "max_model_len"
    assert resolve(Config(max_model_len=4496), machine, model).num_blocks == 4496 // 16


HINT = re.compile(r"--([a-z-]+) (\w+)")


@given(
    free_mib=st.integers(1, 1 << 15),
    parameters=st.integers(1, 1 << 33),
    kv_values=st.integers(1, 1 << 19),
    context_len=st.integers(2, 1 << 18),
    max_model_len=st.none() | st.integers(2, 1 << 18),
    kv_cache_memory=st.none() | st.integers(0, 1 << 14).map("{}MiB".format) | st.just("300tokens"),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    has_drafter=st.booleans(),
)
def test_model_fits_or_each_hint_does(
    free_mib: int,
    parameters: int,
    kv_values: int,
    context_len: int,
    max_model_len: int | None,
    kv_cache_memory: str | None,
    dtype: str,
    has_drafter: bool,
) -> None:
    machine = replace(CPU, free_bytes=free_mib << 20)
    model = ModelInfo("llama", context_len, dtype, parameters, 1000, kv_values, 8)
    drafter = replace(model, parameters=parameters // 10) if has_drafter else None
    max_model_len = max_model_len and min(max_model_len, context_len)
    config = Config(max_model_len=max_model_len, kv_cache_memory=kv_cache_memory)
    try:
        resolved = resolve(config, machine, model, drafter)
    except ConfigError as error:
        _, _, hints = error.message.partition("What would help: ")
        assert hints
        for hint in hints.split(", "):
            if memory := re.fullmatch(r"([0-9.]+) GiB of free memory( and no --kv-cache-memory)?", hint):
                changed = replace(config, kv_cache_memory=None) if memory[2] else config
                resolve(changed, replace(CPU, free_bytes=int(float(memory[1]) * GIB)), model, drafter)
            else:
                options: dict[str, Any] = {name.replace("-", "_"): text for name, text in HINT.findall(hint)}
                without_drafter = options.pop("draft_model", None) or hint.startswith("no --draft-model")
                if "max_model_len" in options:
                    options["max_model_len"] = int(options["max_model_len"])
                resolve(replace(config, **options), machine, model, None if without_drafter else drafter)
    else:
        reserve = 0 if kv_cache_memory else cpu_reserve(machine.free_bytes)
        assert resolved.weight_bytes + resolved.kv_bytes <= machine.free_bytes - reserve
        assert 2 <= resolved.max_model_len <= resolved.num_blocks * 16
        assert kv_cache_memory or resolved.max_model_len >= min(context_len, max_model_len or 512)


# 18 layers of Qwen3.5 0.8B: an anchor takes 19.6 MB, a request up to 96 MB
STATES = replace(
    MODEL,
    parameters=600_000_000,
    kv_values_per_token=6144,
    state_shapes=(StateShape(6144, 4, 16, 16, 128, 128),) * 18,
)


def test_states_are_part_of_the_memory() -> None:
    resolved = resolve(Config(model="m"), CPU, STATES)
    plan = resolved.states
    assert plan is not None and plan.anchor_bytes == 18 * (3 * 6144 * 2 + 16 * 128 * 128 * 4)
    # kept anchors take about as much as K and V
    assert plan.interval == 2048 and plan.interval * 6144 * 2 >= plan.anchor_bytes
    # by default those of all requests take a share of the free memory
    assert resolved.max_num_seqs == 2 * GIB // plan.request_bytes
    parts = {
        part.name: part.num_bytes for part in plan_memory(Config(model="m"), CPU, STATES, None, resolved)
    }
    assert parts["states"] == plan.fixed_bytes and parts["KV cache"] == resolved.kv_bytes
    sizes = plan.sizes(resolved.num_blocks * 16)
    assert sizes.num_slots == resolved.max_num_seqs + 1
    assert sizes.num_anchors > 2 * resolved.max_num_seqs + resolved.num_blocks * 16 // plan.interval


def test_states_of_too_many_requests_are_refused() -> None:
    config = Config(model="m", max_num_seqs=200)
    with pytest.raises(ConfigError, match=r"the states of requests \d+\.\d+ GiB") as error:
        resolve(config, CPU, STATES)
    assert "--max-num-seqs 8" in error.value.message
    assert fits(replace(config, max_num_seqs=8), CPU, [STATES])


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (100, None),
        (20, None),
        (500, "has 1/2.0 of the model's"),
        (10, "1/100.0"),
        (2500, "has 2.5 times the"),
    ],
)
def test_unsuitable_draft_size_is_explained(drafter: int, expected: str | None) -> None:
    warning = draft_size_warning(1000, drafter)
    assert (warning is None) == (expected is None) and (expected or "") in (warning or "")


def test_batched_tokens_cover_all_sequences() -> None:
    fewer = resolve(Config(max_num_batched_tokens=10), CPU, MODEL)
    assert (fewer.max_num_seqs, fewer.max_num_batched_tokens) == (10, 10)
    more = resolve(Config(max_num_seqs=1000), CPU, MODEL)
    assert (more.max_num_seqs, more.max_num_batched_tokens) == (1000, 1000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 10 is below max_num_seqs 100"):
        Config(max_num_seqs=100, max_num_batched_tokens=10)


def test_cache_beyond_free_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 1000.00 GiB and the weights 0.93 GiB; 16.00 GiB are free"):
        resolve(Config(kv_cache_memory="1000GiB"), CPU, MODEL)
    with pytest.raises(ConfigError, match="holds no block"):
        resolve(Config(kv_cache_memory="0"), CPU, MODEL)


def test_torch_backend_holds_float_copies() -> None:
    """Without kernels int8 saves nothing: float32 values, and a copy in the activations' type."""
    slow = replace(CPU, kernel_backend="torch")
    plain, rounded = (resolve(Config(quantization=kind), slow, SHAPED) for kind in (None, "int8"))
    assert plain.weight_bytes == SHAPED.parameters * 2
    assert rounded.weight_bytes == SHAPED.parameters * (4 + 2)
    kept = replace(SHAPED, packed_bytes=77, packed_parameters=400_000_000)
    assert (
        resolve(Config(), slow, kept).weight_bytes == 400_000_000 * 6 + (SHAPED.parameters - 400_000_000) * 2
    )


# GPUs

EIGHT_B = ModelInfo(
    "llama",
    131072,
    "bfloat16",
    8_030_000_000,
    128256,
    2 * 32 * 8 * 128,
    2 * 32 * 8,
    2 * 128256 * 4096,
    activation_values_per_row=55_296,
)
QUARTER = replace(GPU, free_bytes=23 * GIB, total_bytes=24 * GIB)


def test_missing_bfloat16_is_noted_or_refused() -> None:
    (note,) = resolve(Config(), TURING, MODEL).notes
    assert note == "dtype bfloat16 is not supported on Tesla T4 (compute capability 7.5): float16 instead"
    assert resolve(Config(), GPU, MODEL).notes == resolve(Config(dtype="float32"), TURING, MODEL).notes == ()
    with pytest.raises(
        ConfigError, match=r"bfloat16 is not supported on Tesla T4 .*float16 or float32 would work"
    ) as refused:
        resolve(Config(dtype="bfloat16"), TURING, MODEL)
    assert refused.value.param == "dtype"


@pytest.mark.parametrize("name", ["quantization", "kv_cache_dtype"])
def test_fp8_needs_a_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} fp8 needs an NVIDIA GPU; on a CPU int8") as refused:
        resolve(Config(**{name: "fp8"}), CPU, MODEL)
    assert refused.value.param == name
    assert getattr(resolve(Config(**{name: "fp8"}), GPU, MODEL), name) == "fp8"


def test_tiers_of_a_gpu_have_a_note_and_shared_memory_is_refused() -> None:
    assert resolve(Config(kv_cache_dir="kv"), CPU, MODEL).notes == ()
    (note,) = resolve(Config(kv_cache_dir="kv"), GPU, MODEL).notes
    assert note == "kv_cache_dir: not tried on a GPU yet"
    with pytest.raises(ConfigError, match="kv_cache_shared_memory needs --device cpu"):
        resolve(Config(kv_cache_shared_memory=True), GPU, MODEL)


def test_host_memory_counts_where_it_is() -> None:
    """On a GPU against the host's free memory, which replicas share; on a CPU against the model's."""
    host = replace(GPU, host_free_bytes=8 * GIB)
    plain, tiered = (resolve(Config(kv_cache_host_memory=size), host, MODEL) for size in (None, "4GiB"))
    assert tiered == replace(plain, notes=("kv_cache_host_memory: not tried on a GPU yet",))
    with pytest.raises(ConfigError, match=r"kv_cache_host_memory 9GiB does not fit: 8.00 GiB of the host's"):
        resolve(Config(kv_cache_host_memory="9GiB"), host, MODEL)
    with pytest.raises(
        ConfigError, match=r"kv_cache_host_memory 4.5GiB does not fit: 4.00 GiB of the host's"
    ):
        resolve(Config(kv_cache_host_memory="4.5GiB", replicas=2), host, MODEL)
    assert resolve(Config(kv_cache_host_memory="9GiB"), GPU, MODEL).device == "cuda", "it is not known"
    (note,) = resolve(Config(kv_cache_host_memory="4GiB"), CPU, MODEL).notes
    assert note == "kv_cache_host_memory is for GPUs: here a larger kv_cache_memory does the same sooner"
    with pytest.raises(ConfigError, match=r"the model does not fit: .*kv_cache_host_memory 15.00 GiB"):
        resolve(Config(kv_cache_host_memory="15GiB"), CPU, MODEL)


def test_fp8_and_int8_need_equal_memory() -> None:
    for name in ("quantization", "kv_cache_dtype"):
        fp8, int8 = (resolve(Config(**{name: kind}), GPU, SHAPED) for kind in ("fp8", "int8"))
        assert (fp8.weight_bytes, fp8.kv_bytes) == (int8.weight_bytes, int8.kv_bytes)


@pytest.mark.parametrize(("machine", "rows"), [(CPU, 512), (QUARTER, 2048), (GPU, 8192)])
def test_small_gpu_has_fewer_batched_tokens(machine: HardwareInfo, rows: int) -> None:
    assert resolve(Config(), machine, MODEL).max_num_batched_tokens == rows


def test_gpu_converts_types_without_kernels() -> None:
    """Types with GPU kernels stay packed."""
    kept = replace(SHAPED, packed_bytes=77, packed_parameters=400_000_000)
    assert resolve(Config(), GPU, kept).weight_bytes == SHAPED.parameters * 2
    known = replace(kept, gpu_packed_bytes=55, gpu_packed_parameters=300_000_000)
    assert resolve(Config(), GPU, known).weight_bytes == (SHAPED.parameters - 300_000_000) * 2 + 55


@pytest.mark.parametrize("used", [0, 20 * GIB])
def test_gpu_memory_parts_add_up(used: int) -> None:
    """Parts and KV cache fill the usable share; memory of other processes reduces it."""
    machine = replace(GPU, free_bytes=GPU.total_bytes - used)
    resolved = resolve(Config(max_num_seqs=1024), machine, EIGHT_B)
    memory = resolved.memory
    assert memory is not None and not memory.is_measured
    assert memory.other_processes >= max(used, 1)
    assert memory.weights == resolved.weight_bytes == 2 * EIGHT_B.parameters
    workspace = GIB  # of attention
    assert memory.activations == 8192 * (55_296 * 2 + 128256 * 8) + workspace and memory.cuda_graphs > 0
    assert sum(size for _, size in memory.parts) + memory.kv_cache == memory.usable == int(0.9 * 80 * GIB)
    per_block = 16 * EIGHT_B.kv_values_per_token * 2
    assert memory.kv_cache - per_block < resolved.kv_bytes <= memory.kv_cache
    assert (
        resolve(Config(max_num_seqs=1024, enforce_eager=True), machine, EIGHT_B).kv_bytes > resolved.kv_bytes
    )


def test_gpu_cache_is_limited_to_useful_blocks() -> None:
    assert resolve(Config(), GPU, MODEL).num_blocks == 256 * 4096 // 16


def test_small_gpu_limits_the_context() -> None:
    resolved = resolve(Config(), QUARTER, EIGHT_B)
    assert resolved.max_model_len == resolved.num_blocks * 16 < 131072
    assert resolve(Config(max_model_len=4096), QUARTER, EIGHT_B).max_model_len == 4096


def test_context_beyond_gpu_memory_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(Config(max_model_len=131072), QUARTER, EIGHT_B)
    text = refused.value.message
    assert refused.value.param == "max_model_len"
    assert text.startswith("max_model_len 131072 does not fit: its KV cache needs 16.00 GiB, ")
    assert (
        "21.60 of 24.00 GiB may be used; estimated: weights 14.96, activations 2.54, CUDA graphs 0.38, "
        "CUDA and other" in text
    )
    assert text.endswith("What would help: --max-model-len 19248, a GPU of 40 GiB")
    assert resolve(Config(max_model_len=19248), QUARTER, EIGHT_B).max_model_len == 19248
    resolve(Config(max_model_len=131072), _gpu_of(40), EIGHT_B)


def _gpu_of(size: int) -> HardwareInfo:
    """As QUARTER, by GiB."""
    used = QUARTER.total_bytes - QUARTER.free_bytes
    return replace(QUARTER, total_bytes=size * GIB, free_bytes=size * GIB - used)


@pytest.mark.parametrize("size", [1, 6, 10, 12, 16])
@pytest.mark.parametrize("options", [{}, {"max_model_len": 30_000}, {"draft_model": "d"}])
def test_each_gpu_hint_fits_by_the_estimate(size: int, options: dict[str, Any]) -> None:
    config, machine = Config(**options), _gpu_of(size)
    models = [EIGHT_B, MODEL] if "draft_model" in options else [EIGHT_B]
    hints = fitting_options(config, machine, models, fits)
    assert hints and len(hints) <= 6
    for hint in hints:
        chosen, tried = machine, config
        if gpu := re.fullmatch(r"a GPU of (\d+) GiB", hint):
            chosen = _gpu_of(int(gpu[1]))
        for name, value in re.findall(r"(?<!no )--([a-z-]+)(?: ([\w.]+))?", hint):
            read = json.loads(value or "true") if re.fullmatch(r"[\d.]*", value) else value
            tried = replace(tried, **{name.replace("-", "_"): read})
        resolved = resolve(tried, chosen, *(models[:1] if "no --draft-model" in hint else models))
        assert resolved.memory is not None and resolved.memory.kv_cache >= resolved.kv_bytes > 0


def test_uncertain_estimate_does_not_refuse() -> None:
    """Activations and graphs are estimates; with the weights alone 46 thousand tokens fit."""
    tried = resolve(Config(max_model_len=40_000), QUARTER, EIGHT_B)
    assert tried.max_model_len == 40_000 and tried.num_blocks >= 2500
    assert (
        tried.memory is not None and tried.memory.activations > 0 and tried.memory.kv_cache < tried.kv_bytes
    )
    with pytest.raises(ConfigError, match=r"max_model_len 48000 does not fit: .* activations 2.54"):
        resolve(Config(max_model_len=48_000), QUARTER, EIGHT_B)


def test_model_beyond_gpu_memory_is_refused() -> None:
    small = replace(GPU, free_bytes=15 * GIB, total_bytes=16 * GIB)
    expected_message = (
        r"the model does not fit: it leaves no memory for the KV cache \(136.0 KiB a token\) .*weights 15.89"
    )
    with pytest.raises(ConfigError, match=expected_message) as refused:
        resolve(Config(draft_model="d"), small, EIGHT_B, MODEL)
    hints = "What would help: --quantization fp8, --quantization int4, a GPU of 24 GiB"
    assert refused.value.message.endswith(hints) and refused.value.param == "model"


def test_configured_cache_size_is_kept() -> None:
    resolved = resolve(Config(kv_cache_memory="4000tokens"), GPU, EIGHT_B)
    assert resolved.num_blocks == 250 and resolved.memory is None
