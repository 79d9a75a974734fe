"""Quantized checkpoints: the values of every format, and refusals by name."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.ops import Float8Blocks, GroupedInts
from foreword.kernels.quantization import dequantize
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.decoder import Decoder
from foreword.models.interfaces import Precision
from foreword.models.model_loader import check_weights, load_model, read_model_info
from foreword.weights import module_patterns
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.quantized.quantization_config import read_quantization
from foreword.weights.quantized.quantized_weights import QuantizedWeights
from tests.support.budget import is_full
from tests.support.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    change_config,
    change_tensors,
    write_checkpoint,
)
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.forward_helpers import ForwardHelper
from tests.support.quantized_checkpoints import FORMATS, compressed, write_quantized

WIDE: dict[str, Any] = {"intermediate_size": 320}  # several blocks of FP8
SHAPES: dict[str, dict[str, Any]] = {"qwen3_moe": {"moe_intermediate_size": 160}}
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", "llama", seed=1, **WIDE)


@pytest.fixture(scope="module")
def copy(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Copies a checkpoint of a format, which is written once."""
    folder = tmp_path_factory.mktemp("quantized")

    def make(kind: str, path: Path) -> Path:
        if not (folder / kind).exists():
            write_quantized(source, folder / kind, kind)
        return shutil.copytree(folder / kind, path / kind, dirs_exist_ok=True)

    return make


def load(path: Path) -> Decoder:
    return load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64)


def open_weights(path: Path, device_loader: DeviceLoader | None = None) -> QuantizedWeights:
    quantization = read_quantization(ConfigReader(read_json(path / "config.json"), "config.json"), path)
    assert quantization is not None
    return QuantizedWeights(path, quantization, device_loader=device_loader)


def read_matrices(path: Path, names: dict[str, Tensor], **options: Any) -> Iterator[tuple[str, Any]]:
    weights = open_weights(path, **options)
    for name, value in names.items():
        if name.endswith("_proj.weight"):
            with weights.weights({name: value.shape[0]}, value.shape[1]) as (matrix,):
                yield name, matrix


@pytest.mark.parametrize("kind", FORMATS)
def test_values_equal_the_formats_definition(kind: str, source: Path, tmp_path: Path) -> None:
    expected = write_quantized(source, tmp_path / "model", kind)
    for name, matrix in read_matrices(tmp_path / "model", expected):
        assert isinstance(matrix, GroupedInts | Float8Blocks)
        assert torch.equal(dequantize(matrix), expected[name])


@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "pack-quantized-asymmetric", "fp8-block"])
def test_a_device_loader_reads_the_same_values(kind: str, source: Path, tmp_path: Path) -> None:
    expected = write_quantized(source, tmp_path / "model", kind)
    with DeviceLoader("cpu", pinned=False, buffer_bytes=1000) as loader:
        for name, matrix in read_matrices(tmp_path / "model", expected, device_loader=loader):
            assert torch.equal(dequantize(matrix), expected[name])


@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "gptq-act-order-8-bit"])
def test_wide_matrices_are_transposed_in_chunks(kind: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 1184, "num_hidden_layers": 2}
    source = write_checkpoint(tmp_path / "source", "llama", **shape)
    expected = write_quantized(source, tmp_path / "model", kind)
    for name, matrix in read_matrices(tmp_path / "model", expected):
        assert torch.equal(dequantize(matrix), expected[name])


def test_act_order_keeps_groups_and_reorders_inputs(source: Path, tmp_path: Path) -> None:
    for kind, is_ordered in {"gptq": False, "gptq-act-order": True}.items():
        expected = write_quantized(source, tmp_path / kind, kind)
        assert {matrix.input_order is not None for _, matrix in read_matrices(tmp_path / kind, expected)} == {
            is_ordered
        }


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in FORMATS),
        *itertools.product(
            ("phi3", "ernie4_5", "qwen3_moe"), ("awq", "gptq-act-order", "pack-quantized", "fp8-block")
        ),
        *(("glm4", "awq"), ("glm4_moe", "fp8-block"), ("minimax_m2", "fp8-block")),
        *(("cohere2", "pack-quantized"), ("nemotron", "gptq-act-order"), ("seed_oss", "gptq")),
    ],
)
def test_logits_equal_the_dequantized_checkpoint_in_transformers(
    family: str, kind: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", family, seed=1, **SHAPES.get(family, WIDE))
    write_quantized(source, tmp_path / "model", kind, plain=tmp_path / "plain")
    prompt = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    transformers.utils.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = peer(torch.tensor([prompt])).logits[0]
    actual = ForwardHelper(tmp_path / "model").logits(prompt)
    assert (actual - expected).abs().max() < 1e-4


# Projections of branches with state; those of few rows are usually not quantized
STATE_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj", "w1", "w2", "w3")
FEW_ROWS = ("in_proj_a", "in_proj_b", "in_proj_ba")
EXCLUDING: dict[str, dict[str, Any]] = {
    "awq": {"modules_to_not_convert": [*FEW_ROWS, "shared_expert_gate"]},
    **{kind: {"dynamic": {r"-:.*in_proj_(a|b|ba)$": {}}} for kind in ("gptq", "gptq-act-order")},
    "pack-quantized": {"ignore": ["lm_head", r"re:.*in_proj_(a|b|ba)$"]},
    "fp8-block": {"modules_to_not_convert": ["lm_head", *FEW_ROWS]},
}


STATE_CASES = [  # family, format, whether matrices of few rows are floats
    ("qwen3_5_text", "awq", True),
    ("qwen3_5_text", "fp8-block", True),
    ("qwen3_next", "fp8-block", False),
    ("lfm2", "awq", False),
    *(("qwen3_5_text", kind, True) for kind in ("gptq-act-order", "pack-quantized")),
    *(("qwen3_5_text", kind, False) for kind in ("pack-quantized", "float-quantized-channel")),
    *itertools.product(("qwen3_next",), ("gptq", "pack-quantized"), (True, False)),
    ("qwen3_5_moe_text", "fp8-block", True),
    ("lfm2_moe", "pack-quantized", False),
    *(("granitemoehybrid", kind, False) for kind in ("awq", "fp8-block")),
    *(("falcon_h1", kind, False) for kind in ("gptq", "fp8-block", "float-quantized-channel")),
]


@pytest.mark.parametrize(("family", "kind", "is_excluding"), STATE_CASES if is_full() else STATE_CASES[:4])
def test_families_with_states_equal_their_dequantized_checkpoint(
    family: str, kind: str, is_excluding: bool, tmp_path: Path
) -> None:
    """Rows of fused projections and of q with its gate are reordered with their scales."""
    inner = {"moe_intermediate_size": 64} if "moe_intermediate_size" in FAMILIES[family] else {}
    if "shared_expert_intermediate_size" in FAMILIES[family]:
        inner["shared_expert_intermediate_size"] = 96
    source = write_checkpoint(tmp_path / "source", family, seed=1, **inner)
    projections = STATE_PROJECTIONS if is_excluding else (*STATE_PROJECTIONS, *FEW_ROWS)
    names = [name for name in load_file(source / "model.safetensors") if name.endswith(".weight")]
    extra = tuple(name for name in names if name.split(".")[-2] in projections)
    assert extra
    write_quantized(source, tmp_path / "model", kind, plain=tmp_path / "plain", extra=extra)
    if is_excluding:
        config = read_json(tmp_path / "model" / "config.json")["quantization_config"]
        change_config(tmp_path / "model", quantization_config=config | EXCLUDING[kind])
    prompt = torch.randint(0, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = ForwardHelper(tmp_path / "plain").logits(prompt)
    actual = ForwardHelper(tmp_path / "model").logits(prompt)
    assert (actual - expected).abs().max() < 1e-4
    assert read_model_info(tmp_path / "model").parameters == read_model_info(source).parameters
    native = ForwardHelper(tmp_path / "model", ops=CpuOps(FORCED_ISA, threads=1)).logits(prompt)
    assert (native - expected).std() < 0.2 * expected.std()


@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "gptq-8-bit", "int-quantized", "fp8-block"])
def test_native_kernels_agree_within_the_rounding_of_activations(
    kind: str, source: Path, tmp_path: Path
) -> None:
    write_quantized(source, tmp_path / "model", kind)
    prompt = list(range(40, 80))
    expected = ForwardHelper(tmp_path / "model").logits(prompt)
    error = ForwardHelper(tmp_path / "model", ops=CpuOps(FORCED_ISA, threads=1)).logits(prompt) - expected
    assert error.std() < (1e-5 if kind.startswith("fp8") else 0.1) * expected.std()


@pytest.mark.parametrize("kind", FORMATS)
def test_check_reads_headers_and_info_counts_values(kind: str, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, kind)
    plain, info = read_model_info(source), read_model_info(path)
    assert check_weights(path) < check_weights(source)
    assert info.parameters == plain.parameters == load(path).info.parameters
    assert info.packed_parameters == plain.parameters - plain.embedding_parameters - 5 * 64  # norms
    assert info.packed_bytes is not None
    bits = 8 * info.packed_bytes / info.packed_parameters
    is_4_bit = info.packed_bytes < info.packed_parameters
    assert (4 if is_4_bit else 8) < bits <= (5.5 if is_4_bit else 9.5)  # with scales and zeros


def test_mixed_precision_and_excluded_modules(source: Path, tmp_path: Path) -> None:
    """Parts of one fused layer differ: 8 bits for k_proj, floats for v_proj and the second layer."""
    paths = {kind: tmp_path / kind for kind in ("gptq", "gptq-8-bit")}
    expected = {kind: write_quantized(source, path, kind) for kind, path in paths.items()}
    plain, eight = (
        load_file(source / "model.safetensors"),
        load_file(paths["gptq-8-bit"] / "model.safetensors"),
    )
    changes: dict[str, Any] = {}
    for name in load_file(paths["gptq"] / "model.safetensors"):
        if ".k_proj." in name:
            changes[name] = eight[name]
        if (".v_proj." in name or ".layers.1." in name) and "norm" not in name:
            changes[name] = None
            weight = f"{name.rpartition('.')[0]}.weight"
            changes[weight] = plain[weight]
    change_tensors(paths["gptq"], **changes)
    dynamic = {
        r"-:.*\.v_proj": {},
        r"-:model\.layers\.1\.": {},
        r"+:.*k_proj$": {"bits": 8, "group_size": 32, "sym": True},
    }
    config = read_json(paths["gptq"] / "config.json")["quantization_config"]
    change_config(paths["gptq"], quantization_config={**config, "dynamic": dynamic})
    weights = open_weights(paths["gptq"])
    prefix = "model.layers.0.self_attn."
    with weights.weights({f"{prefix}{x}_proj.weight": 64 if x == "q" else 32 for x in "qkv"}, 64) as parts:
        q, k, v = parts
        assert isinstance(q, GroupedInts) and q.bits == 4
        assert isinstance(k, GroupedInts) and k.bits == 8
        assert torch.equal(dequantize(k), expected["gptq-8-bit"][f"{prefix}k_proj.weight"])
        assert torch.equal(v, plain[f"{prefix}v_proj.weight"])
    assert check_weights(paths["gptq"])
    load(paths["gptq"])


def test_compressed_tensors_groups_ignore_names_patterns_and_classes(source: Path, tmp_path: Path) -> None:
    """A name decides before a pattern, and a pattern before the class."""
    groups = {
        "rest": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
        "pattern": {"targets": [r"re:.*\.mlp\..*"], "weights": {"num_bits": 8, "group_size": 64}},
        "name": {"targets": [DOWN_PROJ], "weights": {"num_bits": 8, "group_size": 96}},
    }
    config = compressed("pack-quantized") | {"config_groups": groups, "ignore": ["lm_head", "re:.*k_proj"]}
    reader = ConfigReader({"quantization_config": config}, "config.json")
    quantization = read_quantization(reader, tmp_path)
    assert quantization is not None
    names = (Q_PROJ, "model.layers.1.mlp.up_proj", DOWN_PROJ, "lm_head", Q_PROJ.replace("q_proj", "k_proj"))
    schemes = quantization.schemes(names).values()
    sizes = [(scheme.bits, scheme.group_size) if scheme else None for scheme in schemes]
    assert sizes == [(4, 32), (8, 64), (8, 96), None, None]


def test_quantized_head(source: Path, tmp_path: Path) -> None:
    """GPTQ's lm_head is quantized if the files say so."""
    path = tmp_path / "model"
    expected = write_quantized(source, path, "gptq", extra=("lm_head.weight",))
    info = read_model_info(path)
    assert info.packed_embedding_parameters == expected["lm_head.weight"].numel()
    with open_weights(path).weights({"lm_head.weight": VOCAB_SIZE}, 64) as (head,):
        assert torch.equal(dequantize(head), expected["lm_head.weight"])


def test_quantized_embedding_is_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "gptq", extra=("model.embed_tokens.weight",))
    for open_ in (load, check_weights):
        with pytest.raises(CheckpointError, match=r"embed_tokens.* is of a quantized embedding"):
            open_(path)


def test_config_beside_an_older_config_json(source: Path, tmp_path: Path) -> None:
    older = {
        "quantize_config.json": ("gptq", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        "quant_config.json": ("awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    }
    for file, (kind, config) in older.items():
        path = tmp_path / kind
        write_quantized(source, path, kind)
        change_config(path, quantization_config=...)
        with pytest.raises(CheckpointError, match="missing"):
            check_weights(path)
        (path / file).write_text(json.dumps(config))
        check_weights(path)


def test_zero_biases_of_gptq_are_skipped(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "gptq")
    change_tensors(path, **{f"{Q_PROJ}.bias": torch.zeros(64)})
    load(path)
    change_tensors(path, **{f"{Q_PROJ}.bias": torch.arange(64.0)})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.bias. is not zero"):
        load(path)


def test_scales_of_activations_and_cache_are_not_used(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "float-quantized-tensor")
    config = read_json(path / "config.json")["quantization_config"]
    change_config(path, quantization_config={**config, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    change_tensors(path, **{"model.layers.0.self_attn.k_scale": torch.ones(1)})
    load(path)
    assert "`kv_cache_scheme` is not used" in caplog.text


def test_dummy_weights_of_a_quantized_checkpoint_are_refused(source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "model", "awq")
    with pytest.raises(CheckpointError, match="dummy needs a plain checkpoint"):
        load_model(
            tmp_path / "model", ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64, dummy=True
        )


REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; known: awq, gptq"),
    ("awq", {"bits": 3}, "`bits` must be 4 here, got 3"),
    ("awq", {"version": "gemv"}, "`version` 'gemv' is not supported"),
    ("awq", {"version": "gemv_fast"}, "`version`"),
    ("awq", {"version": "marlin"}, "`version`"),
    ("awq", {"backend": "llm-awq"}, "`backend` llm-awq"),
    ("awq", {"zero_point": False}, "`zero_point` must be true"),
    ("awq", {"group_size": 0}, "`group_size`"),
    ("awq", {"group_size": -2}, "`group_size`"),
    ("awq", {"group_size": 128}, "no multiple of the group size 128"),
    ("awq", {"group_size": 16}, "groups of 16 values"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` must be a list"),
    ("awq", {"sideways": 1}, "`sideways`"),
    ("gptq", {"bits": 2}, "`bits` must be 4 or 8 here, got 2"),
    ("gptq", {"bits": 3}, "`bits` must be 4 or 8 here, got 3"),
    ("gptq", {"checkpoint_format": "marlin"}, "`checkpoint_format`"),
    ("gptq", {"is_marlin_format": True}, "`is_marlin_format`"),
    ("gptq", {"pack_dtype": "int16"}, "`pack_dtype`"),
    ("gptq", {"rotation": "hadamard"}, "`rotation`"),
    ("gptq", {"dynamic": {"+:(": {}}}, "`dynamic` holds '\\('"),
    ("gptq", {"dynamic": {"+:.*": {"bits": 3}}}, "dynamic '\\+:.*'.*`bits`"),
    ("gptq", {"dynamic": {"+:.*": {"wide": 3}}}, "`wide`"),
    ("gptq", {"dynamic": [1]}, "`dynamic`"),
    ("gptq", {"dynamic": {"-:.*q_proj": {}}}, f"{Q_PROJ}.qweight. is quantized, but .* excludes it"),
    ("pack-quantized", {"format": "marlin-24"}, "`format`"),
    ("pack-quantized", {"format": "nvfp4-pack-quantized"}, "`format`"),
    ("pack-quantized", {"format": "dense"}, "`format`"),
    ("pack-quantized", {"format": "mixed-precision"}, "`format` is missing"),
    ("pack-quantized", {"format": "int-quantized"}, "weight_packed. does not fit .* says `weight`"),
    ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`sparsity_config`"),
    ("pack-quantized", {"transform_config": {"config_groups": {"a": 1}}}, "`transform_config`"),
    ("pack-quantized", {"quantization_status": "calibration"}, "`quantization_status`"),
    (
        "pack-quantized",
        {"config_groups": {"a": {"targets": ["q"], "weights": {"num_bits": 4}}}},
        "excludes it",
    ),
    ("fp8-block", {"weight_block_size": [0, 128]}, "`weight_block_size`"),
    ("fp8-block", {"weight_block_size": [128]}, "`weight_block_size`"),
    ("fp8-block", {"weight_block_size": f"{'9' * 5000}x128"}, "`weight_block_size` must be two numbers"),
    ("fp8-block", {"weight_block_size": [48, 32]}, "blocks of 32 columns"),
    ("fp8-block", {"weight_block_size": [64, 128]}, r"weight_scale_inv. is .*, the config says \[1, 1\]"),
    ("fp8-block", {"fmt": "e5m2"}, "`fmt`"),
    ("fp8-block", {"activation_scheme": "token"}, "`activation_scheme`"),
]


def test_config_is_refused_by_name_from_the_headers(
    copy: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    for kind, options, message in REFUSED_CONFIGS:
        path = copy(kind, tmp_path)
        config = read_json(path / "config.json")["quantization_config"]
        change_config(path, quantization_config={**config, **options})
        for open_ in (check_weights, load):
            with pytest.raises(CheckpointError, match=message):
                open_(path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gptq", {"dynamic": {"-:(([a-z._0-9])+)+X": {}}}),
        ("pack-quantized", {"ignore": ["re:(([a-z._0-9])+)+X"]}),
    ],
)
def test_pattern_that_takes_forever_is_refused(
    kind: str, options: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_patterns, "LIMITS", replace(module_patterns.LIMITS, cpu_s=0.05))
    path = tmp_path / "model"
    write_quantized(source, path, kind)
    config = read_json(path / "config.json")["quantization_config"]
    change_config(path, quantization_config={**config, **options})
    for open_ in (check_weights, load, read_model_info):
        with pytest.raises(
            CheckpointError, match="quantization_config: patterns of modules' names: it takes"
        ):
            open_(path)


REFUSED_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"num_bits": 3}, "`num_bits` must be 4 or 8 here, got 3"),
    ({"actorder": "group"}, "`actorder`"),
    ({"dynamic": True}, "`dynamic`"),
    ({"type": "float"}, "`type` float does not fit"),
    ({"strategy": "block", "block_structure": [4, 4]}, "`strategy`"),
    ({"strategy": "tensor_group"}, "`strategy`"),
    ({"scope": "all"}, "`scope`"),
]


def test_weights_of_compressed_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for weights, message in REFUSED_WEIGHTS:
        config = compressed("pack-quantized", **weights)
        with pytest.raises(CheckpointError, match=message):
            read_quantization(ConfigReader({"quantization_config": config}, "config.json"), tmp_path)


def set_values(*values: float) -> Any:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[: len(values)] = torch.tensor(values).to(tensor.dtype)
        return tensor

    return change


def swap_rows(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


REFUSED_HEADERS: list[tuple[str, str, Any, str]] = [
    ("awq", "qweight", None, "weight. .* is missing"),
    ("awq", "qzeros", None, "qzeros. .* is missing"),
    ("awq", "qweight", swap_rows, r"qweight. is \[8, 64\], the config says \[64, 8\]"),
    ("awq", "scales", lambda tensor: tensor.int(), "scales. is of type I32, not F32 or BF16 or F16"),
    ("gptq", "qzeros", lambda tensor: tensor[:1].clone(), "qzeros"),
    ("gptq", "g_idx", lambda tensor: tensor[:-1].clone(), "g_idx"),
    ("gptq-act-order", "g_idx", None, "g_idx. .* is missing"),
    ("pack-quantized", "weight_scale", lambda tensor: tensor[:, :1].clone(), "weight_scale"),
    (
        "pack-quantized",
        "weight_zero_point",
        torch.zeros(8, 2).int(),
        "unexpected tensors: .*weight_zero_point",
    ),
    ("int-quantized", "weight", lambda tensor: tensor.to(torch.float8_e4m3fn), "F8_E4M3, not I8"),
    ("fp8-block", "weight_scale_inv", None, "is missing"),
    ("fp8-tensor", "weight_scale", lambda tensor: torch.ones(3), "weight_scale"),
]


def test_header_is_refused_before_loading(copy: Callable[[str, Path], Path], tmp_path: Path) -> None:
    for kind, suffix, change, message in REFUSED_HEADERS:
        path = copy(kind, tmp_path)
        change_tensors(path, **{f"{Q_PROJ}.{suffix}": change})
        for open_ in (check_weights, load):
            with pytest.raises(CheckpointError, match=message):
                open_(path)


REFUSED_CONTENTS: list[tuple[str, str, Any, str]] = [
    ("awq", "scales", set_values(torch.nan), "scales. holds nan; scales must be finite"),
    ("awq", "scales", set_values(-torch.inf), "scales. holds inf"),
    ("awq", "scales", torch.zeros_like, "scales. holds nothing but zeros"),
    ("gptq", "g_idx", set_values(2), "g_idx. holds group 2; there are 2"),
    ("gptq", "g_idx", set_values(-1), "g_idx. holds group -1"),
    ("gptq", "g_idx", set_values(1), "g_idx. has 31 columns in group 0, not 32"),
    ("gptq", "scales", set_values(torch.nan), "scales. holds nan"),
    ("pack-quantized", "weight_scale", set_values(3e30), "weight_scale. holds 3e.30; .* at most 1e.30"),
    ("pack-quantized", "weight_shape", set_values(32), r"weight_shape. says \[32, 64\]"),
    ("fp8-block", "weight_scale_inv", set_values(torch.nan), "weight_scale_inv. holds nan"),
    ("fp8-tensor", "weight_scale", torch.zeros_like, "weight_scale. holds nothing but zeros"),
]


def test_contents_are_refused_by_name(copy: Callable[[str, Path], Path], tmp_path: Path) -> None:
    for kind, suffix, change, message in REFUSED_CONTENTS:
        path = copy(kind, tmp_path)
        change_tensors(path, **{f"{Q_PROJ}.{suffix}": change})
        with pytest.raises(CheckpointError, match=message):
            load(path)


def test_quantized_norm_is_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "int-quantized")
    change_tensors(path, **{"model.norm.weight": torch.ones(64).to(torch.int8)})
    config = compressed("int-quantized", strategy="channel")
    change_config(path, quantization_config={**config, "ignore": []})
    for open_ in (check_weights, load):
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight. is quantized, but must be plain"):
            open_(path)


def test_truncated_file_is_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "gptq")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        check_weights(path)


def test_quantized_values_without_a_config_are_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_quantized(source, path, "fp8-tensor")
    change_config(path, quantization_config=...)
    for open_ in (check_weights, load):
        with pytest.raises(CheckpointError, match="is of type F8_E4M3; weights must be"):
            open_(path)
