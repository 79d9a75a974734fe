"""What a GGUF file's metadata says of its model, as the options that config.json would have.

Read as strictly: a key of the architecture that is not honoured here is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.gguf.keys import Keys
from foreword.models.gguf.reader import GGUF
from foreword.models.gguf.rope import Factors, frequency_base, rope_options
from foreword.models.gguf.shape import check_shape

__all__ = ["MODEL_TYPES", "read_options"]

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
TOWER = "clip"  # of whatever model, in a file of its own
Options = dict[str, Any]

# Activations beside quantized weights are bfloat16, as beside the weights that these were made from.
DTYPES: Mapping[str, str] = MappingProxyType({"f32": "float32", "f16": "float16"})
QUANTIZATION_VERSION = 2  # of the blocks' layout
GEMMA_PERIOD: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3": 6})  # the last layer of each run sees everything
GEMMA2_WINDOW = 4096
LOCAL_THETA = 10000.0
# Layers of the 27B models, whose scores are scaled by hidden size / heads instead of the size of a head: no key tells.
GEMMA_27B: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
# Keys that may be there as long as they ask for nothing.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "pooling_type": 0,
        "tensor_data_layout": "Meta AI original pth",
        "use_parallel_residual": False,
    }
)


def read_options(gguf: GGUF, factors: Factors) -> Options:
    """config.json's options, `model_type` among them.

    factors  reads one of the small tensors that belong to RoPE, by name
    Raises CheckpointError, which names the key.
    """
    keys = Keys(gguf, _architecture(gguf))
    keys.expect_general("general.type", "model")
    keys.expect_general("general.quantization_version", QUANTIZATION_VERSION)
    check_shape(keys)
    options = _shape(keys) | _biases(keys) | rope_options(keys, factors) | _activation(keys) | _family(keys)
    for key, value in NEUTRAL.items():
        keys.expect(key, value)
    keys.ignore("vocab_size")  # the embedding's rows count
    keys.finish()
    return options


def _architecture(gguf: GGUF) -> str:
    name = str(gguf.metadata.get("general.architecture"))
    if name not in MODEL_TYPES:
        if name == TOWER:
            raise CheckpointError(
                f"{gguf.path}: `general.architecture` {name!r}: the file (mmproj) holds a tower that sees pictures, not the "
                "model; models that see are read from directories in Hugging Face's format",
                "model",
            )
        known = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(f"{gguf.path}: `general.architecture` {name!r} is not supported; known: {known}", "model")
    return name


def _shape(keys: Keys) -> Options:
    head_dim = keys.head_dim()
    keys.expect("attention.value_length", head_dim)
    return {
        "model_type": MODEL_TYPES[keys.architecture],
        "torch_dtype": _dtype(keys),
        "vocab_size": keys.tensor("token_embd.weight").shape[0],
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": keys.whole("attention.head_count"),
        "num_key_value_heads": keys.whole("attention.head_count_kv", keys.whole("attention.head_count")),
        "head_dim": head_dim,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def _dtype(keys: Keys) -> str:
    """That of most weights."""
    values: Counter[str] = Counter()
    for info in keys.tensors.values():
        values[DTYPES.get(info.kind.name, "bfloat16")] += info.values
    return values.most_common(1)[0][0]


def _biases(keys: Keys) -> Options:
    """No key tells of biases; where the architecture leaves them open, the first layer's tensors do."""
    options: Options = {}
    if keys.architecture in ("llama", "qwen3"):
        options["attention_bias"] = "blk.0.attn_q.bias" in keys.tensors
    if keys.architecture == "llama":
        options["mlp_bias"] = "blk.0.ffn_up.bias" in keys.tensors
    return options


def _activation(keys: Keys) -> Options:
    """No key tells of it either."""
    return {"hidden_activation": "gelu_pytorch_tanh"} if keys.architecture in GEMMA_PERIOD else {"hidden_act": "silu"}


def _family(keys: Keys) -> Options:
    if keys.architecture == "phi3":
        return {"sliding_window": keys.whole("attention.sliding_window", 0, low=0) or None}
    return _gemma(keys) if keys.architecture in GEMMA_PERIOD else {}


def _gemma(keys: Keys) -> Options:
    layers, name = keys.whole("block_count"), keys.architecture
    share = keys.whole("embedding_length") // keys.whole("attention.head_count")
    options: Options = {
        "query_pre_attn_scalar": share if layers == GEMMA_27B[name] else keys.head_dim(),
        "layer_types": _layer_types(keys, layers),
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
        "sliding_window": keys.whole("attention.sliding_window", GEMMA2_WINDOW, low=0) or GEMMA2_WINDOW,
    }
    if name == "gemma2":
        return options | {"attn_logit_softcapping": keys.optional_number("attn_logit_softcapping")}
    return options | {"rope_local_base_freq": frequency_base(keys, "rope.freq_base_swa", LOCAL_THETA)}


def _layer_types(keys: Keys, layers: int) -> list[str]:
    """By a period or a list of flags; a Gemma 3 without a window sees everything in all layers."""
    default = 0 if keys.architecture == "gemma3" else GEMMA2_WINDOW
    if not keys.whole("attention.sliding_window", default, low=0):
        return ["full_attention"] * layers
    pattern = keys.raw("attention.sliding_window_pattern", GEMMA_PERIOD[keys.architecture])
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
            raise keys.refuse(
                "attention.sliding_window_pattern", f"must be a number or {layers} flags, got {len(pattern)} values"
            )
        sliding = pattern
    else:
        period = keys.whole("attention.sliding_window_pattern", GEMMA_PERIOD[keys.architecture])
        sliding = [(index + 1) % period != 0 for index in range(layers)]
    return ["sliding_attention" if item else "full_attention" for item in sliding]
