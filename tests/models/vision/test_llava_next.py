"""LLaVA-NeXT against transformers in float32: tiles, padding, newlines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.models.model_loader import read_model_info
from tests.support.cpu_kernels import isas_under_test
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import (
    SIGLIP,
    random_image,
    write_vision_checkpoint,
    write_vision_config,
)
from tests.support.vs_transformers import TransformersReference, backends, check_chunked_prefill, prompt_of

FINE = [[30, 60], [60, 30], [60, 60], [30, 90]]
CASES: dict[str, dict[str, Any]] = {
    "llava-next": {},
    "new-names": {"layout": "new"},
    "qwen2": {"text": "qwen2", "text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True},
    "several-layers": {"vision_feature_layer": [-2, -1]},
    "no-projector-bias": {"multimodal_projector_bias": False},
    "siglip": {
        "vision_config": SIGLIP,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": FINE,
    },
}
ODD_SIZES = [
    (1, 1),
    (28, 28),
    (28, 29),
    (56, 57),
    (27, 500),
    (500, 3),
    (1, 400),
    (640, 480),
    (481, 640),
    (100, 100),
]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "llava_next", **CASES[case])
    ids, images = prompt_of(path)
    theirs, drivers = TransformersReference(path), [ForwardHelper(path, ops=ops) for ops in backends()]
    for expected, image in zip(theirs.features(images), images, strict=True):
        for driver in drivers:
            torch.testing.assert_close(driver.encode(image), expected, atol=1e-4, rtol=0)
    expected, generated = theirs.logits(ids, images), theirs.greedy(ids, 32, images)
    for driver in drivers:
        torch.testing.assert_close(driver.logits(ids, 0, images), expected, atol=1e-3, rtol=0)
        assert driver.greedy(ids, 32, images) == generated
    assert len(set(generated)) > 8, "the output loops, so the comparison is weak"


def test_images_of_odd_sizes(tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "llava_next")
    images = [random_image(path, index, *size) for index, size in enumerate(ODD_SIZES)]
    theirs, ours = TransformersReference(path).features(images), ForwardHelper(path)
    assert len({image.num_tokens for image in images}) > 4
    for expected, image in zip(theirs, images, strict=True):
        torch.testing.assert_close(ours.encode(image), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", [None, *isas_under_test()])
def test_chunked_prefill_gives_the_same_bits(isa: str | None, dtype: str, tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "llava_next", dtype=dtype)
    check_chunked_prefill(
        ForwardHelper(path, dtype=dtype, ops=isa and CpuOps(isa, threads=1), block_size=4), path
    )


def test_config_as_on_the_hub(tmp_path: Path) -> None:
    """It has only the differences from the defaults of transformers."""
    write_vision_checkpoint(tmp_path)
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000,
        "model_type": "llava_next",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
        "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    skipped = [
        item.numel() for name, item in theirs.named_parameters() if "layers.23." in name and "vision" in name
    ]
    skipped += [item.numel() for name, item in theirs.named_parameters() if "post_layernorm" in name]
    info = read_model_info(tmp_path)
    assert info.parameters == sum(item.numel() for item in theirs.parameters()) - sum(skipped)
    assert (info.architecture, info.context_len, info.dtype) == ("llava_next", 32768, "float16")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"image_grid_pinpoints": [[28, 57]]},
            "`image_grid_pinpoints` must be a list of [height, width], multiples of the tower's 28",
        ),
        ({"image_grid_pinpoints": [[28, 0]]}, "`image_grid_pinpoints` must be a list"),
        ({"image_grid_pinpoints": [[28]]}, "`image_grid_pinpoints` must be a list"),
        ({"image_grid_pinpoints": [28, 56]}, "`image_grid_pinpoints` must be a list"),
        ({"image_grid_pinpoints": [[28, 28 * 1025]]}, "and 1024 tiles at most"),
        (
            {"vision_feature_select_strategy": "full"},
            "`vision_feature_select_strategy` must leave exactly the patches of a tile",
        ),
        (
            {"use_image_newline_parameter": False},
            "`use_image_newline_parameter` must be true here, got false",
        ),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model_info(write_vision_config(tmp_path, "llava_next", **overrides))


def test_missing_newline_is_named(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path)  # LLaVA-1.5 has none
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "llava_next"}), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="image_newline` \\[64\\] is missing"):
        ForwardHelper(tmp_path)
