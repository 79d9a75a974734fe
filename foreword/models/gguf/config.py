"""What a GGUF file's metadata says of its model, as the options that config.json would have.

Read as strictly: a key of the architecture that is not honoured here is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.gguf.metadata import MetadataReader
from foreword.models.gguf.reader import GGUFFile
from foreword.models.gguf.rope import TensorReader, read_rope_theta, rope_options
from foreword.models.gguf.validate import check_shape

__all__ = ["MODEL_TYPES", "read_hf_config"]

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "llama": "llama",
        "phi3": "phi3",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
    }
)
MMPROJ_ARCHITECTURE = "clip"  # of whatever model, in a file of its own
Options = dict[str, Any]

# Activations beside quantized weights are bfloat16, as beside the weights that these were made from.
DTYPES: Mapping[str, str] = MappingProxyType({"f32": "float32", "f16": "float16"})
QUANTIZATION_VERSION = 2  # of the blocks' layout
GEMMA_WINDOW_PERIOD: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gemma3": 6}
)  # the last layer of each run sees everything
GEMMA2_WINDOW = 4096
LOCAL_THETA = 10000.0
# Layers of the 27B models, whose scores are scaled by hidden size / heads instead of the size of a head: no key tells.
GEMMA_27B_NUM_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
# Keys that may be there as long as they ask for nothing.
NOOP_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "pooling_type": 0,
        "tensor_data_layout": "Meta AI original pth",
        "use_parallel_residual": False,
    }
)


def read_hf_config(gguf: GGUFFile, read_tensor: TensorReader) -> Options:
    """config.json's options, `model_type` among them.

    factors  reads one of the small tensors that belong to RoPE, by name
    Raises CheckpointError, which names the key.
    """
    keys = MetadataReader(gguf, _read_architecture(gguf))
    keys.require_general_value("general.type", "model")
    keys.require_general_value("general.quantization_version", QUANTIZATION_VERSION)
    check_shape(keys)
    options = (
        _shape_options(keys)
        | _bias_options(keys)
        | rope_options(keys, read_tensor)
        | _activation_options(keys)
        | _family_options(keys)
    )
    for key, value in NOOP_VALUES.items():
        keys.require_value(key, value)
    keys.ignore("vocab_size")  # the embedding's rows count
    keys.check_all_read()
    return options


def _read_architecture(gguf: GGUFFile) -> str:
    name = str(gguf.metadata.get("general.architecture"))
    if name not in MODEL_TYPES:
        if name == MMPROJ_ARCHITECTURE:
            raise CheckpointError(
                f"{gguf.path}: `general.architecture` {name!r}: the file (mmproj) holds a tower that sees pictures, not the "
                "model; models that see are read from directories in Hugging Face's format",
                "model",
            )
        known = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(
            f"{gguf.path}: `general.architecture` {name!r} is not supported; known: {known}", "model"
        )
    return name


def _shape_options(metadata: MetadataReader) -> Options:
    head_dim = metadata.get_head_dim()
    metadata.require_value("attention.value_length", head_dim)
    return {
        "model_type": MODEL_TYPES[metadata.architecture],
        "torch_dtype": _majority_dtype(metadata),
        "vocab_size": metadata.tensor_info("token_embd.weight").shape[0],
        "hidden_size": metadata.get_int("embedding_length"),
        "intermediate_size": metadata.get_int("feed_forward_length"),
        "num_hidden_layers": metadata.get_int("block_count"),
        "num_attention_heads": metadata.get_int("attention.head_count"),
        "num_key_value_heads": metadata.get_int(
            "attention.head_count_kv", metadata.get_int("attention.head_count")
        ),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.get_int("context_length"),
        "rms_norm_eps": metadata.get_float("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
    }


def _majority_dtype(metadata: MetadataReader) -> str:
    """That of most weights."""
    values: Counter[str] = Counter()
    for info in metadata.tensors.values():
        values[DTYPES.get(info.tensor_type.name, "bfloat16")] += info.num_values
    return values.most_common(1)[0][0]


def _bias_options(metadata: MetadataReader) -> Options:
    """No key tells of biases; where the architecture leaves them open, the first layer's tensors do."""
    options: Options = {}
    if metadata.architecture in ("llama", "qwen3"):
        options["attention_bias"] = "blk.0.attn_q.bias" in metadata.tensors
    if metadata.architecture == "llama":
        options["mlp_bias"] = "blk.0.ffn_up.bias" in metadata.tensors
    return options


def _activation_options(metadata: MetadataReader) -> Options:
    """No key tells of it either."""
    return (
        {"hidden_activation": "gelu_pytorch_tanh"}
        if metadata.architecture in GEMMA_WINDOW_PERIOD
        else {"hidden_act": "silu"}
    )


def _family_options(metadata: MetadataReader) -> Options:
    if metadata.architecture == "phi3":
        return {"sliding_window": metadata.get_int("attention.sliding_window", 0, low=0) or None}
    return _gemma_options(metadata) if metadata.architecture in GEMMA_WINDOW_PERIOD else {}


def _gemma_options(metadata: MetadataReader) -> Options:
    layers, name = metadata.get_int("block_count"), metadata.architecture
    share = metadata.get_int("embedding_length") // metadata.get_int("attention.head_count")
    options: Options = {
        "query_pre_attn_scalar": share if layers == GEMMA_27B_NUM_LAYERS[name] else metadata.get_head_dim(),
        "layer_types": _read_layer_types(metadata, layers),
        "final_logit_softcapping": metadata.get_optional_float("final_logit_softcapping"),
        "sliding_window": metadata.get_int("attention.sliding_window", GEMMA2_WINDOW, low=0) or GEMMA2_WINDOW,
    }
    if name == "gemma2":
        return options | {"attn_logit_softcapping": metadata.get_optional_float("attn_logit_softcapping")}
    return options | {"rope_local_base_freq": read_rope_theta(metadata, "rope.freq_base_swa", LOCAL_THETA)}


def _read_layer_types(metadata: MetadataReader, num_layers: int) -> list[str]:
    """By a period or a list of flags; a Gemma 3 without a window sees everything in all layers."""
    default = 0 if metadata.architecture == "gemma3" else GEMMA2_WINDOW
    if not metadata.get_int("attention.sliding_window", default, low=0):
        return ["full_attention"] * num_layers
    pattern = metadata.get("attention.sliding_window_pattern", GEMMA_WINDOW_PERIOD[metadata.architecture])
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(item, bool) for item in pattern):
            raise metadata.error(
                "attention.sliding_window_pattern",
                f"must be a number or {num_layers} flags, got {len(pattern)} values",
            )
        sliding = pattern
    else:
        period = metadata.get_int(
            "attention.sliding_window_pattern", GEMMA_WINDOW_PERIOD[metadata.architecture]
        )
        sliding = [(index + 1) % period != 0 for index in range(num_layers)]
    return ["sliding_attention" if item else "full_attention" for item in sliding]
