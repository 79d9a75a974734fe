"""All encoder families against transformers; bits of a vector do not depend on the batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.config.options import Config
from foreword.embedding.local import LocalEncoder, load_local_encoder
from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.embedding_checkpoints import FAMILIES, write_encoder
from tests.support.tokenizer_builders import DIFFICULT_TEXTS

TEXTS = [
    "",
    "hello",
    "The quick brown fox jumps over the lazy dog. " * 2,
    "naïve café 東京 <pad> x",
    *DIFFICULT_TEXTS[9:14],
]
CLOSE = 1e-5


def load(path: Path, **options: object) -> LocalEncoder:
    return load_local_encoder(Config(embedding_model=str(path), threads=1, **options))  # type: ignore[arg-type]


def floats(vector: bytes) -> np.ndarray:
    return np.frombuffer(vector, dtype=np.float32)


def hidden_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[t, H]"""
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_equal_transformers(tmp_path: Path, family: str) -> None:
    model = write_encoder(tmp_path, family)
    encoder = load(tmp_path)
    ids = [encoder.tokenizer.encode(text) for text in TEXTS]
    states = [hidden_of(model, text) for text in ids]
    pooled = {
        "mean": [state.mean(0) for state in states],
        "cls": [state[0] for state in states],
        "last": [state[-1] for state in states],
        "max": [state.amax(0) for state in states],
    }
    for pooling, expected in pooled.items():
        for vector, other in zip(encoder.encode(ids, pooling), expected, strict=True):
            np.testing.assert_allclose(floats(vector), other, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(tmp_path: Path, family: str) -> None:
    model = write_encoder(tmp_path, family, ranks=True)
    encoder = load(tmp_path)
    pairs = [encoder.tokenizer.encode_pair("quick fox", text) for text in TEXTS]
    with torch.inference_mode():
        logits = [
            model(
                input_ids=torch.tensor([ids]),
                **({"token_type_ids": torch.tensor([types])} if family == "bert" else {}),
            ).logits.item()
            for ids, types in pairs
        ]
    np.testing.assert_allclose(encoder.score(pairs), torch.sigmoid(torch.tensor(logits)), rtol=0, atol=CLOSE)
    assert len(set(encoder.score(pairs))) > len(pairs) // 2, "equal scores would prove nothing"


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_vector_do_not_depend_on_the_batch(tmp_path: Path, family: str, ops: str) -> None:
    write_encoder(tmp_path, family)
    config = Config(embedding_model=str(tmp_path), threads=2)
    encoder = load_local_encoder(config, ReferenceOps() if ops == "reference" else None)
    ids = [encoder.tokenizer.encode(text) for text in TEXTS]
    alone = [encoder.encode([text])[0] for text in ids]
    assert encoder.encode(ids) == alone
    assert encoder.encode(ids[::-1]) == alone[::-1]
    assert encoder.encode(ids * 3) == alone * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_unsupported_option_is_named(tmp_path: Path, family: str) -> None:
    write_encoder(tmp_path, family, flux_capacitor=7)
    with pytest.raises(CheckpointError, match="flux_capacitor"):
        load(tmp_path)


def test_norms_with_gamma_and_beta_are_loaded(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    before = load(tmp_path).encode([[2, 9, 3]])
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for new, older in names.items():
            name = name.replace(new, older)
        old[f"bert.{name}"] = tensor
    save_file(old, tmp_path / "model.safetensors")
    assert load(tmp_path).encode([[2, 9, 3]]) == before


def test_head_with_several_labels_is_rejected(tmp_path: Path) -> None:
    write_encoder(tmp_path, ranks=True, num_labels=3, id2label=None, label2id=None)
    with pytest.raises(CheckpointError, match="names 3 labels"):
        load(tmp_path)


def test_names_that_are_no_list_name_no_ranker(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": 3}))
    assert load(tmp_path).info.task == "embed"


def test_odd_heads_are_refused(tmp_path: Path) -> None:
    """RoPE rotates pairs: its native table of an odd head was one value too wide, and corrupted the heap."""
    write_encoder(tmp_path, "modernbert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 45, "num_attention_heads": 3}))
    with pytest.raises(
        CheckpointError, match="`num_attention_heads` 3 must divide hidden_size 45 into heads of an even"
    ):
        load(tmp_path)
