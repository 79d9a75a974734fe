"""Configs of Qwen VL models: published ones, other layouts, and unsupported options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.errors import CheckpointError
from foreword.kernels.ops import MRopeSections
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.decoder_config import read_rope
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.weights.config_reader import ConfigReader
from tests.support.vision_checkpoints import write_vision_checkpoint, write_vision_config

TOKENS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
FLAT: dict[str, Any] = {
    **TOKENS,
    "vision_token_id": 151654,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
VISION_CONFIG: dict[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
QWEN2_5_TOWER: dict[str, Any] = {
    **VISION_CONFIG,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}
QWEN3_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}
QWEN3_TOWER: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# As published, with the number of values in their files.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2-VL-7B": (
        8291375616,
        {
            **FLAT,
            "model_type": "qwen2_vl",
            "vision_config": {**VISION_CONFIG, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584},
        },
    ),
    "Qwen2.5-VL-7B": (8292166656, {**FLAT, "model_type": "qwen2_5_vl", "vision_config": QWEN2_5_TOWER}),
    "Qwen3-VL-8B": (
        8767123696,
        {
            **TOKENS,
            "model_type": "qwen3_vl",
            "text_config": QWEN3_TEXT,
            "vision_config": QWEN3_TOWER,
            "tie_word_embeddings": False,
        },
    ),
}
COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "preprocessor_config.json").write_text(json.dumps(COLOURS), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_right_size(name: str, tmp_path: Path):
    parameters, config = PUBLISHED[name]
    facts = read_model_info(write(tmp_path, config))
    assert facts.parameters == parameters
    assert facts.vision_parameters > 5e8 and facts.image_token_id == TOKENS["image_token_id"]
    assert facts.architecture == config["model_type"] and facts.dtype == "bfloat16"


def test_text_options_may_be_repeated_at_the_top(tmp_path: Path):
    """transformers 4.5x writes this for flat files."""
    text = {key: value for key, value in FLAT.items() if key not in TOKENS}
    text |= {"model_type": "qwen2_5_vl_text", "image_token_id": None, "vision_start_token_id": 151652}
    rope = {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}
    whole = {**FLAT, "model_type": "qwen2_5_vl", "vision_config": QWEN2_5_TOWER}
    facts = read_model_info(
        write(tmp_path, {**whole, "rope_scaling": rope, "text_config": {**text, "rope_scaling": rope}})
    )
    assert facts == read_model_info(write(tmp_path, whole))
    with pytest.raises(CheckpointError, match="`hidden_size` = 999 is not supported"):
        read_model_info(write(tmp_path, {**whole, "hidden_size": 999, "text_config": text}))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no vision_config": ("qwen2_vl", {"vision_config": None}, "`vision_config` is missing"),
    "no text": ("qwen3_vl", {"text_config": None}, "`text_config` is missing"),
    "width": (
        "qwen2_5_vl",
        {"vision_config": {"out_hidden_size": 63}},
        "is 63, but the decoder's hidden_size is 64",
    ),
    "heads": ("qwen2_vl", {"vision_config": {"num_heads": 5}}, "5 heads must divide hidden_size 32 by fours"),
    "grey": ("qwen2_vl", {"vision_config": {"in_channels": 1}}, "`in_channels` must be 3"),
    "window": ("qwen2_5_vl", {"vision_config": {"window_size": 7}}, "less than a cell of 8 pixels"),
    "blocks": ("qwen2_5_vl", {"vision_config": {"fullatt_block_indexes": [3]}}, "numbers below depth 3"),
    "order": ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [2, 0]}}, "must be ascending"),
    "too deep": (
        "qwen3_vl",
        {"vision_config": {"deepstack_visual_indexes": [0, 1, 2]}},
        "has 3 blocks, but the decoder has 2",
    ),
    "square": (
        "qwen3_vl",
        {"vision_config": {"num_position_embeddings": 35}},
        "must be a square number, got 35",
    ),
    "activation": (
        "qwen2_5_vl",
        {"vision_config": {"hidden_act": "quick_gelu"}},
        "`hidden_act` must be one of",
    ),
    "unknown": ("qwen2_vl", {"vision_config": {"use_moe": True}}, "`use_moe` = true is not supported"),
    "turns": (
        "qwen3_vl",
        {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
        '`rope_type` must be "axial"',
    ),
    "token": ("qwen2_5_vl", {"image_token_id": 280}, "280 must be below the vocab_size 280"),
    "sections": (
        "qwen2_vl",
        {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}},
        "has 9 angles, and a head has 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_options_are_refused(case: str, tmp_path: Path):
    family, overrides, message = REFUSED[case]
    path = write_vision_config(tmp_path, family)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for key, value in overrides.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_model_info(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_encoder_is_not_quantized(family: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path, family)
    ops = Kinds()
    load_model(path, ops, Precision.from_dtypes("float32", quantization="int4"), "cpu", 64)
    assert ops.kinds["float32"] > 6 and set(ops.kinds) == {"float32", "int4", "int8"}


class Kinds(ReferenceOps):
    """Counts weight formats."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, int] = {}

    def pack_linear(self, parts: Any, weight_format: str, bias: Any = None) -> Any:
        self.kinds[weight_format] = self.kinds.get(weight_format, 0) + 1
        return super().pack_linear(parts, weight_format, bias)


@pytest.mark.parametrize(
    ("options", "axes", "expected"),
    [
        ({"type": "mrope", "mrope_section": [1, 2, 5]}, MRopeSections((2, 3, 3)), MRopeSections((1, 2, 5))),
        (
            {"rope_type": "default", "type": "mrope", "mrope_section": [1, 2, 5]},
            MRopeSections((2, 3, 3)),
            MRopeSections((1, 2, 5)),
        ),
        ({}, MRopeSections((2, 3, 3)), MRopeSections((2, 3, 3))),
        (
            {"mrope_interleaved": True, "mrope_section": [4, 2, 2]},
            MRopeSections((2, 3, 3), True),
            MRopeSections((4, 2, 2), True),
        ),
    ],
)
def test_mrope_sections_are_read(options: dict[str, Any], axes: MRopeSections, expected: MRopeSections):
    assert (
        read_rope(ConfigReader({"rope_scaling": options}, "x"), 16, 64, mrope_sections=axes).mrope_sections
        == expected
    )


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"type": "mrope", "mrope_section": [1, 2]}, MRopeSections((2, 3, 3))),
        ({"type": "mrope", "mrope_section": [1, 2, -1]}, MRopeSections((2, 3, 3))),
        ({"mrope_interleaved": True, "mrope_section": [4, 2, 2]}, MRopeSections((2, 3, 3))),
        ({"mrope_interleaved": False, "mrope_section": [4, 2, 2]}, MRopeSections((2, 3, 3), True)),
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, None),
        ({"type": "linear", "rope_type": "default"}, None),
    ],
)
def test_unsupported_mrope_sections_are_refused(options: dict[str, Any], axes: MRopeSections | None):
    with pytest.raises(CheckpointError, match=r"mrope|type"):
        read_rope(ConfigReader({"rope_scaling": options}, "x"), 16, 64, mrope_sections=axes)
