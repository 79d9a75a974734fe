"""MTP heads: logits of drafted chains against transformers' layers, files, bits of their memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foreword import LLM
from foreword.checkpoint import resolve_paths
from foreword.config.options import Config
from foreword.engine.loader import describe_model
from foreword.errors import CheckpointError
from foreword.models.heads.head_loader import read_head_info
from foreword.models.model_loader import read_model_info
from foreword.weights.gguf.header import open_gguf
from foreword.weights.trained_heads import brings_mtp_head
from tests.support.checkpoints import change_tensors, write_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.head_runner import BACKENDS, DRAFT, HeadRunner, check_memory
from tests.support.mtp_checkpoints import (
    MTP_FAMILIES,
    QWEN_FAMILIES,
    MTPNames,
    ReferenceMTP,
    mtp_gguf_keys,
    write_mtp_checkpoint,
)
from tests.support.quantized_checkpoints import write_quantized

# Names by llama.cpp's converter (conversion/qwen.py and glm.py), and those of copies in GLM's files
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
NEXTN_COPIES = ("embed_tokens", "shared_head_head")
TEXT = [(37 * i * i + 11 * i) % 250 for i in range(50)]


def open_runner(path: Path, backend: str = "reference", draft_vocab_size: int = 0) -> HeadRunner:
    return HeadRunner(path, path, backend, TEXT, draft_vocab_size)


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_checkpoint(tmp_path_factory.mktemp("mtp") / "model", request.param)


@pytest.fixture(scope="module")
def reference(path: Path) -> ReferenceMTP:
    return ReferenceMTP(path, path.parent / "scratch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_chains_of_a_whole_text_equal_the_reference(
    path: Path, reference: ReferenceMTP, backend: str
) -> None:
    runner = open_runner(path, backend)
    done = 0
    for length in (2, 3, 9, 33, len(TEXT)):
        runner.commit(done, length - 1)  # over slots of the draft before
        done = length - 1
        tokens, expected = reference.draft(TEXT[:length], DRAFT)
        actual = runner.chain(length, DRAFT)
        assert [int(row.argmax()) for row in actual] == tokens
        for step, (logits, row) in enumerate(zip(expected, actual, strict=True)):
            torch.testing.assert_close(row, logits, rtol=5e-3, atol=5e-3, msg=f"{length}, {step}")


def test_memory_and_drafts_do_not_depend_on_how_the_text_was_computed(path: Path) -> None:
    check_memory([open_runner(path, BACKENDS[-1]) for _ in range(3)])


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v3"],
)
def test_gguf_file_has_the_heads_bits(family: str, tmp_path: Path) -> None:
    checkpoint = write_mtp_checkpoint(tmp_path / "model", family)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", **mtp_gguf_keys(checkpoint))
    copies = () if family in QWEN_FAMILIES else NEXTN_COPIES
    names = {name.partition(".nextn.")[2] for name in open_gguf(file).tensors if ".nextn." in name}
    assert names == {f"{name}.weight" for name in (*NEXTN, *copies)}
    assert brings_mtp_head(file) and read_model_info(file).unused_parts == ()
    runners = [open_runner(each) for each in (checkpoint, file)]
    for runner in runners:
        runner.commit(0, 20)
    mine, other = (runner.chain(21, DRAFT) for runner in runners)
    assert all(map(torch.equal, mine, other))
    infos = [read_head_info(each, each) for each in (checkpoint, file)]
    assert infos[0] == infos[1]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("deepseek_v3", "fp8-block"),
        *(("glm4_moe", kind) for kind in ("awq", "pack-quantized")),
        *(("qwen3_5_text", kind) for kind in ("fp8-block", "awq", "gptq")),
    ],
)
def test_quantized_head_equals_its_floats(family: str, kind: str, tmp_path: Path) -> None:
    shape = {"moe_intermediate_size": 64} if family == "glm4_moe" else {}
    source = write_mtp_checkpoint(tmp_path / "source", family, **shape)
    write_quantized(source, tmp_path / "model", kind, tmp_path / "plain")
    assert brings_mtp_head(tmp_path / "model")
    runners = [open_runner(tmp_path / name) for name in ("model", "plain")]
    for runner in runners:
        runner.commit(0, 20)
    for mine, other in zip(*(runner.chain(21, DRAFT) for runner in runners), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    native = open_runner(tmp_path / "model", BACKENDS[-1])
    native.commit(0, 20)
    assert all(row.isfinite().all() for row in native.chain(21, DRAFT))


def test_head_is_found_by_its_tensors(tmp_path: Path) -> None:
    path = write_mtp_checkpoint(tmp_path / "model", "qwen3_5_text")
    assert brings_mtp_head(path)
    info = read_head_info(path, path)
    names = MTPNames("qwen3_5_text", 3)
    assert info.parameters == sum(
        value.numel()
        for name, value in load_file(path / "model.safetensors").items()
        if name.startswith(names.prefix)
    )
    change_tensors(path, **{f"{names.fc}.weight": None})  # a quantizer left it out
    assert not brings_mtp_head(path)
    (part,) = read_model_info(path).unused_parts
    assert part.startswith("the MTP head, which drafts, is not used")


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("qwen3_5_text", "mtp.layers.0.mlp.down_proj.weight", None),
        ("qwen3_5_text", "mtp.embed_tokens.weight", torch.zeros(4, 64)),
        ("qwen3_5_text", "mtp.layers.1.input_layernorm.weight", torch.zeros(64)),
        ("glm4_moe", "model.layers.2.mlp.gate.weight", None),
    ],
)
def test_model_runs_without_a_head_that_auto_chose_and_cannot_load(
    family: str, name: str, value: torch.Tensor | None, tmp_path: Path
) -> None:
    path = write_mtp_checkpoint(tmp_path / "model", family)
    change_tensors(path, **{name: value})
    for speculate in ("auto", "auto,ngram"):
        config = resolve_paths(Config(model=str(path), speculate=speculate))
        assert config.is_head_optional and resolve_paths(config) == config
        described = describe_model(config)
        (note,) = described.model.unused_parts
        assert described.drafter is None and name.removesuffix(".weight") in note
        assert note.startswith("the MTP head, which drafts, is not used: ")
    for speculate in ("mtp", "auto,mtp"):
        with pytest.raises(CheckpointError, match=re.escape(name.removesuffix(".weight"))):
            describe_model(resolve_paths(Config(model=str(path), speculate=speculate)))
    llm = LLM(str(path), max_model_len=64)
    assert llm.info.resolved.notes == (note,) and llm.info.draft_model is None
    assert llm.info.resolved.drafters == ("grammar", "prediction", "suffix", "text")


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "glm4_moe"])
def test_checkpoints_without_a_head(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", family)
    assert not brings_mtp_head(path) and not brings_mtp_head(tmp_path / "nothing")


def test_header_nested_too_deeply_has_no_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "deepseek_v3")
    header = b"[" * 200_000
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert not brings_mtp_head(path)


def test_wrong_shape_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    path = write_mtp_checkpoint(tmp_path / "model", "glm4_moe")
    change_tensors(path, **{"model.layers.2.eh_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(CheckpointError, match=r"eh_proj.weight` is \[64, 64\], the config says \[64, 128\]"):
        read_head_info(path, path)
    change_tensors(path, **{"model.layers.2.eh_proj.weight": torch.zeros(64, 128)})
    change_tensors(path, **{"model.layers.2.mlp.other.weight": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model.layers.2.mlp.other"):
        read_head_info(path, path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_vocabulary_is_the_first_ids(path: Path, backend: str) -> None:
    whole, first = (open_runner(path, backend, size) for size in (0, 100))
    for runner in (whole, first):
        runner.commit(0, 20)
    expected, actual = whole.chain(21, 1)[0], first.chain(21, 1)[0]
    assert torch.equal(actual[:100], expected[:100]) and actual[100:].isneginf().all()
