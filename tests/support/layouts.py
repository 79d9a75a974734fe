"""Names and shapes of the tensors of families that differ from Llama by options alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Flag = Callable[[dict[str, Any]], bool]


def never(config: dict[str, Any]) -> bool:
    return False


def option(key: str, default: bool = False) -> Flag:
    return lambda config: bool(config.get(key, default))


def always(config: dict[str, Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of a family; flags say which projections have biases."""

    architecture: str  # class of transformers
    body: str = "model"
    layers: str = "layers"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    last_norm: str = "norm"
    embedding: str = "embed_tokens"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: fused
    out: str = "o_proj"
    qkv_bias: Flag = never
    out_bias: Flag = never
    qk_norms: tuple[str, ...] = ()
    qk_norm_option: Flag = always
    norms_all_heads: bool = False
    norms_by_head: bool = False
    sinks: bool = False
    gate_up: tuple[str, ...] = (
        "gate_proj",
        "up_proj",
    )  # rows of each: intermediate_size, or 2 of it if fused
    fuses_gate_up: bool = False
    down: str = "down_proj"
    mlp_bias: Flag = never
    xielu: bool = False
    head_bias: Flag = never
    is_sparse: Callable[[dict[str, Any], int], bool] | None = None  # whether a layer has experts
    module: str = "mlp"
    router: str = "gate.weight"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_size: str = "moe_intermediate_size"
    score_bias: str | None = None
    score_bias_is_row: bool = False
    shared: str = "mlp.shared_experts"
    num_shared: str = "n_shared_experts"


def first_dense(config: dict[str, Any], index: int) -> bool:
    return index >= config.get("first_k_dense_replace", 0)


def by_mlp_types(config: dict[str, Any], index: int) -> bool:
    return config.get("mlp_layer_types", ["sparse"] * 99)[index] == "sparse"


ROUTED = {"is_sparse": first_dense, "score_bias": "mlp.gate.e_score_correction_bias"}
QK = ("q_norm", "k_norm")
COHERE = {
    "norms": ("input_layernorm",),
    "qkv_bias": option("attention_bias"),
    "out_bias": option("attention_bias"),
}
BAILING = {
    "embedding": "word_embeddings",
    "attention": "attention",
    "qkv": ("query_key_value",),
    "out": "dense",
    "is_sparse": first_dense,
    "num_shared": "num_shared_experts",
}
GLM = {"qkv_bias": option("attention_bias", True), "gate_up": ("gate_up_proj",), "fuses_gate_up": True}
LAYOUTS: dict[str, Layout] = {
    "apertus": Layout(
        "ApertusForCausalLM",
        norms=("attention_layernorm", "feedforward_layernorm"),
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        qk_norms=QK,
        gate_up=("up_proj",),
        xielu=True,
    ),
    "arcee": Layout(
        "ArceeForCausalLM",
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        gate_up=("up_proj",),
        mlp_bias=option("mlp_bias"),
    ),
    "bailing_moe": Layout("BailingMoeForCausalLM", **BAILING),
    "bailing_moe_v2": Layout(
        "BailingMoeV2ForCausalLM",
        qk_norms=("query_layernorm", "key_layernorm"),
        score_bias="mlp.gate.expert_bias",
        **BAILING,
    ),
    "cohere": Layout(
        "CohereForCausalLM",
        qk_norms=QK,
        qk_norm_option=option("use_qk_norm"),
        norms_by_head=True,
        **COHERE,
    ),
    "cohere2": Layout("Cohere2ForCausalLM", **COHERE),
    "cohere2_moe": Layout(
        "Cohere2MoeForCausalLM",
        is_sparse=first_dense,
        expert_size="intermediate_size",
        num_shared="num_shared_experts",
        **COHERE,
    ),
    "dots1": Layout(
        "Dots1ForCausalLM",
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        qk_norms=QK,
        **ROUTED,
    ),
    "ernie4_5_moe": Layout(
        "Ernie4_5_MoeForCausalLM",
        qkv_bias=option("use_bias"),
        out_bias=option("use_bias"),
        mlp_bias=option("use_bias"),
        is_sparse=lambda config, index: index >= config["moe_layer_start_index"],
        score_bias="mlp.moe_statics.e_score_correction_bias",
        score_bias_is_row=True,
        num_shared="moe_num_shared_experts",
    ),
    "exaone": Layout(
        "ExaoneForCausalLM",
        body="transformer",
        layers="h",
        norms=("ln_1", "ln_2"),
        last_norm="ln_f",
        embedding="wte",
        attention="attn.attention",
        out="out_proj",
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        gate_up=("c_fc_0", "c_fc_1"),
        down="c_proj",
        mlp_bias=option("mlp_bias"),
    ),
    "exaone_moe": Layout("ExaoneMoeForCausalLM", qk_norms=QK, num_shared="num_shared_experts", **ROUTED),
    "gemma": Layout("GemmaForCausalLM"),
    "glm": Layout("GlmForCausalLM", **GLM),
    "glm4": Layout(
        "Glm4ForCausalLM",
        norms=(
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        **GLM,
    ),
    "glm4_moe": Layout(
        "Glm4MoeForCausalLM",
        qkv_bias=option("attention_bias"),
        qk_norms=QK,
        qk_norm_option=option("use_qk_norm"),
        **ROUTED,
    ),
    "granite_swa": Layout("GraniteSWAForCausalLM", sinks=True),
    "hunyuan_v1_moe": Layout(
        "HunYuanMoEV1ForCausalLM",
        qk_norms=("query_layernorm", "key_layernorm"),
        is_sparse=lambda config, index: True,
        router="gate.wg.weight",
        expert_size="intermediate_size",
        shared="mlp.shared_mlp",
    ),
    "mellum": Layout("MellumForCausalLM", qk_norms=QK, is_sparse=by_mlp_types),
    "minimax_m2": Layout(
        "MiniMaxM2ForCausalLM",
        qk_norms=QK,
        norms_all_heads=True,
        is_sparse=lambda config, index: True,
        module="block_sparse_moe",
        experts=("w1", "w3", "w2"),
        expert_size="intermediate_size",
        score_bias="block_sparse_moe.e_score_correction_bias",
    ),
    "ministral": Layout("MinistralForCausalLM"),
    "nemotron": Layout(
        "NemotronForCausalLM",
        norm_bias=True,
        gate_up=("up_proj",),
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        mlp_bias=option("mlp_bias"),
    ),
    "phi": Layout(
        "PhiForCausalLM",
        norms=("input_layernorm",),
        norm_bias=True,
        last_norm="final_layernorm",
        out="dense",
        qkv_bias=always,
        out_bias=always,
        gate_up=("fc1",),
        down="fc2",
        mlp_bias=always,
        head_bias=always,
    ),
    "phimoe": Layout(
        "PhimoeForCausalLM",
        norm_bias=True,
        qkv_bias=option("attention_bias"),
        out_bias=option("attention_bias"),
        head_bias=option("lm_head_bias"),
        is_sparse=lambda config, index: True,
        module="block_sparse_moe",
        experts=("w1", "w3", "w2"),
        expert_size="intermediate_size",
    ),
    "seed_oss": Layout(
        "SeedOssForCausalLM",
        qkv_bias=option("attention_bias", True),
        out_bias=option("attention_out_bias"),
        mlp_bias=option("mlp_bias"),
    ),
    "solar_open": Layout("SolarOpenForCausalLM", qkv_bias=option("attention_bias"), **ROUTED),
    "stablelm": Layout("StableLmForCausalLM", norm_bias=True, qkv_bias=option("use_qkv_bias")),
    "starcoder2": Layout(
        "Starcoder2ForCausalLM",
        norm_bias=True,
        qkv_bias=option("use_bias", True),
        out_bias=option("use_bias", True),
        gate_up=("c_fc",),
        down="c_proj",
        mlp_bias=option("use_bias", True),
    ),
}
LAYER_NORM_FAMILIES = (
    *("cohere", "cohere2", "cohere2_moe", "nemotron", "phi", "phimoe", "stablelm", "starcoder2"),
)

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROUTED_EXPERTS: dict[str, Any] = {
    **EXPERTS,
    "num_experts": ...,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
LAYER_NORM: dict[str, Any] = {"rms_norm_eps": ..., "layer_norm_eps": 1e-5}
COHERE_OPTIONS: dict[str, Any] = {**LAYER_NORM, "tie_word_embeddings": True, "logit_scale": 0.3}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
# Options of config.json beside the common ones; ... removes one
LAYOUT_OPTIONS: dict[str, dict[str, Any]] = {
    "apertus": {
        "hidden_act": "xielu",
        "rope_theta": ...,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "arcee": {"hidden_act": "relu2"},
    "bailing_moe": {**EXPERTS, "num_shared_experts": 2, "norm_topk_prob": True},
    "bailing_moe_v2": {
        **EXPERTS,
        "head_dim": 16,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.3,
        "score_function": "sigmoid",
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "cohere": COHERE_OPTIONS,
    "cohere2": {**COHERE_OPTIONS, "sliding_window": 24, "sliding_window_pattern": 2},
    "cohere2_moe": {
        **COHERE_OPTIONS,
        **EXPERTS,
        "moe_intermediate_size": ...,
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 96,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
    },
    "dots1": {**ROUTED_EXPERTS, "sliding_window": 24, "max_window_layers": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "use_bias": False,
    },
    "exaone": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "exaone_moe": {
        **ROUTED_EXPERTS,
        "n_routed_experts": ...,
        "n_shared_experts": ...,
        "num_experts": 8,
        "num_shared_experts": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "gemma": {"head_dim": 16, "hidden_act": "gelu", "tie_word_embeddings": True},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**ROUTED_EXPERTS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "granite_swa": {
        **GRANITE,
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "layer_rope_theta": [10000.0, 0, 500.0],
    },
    "hunyuan_v1_moe": {
        **EXPERTS,
        "num_experts_per_tok": ...,
        "moe_topk": [3, 3],
        "moe_intermediate_size": ...,
        "intermediate_size": 48,
        "head_dim": 16,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "mellum": {
        **EXPERTS,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 24,
        "rope_theta": ...,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "ministral": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron": {"rms_norm_eps": ..., "norm_eps": 1e-5, "hidden_act": "relu2"},
    "phi": {**LAYER_NORM, "hidden_act": "gelu_new"},
    "phimoe": {
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "router_jitter_noise": 0.3,  # 0.01 leaves few logits near each other
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "seed_oss": {"head_dim": 16},
    "solar_open": {
        **ROUTED_EXPERTS,
        "first_k_dense_replace": ...,
        "intermediate_size": ...,
        "head_dim": 16,
        "rope_theta": ...,
        "rope_parameters": YARN,
    },
    "stablelm": {**LAYER_NORM, "use_qkv_bias": True},
    "starcoder2": {
        "rms_norm_eps": ...,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 24,
        "tie_word_embeddings": True,
    },
}


def layout_shapes(layout: Layout, config: dict[str, Any]) -> Shapes:
    """Names and shapes of a checkpoint's tensors."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    result: Shapes = {
        f"{layout.body}.{layout.embedding}.weight": (vocab, hidden),
        **_norm(layout, f"{layout.body}.{layout.last_norm}", hidden),
    }
    if not config["tie_word_embeddings"]:
        result |= linear_shapes("lm_head", vocab, hidden, layout.head_bias(config))
    for index in range(config.get("num_layers") or config["num_hidden_layers"]):
        layer = _attention(layout, config)
        for name in layout.norms:
            layer |= _norm(layout, name, hidden)
        is_sparse = layout.is_sparse is not None and layout.is_sparse(config, index)
        if is_sparse:
            layer |= _experts(layout, config)
        else:
            size = config.get("prefix_dense_intermediate_size") or config["intermediate_size"]
            layer |= _mlp(layout, config, "mlp", size)
        prefix = f"{layout.body}.{layout.layers}.{index}"
        result |= {f"{prefix}.{name}": shape for name, shape in layer.items()}
    return result


def linear_shapes(name: str, outputs: int, inputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(layout: Layout, name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if layout.norm_bias else {})}


def _attention(layout: Layout, config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, (config["num_key_value_heads"] or heads) * head_dim
    sizes = (q, kv, kv) if len(layout.qkv) > 1 else (q + 2 * kv,)
    result: Shapes = {}
    for name, size in zip(layout.qkv, sizes, strict=True):
        result |= linear_shapes(name, size, hidden, layout.qkv_bias(config))
    result |= linear_shapes(layout.out, hidden, q, layout.out_bias(config))
    if layout.qk_norm_option(config):
        for name, size in zip(layout.qk_norms, (q, kv), strict=False):
            shape = (size if layout.norms_all_heads else head_dim,)
            result[f"{name}.weight"] = (size // head_dim, head_dim) if layout.norms_by_head else shape
    if layout.sinks:
        result["sinks"] = (heads,)
    return {f"{layout.attention}.{name}": shape for name, shape in result.items()}


def _mlp(layout: Layout, config: dict[str, Any], name: str, size: int) -> Shapes:
    hidden, bias = config["hidden_size"], layout.mlp_bias(config)
    result: Shapes = {}
    for part in layout.gate_up:
        result |= linear_shapes(f"{name}.{part}", size * (1 + layout.fuses_gate_up), hidden, bias)
    if layout.xielu:
        result |= {f"{name}.act_fn.{part}": shape for part, shape in XIELU_SHAPES.items()}
    return result | linear_shapes(f"{name}.{layout.down}", hidden, size, bias)


XIELU_SHAPES: Shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def _experts(layout: Layout, config: dict[str, Any]) -> Shapes:
    counts = (
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
    count = next(filter(None, counts))
    hidden, size = config["hidden_size"], config[layout.expert_size]
    result: Shapes = {f"{layout.module}.{layout.router}": (count, hidden)}
    if layout.score_bias:
        result[layout.score_bias] = (1, count) if layout.score_bias_is_row else (count,)
    gate, up, down = layout.experts
    for expert in range(count):
        prefix = f"{layout.module}.experts.{expert}"
        result |= {f"{prefix}.{name}.weight": (size, hidden) for name in (gate, up)}
        result[f"{prefix}.{down}.weight"] = (hidden, size)
    shared = 1 if layout.shared == "mlp.shared_mlp" else config.get(layout.num_shared) or 0
    return result | (_mlp(layout, config, layout.shared, shared * size) if shared else {})
