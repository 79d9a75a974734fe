"""Dummy weights: the checkpoint's shapes, deterministic, with finite logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.weights.dummy_weights import DummyWeights
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.gguf_files import Kind, write_gguf
from tests.support.vision_checkpoints import write_vision_checkpoint


def bare(path: Path) -> Path:
    """A checkpoint without its weights."""
    for file in path.glob("*.safetensors"):
        file.unlink()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_have_the_configs_shapes(family: str, tmp_path: Path) -> None:
    path = bare(write_checkpoint(tmp_path, family))
    model = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64, dummy=True)
    assert model.info == read_model_info(path)


@pytest.mark.parametrize("kind", ["llava_next", "qwen2_5_vl"])
def test_dummy_weights_include_vision_encoders(kind: str, tmp_path: Path) -> None:
    path = bare(write_vision_checkpoint(tmp_path, kind))
    model = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64, dummy=True)
    assert model.info == read_model_info(path) and model.vision_encoder is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dummy_weights_depend_on_the_name(dtype: torch.dtype) -> None:
    first, second = DummyWeights("cpu", dtype), DummyWeights("cpu", dtype).prefixed("model.")
    with (
        first.weights({"model.a": 40, "model.b": 40}, 30) as (a, b),
        second.weights({"a": 40}, 30) as (again,),
    ):
        assert isinstance(a, torch.Tensor) and a.dtype == dtype
        assert torch.equal(a, again) and not torch.equal(a, b)
        assert a.float().std() * 30**0.5 == pytest.approx(1, abs=0.1)
    assert first.num_parameters == 2 * 40 * 30
    norm, bias = first.tensor("norm.weight", 500), first.tensor("bias", 500)
    assert norm.mean() == pytest.approx(1, abs=0.01) and bias.mean() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_engine_generates_with_dummy_weights(tmp_path: Path, dtype: str) -> None:
    path = bare(write_checkpoint(tmp_path, "llama", dtype=dtype, num_hidden_layers=40))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    llm = LLM(str(path), load_format="dummy", kv_cache_memory="400tokens", threads=1)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
    again = LLM(str(path), load_format="dummy", kv_cache_memory="400tokens", threads=1)
    assert len(answer.token_ids) == 8
    assert again.generate([{"prompt_token_ids": [1, 2, 3]}], params)[0].token_ids == answer.token_ids


def test_dummy_weights_refuse_gguf_files(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "model", "llama"), tmp_path / "model.gguf", Kind.F16)
    with pytest.raises(CheckpointError, match="load_format dummy needs a directory"):
        load_model(file, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64, dummy=True)
