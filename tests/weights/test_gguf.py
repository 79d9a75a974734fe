"""GGUF models: the same bits as the checkpoints they were converted from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.kernels.cpu.library import FORMAT_IDS, load_library
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info, weight_files
from foreword.weights.gguf.gguf_weights import PACKED_TYPES
from foreword.weights.gguf.header import open_gguf
from foreword.weights.mapped_file import MappedFile
from tests.support.budget import some_of
from tests.support.checkpoints import FAMILIES, write_checkpoint, write_drafter
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import (
    CODEBOOK_TYPES,
    NO_GGUF_FAMILIES,
    Kind,
    finish,
    llama3_divisors,
    quantize,
    write_gguf,
)

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(7)).tolist()
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "head_dim": 32,
}  # rows of whole blocks
ODD = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "hidden_size": 72,
    "intermediate_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PACKED_KINDS = [Kind[name.upper()] for name in PACKED_TYPES]
Write = Callable[[gguf.GGUFWriter], None]


def factors(name: str, values: list[float]) -> Write:
    return lambda writer: writer.add_tensor(name, np.array(values, np.float32))


def both(*writes: Write) -> Write:
    def write(writer: gguf.GGUFWriter) -> None:
        for one in writes:
            one(writer)

    return write


OPTIONS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"routed_scaling_factor": 1.0},  # no other in files
    "dots1": {"sliding_window": None},
}
# Family, options of the checkpoint, keys of the file beyond the usual, further tensors.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Write | None]] = {
    **{
        family: (family, OPTIONS.get(family, {}), {}, None)
        for family in FAMILIES
        if family not in ("gemma3_text", *NO_GGUF_FAMILIES)
    },
    "gemma3": ("gemma3_text", {}, {"attention__sliding_window_pattern": 2}, None),
    "gemma3-default-pattern": (
        "gemma3_text",
        {"sliding_window_pattern": 6, "num_hidden_layers": 7},
        {},
        None,
    ),
    "gemma3-listed-pattern": ("gemma3_text", {}, {"attention__sliding_window_pattern": [True, False]}, None),
    "gemma3-rope": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5000.0},
        {
            "attention__sliding_window_pattern": 2,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
            "rope__freq_base_swa": 5000.0,
        },
        None,
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}, None),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}, None),
    "llama-odd-shape": ("llama", ODD, {}, None),
    "llama-few-keys": (
        "llama",
        {"num_key_value_heads": 4},
        dict.fromkeys(
            (
                "attention__head_count_kv",
                "rope__freq_base",
                "vocab_size",
                "attention__key_length",
                "attention__value_length",
                "rope__dimension_count",
            )
        ),
        None,
    ),
    "llama-one-for-each-layer": (
        "llama",
        {},
        {"attention__head_count_kv": [2, 2], "feed_forward_length": [96, 96]},
        None,
    ),
    "llama-linear": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope__scaling__factor": 2.5},
        None,
    ),
    "llama-linear-old": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope__scale_linear": 2.5},
        None,
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
            }
        },
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64,
            "rope__scaling__yarn_beta_fast": 16.0,
        },
        None,
    ),
    "llama-llama3": (
        "llama",
        {"rope_scaling": LLAMA3},
        {},
        factors("rope_freqs.weight", llama3_divisors({**LLAMA3, "rope_theta": 10000.0}, 16)),
    ),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True}, {}, None),
    "exaone4-no-window": (
        "exaone4",
        {"layer_types": ["full_attention"] * 2, "sliding_window": None},
        {"attention__sliding_window": None, "attention__sliding_window_pattern": None},
        None,
    ),
    "exaone4-default-pattern": (
        "exaone4",
        {"layer_types": ..., "sliding_window_pattern": 4, "num_hidden_layers": 5},
        {},
        None,
    ),
    "granite-no-scales": (
        "granite",
        {"attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
        {"attention__scale": None, "embedding_scale": 0.0, "residual_scale": None},
        None,
    ),
    "hunyuan-biases": ("hunyuan_v1_dense", {"attention_bias": True}, {}, None),
    "mistral3-without-query-scale": ("mistral", {"head_dim": 16}, {"architecture": "mistral3"}, None),
    "olmo3-attention-factor": ("olmo3", {}, {"rope__scaling__yarn_attn_factor": 1.1386294}, None),
    "smollm3-biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}, {}, None),
    "command-r-plus": ("cohere", {"use_qk_norm": True}, {}, None),
    "phi2-fused": ("phi", {"partial_rotary_factor": 0.25}, {"join_qkv": True}, None),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}, {}, None),
    "phi3-no-window": ("phi3", {}, {"attention__sliding_window": None}, None),
    "phi3-window": ("phi3", {"sliding_window": 30}, {}, None),
    "phi3-long": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 2.5] * 2,
                "long_factor": [4.0] * 8,
            },
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
        },
        {"rope__scaling__original_context_length": 256},
        both(
            factors("rope_factors_short.weight", [1.0, 1.5, 2.0, 2.5] * 2),
            factors("rope_factors_long.weight", [4.0] * 8),
        ),
    ),
}


# Keys are float32: divisors of frequencies, multipliers, the stretched base.
ROUNDED_CASES = (
    *("apertus", "exaone", "llama-llama3", "granite", "ministral3"),
    *("hunyuan_v1_dense", "hunyuan-biases", "hunyuan_v1_moe"),
)


def pair(case: str, tmp_path: Path) -> tuple[Path, Path]:
    family, options, keys, more = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    return checkpoint, write_gguf(checkpoint, tmp_path / "model.gguf", more=more, **keys)


@pytest.mark.parametrize("case", some_of(CASES, 2))
def test_float32_gguf_has_the_checkpoints_bits(case: str, tmp_path: Path) -> None:
    checkpoint, file = pair(case, tmp_path)
    theirs, ours = ForwardHelper(checkpoint).logits(PROMPT), ForwardHelper(file).logits(PROMPT)
    if case in ROUNDED_CASES:
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    else:
        assert torch.equal(ours, theirs)
    facts = read_model_info(file)
    num_keys = 8 if case == "apertus" else 0  # tensors of checkpoints that are keys of files
    assert (
        facts.parameters == read_model_info(checkpoint).parameters - num_keys
        and facts.context_len == read_model_info(checkpoint).context_len
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in (*PACKED_KINDS, Kind.BF16, Kind.F16)),
        *((family, Kind.Q8_0) for family in ("qwen2", "phi3", "gemma2", "ernie4_5")),
    ],
)
def test_quantized_gguf_equals_rounded_checkpoint(family: str, kind: Kind, tmp_path: Path) -> None:
    scalar = {"query_pre_attn_scalar": 32} if family == "gemma2" else {}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **WIDE, **scalar)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.from_numpy(gguf.dequantize(quantize(tensor.numpy(), kind), kind)).view(
                tensor.shape
            )
    save_file(tensors, checkpoint / "model.safetensors")
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(checkpoint).logits(PROMPT))


# Types of tensors whose names contain a word, in the order of precedence, and of the others.
MIXTURES: dict[str, dict[str, Kind]] = {
    "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.weight": Kind.Q8_0, "": Kind.Q4_K},
    "UD-IQ4_XS": {
        "attn_v": Kind.Q5_K,
        "attn_k": Kind.IQ4_NL,
        "ffn_down": Kind.Q4_1,
        "ffn_gate": Kind.Q3_K,
        "output.weight": Kind.Q6_K,
        "": Kind.IQ4_XS,
    },
    "UD-Q2_K_XL": {
        "attn_v": Kind.Q4_K,
        "attn_q": Kind.IQ4_XS,
        "ffn_down": Kind.Q3_K,
        "token_embd": Kind.Q4_K,
        "output.weight": Kind.Q5_1,
        "": Kind.Q2_K,
    },
    "MXFP4": {"ffn": Kind.MXFP4, "": Kind.Q8_0},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixed_tensor_types(mixture: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)

    def kind(name: str) -> Kind:
        return next(kind for word, kind in MIXTURES[mixture].items() if word in name)

    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    llm = LLM(str(file), speculate="off")
    greedy = SamplingParams(temperature=0, max_tokens=24)
    alone = llm.generate([{"prompt_token_ids": PROMPT[:20]}], greedy)[0].token_ids
    crowd = llm.generate(
        [{"prompt_token_ids": PROMPT[:20]}, *({"prompt_token_ids": PROMPT[i : 40 + i]} for i in range(5))],
        greedy,
    )
    assert crowd[0].token_ids == alone and len(set(alone)) > 10


def test_gguf_as_target_and_draft_model(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "target")
    file, drafter = (
        write_gguf(checkpoint, tmp_path / "target.gguf"),
        write_gguf(write_drafter(tmp_path / "d"), tmp_path / "d.gguf"),
    )
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    outputs = [
        LLM(str(model), **options).generate(["the thing"], params)[0]
        for model in (checkpoint, file)
        for options in ({"speculate": "off"}, {"draft_model": str(drafter)})
    ]
    assert len({output.token_ids for output in outputs}) == 1
    assert outputs[0].prompt_token_ids == outputs[2].prompt_token_ids


def test_model_info_of_quantized_files(tmp_path: Path) -> None:
    """Packed bytes are those of the file; other tensors are bfloat16."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    facts = read_model_info(write_gguf(checkpoint, tmp_path / "q.gguf", Kind.Q4_0))
    matrices, outer = facts.parameters - 5 * 256, 2 * 272 * 256
    assert (facts.dtype, facts.packed_bytes) == ("bfloat16", matrices * 18 // 32)
    assert (facts.packed_parameters, facts.packed_embedding_parameters, facts.embedding_parameters) == (
        matrices,
        outer,
        outer,
    )
    for kind, dtype in ((Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16")):
        facts = read_model_info(write_gguf(checkpoint, tmp_path / f"{dtype}.gguf", kind))
        assert (facts.dtype, facts.packed_bytes) == (dtype, None)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_bytes_match_the_kernels(kind: Kind, tmp_path: Path) -> None:
    """Of rows of 256 and of 768 columns."""
    library, _ = load_library()
    if library is None:
        pytest.skip("no native library")
    options = {**WIDE, "intermediate_size": 768}
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint", **options), tmp_path / "model.gguf", kind)
    shapes = [info.shape for info in open_gguf(file).tensors.values() if len(info.shape) == 2]
    assert read_model_info(file).packed_bytes == sum(
        library.foreword_packed_bytes(FORMAT_IDS[kind.name.lower()], rows, length, 0)
        for rows, length in shapes
    )


def test_dequantized_tensors_are_not_packed(tmp_path: Path) -> None:
    """The embedding stays packed; layers and head are dequantized."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    file = write_gguf(
        checkpoint,
        tmp_path / "model.gguf",
        lambda name: Kind.Q8_0 if name == "token_embd.weight" else Kind.IQ3_XXS,
    )
    facts = read_model_info(file, gguf_dequantize=True)
    assert facts.packed_bytes == 272 * 256 * 34 // 32
    assert facts.packed_parameters == facts.packed_embedding_parameters == 272 * 256


@pytest.mark.parametrize("kind", [*CODEBOOK_TYPES, Kind.TQ1_0, Kind.TQ2_0])
def test_types_without_kernels_are_dequantized_on_request(kind: Kind, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    for refuse in (lambda: read_model_info(file), lambda: load(file)):
        with pytest.raises(CheckpointError, match=rf"{kind.name.lower()} \(\d+ tensors\).*--gguf-dequantize"):
            refuse()
    assert load(file, gguf_dequantize=True).info.parameters == read_model_info(file, True).parameters


def test_every_type_without_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"down": Kind.IQ3_XXS, "attn_k": Kind.IQ2_S, "attn_q": Kind.IQ2_S, "": Kind.IQ4_XS}

    def kind(name: str) -> Kind:
        return next(kind for word, kind in kinds.items() if word in name)

    file = write_gguf(write_checkpoint(tmp_path / "checkpoint", **WIDE), tmp_path / "model.gguf", kind)
    missing = r"tensor types without kernels: iq2_s \(4 tensors\), iq3_xxs \(2 tensors\); "
    with pytest.raises(CheckpointError, match=missing + "--gguf-dequantize converts"):
        read_model_info(file)
    assert read_model_info(file, gguf_dequantize=True)
    monkeypatch.setattr("foreword.weights.gguf.gguf_weights.has_gguf_package", lambda: False)
    with pytest.raises(CheckpointError, match=missing + r".*pip install 'foreword\[gguf\]'"):
        read_model_info(file, gguf_dequantize=True)


def load(path: Path, **options: Any) -> Any:
    return load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64, **options)


def test_pages_are_released_and_progress_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(MappedFile, "release", lambda self, start, size: released.append(size))
    seen: list[tuple[int, int]] = []
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    load(file, progress=lambda done, total: seen.append((done, total)))
    assert sum(released) == seen[-1][0] == seen[-1][1] and seen == sorted(seen)


# What is refused

REFUSED: list[tuple[dict[str, Any], Write | None, str]] = [
    ({"block_count": None}, None, "lacks `llama.block_count`"),
    ({"block_count": 0}, None, "`llama.block_count` must be a whole number of at least 1"),
    ({"block_count": 3}, None, "tensor `blk.2.attn_norm.weight` is missing"),
    ({"block_count": 1}, None, "`llama.block_count` is 1, but tensor `blk.1.attn_norm.weight` is there too"),
    ({"context_length": "long"}, None, "`llama.context_length` must be a whole number"),
    ({"attention__head_count_kv": 4}, None, "`llama.attention.head_count_kv` makes 64 rows"),
    ({"attention__head_count_kv": [1, 2]}, None, "`llama.attention.head_count_kv` must be a whole number"),
    ({"attention__value_length": 8}, None, "`llama.attention.value_length` must be 16 here, got 8"),
    ({"attention__layer_norm_rms_epsilon": None}, None, "lacks `llama.attention.layer_norm_rms_epsilon`"),
    ({"attention__causal": False}, None, "`llama.attention.causal` must be true here"),
    ({"attention__sliding_window": 128}, None, "`llama.attention.sliding_window` = 128 is not supported"),
    ({"expert_count": 8}, None, "tensor `blk.0.ffn_down_exps.weight` is missing"),
    ({"expert_used_count": 2}, None, "`llama.expert_used_count` must be 0 here, got 2"),
    ({"logit_scale": 0.5}, None, "`llama.logit_scale` = 0.5 is not supported"),
    (
        {"rope__dimension_count": 8},
        None,
        "`llama.rope.dimension_count` must be 16, the size of a head, got 8",
    ),
    (
        {"rope__scaling__type": "spiral"},
        None,
        "`llama.rope.scaling.type` must be one of none, linear, yarn, longrope",
    ),
    ({"rope__scaling__type": "yarn"}, None, "lacks `llama.rope.scaling.factor`"),
    ({"rope__scaling__type": "longrope"}, None, "but there is no tensor `rope_factors_long.weight`"),
    ({"rope__scaling__yarn_log_multiplier": 0.1}, None, "yarn_log_multiplier` = 0.1"),
    (
        {"rope__scaling__factor": 2.0},
        factors("rope_freqs.weight", [1.0] * 8),
        "contradicts the tensor `rope_freqs.weight`",
    ),
    ({}, factors("rope_freqs.weight", [1.0] * 7), "short_factor"),
    ({}, factors("rope_freqs.weight", [1.0] * 7 + [float("nan")]), "short_factor"),
    (
        {},
        factors("rope_freqs.weight", [1.0] * 7 + [0.0]),
        "short_factor` must be a list of numbers between 1e-30 and",
    ),
    ({}, factors("rope_factors_long.weight", [1.0] * 8), "tensor `rope_factors_short.weight` is missing"),
    ({}, factors("blk.0.attn_sinks.weight", [1.0] * 8), "unexpected tensors: blk.0.attn_sinks.weight"),
    (
        {},
        lambda writer: writer.add_quantization_version(1),
        "`general.quantization_version` must be 2 here, got 1",
    ),
    ({}, lambda writer: writer.add_type("adapter"), '`general.type` must be "model" here'),
    (
        {"embedding_length": 80, "attention__key_length": 16},
        None,
        r"makes 80 columns of tensor `token_embd.weight`, which is \[272, 64\]",
    ),
]


def test_unsupported_keys_are_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    for keys, more, message in REFUSED:
        file = write_gguf(checkpoint, tmp_path / "model.gguf", more=more, **keys)
        with pytest.raises(CheckpointError, match=message) as caught:
            load(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "family, keys, message",
    [
        ("exaone4", {"rope__freq_base_swa": 5000.0}, "`exaone4.rope.freq_base_swa` must be 10000.0 here"),
        (
            "granite",
            {"rope__scaling__finetuned": False},
            "`granite.rope.scaling.finetuned` must be true here",
        ),
        ("granite", {"logit_scale": None}, "lacks `granite.logit_scale`"),
        (
            "hunyuan_v1_dense",
            {"rope__scaling__factor": 2.0},
            "`hunyuan-dense.rope.scaling.factor` must be 1.0",
        ),
        ("ministral3", {"rope__scaling__type": "none"}, "`mistral3.rope.scaling.type` must be yarn beside"),
        ("olmo2", {"block_count": 3}, "tensor `blk.2.post_attention_norm.weight` is missing"),
        ("smollm3", {"attention__sliding_window": 32}, "`smollm3.attention.sliding_window` = 32 is not"),
    ],
)
def test_unsupported_keys_of_families_are_named(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint", family), tmp_path / "model.gguf", **keys)
    with pytest.raises(CheckpointError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("architecture", "expected_message"),
    [
        *(
            (name, f"'{name}' is not supported.*; known: apertus, arcee, .*gemma3, .*llama")
            for name in ("gemma3n", "qwen2vl", "mamba")
        ),
        (
            "clip",
            r"'clip': the file \(mmproj\) is a vision encoder, not a model; vision-language models are",
        ),
    ],
)
def test_unsupported_architecture_is_named(architecture: str, expected_message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"`general.architecture` {expected_message}"):
        read_model_info(tmp_path / "x.gguf")


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("extra.weight", np.zeros((1, 36), np.int16))

    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf", more=more)
    with pytest.raises(CheckpointError, match=r"without kernels: i16 \(1 tensor\); known: f32, f16"):
        read_model_info(file, gguf_dequantize=True)


def test_quantized_norm_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, checkpoint / "model.safetensors")

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", gguf.quantize(norm.numpy(), Kind.Q8_0), raw_dtype=Kind.Q8_0)

    file = write_gguf(checkpoint, tmp_path / "model.gguf", more=more)
    with pytest.raises(CheckpointError, match=r"`output_norm\.weight` must be of type f32, f16, bf16"):
        load(file)


def test_split_file_has_the_same_weights(tmp_path: Path) -> None:
    """The second part has every other tensor."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    whole = write_gguf(checkpoint, tmp_path / "model.gguf")
    tensors = load_file(checkpoint / "model.safetensors")
    parts = [dict(list(tensors.items())[number::2]) for number in range(2)]
    files = []
    for number, part in enumerate(parts):
        save_file(part, checkpoint / "model.safetensors")

        def more(writer: gguf.GGUFWriter, number: int = number) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", len(tensors))

        files.append(write_gguf(checkpoint, tmp_path / f"m-{number + 1:05}-of-00002.gguf", more=more))
    assert torch.equal(ForwardHelper(files[0]).logits(PROMPT), ForwardHelper(whole).logits(PROMPT))
    assert weight_files(files[0]) == files and weight_files(whole) == [whole]
