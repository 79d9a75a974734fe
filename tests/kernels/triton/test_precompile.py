"""A start compiles its kernels in threads, all of them, and only once."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.kernels.triton import elementwise, precompile
from tests.support.checkpoints import write_json
from tests.support.device import DEVICE
from tests.support.triton_interpreter import IS_INTERPRETED

MAX_KERNELS = 130  # of a cold start
ROOT = Path(__file__).parents[3]
# Llama's 8B model but for the sizes that change no kernel.
SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 34048, "hidden_size": 512,
    "intermediate_size": 3072, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFTER = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("start") / "model")


def write_model(path: Path, **changes: Any) -> Path:
    path.mkdir()
    write_json(path / "config.json", SHAPE | changes)
    return path


def observe_start(model: Path, cache: Path, **options: Any) -> dict[str, Any]:
    """See tests/support/triton_start.py."""
    defaults = {"load_format": "dummy", "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    arguments = {"model": str(model), "speculate": "off", **defaults, **options}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_start", json.dumps(arguments)],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def check_compiled_while_loading(report: dict[str, Any]) -> None:
    """All kernels are compiled in threads, before the first launch."""
    kernels = [kernel for kernel in report["kernels"] if not kernel["is_cached"]]
    names = Counter(kernel["name"] for kernel in kernels)
    assert {kernel["name"] for kernel in kernels if not kernel["in_thread"]} == set()
    assert {kernel["name"] for kernel in kernels if kernel["stage"] != "load"} == set()
    assert 40 < len(kernels) <= MAX_KERNELS, names
    assert kernels[0]["launches"] == 0 < report["launches"] and report["refused"] == []
    compiled = [(done, total) for stage, done, total in report["progress"] if stage == "kernels"]
    assert compiled[-1][0] == compiled[-1][1] and len(compiled) >= len(kernels)


def test_draft_model_is_compiled_while_loading(model: Path, tmp_path: Path) -> None:
    drafter = str(write_model(tmp_path / "drafter", **DRAFTER))
    options = {"speculate": "draft", "draft_model": drafter, "draft_length": "fixed"}
    check_compiled_while_loading(observe_start(model, tmp_path, **options))


def test_quantized_model_is_compiled_while_loading(model: Path, tmp_path: Path) -> None:
    options = {"quantization": "int4", "kv_cache_dtype": "int8", "speculate": "auto"}
    check_compiled_while_loading(observe_start(model, tmp_path, **options))


def test_warm_start_compiles_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold, warm = (observe_start(model, tmp_path / "cache", compile=True) for _ in range(2))
    check_compiled_while_loading(cold)
    kernels = [kernel for kernel in cold["kernels"] if not kernel["is_cached"]]
    assert {kernel["name"] for kernel in kernels} >= {"gemm_kernel", "attend"}
    assert len(warm["kernels"]) >= len(kernels)
    assert [kernel for kernel in warm["kernels"] if not kernel["is_cached"]] == []
    with capsys.disabled():
        print(f"\ncold start: {len(kernels)} kernels, {cold['load_cpu_s']:.0f} CPU seconds")
        print(f"warm start: none, {warm['load_cpu_s']:.0f} CPU seconds")


@pytest.mark.skipif(not IS_INTERPRETED, reason="nothing is compiled by the interpreter alone")
def test_kernels_write_zeros_while_they_are_compiled() -> None:
    x, results = torch.ones(4, device=DEVICE), []
    summary = precompile.precompile(lambda: results.append(elementwise.softcap(x, 30.0)))
    assert results[0].tolist() == [0.0] * 4 and summary.num_failed == 0
    assert elementwise.softcap(x, 30.0).tolist() != [0.0] * 4


def test_error_of_a_run_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise RuntimeError("no C compiler")

    with caplog.at_level(logging.WARNING):
        assert precompile.precompile(run).num_kernels == 0
    assert "kernels are compiled at their first launch: RuntimeError: no C compiler" in caplog.text


def test_without_async_compile_mode_launches_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompile, "AsyncCompileMode", None)
    with caplog.at_level(logging.WARNING):
        precompile.precompile(pytest.fail)
    assert "compiles no kernels in threads" in caplog.text
