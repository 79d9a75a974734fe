"""Invalid values in GGUF metadata are refused by name, before anything is allocated."""

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import CheckpointError
from foreword.models import model_loader
from foreword.weights.gguf.gguf_weights import GGUF_PACKAGE_TYPES, dequantize
from foreword.weights.gguf.header import TENSOR_TYPES, GGUFFile, open_gguf
from foreword.weights.gguf.hf_config import NOOP_VALUES
from tests.support.budget import SHARED_FIXTURES, examples, some_of
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.gguf_files import NO_GGUF_FAMILIES, write_gguf

SCALING = {  # keys of RoPE scaling, with which every kind of it is reached by a change of one or two
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
INVALID_VALUES = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 5e-324, 1e-30, 1.0, 1.0000001, 1e30, 1e300),
    *(0, -1, 1, 2, 3, 7, 10**6, 2**24, 2**24 + 1, 2_000_000_000, 2**32 - 1, 2**64 - 1),
    *(
        True,
        False,
        "",
        "x",
        "yarn",
        "linear",
        "longrope",
        [],
        [1, 2],
        [math.nan, 1.0],
        [True],
        [True, False],
        ["x", "y"],
    ),
)


GGUF_FAMILIES = tuple(family for family in FAMILIES if family not in NO_GGUF_FAMILIES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    """A valid header of each family."""
    path = tmp_path_factory.mktemp("values")
    return {
        family: open_gguf(write_gguf(write_checkpoint(path / family, family), path / f"{family}.gguf"))
        for family in GGUF_FAMILIES
    }


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit further memory to `size` bytes; more raises MemoryError."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def own_keys(file: GGUFFile) -> list[str]:
    """Keys of the architecture without their prefix."""
    return [
        key.partition(".")[2]
        for key in file.metadata
        if key.startswith(file.metadata["general.architecture"])
    ]


def read(file: GGUFFile, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """ModelInfo of the file with changed keys of the architecture (None removes one)."""
    name = file.metadata["general.architecture"]
    metadata = {**file.metadata, **{f"{name}.{key}": value for key, value in changes.items()}}
    sound = {key: value for key, value in metadata.items() if value is not None}
    with monkeypatch.context() as patch, at_most(1 << 30):
        patch.setattr(model_loader, "open_gguf", lambda path: replace(file, metadata=sound))
        return model_loader.read_model_info(file.path)


@pytest.mark.parametrize("family", some_of(GGUF_FAMILIES, 6))
def test_any_value_is_accepted_or_refused(
    family: str, files: dict[str, GGUFFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing crashes, hangs or allocates; the tensors determine the sizes."""
    file = files[family]
    parameters = read(file, {}, monkeypatch).parameters
    for key in {
        *own_keys(file),
        *SCALING,
        *NOOP_VALUES,
        "rope.scale_linear",
        "rope.freq_base_swa",
        "attention.sliding_window_pattern",
    }:
        for value in INVALID_VALUES:
            try:
                info = read(file, {key: value}, monkeypatch)
            except CheckpointError as error:
                assert f"`{file.metadata['general.architecture']}." in str(error), (key, value)
            else:
                assert 0 < info.context_len < 2**60, (key, value)
                # Files of Gemma 4 may hold K and V of layers that do not read them
                assert info.parameters == parameters or key == "attention.shared_kv_layers", (key, value)


@settings(
    max_examples=examples(400),
    suppress_health_check=SHARED_FIXTURES,
)
@given(
    st.sampled_from(sorted(GGUF_FAMILIES)),
    st.sampled_from(["none", "linear", "yarn", "longrope"]),
    st.dictionaries(
        st.integers(0, 40),
        st.one_of(st.sampled_from(INVALID_VALUES), st.floats(), st.integers(0, 2**64 - 1)),
        max_size=4,
    ),
)
def test_several_changed_values(
    files: dict[str, GGUFFile],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kind: str,
    changes: dict[int, Any],
) -> None:
    file = files[family]
    keys = [*own_keys(file), *SCALING]
    values = {
        **SCALING,
        "rope.scaling.type": kind,
        **{keys[index % len(keys)]: value for index, value in changes.items()},
    }
    try:
        info = read(file, values, monkeypatch)
    except CheckpointError:
        return
    assert info.parameters == read(file, {}, monkeypatch).parameters or "attention.shared_kv_layers" in values


BIGGEST = 2**32 - 1
NAMED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"block_count": BIGGEST},
        "block_count` must be a whole number of at most 16777216 here, got 4294967295",
    ),
    ("llama", {"block_count": 10**6}, "block_count` is 1000000, but the file has 21 tensors"),
    ("llama", {"block_count": 3}, "block_count` is 3, but tensor `blk.2.attn_norm.weight` is missing"),
    ("llama", {"embedding_length": BIGGEST}, "embedding_length` must be a whole number of at most 16777216"),
    (
        "llama",
        {"embedding_length": 2**24},
        r"embedding_length` makes 16777216 columns of tensor `token_embd.weight`, which is \[272, 64\]",
    ),
    (
        "llama",
        {"attention.key_length": BIGGEST},
        "attention.key_length` must be a whole number of at most 16777216",
    ),
    (
        "llama",
        {"attention.key_length": 18},
        r"attention.key_length` makes 72 rows of tensor `blk.0.attn_q.weight`",
    ),
    (
        "llama",
        {"attention.key_length": None, "attention.head_count": 5},
        r"attention.head_count` makes 60 rows of tensor",
    ),
    (
        "llama",
        {"attention.head_count_kv": 3},
        r"attention.head_count_kv` makes 48 rows of tensor `blk.0.attn_k.weight`",
    ),
    (
        "phi3",
        {"attention.key_length": 18},
        r"attention.key_length` makes 144 rows of tensor `blk.0.attn_qkv.weight`",
    ),
    (
        "llama",
        {"feed_forward_length": 10**6},
        r"feed_forward_length` makes 1000000 rows of tensor `blk.0.ffn_up.weight`",
    ),
    (
        "phi3",
        {"feed_forward_length": 97},
        r"feed_forward_length` makes 194 rows of tensor `blk.0.ffn_up.weight`",
    ),
    ("llama", {"rope.freq_base": 1.0, "rope.scaling.type": "yarn"}, "rope.freq_base` must be above 1, got 1"),
    ("llama", {"rope.freq_base": math.nan}, "rope.freq_base` must be a positive number here, got NaN"),
    (
        "llama",
        {"rope.freq_base": 1e300},
        r"rope.freq_base` must be between 1e-30 and 1e\+30 here, got 1e\+300",
    ),
    (
        "llama",
        {"attention.layer_norm_rms_epsilon": math.inf},
        "epsilon` must be a positive number here, got Infinity",
    ),
    (
        "gemma2",
        {"attn_logit_softcapping": math.nan},
        "attn_logit_softcapping` must be a positive number here, got NaN",
    ),
    (
        "gemma2",
        {"final_logit_softcapping": -math.inf},
        "final_logit_softcapping` must be a positive number here, got -Inf",
    ),
    (
        "gemma3_text",
        {"attention.sliding_window_pattern": [True]},
        "sliding_window_pattern` must be a number or 2 flags, got 1",
    ),
    ("gemma3_text", {"rope.freq_base_swa": 0.5}, "rope.freq_base_swa` must be above 1, got 0.5"),
    (
        "phi3",
        {"rope.dimension_count": 3},
        "rope.dimension_count` must be even and at most 16, the size of a head, got 3",
    ),
    (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 0.8},
        "rope.scaling.yarn_attn_factor` must be 1 or 1.13863 here, got 0.8",
    ),
]


def test_error_names_key_and_limit(files: dict[str, GGUFFile], monkeypatch: pytest.MonkeyPatch) -> None:
    for family, changes, message in NAMED:
        with pytest.raises(CheckpointError, match=message) as caught:
            read(files[family], changes, monkeypatch)
        assert str(caught.value).startswith(
            f"{files[family].path}: `{files[family].metadata['general.architecture']}."
        )


@pytest.mark.parametrize("name", GGUF_PACKAGE_TYPES)
def test_package_reads_every_type(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    rows = np.random.default_rng(3).integers(0, 256, (7, 5 * kind.block_bytes), dtype=np.uint8)
    values = dequantize(name, rows)
    assert values.shape == (7, 5 * kind.block_values) and values.dtype == np.float32
    assert np.isfinite(values).mean() > 0.5
    assert np.array_equal(dequantize(name, rows[2:3]), values[2:3], equal_nan=True)


def test_dequantize_q8_k() -> None:
    """A float32 scale, 256 values, and unused sums; the gguf package cannot read it."""
    scales, values = np.array([[0.5], [-2.0]], np.float32), np.arange(-128, 128, dtype=np.int8)
    rows = np.concatenate(
        (scales.view(np.uint8), np.tile(values.view(np.uint8), (2, 1)), np.zeros((2, 32), np.uint8)), 1
    )
    assert np.array_equal(dequantize("q8_k", rows), scales * values.astype(np.float32))
