"""LLaVA-1.5 and LLaVA-NeXT against transformers in float32, and their config options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.models.model_loader import read_model_info
from tests.support.budget import some_of
from tests.support.checkpoints import VOCAB_SIZE, write_json
from tests.support.cpu_kernels import isas_under_test
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import (
    IMAGE_TOKEN_ID,
    SIGLIP,
    random_image,
    write_vision_checkpoint,
    write_vision_config,
)
from tests.support.vs_transformers import TransformersReference, backends, check_chunked_prefill, prompt_of

FULL = {"vision_feature_select_strategy": "full"}
each_isa = pytest.mark.parametrize("isa", [None, *isas_under_test()[-1:]])  # None: the reference
# Decoders with scaled or tied embeddings, scaled logits, states, latent attention, windows or sinks;
# tests/models/test_families.py has all decoders.
DECODERS = (
    *("gemma2", "gemma3_text", "granite", "granitemoehybrid", "cohere2", "qwen3_5_moe_text", "lfm2"),
    *("deepseek_v3", "gpt_oss", "mixtral", "starcoder2", "hunyuan_v1_dense"),
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "llava-new-names": ("llava", {"layout": "new"}),
    "llava-class-token": ("llava", FULL),
    "llava-last-layer": ("llava", {"vision_feature_layer": -1}),
    "llava-several-layers": ("llava", {"vision_feature_layer": [-1, 0, 1]}),
    "llava-projector": ("llava", {"projector_hidden_act": "relu", "multimodal_projector_bias": False}),
    "llava-gelu": ("llava", {"vision_config": {"hidden_act": "gelu", "layer_norm_eps": 1e-3}}),
    "llava-odd-shape": (
        "llava",
        {
            "vision_config": {
                "hidden_size": 36,
                "intermediate_size": 50,
                "num_attention_heads": 3,
                "patch_size": 5,
            }
        },
    ),
    "next": ("llava_next", {}),
    "next-new-names": ("llava_next", {"layout": "new"}),
    "next-qwen2": (
        "llava_next",
        {"text": "qwen2", "text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True},
    ),
    "next-several-layers": ("llava_next", {"vision_feature_layer": [-2, -1]}),
    "next-no-projector-bias": ("llava_next", {"multimodal_projector_bias": False}),
    "next-siglip": (
        "llava_next",
        {
            "vision_config": SIGLIP,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[30, 60], [60, 30], [60, 60], [30, 90]],
        },
    ),
    "llava-tied": ("llava", {"text_config": {"tie_word_embeddings": True}}),
    "siglip": ("llava_siglip", {}),
    "siglip-new-names": ("llava_siglip", {"layout": "new"}),
    "siglip-head": ("llava_siglip", {"vision_config": {"vision_use_head": True}}),
    "siglip-without-first": ("llava_siglip", {"vision_feature_select_strategy": "default"}),
    **{f"llava-{text}": ("llava", {"text": text}) for text in DECODERS},
}


@pytest.mark.parametrize("case", some_of(CASES, 8))
def test_logits_and_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    path = write_vision_checkpoint(tmp_path, family, **overrides)
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


ODD_SIZES = ((1, 1), (28, 28), (28, 29), (56, 57), (27, 500), (500, 3), (1, 400), (640, 480), (481, 640))


def test_tiles_of_odd_sizes(tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "llava_next")
    images = [random_image(path, index, *size) for index, size in enumerate(ODD_SIZES)]
    theirs, ours = TransformersReference(path).features(images), ForwardHelper(path)
    assert len({image.num_tokens for image in images}) > 4
    for expected, image in zip(theirs, images, strict=True):
        torch.testing.assert_close(ours.encode(image), expected, atol=1e-4, rtol=0)


def test_output_depends_on_the_image(tmp_path: Path) -> None:
    ours = ForwardHelper(write_vision_checkpoint(tmp_path))
    one, other = (
        ours.greedy(ids, 16, images) for ids, images in (prompt_of(tmp_path), prompt_of(tmp_path, seed=9))
    )
    assert one != other


@pytest.mark.parametrize(("family", "dtype"), [("llava", "float32"), ("llava_next", "bfloat16")])
@each_isa
def test_chunked_prefill_gives_the_same_bits(
    isa: str | None, family: str, dtype: str, tmp_path: Path
) -> None:
    path = write_vision_checkpoint(tmp_path, family, dtype=dtype)
    check_chunked_prefill(
        ForwardHelper(path, dtype=dtype, ops=isa and CpuOps(isa, threads=1), block_size=4), path
    )


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
@each_isa
def test_vision_encoder_is_never_quantized(isa: str | None, options: dict[str, str], tmp_path: Path) -> None:
    """Features are the same for any precision of the decoder."""
    path = write_vision_checkpoint(tmp_path)
    image = random_image(path)
    expected = ForwardHelper(path).encode(image)
    features = ForwardHelper(path, ops=isa and CpuOps(isa, threads=1), **options).encode(image)
    assert features.dtype == getattr(torch, options.get("dtype", "float32"))
    assert (features - expected).norm() < (0.02 if "dtype" in options else 1e-4) * expected.norm()


@each_isa
def test_features_depend_on_the_image_alone(isa: str | None, tmp_path: Path) -> None:
    """Also with interleaved pieces of two images, and on other threads."""
    path = write_vision_checkpoint(tmp_path, "llava_next")
    alone, ours = (ForwardHelper(path, ops=isa and CpuOps(isa, threads)) for threads in (1, 3))
    images = [random_image(path, seed) for seed in range(2)]
    assert ours.model.vision_encoder is not None
    works, done = [ours.model.vision_encoder.encode(image) for image in images], {}
    with torch.inference_mode():
        while len(done) < len(works):
            for index, work in enumerate(works):
                try:
                    next(work)
                except StopIteration as end:
                    done.setdefault(index, end.value)
    assert all(torch.equal(done[index], alone.encode(image)) for index, image in enumerate(images))


def test_model_info_counts_loaded_layers(tmp_path: Path) -> None:
    """Layers after the feature layer are neither loaded nor counted."""
    facts, whole = (
        read_model_info(write_vision_checkpoint(tmp_path)),
        TransformersReference(tmp_path).num_parameters,
    )
    layer, norm = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32, 2 * 32
    assert facts.parameters == ForwardHelper(tmp_path).model.info.parameters == whole - layer - norm
    assert facts.vision_parameters == ForwardHelper(tmp_path).model.info.vision_parameters
    assert (facts.architecture, facts.image_token_id, facts.vocab_size) == (
        "llava",
        IMAGE_TOKEN_ID,
        VOCAB_SIZE,
    )


@pytest.mark.parametrize("family", ["llava", "llava_siglip", "llava_next"])
def test_checkpoint_written_by_transformers(family: str, tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path / "ours", family)
    theirs, (ids, images) = TransformersReference(path), prompt_of(path)
    theirs.model.save_pretrained(tmp_path / "theirs")
    values = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
    (tmp_path / "theirs" / "processor_config.json").write_text(
        json.dumps({"image_processor": values}), encoding="utf-8"
    )
    assert torch.equal(
        ForwardHelper(tmp_path / "theirs").logits(ids, 0, images),
        ForwardHelper(path).logits(ids, 0, images),
    )


HUB: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
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


INTERLEAVE: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 151646,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "Qwen/Qwen1.5-0.5B-Chat",
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 152000,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vocab_size": 152000,
}
HUB_NEXT: dict[str, Any] = {
    **HUB,
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "model_type": "llava_next",
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
    "use_image_newline_parameter": True,
}
HUB_FACTS = (4096, "float16", 32064, 32000)
UNUSED = ("vision_tower.encoder.layers.23.", "post_layernorm")


@pytest.mark.parametrize(
    ("config", "skipped", "facts"),
    [
        (HUB, UNUSED, HUB_FACTS),
        (HUB | {"vision_config": None}, UNUSED, HUB_FACTS),
        (INTERLEAVE, ("post_layernorm",), (32768, "bfloat16", 152000, 151646)),
        (HUB_NEXT, UNUSED, (32768, "float16", 32064, 32000)),
    ],
    ids=["llava-1.5", "no-vision-config", "interleave", "llava-next"],
)
def test_config_as_on_the_hub(
    tmp_path: Path, config: dict[str, Any], skipped: Sequence[str], facts: tuple[Any, ...]
) -> None:
    """It has only the differences from the defaults of transformers."""
    write_vision_config(tmp_path, config["model_type"])
    write_json(tmp_path / "config.json", config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    needed = [
        item.numel() for name, item in theirs.named_parameters() if not any(part in name for part in skipped)
    ]
    read = read_model_info(tmp_path)
    assert read.parameters == sum(needed)
    assert (read.context_len, read.dtype, read.vocab_size, read.image_token_id) == facts


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llava": [
        ({"vision_feature_layer": 4}, "`vision_feature_layer` 4 is none of the tower's 3 layers"),
        ({"vision_feature_layer": -5}, "`vision_feature_layer` -5 is none of the tower's 3 layers"),
        ({"vision_feature_layer": []}, "`vision_feature_layer` must be a number or 1 to 64 of them, got []"),
        (
            {"vision_feature_layer": "last"},
            "`vision_feature_layer` must be a number or 1 to 64 of them, got 'last'",
        ),
        (
            {"vision_feature_select_strategy": "cls"},
            '`vision_feature_select_strategy` must be one of default, full here, got "cls"',
        ),
        ({"projector_hidden_act": "tanh"}, "`projector_hidden_act` must be one of"),
        (
            {"image_token_index": VOCAB_SIZE},
            f"`image_token_index` {VOCAB_SIZE} must be below the vocab_size {VOCAB_SIZE}",
        ),
        ({"image_token_index": None}, "lacks `image_token_index`"),
        ({"mm_vision_tower": "clip"}, '`mm_vision_tower` = "clip" is not supported'),
        (
            {"vision_config": {"num_attention_heads": 5}},
            "vision_config: `num_attention_heads` 5 does not divide hidden_size 32",
        ),
        (
            {"vision_config": {"patch_size": 29}},
            "vision_config: `patch_size` 29 makes 0 patches of image_size 28",
        ),
        ({"vision_config": {"image_size": 8000}}, "makes 1304164 patches of image_size 8000"),
        ({"vision_config": {"num_channels": 1}}, "vision_config: `num_channels` must be 3 here, got 1"),
        (
            {"vision_config": {"model_type": "dinov2"}},
            "vision_config: `model_type` must be one of clip_vision_model, siglip",
        ),
        ({"vision_config": {"hidden_act": "tanh"}}, "vision_config: `hidden_act` must be one of"),
        ({"vision_config": {"use_rope": True}}, "vision_config: `use_rope` = true is not supported"),
        ({"text_config": {"use_rope": True}}, "text_config: `use_rope` = true is not supported"),
        ({"text_config": {"model_type": "mamba"}}, "text_config: model_type 'mamba' is not supported"),
    ],
    "llava_next": [
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
}


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_configs_are_refused(tmp_path: Path, family: str) -> None:
    written = (write_vision_config(tmp_path, family) / "config.json").read_text(encoding="utf-8")
    for overrides, message in REFUSED[family]:
        config = json.loads(written)
        for key, value in overrides.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        write_json(tmp_path / "config.json", config)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("gemma4_text", "has per-layer embeddings"), ("phi", "phi has a bias in its head, and LLaVA has none")],
)
def test_decoders_that_llava_cannot_hold_are_refused(text: str, message: str, tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "llava", text=text)
    with pytest.raises(CheckpointError, match=f"`text_config` {message}"):
        read_model_info(tmp_path)


def test_missing_preprocessor_is_named(tmp_path: Path) -> None:
    write_vision_config(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=re.escape("lacks preprocessor_config.json")):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"image_size": 35}, "embeddings.position_embedding.weight` is [17, 32], the config says [26, 32]"),
        ({"intermediate_size": 47}, "layers.0.mlp.fc1.bias` is [48], the config says [47]"),
        (
            {"num_hidden_layers": 5},
            "vision_tower.vision_model.encoder.layers.3.layer_norm1.weight` [32] is missing",
        ),
        ({"num_hidden_layers": 2}, "unexpected tensors: vision_tower.vision_model.encoder.layers.2"),
        ({"model_type": "llava_next"}, "image_newline` [64] is missing"),
    ],
)
def test_tensors_must_match_the_config(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_vision_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    changed = config if "model_type" in overrides else config["vision_config"]
    changed |= overrides
    write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ForwardHelper(tmp_path)
