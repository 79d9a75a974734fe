"""Families with latent attention: memory, quantized checkpoints, adapters, unused heads and bad configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError, ConfigError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.model_loader import check_weights, read_model_info
from foreword.planning.memory import kv_bytes_per_token
from tests.support.checkpoints import LATENT_FAMILIES, change_config, change_tensors, write_checkpoint
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.forward_helpers import ForwardHelper
from tests.support.lora_files import merge_adapter, write_adapter
from tests.support.quantized_checkpoints import write_quantized

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(7)).tolist()
OPTIONS: dict[str, Any] = {"max_model_len": 200, "kv_cache_memory": "4000tokens", "threads": 1}
ADAPTED = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")


@pytest.mark.parametrize(("kv_dtype", "size"), [("float32", 160), ("bfloat16", 80), ("int8", 48)])
def test_a_token_takes_one_vector(kv_dtype: str, size: int, tmp_path: Path) -> None:
    """Of 32 + 8 values in a layer, and a scale for each part of it."""
    path = write_checkpoint(tmp_path / "model", "deepseek_v3")
    info = read_model_info(path)
    assert info.kv_values_per_token == 2 * 40
    assert kv_bytes_per_token(info, kv_dtype, "float32") == 2 * size
    storage = KVStorage(7, 16, ForwardHelper(path).model.cache_shapes, kv_dtype)
    assert storage.nbytes == 8 * 16 * 2 * size


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_int8_cache_is_close_and_exact(family: str, tmp_path: Path) -> None:
    """Without experts, whose choice small errors change."""
    options = (
        {"mlp_layer_types": ["dense"] * 2} if family == "glm4_moe_lite" else {"first_k_dense_replace": 2}
    )
    path = write_checkpoint(tmp_path / "model", family, **options)
    exact = ForwardHelper(path).logits(PROMPT)
    for ops in (None, CpuOps(FORCED_ISA, threads=2)):
        rounded = ForwardHelper(path, ops=ops, kv_dtype="int8")
        whole = rounded.logits(PROMPT)
        assert (whole - exact).norm() <= 0.03 * exact.norm()
        again = [rounded.logits(PROMPT[i : i + 1], i) for i in range(60, 70)]
        assert torch.equal(torch.cat(again), whole[60:])


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq-act-order", "pack-quantized", "fp8-block"])
def test_quantized_checkpoint_has_its_values(kind: str, tmp_path: Path) -> None:
    """Keys of the latent vector are transposed as floats, whatever their format."""
    sizes = {
        "first_k_dense_replace": 2,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    source = write_checkpoint(
        tmp_path / "source",
        "deepseek_v3",
        q_lora_rank=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        **sizes,
    )
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    write_quantized(
        source, quantized, kind, plain, extra=("model.layers.0.self_attn.kv_a_proj_with_mqa.weight",)
    )
    ours, expected = ForwardHelper(quantized).logits(PROMPT), ForwardHelper(plain).logits(PROMPT)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    native = ForwardHelper(quantized, ops=CpuOps(FORCED_ISA, threads=1)).logits(PROMPT)
    assert native.isfinite().all()
    assert check_weights(quantized) > 0


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_adapter_gives_the_merged_models_tokens(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    adapter = write_adapter(tmp_path / "adapter", base, modules=ADAPTED)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    tuned = LLM(str(base), lora_modules=f"tuned={adapter}", **OPTIONS)
    prompts = [{"prompt_token_ids": PROMPT}]
    (ours,) = tuned.generate(prompts, params, lora_request="tuned")
    (expected,) = LLM(str(merged), **OPTIONS).generate(prompts, params)
    (plain,) = tuned.generate(prompts, params)
    assert ours.outputs[0].token_ids == expected.outputs[0].token_ids != plain.outputs[0].token_ids


def test_adapter_of_absorbed_projection_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "deepseek_v3")
    adapter = write_adapter(tmp_path / "adapter", base, modules=("kv_b_proj",))
    with pytest.raises((CheckpointError, ConfigError), match="kv_b_proj` cannot be adapted: latent"):
        LLM(str(base), lora_modules=f"tuned={adapter}", **OPTIONS)


def test_mtp_layers_are_named_and_not_loaded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "deepseek_v3")
    expected = ForwardHelper(path).logits(PROMPT)
    assert read_model_info(path).unused_parts == ()
    extra = {"eh_proj.weight": (64, 128), "self_attn.o_proj.weight": (64, 48), "enorm.weight": (64,)}
    change_tensors(path, **{f"model.layers.2.{name}": torch.zeros(shape) for name, shape in extra.items()})
    count = sum(torch.zeros(shape).numel() for shape in extra.values()) / 1e6
    (part,) = read_model_info(path).unused_parts
    assert part == f"the MTP head, which drafts, is not used yet ({count:.1f} M values)"
    assert torch.equal(ForwardHelper(path).logits(PROMPT), expected)
    change_config(path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.2"):
        check_weights(path)


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    options = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    path = write_checkpoint(tmp_path / "model", "deepseek_v3", **options)
    expected = ForwardHelper(path).logits(PROMPT)
    change_config(path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    assert torch.equal(ForwardHelper(path).logits(PROMPT), expected)
