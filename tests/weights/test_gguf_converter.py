"""Files as llama.cpp's converter writes them: names, keys that it adds, and defaults of missing ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.errors import CheckpointError
from foreword.models.model_loader import check_weights, read_model_info
from foreword.weights.gguf.header import open_gguf
from tests.support.checkpoints import write_checkpoint
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import write_gguf
from tests.support.gguf_written_names import WRITTEN

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(7)).tolist()
OPTIONS: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "dots1": {"sliding_window": None},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256},
    "starcoder2": {"sliding_window": None},
}

# What the converter of Granite 4 (conversion/granite.py) adds to `granite` if no layer has Mamba-2
GRANITE_WITHOUT_MAMBA: dict[str, Any] = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": 32,
    "ssm__group_count": 1,
    "ssm__inner_size": 128,
    "ssm__time_step_rank": 4,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 96,
    "rope__scaling__finetuned": True,
}


def convert(family: str, path: Path, **keys: Any) -> tuple[Path, Path]:
    checkpoint = write_checkpoint(path / "checkpoint", family, **OPTIONS.get(family, {}))
    return checkpoint, write_gguf(checkpoint, path / "model.gguf", **keys)


@pytest.mark.parametrize("family", WRITTEN)
def test_files_of_tests_have_the_converters_names(family: str, tmp_path: Path) -> None:
    """write_gguf() takes names of tensors from the reader: both could be wrong alike."""
    _, file = convert(family, tmp_path)
    written, gguf = WRITTEN[family], open_gguf(file)
    assert gguf.metadata["general.architecture"] == written.architecture
    prefix = re.compile(r"blk\.\d+\.")
    assert {prefix.sub("", name) for name in gguf.tensors} == {*written.tensors.split()}
    keys = {key for key in gguf.metadata if not key.startswith(("general.", "tokenizer."))}
    assert {key.removeprefix(f"{written.architecture}.") for key in keys} == {*written.keys.split()}
    assert check_weights(file) > 0


def logits(path: Path) -> torch.Tensor:
    return ForwardHelper(path).logits(PROMPT)


def test_granite_4_without_mamba_has_its_keys(tmp_path: Path) -> None:
    checkpoint, file = convert("granite", tmp_path, **GRANITE_WITHOUT_MAMBA)
    torch.testing.assert_close(logits(file), logits(checkpoint), atol=1e-3, rtol=0)


def test_first_layer_with_shared_experts_needs_no_size_of_them(tmp_path: Path) -> None:
    """ERNIE's converter derives it from the number of KV heads; a count and the size of an expert tell."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "ernie4_5_moe", moe_layer_start_index=0)
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    assert torch.equal(logits(file), logits(checkpoint))


def test_nemotron_h_needs_one_of_two_epsilons(tmp_path: Path) -> None:
    """llama.cpp reads that of RMS norms first."""
    _, plain = convert("nemotron_h", tmp_path / "plain")
    keys: dict[str, Any] = {"attention__layer_norm_epsilon": 0.5}
    checkpoint, file = convert("nemotron_h", tmp_path / "both", **keys)
    assert torch.equal(logits(file), logits(plain))
    keys = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 1e-5}
    _, file = convert("nemotron_h", tmp_path / "one", **keys)
    assert torch.equal(logits(file), logits(checkpoint))
    keys["attention__layer_norm_epsilon"] = None
    with pytest.raises(CheckpointError, match=r"lacks `nemotron_h_moe\.attention\.layer_norm_epsilon`"):
        read_model_info(write_gguf(checkpoint, tmp_path / "none.gguf", **keys))


@pytest.mark.parametrize(
    ("family", "softcaps"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("gemma4_text", {"final_logit_softcapping": 30.0}),
    ],
)
def test_missing_softcaps_are_those_of_llama_cpp(
    family: str, softcaps: dict[str, float], tmp_path: Path
) -> None:
    _, capped = convert(family, tmp_path / "capped", **softcaps)
    checkpoint, file = convert(family, tmp_path / "missing", **dict.fromkeys(softcaps))
    assert torch.equal(logits(file), logits(capped))
    other = write_gguf(checkpoint, tmp_path / "other.gguf", **dict.fromkeys(softcaps, 5.0))
    assert not torch.equal(logits(other), logits(capped))


def test_hybrid_without_a_key_of_rope_has_rope(tmp_path: Path) -> None:
    """llama.cpp's default: Bamba."""
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.finetuned` must be false here"):
        read_model_info(convert("granitemoehybrid", tmp_path, rope__scaling__finetuned=None)[1])
