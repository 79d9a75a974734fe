"""The fingerprint, and the warnings of the start."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine import fingerprint
from foreword.engine.loader import load
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.registry import native_unavailable_reason
from tests.support.checkpoints import write_checkpoint
from tests.support.device import DEVICE
from tests.support.gguf_files import write_gguf
from tests.support.vision_checkpoints import write_vision_checkpoint


def warnings(path: Path, **options: str) -> tuple[str, ...]:
    config = Config(model=str(path), kv_cache_memory="400tokens", max_model_len=400, threads=1, **options)
    return load(config, ()).info.warnings


def backend_warnings() -> tuple[str, ...]:
    """The warning of a machine without native kernels."""
    reason = native_unavailable_reason(DEVICE)
    return (reason,) if reason else ()


def test_load_without_warnings(tmp_path: Path) -> None:
    messages = warnings(write_checkpoint(tmp_path / "model", "llama", seed=1), quantization="int8")
    assert messages == backend_warnings()


def test_shortened_context_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=str(write_checkpoint(tmp_path / "model", max_position_embeddings=4096)), threads=1)
    monkeypatch.setattr("foreword.planning.resolve.MAX_CPU_KV_BYTES", 100_000)
    info = load(config, ()).info
    expected = f"the context is {info.resolved.max_model_len} tokens, of the checkpoint's 4096: a KV cache of"
    assert sum(expected in warning for warning in info.warnings) == 1
    asked = load(replace(config, max_model_len=64), ()).info
    assert asked.resolved.max_model_len == 64 and asked.warnings == backend_warnings()
    configured = load(replace(config, kv_cache_memory="1tokens"), ()).info
    expected = "the context is 16 tokens, of the checkpoint's 4096: a KV cache of 1tokens holds no more"
    assert sum(expected in warning for warning in configured.warnings) == 1


def test_missing_kernels_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    reason = f"no compiler for the {DEVICE}"
    monkeypatch.setattr(fingerprint, "native_unavailable_reason", lambda *_: reason)
    assert warnings(path) == (reason,)


def test_ineffective_quantization_is_warned_of(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama", seed=1)
    *others, warning = warnings(
        write_gguf(checkpoint, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0), quantization="int4"
    )
    assert tuple(others) == backend_warnings()
    assert warning == "--quantization int4 skips blocks that are quantized in the file"


def fingerprint_of(path: Path) -> str:
    return load(
        Config(model=str(path), kv_cache_memory="400tokens", threads=1, speculate="off"), ()
    ).info.fingerprint


BIT_NEUTRAL: dict[str, dict[str, Any]] = {
    "threads": {"threads": 3},
    "a shorter context": {"max_model_len": 160},
    "a longer context": {"max_model_len": 512},
    "size of blocks": {"block_size": 4},
    "size of the KV cache": {"kv_cache_memory": "900tokens"},
    "size of steps": {"max_num_batched_tokens": 7, "max_num_seqs": 2},
    "room for adapters": {"enable_lora": True},
    "replicas": {"replicas": 2},
    "no prefix cache": {"prefix_caching": False},
    "speculation": {"speculate": "auto"},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for threads to share a matrix."""
    path = tmp_path_factory.mktemp("wide") / "model"
    return write_checkpoint(path, "llama", seed=3, hidden_size=512, intermediate_size=1024)


@pytest.fixture(scope="module")
def plain_answer(wide_model: Path) -> tuple[str, list[int]]:
    return fingerprint_and_hashes(wide_model)


def fingerprint_and_hashes(path: Path, **options: Any) -> tuple[str, list[int]]:
    """The fingerprint, and hashes of all logits of an answer."""
    defaults = {"kv_cache_memory": "600tokens", "threads": 1, "speculate": "off"}
    engine = load(Config(model=str(path), test_mode=True, **(defaults | options)), ())
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    engine.submit(Request("a", tuple(range(100)), params, seed=5))
    hashes: list[int] = []
    while not engine.idle:
        for event in engine.step().events:
            assert isinstance(event, TokenEvent)
            hashes += event.logits_hashes
    return engine.info.fingerprint, hashes


@pytest.mark.parametrize("options", BIT_NEUTRAL.values(), ids=BIT_NEUTRAL)
def test_options_that_change_no_bit_keep_the_fingerprint(
    wide_model: Path, plain_answer: tuple[str, list[int]], options: dict[str, Any]
) -> None:
    """Engines that differ in these options may go on with each other's answers."""
    assert fingerprint_and_hashes(wide_model, **options) == plain_answer


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"cpu_isa": "reference"}], ids=str
)
def test_options_that_change_bits_change_the_fingerprint(
    wide_model: Path, plain_answer: tuple[str, list[int]], options: dict[str, Any]
) -> None:
    changed = fingerprint_and_hashes(wide_model, **options)
    assert changed[0] != plain_answer[0] and changed[1] != plain_answer[1]


def test_fingerprint_has_the_context_limit_where_rope_depends_on_it(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = write_checkpoint(
        tmp_path / "model", "llama", seed=3, rope_parameters=rope, max_position_embeddings=128
    )
    first, second = (fingerprint_and_hashes(path, max_model_len=length) for length in (200, 256))
    assert first[0] != second[0] and first[1] != second[1]


def test_fingerprint_has_the_ids_that_are_never_sampled(wide_model: Path) -> None:
    config = Config(model=str(wide_model), kv_cache_memory="400tokens", threads=1, speculate="off")
    assert load(config, (3,)).info.fingerprint != load(config, (4,)).info.fingerprint


def test_fingerprint_covers_image_preprocessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's version and the preprocessor config change pixels; text models do not depend on them."""
    vision, text = (
        write_vision_checkpoint(tmp_path / "sees", "llava"),
        write_checkpoint(tmp_path / "reads", "llama", seed=1),
    )
    before = fingerprint_of(vision), fingerprint_of(text)
    assert before == (fingerprint_of(vision), fingerprint_of(text))
    monkeypatch.setattr(
        fingerprint, "version", lambda name: f"another {name}" if name == "pillow" else version(name)
    )
    assert fingerprint_of(vision) != before[0] and fingerprint_of(text) == before[1]
    monkeypatch.undo()
    options = vision / "preprocessor_config.json"
    options.write_text(json.dumps(json.loads(options.read_text()) | {"image_mean": [0.5, 0.5, 0.5]}))
    assert fingerprint_of(vision) != before[0]


def test_fingerprint_covers_gpu_kernel_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels have no library file: their source is hashed."""
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    on_gpu = replace(load(config, ()).info.resolved, device="cuda")
    facts = (config, on_gpu, ReferenceOps(), "rope", (), False)
    before = fingerprint.make_fingerprint(*facts)
    assert before == fingerprint.make_fingerprint(*facts)
    monkeypatch.setattr(fingerprint, "source_digest", lambda: "another")
    assert before != fingerprint.make_fingerprint(*facts)
