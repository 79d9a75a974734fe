"""MTP heads: logits of drafted chains against transformers' layers, files, bits of their memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foreword.core.batch import Chunk, build_batch
from foreword.core.states import StateSizes
from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.heads.head_loader import load_mtp_head, read_head_info
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.weights.trained_heads import brings_mtp_head
from tests.support.checkpoints import change_tensors, write_checkpoint
from tests.support.cpu_kernels import isas_under_test
from tests.support.gguf_files import write_gguf
from tests.support.mtp_checkpoints import (
    MTP_FAMILIES,
    QWEN_FAMILIES,
    MTPNames,
    ReferenceMTP,
    write_mtp_checkpoint,
)
from tests.support.quantized_checkpoints import write_quantized

BLOCK_SIZE = 8
DRAFT = 4
TEXT = [(37 * i * i + 11 * i) % 250 for i in range(50)]
BACKENDS = ("reference", *isas_under_test())


class Runner:
    """A target with its MTP head on one backend, and one request in shuffled blocks."""

    def __init__(self, path: Path, ops: Ops, max_len: int = 128, draft_vocab_size: int = 0) -> None:
        precision = Precision.from_dtypes("float32")
        self.ops = ops
        self.target = load_model(path, ops, precision, "cpu", max_len)
        self.head = self.target.head = load_mtp_head(
            path, self.target, ops, precision, "cpu", draft_vocab_size=draft_vocab_size
        )
        num_blocks = max_len // BLOCK_SIZE
        states = StateSizes(2, 4, max_rows=max_len)
        self.kv = KVStorage(
            num_blocks,
            BLOCK_SIZE,
            self.target.cache_shapes,
            "float32",
            states=states,
            head=self.head.cache_shape,
            num_draft_blocks=2,
        )
        assert self.kv.head is not None
        self.cache = self.kv.head
        self.forward = self.target.compile_logits(self.kv)
        self.draft = self.head.compile_draft(self.kv)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.blocks = (order + 1).tolist()

    def commit(self, start: int, end: int) -> None:
        """A pass of the target over TEXT[start:end]."""
        anchors = [1, 2][start // 64 : end // 64 + 1]
        self.run(self.forward, Chunk(TEXT[start:end], start, self.blocks, 1, state_slot=1, anchors=anchors))

    def chain(self, length: int, count: int) -> list[Tensor]:
        """Logits of greedy draft tokens after TEXT[:length], of which the target has computed all but one."""
        token_id, logits = TEXT[length - 1], []
        for position in range(length - 1, length - 1 + count):
            logits.append(self.run(self.draft, Chunk([token_id], position, self.blocks, 1))[0])
            token_id = int(logits[-1].argmax())
        return logits

    def run(self, forward: Any, chunk: Chunk) -> Tensor:
        states = self.target.has_states and chunk.state_slot > 0
        options = {"with_states": states, "with_prev_slots": True}
        batch = build_batch([chunk], BLOCK_SIZE, self.ops.row_tile, "cpu", **options)
        with torch.inference_mode():
            return forward(batch).clone()


def make_ops(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else CpuOps(name)


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
    runner = Runner(path, make_ops(backend))
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
    """One pass, chunks, and single rows after another draft in the same slots leave the same bits."""
    runners = [Runner(path, make_ops(BACKENDS[-1])) for _ in range(3)]
    end = len(TEXT) - 1
    runners[0].commit(0, end)
    for start in range(0, end, 7):
        runners[1].commit(start, min(start + 7, end))
    for position in range(end):
        if position > 1:
            runners[2].chain(position + 1, DRAFT)
        runners[2].commit(position, position + 1)
    slots = [block * BLOCK_SIZE + i for block in runners[0].blocks for i in range(BLOCK_SIZE)][1:end]
    chains = [runner.chain(len(TEXT), DRAFT) for runner in runners]
    for runner, chain in zip(runners[1:], chains[1:], strict=True):
        for name in ("k", "v"):
            mine, other = getattr(runner.cache.layers[0], name), getattr(runners[0].cache.layers[0], name)
            assert torch.equal(mine[slots], other[slots])
        assert torch.equal(runner.cache.hidden[slots], runners[0].cache.hidden[slots])
        assert all(map(torch.equal, chain, chains[0]))


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "deepseek_v3"]
)
def test_gguf_file_has_the_heads_bits(family: str, tmp_path: Path) -> None:
    checkpoint = write_mtp_checkpoint(tmp_path / "model", family)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", **gguf_keys(checkpoint))
    assert brings_mtp_head(file) and read_model_info(file).unused_parts == ()
    runners = [Runner(each, ReferenceOps()) for each in (checkpoint, file)]
    for runner in runners:
        runner.commit(0, 20)
    mine, other = (runner.chain(21, DRAFT) for runner in runners)
    assert all(map(torch.equal, mine, other))
    infos = [read_head_info(each, each) for each in (checkpoint, file)]
    assert infos[0] == infos[1]


def gguf_keys(checkpoint: Path) -> dict[str, Any]:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    keys: dict[str, Any] = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    if config["model_type"] in QWEN_FAMILIES:
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        keys["attention__recurrent_layers"] = [*(kind != "full_attention" for kind in kinds), False]
    return keys


@pytest.mark.parametrize(
    ("family", "kind"),
    [("deepseek_v3", "fp8-block"), *(("qwen3_5_text", kind) for kind in ("fp8-block", "awq", "gptq"))],
)
def test_quantized_head_equals_its_floats(family: str, kind: str, tmp_path: Path) -> None:
    source = write_mtp_checkpoint(tmp_path / "source", family)
    write_quantized(source, tmp_path / "model", kind, tmp_path / "plain")
    runners = [Runner(tmp_path / name, ReferenceOps()) for name in ("model", "plain")]
    for runner in runners:
        runner.commit(0, 20)
    for mine, other in zip(*(runner.chain(21, DRAFT) for runner in runners), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    native = Runner(tmp_path / "model", make_ops(BACKENDS[-1]))
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


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "glm4_moe"])
def test_checkpoints_without_a_head(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", family)
    assert not brings_mtp_head(path) and not brings_mtp_head(tmp_path / "nothing")


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
    whole, first = (Runner(path, make_ops(backend), draft_vocab_size=size) for size in (0, 100))
    for runner in (whole, first):
        runner.commit(0, 20)
    expected, actual = whole.chain(21, 1)[0], first.chain(21, 1)[0]
    assert torch.equal(actual[:100], expected[:100]) and actual[100:].isneginf().all()
