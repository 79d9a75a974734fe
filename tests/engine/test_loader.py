"""What the operator is told when a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from foreword.config.options import Config
from foreword.engine import loader as module
from foreword.engine import loader as parts
from foreword.engine.loader import load
from foreword.errors import ConfigError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.registry import native_unavailable_reason
from tests.support.checkpoints import write_checkpoint
from tests.support.device import DEVICE
from tests.support.gguf_files import write_gguf
from tests.support.vision_checkpoints import write_vision_checkpoint


def warnings(path: Path, **options: str) -> tuple[str, ...]:
    return load(Config(model=str(path), kv_cache_memory="400tokens", threads=1, **options), ()).info.warnings


def unbuilt() -> tuple[str, ...]:
    """What is said wherever torch computes because kernels for the device are not to be had."""
    reason = native_unavailable_reason(DEVICE)
    return (reason,) if reason else ()


def test_nothing_to_say(tmp_path: Path) -> None:
    told = warnings(write_checkpoint(tmp_path / "model", "llama", seed=1), quantization="int8")
    assert told == unbuilt()


def test_missing_kernels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    monkeypatch.setattr(module, "native_unavailable_reason", lambda device: f"no compiler for the {device}")
    assert warnings(path) == (f"no compiler for the {DEVICE}",)


def test_quantization_that_has_no_effect_is_told(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama", seed=1)
    *others, warning = warnings(
        write_gguf(checkpoint, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0), quantization="int4"
    )
    assert tuple(others) == unbuilt()
    assert warning == "--quantization int4 leaves blocks that are quantized in the file as they are"


def test_what_was_timed_once_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    first = load(config, ())
    monkeypatch.delattr(module, "StepCostProfiler")
    again = load(config, (), first.info.resolved, timings=first.proposer.timings)
    assert first.proposer.timings is not None and again.proposer.timings is first.proposer.timings


def fingerprint(path: Path) -> str:
    return load(
        Config(model=str(path), kv_cache_memory="400tokens", threads=1, speculate="off"), ()
    ).info.fingerprint


def test_what_pictures_are_made_with_is_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file may have other pixels in another version, or prepared otherwise; a model that sees none does not care."""
    sees, reads = (
        write_vision_checkpoint(tmp_path / "sees", "llava"),
        write_checkpoint(tmp_path / "reads", "llama", seed=1),
    )
    before = fingerprint(sees), fingerprint(reads)
    assert before == (fingerprint(sees), fingerprint(reads))
    monkeypatch.setattr(
        module, "version", lambda name: f"another {name}" if name == "pillow" else version(name)
    )
    assert fingerprint(sees) != before[0] and fingerprint(reads) == before[1]
    monkeypatch.undo()
    options = sees / "preprocessor_config.json"
    options.write_text(json.dumps(json.loads(options.read_text()) | {"image_mean": [0.5, 0.5, 0.5]}))
    assert fingerprint(sees) != before[0]


def test_the_source_of_kernels_for_gpus_is_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled where they run: no file of the library tells one version from the next."""
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    on_gpu = replace(load(config, ()).info.resolved, device="cuda")
    before = module._fingerprint(config, on_gpu, ReferenceOps(), False)
    assert before == module._fingerprint(config, on_gpu, ReferenceOps(), False)
    monkeypatch.setattr(module, "source_digest", lambda: "another")
    assert before != module._fingerprint(config, on_gpu, ReferenceOps(), False)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes")]
)
def test_memory_that_is_not_there_is_told_with_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_room(*_: object) -> None:
        raise error

    monkeypatch.setattr(parts, "KVStorage", no_room)
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    with pytest.raises(ConfigError, match=r"out of memory .* weights need about 0.00 GiB and the KV cache"):
        load(config, ())


def test_other_errors_of_torch_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KVStorage", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        load(
            Config(
                model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)), kv_cache_memory="400tokens"
            ),
            (),
        )
