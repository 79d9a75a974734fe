"""Converts GGUF metadata to the options of config.json. A key that is not supported is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError
from foreword.weights.gguf import gemma4_config
from foreword.weights.gguf.expert_config import (
    EXPERTS_TENSOR,
    check_experts,
    expert_options,
    expert_size_key,
    has_experts,
    is_mixtral,
)
from foreword.weights.gguf.header import GGUFFile
from foreword.weights.gguf.latent_config import (
    LATENT_ARCHITECTURES,
    check_latent_heads,
    has_score_bias,
    latent_shape_options,
)
from foreword.weights.gguf.metadata import (
    DEFAULT_THETA,
    LOGIT_SOFTCAP,
    MetadataReader,
    TensorReader,
    read_rope_theta,
    rope_options,
)
from foreword.weights.gguf.state_config import (
    DELTA_NET_ARCHITECTURES,
    LFM2_ARCHITECTURES,
    NEMOTRON_H_ARCHITECTURES,
    SHARED_SIZE,
    SSM_KEYS,
    STATE_ARCHITECTURES,
    falcon_h1_options,
    nemotron_h_options,
    read_attention_layers,
    read_kv_heads,
    read_num_dense_layers,
    read_num_layers,
    state_options,
)
from foreword.weights.gguf.tensor_names import POST_NORM_ARCHITECTURES
from foreword.weights.unsupported_families import missing_feature

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "apertus": "apertus",
        "arcee": "arcee",
        "bailingmoe2": "bailing_moe_v2",
        "cohere2": "cohere2",
        "command-r": "cohere",
        "dots1": "dots1",
        "deepseek2": "deepseek_v2",  # deepseek_v3 if experts are chosen with a bias
        "ernie4_5": "ernie4_5",
        "ernie4_5-moe": "ernie4_5_moe",
        "exaone": "llama",  # which it is under the names of files
        "exaone4": "exaone4",
        "falcon-h1": "falcon_h1",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "glm4": "glm4",
        "glm4moe": "glm4_moe",  # Solar Open too
        "gpt-oss": "gpt_oss",
        "granite": "granite",
        "granitehybrid": "granitemoehybrid",
        "granitemoe": "granitemoe",  # granitemoeshared if it has a shared expert
        "hunyuan-dense": "hunyuan_v1_dense",
        "hunyuan-moe": "hunyuan_v1_moe",
        "lfm2": "lfm2",
        "lfm2moe": "lfm2_moe",
        "llama": "llama",  # mixtral if it has experts
        "minimax-m2": "minimax_m2",
        "mistral3": "mistral",  # ministral3 if it scales queries
        "nemotron": "nemotron",
        "nemotron_h": "nemotron_h",
        "nemotron_h_moe": "nemotron_h",
        "olmo2": "olmo2",  # olmo3 if it has a window
        "olmoe": "olmoe",
        "phi2": "phi",
        "phi3": "phi3",
        "qwen2": "qwen2",
        "qwen2moe": "qwen2_moe",
        "qwen3": "qwen3",
        "qwen35": "qwen3_5_text",
        "qwen35moe": "qwen3_5_moe_text",
        "qwen3moe": "qwen3_moe",
        "qwen3next": "qwen3_next",
        "seed_oss": "seed_oss",
        "smollm3": "smollm3",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
    }
)
NO_MTP_HEAD = {"num_nextn_predict_layers": 0}  # its blocks are split off
MMPROJ_ARCHITECTURE = "clip"  # a vision encoder in a separate file
Options = dict[str, Any]

# Model data type by tensor type; models with quantized weights are bfloat16, like the originals.
DTYPES: Mapping[str, str] = MappingProxyType({"f32": "float32", "f16": "float16"})
QUANTIZATION_VERSION = 2  # version of the blocks' layout
# Every n-th layer has full attention, the others a window.
WINDOW_PERIOD: Mapping[str, int] = MappingProxyType(
    {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2, "olmo2": 4}
)
GEMMA2_WINDOW, GEMMA2_SCORE_SOFTCAP = 4096, 50.0
LOCAL_THETA = 10000.0
# The 27B models scale scores by hidden size / heads instead of the head size; only the layer count tells.
GEMMA_27B_NUM_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
# No key declares biases: where the architecture leaves them open, the first layer's tensors decide.
QKV_BIAS, MLP_BIAS, USE_BIAS = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_up"}, {"use_bias": "attn_q"}
BIAS_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("apertus", "cohere2", "command-r", "glm4", "glm4moe", "gpt-oss"), QKV_BIAS),
        **dict.fromkeys(("granitemoe", "hunyuan-dense", "hunyuan-moe", "olmo2", "olmoe"), QKV_BIAS),
        **dict.fromkeys(("qwen3", "qwen3moe"), QKV_BIAS),
        **dict.fromkeys(("arcee", "exaone", "falcon-h1", "granite", "llama"), QKV_BIAS | MLP_BIAS),
        **dict.fromkeys(("nemotron", "smollm3"), QKV_BIAS | MLP_BIAS),
        **dict.fromkeys(("ernie4_5", "ernie4_5-moe", "starcoder2"), USE_BIAS),
        "bailingmoe2": {"use_qkv_bias": "attn_qkv", "use_bias": "attn_output"},
        "seed_oss": QKV_BIAS | MLP_BIAS | {"attention_out_bias": "attn_output"},
        "stablelm": {"use_qkv_bias": "attn_q"},
    }
)
FUSED_QKV = ("bailingmoe2", "phi3")  # architectures with q, k and v in one tensor
XIELU_CONSTANTS = ("alpha_p", "alpha_n", "beta", "eps")
QKV_TENSOR = "blk.0.attn_qkv.weight"
FUSED_GATE_UP = ("glm4", "phi3")
EPS, RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
LAYER_NORM_ARCHITECTURES = ("cohere2", "command-r", "nemotron", "phi2", "stablelm", "starcoder2")
EPS_OPTIONS: Mapping[str, str] = MappingProxyType(  # rms_norm_eps in the others
    {
        **dict.fromkeys(("cohere2", "command-r", "phi2", "stablelm"), "layer_norm_eps"),
        **dict.fromkeys(LFM2_ARCHITECTURES, "norm_eps"),
        **dict.fromkeys(NEMOTRON_H_ARCHITECTURES, "layer_norm_epsilon"),
        "nemotron": "norm_eps",
        "starcoder2": "norm_epsilon",
    }
)
ACTIVATIONS: Mapping[str, str] = MappingProxyType(  # no key declares them; silu in the others
    {
        **dict.fromkeys(("gemma", "phi2", "starcoder2"), "gelu_pytorch_tanh"),
        **dict.fromkeys(("arcee", "nemotron"), "relu2"),
    }
)
# Keys that are accepted with these values only.
NOOP_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "attention.causal": True,
        "pooling_type": 0,
        "tensor_data_layout": "Meta AI original pth",
        "use_parallel_residual": False,
    }
)


def read_hf_config(gguf: GGUFFile, read_tensor: TensorReader, key_prefix: str = "") -> Options:
    """Options of config.json, including `model_type`; read_tensor reads RoPE tensors by name.

    key_prefix  of the architecture's keys, if not its name
    Raises CheckpointError, which names the key.
    """
    keys = MetadataReader(gguf, _read_architecture(gguf), key_prefix)
    keys.require_general_value("general.type", "model")
    keys.require_general_value("general.quantization_version", QUANTIZATION_VERSION)
    if keys.architecture == gemma4_config.ARCHITECTURE:
        options = _gemma4_options(keys, read_tensor)
    else:
        _check_shape(keys)
        options = (
            _shape_options(keys)
            | expert_options(keys)
            | _bias_options(keys)
            | rope_options(keys, read_tensor)
            | _family_options(keys)
        )
    for key, value in NOOP_VALUES.items():
        keys.require_value(key, value)
    keys.ignore("vocab_size")  # the embedding's rows decide
    keys.check_all_read()
    return options


def _read_architecture(gguf: GGUFFile) -> str:
    name = str(gguf.metadata.get("general.architecture"))
    if name not in MODEL_TYPES:
        if name == MMPROJ_ARCHITECTURE:
            raise CheckpointError(
                f"{gguf.path}: `general.architecture` {name!r}: the file (mmproj) is a vision encoder, not a "
                "model; vision-language models are loaded from directories in Hugging Face's format",
                "model",
            )
        known = ", ".join(sorted(MODEL_TYPES))
        problem = f"`general.architecture` {name!r} is not supported{missing_feature(name)}"
        raise CheckpointError(f"{gguf.path}: {problem}; known: {known}", "model")
    return name


def _gemma4_options(metadata: MetadataReader, read_tensor: TensorReader) -> Options:
    _check_outer_shape(metadata)
    windows = _window_options(metadata)
    own = gemma4_config.gemma4_options(metadata, windows["layer_types"], read_tensor)
    return {**_common_options(metadata), **own, **windows}


def _check_outer_shape(metadata: MetadataReader) -> None:
    _check_layers(metadata)
    hidden = metadata.get_int("embedding_length")
    metadata.check_dimension("embedding_length", "token_embd.weight", 1, hidden)


def _check_shape(metadata: MetadataReader) -> None:
    """Compare the claimed sizes with the tensors before anything is allocated. Raises CheckpointError."""
    _check_outer_shape(metadata)
    _check_heads(metadata)
    if metadata.architecture in NEMOTRON_H_ARCHITECTURES:
        return
    if has_experts(metadata):
        check_experts(metadata)
        return
    tensor = EXPERTS_TENSOR.format(0)
    if tensor in metadata.tensors:
        raise metadata.error("expert_count", f"is 0, but tensor `{tensor}` is there")
    size = metadata.get_int("feed_forward_length") * (1 + (metadata.architecture in FUSED_GATE_UP))
    metadata.check_dimension("feed_forward_length", "blk.0.ffn_up.weight", 0, size)


def _read_intermediate_size(metadata: MetadataReader) -> int:
    """Intermediate size of an MLP, or of an expert in models without MLPs."""
    if metadata.architecture in NEMOTRON_H_ARCHITECTURES:
        return 0  # differs by layer: see nemotron_h_options()
    if not has_experts(metadata) or read_num_dense_layers(metadata):
        return metadata.get_int("feed_forward_length")
    size = metadata.get_int(expert_size_key(metadata))
    metadata.get_int("feed_forward_length", size)  # no layer has an MLP of this size
    return size


def _check_layers(metadata: MetadataReader) -> None:
    layers, tensors = metadata.get_int("block_count"), len(metadata.tensors)
    if layers > tensors:
        raise metadata.error("block_count", f"is {layers}, but the file has {tensors} tensors")
    norm = "post_attention_norm" if metadata.architecture in POST_NORM_ARCHITECTURES else "attn_norm"
    for layer, expected, reason in ((layers - 1, True, "missing"), (layers, False, "there too")):
        name = f"blk.{layer}.{norm}.weight"
        if (name in metadata.tensors) is not expected:
            raise metadata.error("block_count", f"is {layers}, but tensor `{name}` is {reason}")


def _check_heads(metadata: MetadataReader) -> None:
    """The first layer with attention decides. Gated attention has twice the rows of queries."""
    if metadata.architecture in LATENT_ARCHITECTURES:
        check_latent_heads(metadata)
        return
    heads, size = metadata.get_int("attention.head_count"), metadata.get_head_dim()
    kv_heads = read_kv_heads(metadata)
    key = "attention.key_length" if "attention.key_length" in metadata else "attention.head_count"
    is_fused = metadata.architecture in FUSED_QKV
    if is_fused or (metadata.architecture == "phi2" and QKV_TENSOR in metadata.tensors):  # older files
        metadata.check_dimension(key, QKV_TENSOR, 0, (heads + 2 * kv_heads) * size)
        return
    block = f"blk.{read_attention_layers(metadata).index(True)}"
    rows = heads * size * (1 + (metadata.architecture in DELTA_NET_ARCHITECTURES))
    metadata.check_dimension(key, f"{block}.attn_q.weight", 0, rows)
    metadata.check_dimension("attention.head_count_kv", f"{block}.attn_k.weight", 0, kv_heads * size)


def _shape_options(metadata: MetadataReader) -> Options:
    if metadata.architecture in LATENT_ARCHITECTURES:
        attention = latent_shape_options(metadata)
    else:
        head_dim = metadata.get_head_dim()
        metadata.require_value("attention.value_length", head_dim)
        attention = {"num_key_value_heads": read_kv_heads(metadata), "head_dim": head_dim}
    return {
        **_common_options(metadata),
        "intermediate_size": _read_intermediate_size(metadata),
        **attention,
    }


def _common_options(metadata: MetadataReader) -> Options:
    """Options of every family."""
    return {
        "model_type": _read_model_type(metadata),
        "torch_dtype": _majority_dtype(metadata),
        "vocab_size": metadata.gguf.vocab_size,
        "hidden_size": metadata.get_int("embedding_length"),
        "num_hidden_layers": read_num_layers(metadata),
        "num_attention_heads": metadata.get_int("attention.head_count"),
        "max_position_embeddings": metadata.get_int("context_length"),
        **_eps_options(metadata),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
    }


def _eps_options(metadata: MetadataReader) -> Options:
    """An architecture has norms of one kind; the converter may write the other kind's epsilon too."""
    name = metadata.architecture
    key, other = (EPS, RMS_EPS) if name in LAYER_NORM_ARCHITECTURES else (RMS_EPS, EPS)
    if name in NEMOTRON_H_ARCHITECTURES and key not in metadata:
        key, other = other, key
    metadata.ignore(other)
    return {EPS_OPTIONS.get(name, "rms_norm_eps"): metadata.get_float(key)}


def _read_model_type(metadata: MetadataReader) -> str:
    """An architecture of files may be two model types."""
    if metadata.architecture == "olmo2" and _read_window(metadata):
        return "olmo3"
    if metadata.architecture == "mistral3" and metadata.get_optional_float("attention.temperature_scale"):
        return "ministral3"
    if is_mixtral(metadata):
        return "mixtral"
    if metadata.architecture in LATENT_ARCHITECTURES and has_score_bias(metadata):
        return "deepseek_v3"
    if metadata.architecture == "granitemoe" and metadata.get_int(SHARED_SIZE, 0, low=0):
        return "granitemoeshared"
    return MODEL_TYPES[metadata.architecture]


def _majority_dtype(metadata: MetadataReader) -> str:
    """Data type of most weights."""
    values: Counter[str] = Counter()
    for info in metadata.tensors.values():
        values[DTYPES.get(info.tensor_type.name, "bfloat16")] += info.num_values
    return values.most_common(1)[0][0]


def _bias_options(metadata: MetadataReader) -> Options:
    options = {} if is_mixtral(metadata) else BIAS_OPTIONS.get(metadata.architecture, {})
    return {option: f"blk.0.{name}.bias" in metadata.tensors for option, name in options.items()}


def _family_options(metadata: MetadataReader) -> Options:
    """Activation (no key declares it), windows, softcaps and multipliers."""
    name = metadata.architecture
    if name.startswith("gemma") and name != "gemma":
        return {"hidden_activation": "gelu_pytorch_tanh"} | _gemma_options(metadata)
    if name in NEMOTRON_H_ARCHITECTURES:
        return nemotron_h_options(metadata)
    if name == "falcon-h1":
        return falcon_h1_options(metadata)
    if name == "granitehybrid":
        return state_options(metadata) | _granite_hybrid_options(metadata)
    if name in STATE_ARCHITECTURES:
        return state_options(metadata)
    options: Options = {"hidden_act": ACTIVATIONS.get(name, "silu")}
    if name == "apertus":
        return {"xielu": _xielu_options(metadata)}
    if name in ("cohere2", "command-r"):
        return options | _cohere_options(metadata)
    if name == "glm4moe":
        return options | {"use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.tensors, **NO_MTP_HEAD}
    if name == "hunyuan-moe":
        metadata.require_value("expert_shared_count", 1)
        metadata.require_value(SHARED_SIZE, metadata.get_int(expert_size_key(metadata)))
    if name in ("granite", "granitemoe"):
        return options | _granite_options(metadata)
    if name in ("dots1", "mistral3"):
        return options | {"sliding_window": None}
    if name in ("phi3", "starcoder2"):
        return options | {"sliding_window": _read_window(metadata)}
    if name in ("exaone4", "gpt-oss") or _read_model_type(metadata) == "olmo3":
        theta = read_rope_theta(metadata, "rope.freq_base", DEFAULT_THETA)
        metadata.require_value("rope.freq_base_swa", theta)
        return options | _window_options(metadata)
    return options


def _window_options(metadata: MetadataReader) -> Options:
    layer_types = _read_layer_types(metadata, metadata.get_int("block_count"))
    return {"sliding_window": _read_window(metadata), "layer_types": layer_types}


def _xielu_options(metadata: MetadataReader) -> Options:
    """Constants of each layer's activation; their keys have no architecture in front."""
    count = read_num_layers(metadata)
    return {name: metadata.get_general_numbers(f"xielu.{name}", count) for name in XIELU_CONSTANTS}


def _granite_hybrid_options(metadata: MetadataReader) -> Options:
    """Without experts the MLP has the place of the shared expert."""
    if metadata.get("rope.scaling.finetuned", True) is not False:  # files of Bamba, which has RoPE
        raise metadata.error("rope.scaling.finetuned", "must be false here: Bamba is not supported")
    inner, hidden = metadata.get_int("ssm.inner_size"), metadata.get_int("embedding_length")
    if inner % hidden:
        raise metadata.error("ssm.inner_size", f"must be a multiple of embedding_length, {hidden}")
    options: Options = {
        "mamba_expand": inner // hidden,
        "position_embedding_type": "nope",
        "num_local_experts": metadata.get_int("expert_count", 0, low=0),
    }
    if not options["num_local_experts"]:
        options["shared_intermediate_size"] = metadata.get_int("feed_forward_length")
        metadata.ignore(SHARED_SIZE)
    return options | _granite_multipliers(metadata)


def _cohere_options(metadata: MetadataReader) -> Options:
    options: Options = {"logit_scale": metadata.get_float("logit_scale")}
    if metadata.architecture == "command-r":
        return options | {"use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.tensors}
    return options | _window_options(metadata)


def _granite_options(metadata: MetadataReader) -> Options:
    metadata.require_value("rope.scaling.finetuned", True)  # false means no RoPE here
    for key in SSM_KEYS:  # the converter of Granite 4 writes them for models without Mamba-2 too
        metadata.ignore(key)
    if metadata.architecture == "granite":
        metadata.ignore(SHARED_SIZE)
    return _granite_multipliers(metadata)


def _granite_multipliers(metadata: MetadataReader) -> Options:
    return {
        "attention_multiplier": metadata.get_optional_float("attention.scale")
        or metadata.get_head_dim() ** -0.5,
        "embedding_multiplier": metadata.get_optional_float("embedding_scale") or 1.0,
        "residual_multiplier": metadata.get_optional_float("residual_scale") or 1.0,
        "logits_scaling": metadata.get_float("logit_scale"),
    }


def _gemma_options(metadata: MetadataReader) -> Options:
    layers, name = metadata.get_int("block_count"), metadata.architecture
    share = metadata.get_int("embedding_length") // metadata.get_int("attention.head_count")
    logit_softcap = LOGIT_SOFTCAP if name == "gemma2" else None
    options: Options = {
        "query_pre_attn_scalar": share if layers == GEMMA_27B_NUM_LAYERS[name] else metadata.get_head_dim(),
        "layer_types": _read_layer_types(metadata, layers),
        "final_logit_softcapping": metadata.get_optional_float("final_logit_softcapping", logit_softcap),
        "sliding_window": _read_window(metadata) or GEMMA2_WINDOW,
    }
    if name == "gemma2":
        softcap = metadata.get_optional_float("attn_logit_softcapping", GEMMA2_SCORE_SOFTCAP)
        return options | {"attn_logit_softcapping": softcap}
    return options | {"rope_local_base_freq": read_rope_theta(metadata, "rope.freq_base_swa", LOCAL_THETA)}


def _read_window(metadata: MetadataReader) -> int | None:
    """None means full attention in all layers."""
    default = GEMMA2_WINDOW if metadata.architecture == "gemma2" else 0
    return metadata.get_int("attention.sliding_window", default, low=0) or None


def _read_layer_types(metadata: MetadataReader, num_layers: int) -> list[str]:
    """From a period or a list of flags."""
    default = WINDOW_PERIOD[metadata.architecture]
    if _read_window(metadata) is None:
        return ["full_attention"] * num_layers
    pattern = metadata.get("attention.sliding_window_pattern", default)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(item, bool) for item in pattern):
            reason = f"must be a number or {num_layers} flags, got {len(pattern)} values"
            raise metadata.error("attention.sliding_window_pattern", reason)
        sliding = pattern
    else:
        period = metadata.get_int("attention.sliding_window_pattern", default)
        sliding = [(index + 1) % period != 0 for index in range(num_layers)]
    return ["sliding_attention" if item else "full_attention" for item in sliding]
