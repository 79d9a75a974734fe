"""Adapters' files: what does not fit the base is refused by name before its data is read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.lora.adapter import Adapter, read_adapter
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from foreword.weights import module_patterns
from tests.support.checkpoints import write_checkpoint
from tests.support.lora_files import write_adapter, write_gguf_adapter

Shapes = dict[str, tuple[int, int]]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shapes]:
    path = write_checkpoint(tmp_path_factory.mktemp("base") / "model", "llama")
    model = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64)
    return path, model.lora.shapes


def read(path: Path, shapes: Shapes, max_rank: int = 16, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(path, shapes, max_rank, dtype)


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_adapter_is_read(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    model, shapes = base
    path = write_adapter(tmp_path / "a", model, rank=4, ranks={"q_proj": 6}, dtype=torch.float16)
    adapter = read(path, shapes, dtype=torch.bfloat16)
    assert set(adapter.weights) == set(shapes)
    weights = adapter.weights["layers.1.self_attn.q_proj"]
    assert weights.a.shape == (6, 64) and weights.b.shape == (64, 6) and weights.b.dtype == torch.bfloat16
    assert (adapter.info.rank, adapter.info.num_projections) == (6, 14)
    assert adapter.info.num_bytes == sum(each.a.nbytes + each.b.nbytes for each in adapter.weights.values())
    source = load_file(path / "adapter_model.safetensors")[f"{Q}.lora_A.weight"]
    assert torch.equal(adapter.weights["layers.0.self_attn.q_proj"].a, source.bfloat16())


def test_digest_covers_weights_and_options(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    model, shapes = base
    digests = [
        read(write_adapter(tmp_path / str(number), model, **options), shapes).info.digest
        for number, options in enumerate(({}, {}, {"seed": 1}, {"lora_alpha": 9}))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_paths_of_multimodal_models(base: tuple[Path, Shapes], tmp_path: Path, prefix: str) -> None:
    model, shapes = base
    path = edit(
        write_adapter(tmp_path / "a", model),
        lambda tensors: [
            tensors.__setitem__(
                name.replace("base_model.model.model.", f"base_model.model.{prefix}"), tensors.pop(name)
            )
            for name in list(tensors)
        ],
    )
    assert set(read(path, shapes).weights) == set(shapes)


REFUSALS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "head": (
        lambda t: t.update(
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(272, 4),
            }
        ),
        "`lm_head` cannot be adapted: the head is shared",
    ),
    "experts": (
        lambda t: t.update(
            {
                "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_B.weight": torch.zeros(96, 4),
            }
        ),
        "experts' weights have no adapters",
    ),
    "vision": (
        lambda t: t.update(
            {
                "base_model.model.visual.blocks.0.attn.qkv.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.visual.blocks.0.attn.qkv.lora_B.weight": torch.zeros(96, 4),
            }
        ),
        "the vision encoder has no adapters",
    ),
    "layer": (
        lambda t: [
            t.__setitem__(name.replace("layers.1", "layers.9"), t.pop(name))
            for name in list(t)
            if "layers.1" in name
        ],
        "the model has no such projection",
    ),
    "embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 272)}),
        "unexpected tensor",
    ),
    "DoRA": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(64)}), "unexpected tensor"),
    "B": (lambda t: t.pop(f"{Q}.lora_B.weight"), "has no lora_B: the file is incomplete"),
    "A": (lambda t: t.pop(f"{Q}.lora_A.weight"), "has no lora_A"),
    "none": (lambda t: t.clear(), "it has no tensors"),
    "rows": (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(63, 4)}), "lora_B of `model.layers.0"),
    "columns": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 65)}), "is [4, 65], the model"),
    "ranks": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(5, 64)}), "is [5, 64], the model"),
    "dimensions": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64, 1)}), "is [4, 64, 1]"),
    "NaN": (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), "lora_A of `model.layers.0.self_attn"),
    "infinity": (lambda t: t[f"{Q}.lora_B.weight"][3].fill_(float("inf")), "values that are not finite"),
    "type": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64).int()}), "is of type I32"),
    "twice": (
        lambda t: t.update(
            {
                "base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
            }
        ),
        "is there twice",
    ),
}


def test_tensors_that_do_not_fit_are_refused(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    for case in REFUSALS:
        model, shapes = base
        change, problem = REFUSALS[case]
        path = edit(write_adapter(tmp_path / "a", model), change)
        with pytest.raises(CheckpointError) as error:
            read(path, shapes)
        assert problem in error.value.message and str(path) in error.value.message


def test_bounds_and_targets(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    model, shapes = base
    path = write_adapter(tmp_path / "a", model, rank=8)
    with pytest.raises(CheckpointError, match="has rank 8; --max-lora-rank is 7"):
        read(path, shapes, max_rank=7)
    path = write_adapter(tmp_path / "b", model, target_modules=["k_proj"])
    with pytest.raises(CheckpointError, match=r"not among the targets of adapter_config\.json"):
        read(path, shapes)


@pytest.mark.parametrize("option", ["target_modules", "rank_pattern"])
def test_pattern_that_takes_forever_is_refused(
    base: tuple[Path, Shapes], tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_patterns, "LIMITS", replace(module_patterns.LIMITS, cpu_s=0.2))
    model, shapes = base
    pattern = "(([a-z._0-9])+)+X"
    value = pattern if option == "target_modules" else {pattern: 4}
    path = write_adapter(tmp_path / "a", model, **{option: value})
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: patterns .* CPU time"):
        read(path, shapes)


def test_files_that_are_no_adapters(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    model, shapes = base
    with pytest.raises(
        CheckpointError, match=r"neither a directory with adapter_config\.json nor a GGUF file"
    ):
        read(tmp_path / "missing", shapes)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        read(model, shapes)
    path = write_adapter(tmp_path / "a", model)
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    for damaged in (b"", content[:100], content[:-1], struct.pack("<Q", 1 << 40) + content[8:]):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged or incomplete"):
            read(path, shapes)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        read(path, shapes)
    (path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is pickled"):
        read(path, shapes)
    (path / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read(path, shapes)


def test_gguf_adapter_is_that_of_its_directory(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    """Rows of q and k stay as the converter permuted them; the layers turn them back."""
    model, shapes = base
    path = write_adapter(tmp_path / "a", model)
    expected = read(path, shapes).weights
    converted = read(write_gguf_adapter(tmp_path / "a.gguf", path, "llama", {"q_proj": 4}), shapes).weights
    assert set(converted) == set(expected)
    for name, ours in converted.items():
        theirs = expected[name]
        assert ours.scale == theirs.scale and ours.interleaves_qk and torch.equal(ours.a, theirs.a)
        assert torch.equal(ours.b, theirs.b) == (not name.endswith("q_proj"))
    kind = gguf.GGMLQuantizationType.Q8_0
    rounded = read(write_gguf_adapter(tmp_path / "q.gguf", path, "llama", quantization=kind), shapes).weights
    for name, ours in rounded.items():
        assert (ours.a - expected[name].a).abs().max() <= expected[name].a.abs().max() / 127


def test_gguf_adapter_on_reordered_value_heads_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "qwen3_5_text")
    shapes = load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64).lora.shapes
    for modules, is_refused in ((("q_proj", "o_proj"), False), (("out_proj",), True)):
        adapter = write_adapter(tmp_path / "a", path, modules=modules)
        file = write_gguf_adapter(tmp_path / "a.gguf", adapter, "qwen35")
        if is_refused:
            with pytest.raises(
                CheckpointError, match=r"`blk\.0\.ssm_out\.weight` cannot be adapted from a GGUF"
            ):
                read(file, shapes)
        else:
            assert len(read(file, shapes).weights) == len(modules)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.type": "model"}, "general.type and adapter.type are 'model' and 'lora'"),
        ({"adapter.type": "control"}, "'adapter' and 'control'"),
        ({"adapter.lora.alpha": None}, "adapter.lora.alpha must be a number"),
        ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha must be a number"),
        ({"adapter.lora.alpha": -1.0}, "adapter.lora.alpha must be a number"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "aLoRA is not supported"),
    ],
)
def test_gguf_metadata(
    base: tuple[Path, Shapes], tmp_path: Path, metadata: dict[str, Any], problem: str
) -> None:
    model, shapes = base
    path = write_gguf_adapter(tmp_path / "a.gguf", write_adapter(tmp_path / "a", model), "llama", **metadata)
    with pytest.raises(CheckpointError) as error:
        read(path, shapes)
    assert problem in error.value.message


def test_split_gguf_file(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    """Its tensors would be read from the first file."""
    model, shapes = base
    files = [tmp_path / f"a-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part, file in enumerate(files):
        adapter = edit(
            write_adapter(tmp_path / "a", model),
            lambda tensors, part=part: [tensors.pop(name) for name in list(tensors) if f".{part}." in name],
        )
        write_gguf_adapter(file, adapter, "llama", **{"split.no": part, "split.count": 2})
    with pytest.raises(CheckpointError, match="it is split into several files"):
        read(files[0], shapes)


def test_truncated_gguf_file(base: tuple[Path, Shapes], tmp_path: Path) -> None:
    model, shapes = base
    path = write_gguf_adapter(tmp_path / "a.gguf", write_adapter(tmp_path / "a", model), "llama")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="truncated"):
        read(path, shapes)
