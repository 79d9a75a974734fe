"""Vision encoders of CLIP and SigLIP against transformers, layer by layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.vision.vision_layers import ATTENTION_COST_FACTOR
from foreword.models.vision.vit import CLIP, Siglip
from foreword.weights.config_reader import ConfigReader
from foreword.weights.dummy_weights import MetaWeights
from foreword.weights.safetensors_weights import SafetensorsWeights
from tests.support.vision_checkpoints import write_vision_checkpoint
from tests.support.vs_transformers import TransformersReference


@pytest.mark.parametrize(
    ("encoder", "family", "image_size"),
    [(CLIP, "llava", 28), (CLIP, "llava", 31), (Siglip, "llava_siglip", 28), (Siglip, "llava_siglip", 34)],
)
def test_every_layer_equals_transformers(
    tmp_path: Path, encoder: type[CLIP | Siglip], family: str, image_size: int
) -> None:
    """Also where patches do not fill a tile."""
    path = write_vision_checkpoint(tmp_path, family, vision_config={"image_size": image_size})
    theirs = TransformersReference(path).model.model.vision_tower
    weights = SafetensorsWeights(path).prefixed("vision_tower.vision_model.")
    config = encoder.read_config(ConfigReader(theirs.config.to_dict(), "config.json"))
    count = theirs.config.num_hidden_layers
    ours = encoder(config, ReferenceOps(), "float32", torch.float32, weights, num_layers=count)
    tile = torch.randn(3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = torch.cat(theirs(tile[None], output_hidden_states=True).hidden_states, -1)[0]
        work, pieces = ours.encode_tile(tile, range(count + 1)), []
        try:
            while True:
                pieces.append(next(work))
        except StopIteration as done:
            torch.testing.assert_close(done.value, expected, atol=1e-4, rtol=0)
    rows, hidden, size = config.num_positions, config.hidden_size, theirs.config.intermediate_size
    products = rows * (4 * hidden**2 + 2 * hidden * size) + ATTENTION_COST_FACTOR * 2 * rows**2 * hidden
    assert pieces == [products] * count


def test_defaults_are_vit_b_32() -> None:
    """An empty config is OpenAI's ViT-B/32."""
    config = CLIP.read_config(ConfigReader({}, "config.json"))
    assert (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.patches_per_side,
        config.num_positions,
    ) == (768, 12, 12, 7, 50)
    assert (config.activation, config.eps) == ("quick_gelu", 1e-5)
    weights = MetaWeights()
    CLIP(config, ReferenceOps(), "float32", torch.float32, weights, num_layers=0)
    assert weights.num_parameters == 768 + 768 * 3 * 32 * 32 + 50 * 768 + 2 * 768


def test_options_of_old_transformers_are_accepted() -> None:
    """They wrote all defaults to the file."""
    old = {
        "is_decoder": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "tie_word_embeddings": True,
        "vocab_size": 32000,
    }
    reader = ConfigReader(old, "config.json")
    CLIP.read_config(reader)
    reader.check_all_read()
    reader = ConfigReader({**old, "is_decoder": True}, "config.json")
    with pytest.raises(CheckpointError, match=re.escape("`is_decoder` = true is not supported")):
        reader.check_all_read()


def test_defaults_are_b_16() -> None:
    """An empty config is Google's B/16."""
    config = Siglip.read_config(ConfigReader({}, "config.json"))
    assert (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.patches_per_side,
        config.num_positions,
    ) == (768, 12, 12, 14, 196)
    assert (config.activation, config.eps) == ("gelu_tanh", 1e-6)
    weights = MetaWeights()
    Siglip(config, ReferenceOps(), "float32", torch.float32, weights, num_layers=0)
    assert weights.num_parameters == 768 + 768 * 3 * 16 * 16 + 196 * 768
