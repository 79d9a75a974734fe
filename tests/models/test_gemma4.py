"""Gemma 4: multimodal checkpoints as text, quantized ones, and configs that contradict themselves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from foreword.errors import CheckpointError
from foreword.models.model_loader import check_weights, read_model_info
from tests.support import gemma4_checkpoints as gemma4
from tests.support.checkpoints import VOCAB_SIZE, change_tensors, write_checkpoint
from tests.support.forward_helpers import ForwardHelper
from tests.support.quantized_checkpoints import write_quantized

PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7)).tolist()
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL: dict[str, Any] = {
    **{key: value for key, value in gemma4.COMMON.items() if value is not ...},
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PATCHES = ("image", "video", "audio", "boi", "eoi", "boa")


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_multimodal_checkpoint_runs_as_text(kind: str, tmp_path: Path) -> None:
    """As transformers writes it, with names as on the hub and `per_layer_config`."""
    transformers.utils.logging.disable_progress_bar()
    ids: dict[str, Any] = {f"{name}_token_id": 260 + index for index, name in enumerate(PATCHES)}
    if kind == "gemma4":
        text = SMALL | {key: value for key, value in gemma4.SHARED_KV.items() if value is not ...}
        config = transformers.Gemma4Config(text_config=text, vision_config=TOWER, eoa_token_index=267, **ids)
        model: Any = transformers.Gemma4ForConditionalGeneration(config)
    else:
        text = {**SMALL, "num_hidden_layers": 2, "layer_types": [gemma4.SLIDING, gemma4.FULL]}
        vision = {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64}
        config = transformers.Gemma4UnifiedConfig(
            text_config=text, vision_config=vision, eoa_token_index=267, **ids
        )
        model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    model.eval().save_pretrained(tmp_path)
    assert "model_type" in json.loads((tmp_path / "config.json").read_text())["text_config"]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    ours = ForwardHelper(tmp_path)
    torch.testing.assert_close(ours.logits(PROMPT), expected, atol=1e-4, rtol=0)
    info = read_model_info(tmp_path)
    (part,) = info.unused_parts
    assert re.fullmatch(r"the vision encoder is not used yet \(0\.\d M values\)", part)
    assert info.image_token_id is None and ours.model.vision_encoder is None
    assert check_weights(tmp_path) > 0


def test_tensors_of_layers_without_kv_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints have them."""
    path = write_checkpoint(tmp_path, "gemma4_text")
    expected = ForwardHelper(path).logits(PROMPT)
    prefix, size = "model.layers.4.self_attn", torch.full((64, 64), torch.nan)
    unread = {f"{prefix}.{name}_proj.weight": size.clone() for name in "kv"}
    change_tensors(path, **unread, **{f"{prefix}.k_norm.weight": torch.ones(32)})
    assert torch.equal(ForwardHelper(path).logits(PROMPT), expected)
    change_tensors(path, **{"model.layers.1.self_attn.v_norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match="unexpected tensors"):
        ForwardHelper(path)


@pytest.mark.parametrize("variant", ["shared-kv", "experts"])
@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-block"])
def test_quantized_checkpoints_have_the_values_they_stand_for(
    variant: str, name: str, tmp_path: Path
) -> None:
    options = {"hidden_size_per_layer_input": 32} if variant == "shared-kv" else gemma4.EXPERTS
    plain = write_checkpoint(
        tmp_path / "plain", "gemma4_text", hidden_size=128, intermediate_size=128, **options
    )
    exact, quantized = tmp_path / "exact", tmp_path / "quantized"
    write_quantized(plain, quantized, name, exact)
    torch.testing.assert_close(ForwardHelper(quantized).logits(PROMPT), ForwardHelper(exact).logits(PROMPT))


def test_memory_counts_only_own_k_and_v(tmp_path: Path) -> None:
    info = read_model_info(write_checkpoint(tmp_path, "gemma4_text", dtype="bfloat16"))
    assert info.kv_values_per_token == 2 * 2 * (16 + 32 + 16) and info.kv_vectors_per_token == 2 * 2 * 3
    assert info.embedding_parameters == VOCAB_SIZE * (64 + 5 * 8)
    tensors = load_file(tmp_path / "model.safetensors")
    assert info.parameters == sum(tensor.numel() for tensor in tensors.values())
