"""Options of config.json for GGUF architectures whose layers have states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreword.weights.config_reader import MAX_INT
from foreword.weights.gguf.header import GGUFFile
from foreword.weights.gguf.metadata import MetadataReader

LFM2_ARCHITECTURES = ("lfm2", "lfm2moe")
DELTA_NET_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
MAMBA2_ARCHITECTURES = ("granitehybrid",)
ROUTED_ARCHITECTURES = ("bailingmoe2", "dots1", "glm4moe")  # experts as in DeepSeek-V3
NEMOTRON_H_ARCHITECTURES = ("nemotron_h", "nemotron_h_moe")
MTP_ARCHITECTURES = (
    *(*DELTA_NET_ARCHITECTURES, *NEMOTRON_H_ARCHITECTURES),
    *("bailingmoe2", "deepseek2", "glm4moe"),
)
STATE_ARCHITECTURES = (*LFM2_ARCHITECTURES, *DELTA_NET_ARCHITECTURES, *MAMBA2_ARCHITECTURES)
INTERVAL = 4  # every n-th layer of a DeltaNet architecture has attention
MAX_MROPE_SECTIONS = 4
SSM_KEYS = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)
KV_HEADS, DENSE_LAYERS = "attention.head_count_kv", "leading_dense_block_count"
FEED_FORWARD, SIGMOID_GATING = "feed_forward_length", 2
PATTERN_TENSORS = {"M": "ssm_in", "*": "attn_k", "-": "ffn_up", "E": "ffn_gate_inp"}
RECURRENT_LAYERS = "attention.recurrent_layers"
SHARED_SIZE = "expert_shared_feed_forward_length"


def read_num_layers(metadata: MetadataReader) -> int:
    """Layers of the model: blocks but those of the MTP head, which come last."""
    blocks = metadata.get_int("block_count")
    if metadata.architecture not in MTP_ARCHITECTURES:
        return blocks
    drafting = metadata.get_int("nextn_predict_layers", 0, low=0)
    if drafting >= blocks:
        raise metadata.error("nextn_predict_layers", f"must be below block_count, {blocks}, got {drafting}")
    return blocks - drafting


def split_mtp_head(gguf: GGUFFile) -> tuple[GGUFFile, GGUFFile]:
    """The file without the blocks of an MTP head, and with these alone. Its config has been read."""
    metadata = MetadataReader(gguf, gguf.metadata["general.architecture"])
    blocks = range(read_num_layers(metadata), metadata.get_int("block_count"))
    prefixes = tuple(f"blk.{block}." for block in blocks)
    drafting = {name: info for name, info in gguf.tensors.items() if name.startswith(prefixes)}
    others = {name: info for name, info in gguf.tensors.items() if name not in drafting}
    return replace(gguf, tensors=others), replace(gguf, tensors=drafting)


def read_kv_heads(metadata: MetadataReader) -> int:
    """Heads of keys and values. LFM2 and Mamba-2 hybrids have one number per layer, 0 for a state."""
    counts: list[int] | int | None = metadata.get(KV_HEADS, None)
    by_layer = (*LFM2_ARCHITECTURES, *MAMBA2_ARCHITECTURES, *NEMOTRON_H_ARCHITECTURES)
    has_counts = metadata.architecture in by_layer
    if not has_counts or not isinstance(counts, list):
        return metadata.get_int(KV_HEADS, metadata.get_int("attention.head_count"))
    blocks = metadata.get_int("block_count")
    is_valid = all(type(count) is int and 0 <= count <= MAX_INT for count in counts)
    if len(counts) != blocks or not is_valid or len(set(counts) - {0}) != 1:
        reason = f"must be a number or {blocks} numbers, 0 or all equal, got {counts!s:.60}"
        raise metadata.error(KV_HEADS, reason)
    return max(counts)


def read_attention_layers(metadata: MetadataReader) -> list[bool]:
    """Whether each layer has attention, not a state; compared with the layers' tensors."""
    num_layers = read_num_layers(metadata)
    if metadata.architecture in NEMOTRON_H_ARCHITECTURES:
        return [kind == "*" for kind in read_pattern(metadata)]
    if metadata.architecture not in STATE_ARCHITECTURES:
        return [True] * num_layers
    key, flags = _read_layer_flags(metadata, num_layers)
    for layer, has_attention in enumerate(flags):
        tensor = f"blk.{layer}.attn_k.weight"
        if (tensor in metadata.tensors) is not has_attention:
            kind, state = ("attention", "missing") if has_attention else ("a state", "there")
            raise metadata.error(key, f"gives layer {layer} {kind}, but tensor `{tensor}` is {state}")
    if not any(flags):
        raise metadata.error(key, f"leaves none of {num_layers} layers with attention")
    return flags


def _read_layer_flags(metadata: MetadataReader, num_layers: int) -> tuple[str, list[bool]]:
    """The key that decides, and whether each layer has attention."""
    if metadata.architecture not in DELTA_NET_ARCHITECTURES:
        read_kv_heads(metadata)
        counts = metadata.get(KV_HEADS, None)
        return KV_HEADS, [count > 0 for count in counts] if isinstance(counts, list) else [True] * num_layers
    interval = metadata.get_int("full_attention_interval", INTERVAL)
    if RECURRENT_LAYERS in metadata:
        recurrent = _read_recurrent_layers(metadata)[:num_layers]
        return RECURRENT_LAYERS, [not is_recurrent for is_recurrent in recurrent]
    return "full_attention_interval", [(index + 1) % interval == 0 for index in range(num_layers)]


def _read_recurrent_layers(metadata: MetadataReader) -> list[bool]:
    """One flag per block."""
    flags, blocks = metadata.get(RECURRENT_LAYERS), metadata.get_int("block_count")
    if not isinstance(flags, list) or len(flags) != blocks or not all(type(flag) is bool for flag in flags):
        raise metadata.error(RECURRENT_LAYERS, f"must be {blocks} flags, got {flags!s:.60}")
    return flags


def read_num_dense_layers(metadata: MetadataReader) -> int:
    """First layers with an MLP instead of experts."""
    if metadata.architecture not in ("deepseek2", "ernie4_5-moe", "lfm2moe", *ROUTED_ARCHITECTURES):
        return 0
    count, num_layers = metadata.get_int(DENSE_LAYERS, 0, low=0), read_num_layers(metadata)
    for layer, name in ((count - 1, "ffn_up"), (count, "ffn_gate_inp")):
        tensor = f"blk.{layer}.{name}.weight"
        if layer >= num_layers or (layer >= 0 and tensor not in metadata.tensors):
            raise metadata.error(DENSE_LAYERS, f"is {count}, but tensor `{tensor}` is missing")
    return count


def state_options(metadata: MetadataReader) -> dict[str, Any]:
    """Layer types and the shape of states, compared with the first layer that has one."""
    flags = read_attention_layers(metadata)
    if metadata.architecture in LFM2_ARCHITECTURES:
        return _lfm2_options(metadata, flags)
    if metadata.architecture in MAMBA2_ARCHITECTURES:
        return _granite_options(metadata, flags)
    return _delta_net_options(metadata, flags)


def _lfm2_options(metadata: MetadataReader, flags: list[bool]) -> dict[str, Any]:
    kernel_size = metadata.get_int("shortconv.l_cache")
    if False in flags:
        name = f"blk.{flags.index(False)}.shortconv.conv.weight"
        metadata.check_dimension("shortconv.l_cache", name, 1, kernel_size)
    options: dict[str, Any] = {
        "layer_types": ["full_attention" if has_attention else "conv" for has_attention in flags],
        "conv_L_cache": kernel_size,
    }
    if metadata.architecture == "lfm2":
        return options | {"block_auto_adjust_ff_dim": False}
    return options | {"num_dense_layers": read_num_dense_layers(metadata), "use_expert_bias": True}


def _granite_options(metadata: MetadataReader, flags: list[bool]) -> dict[str, Any]:
    block = f"blk.{flags.index(False)}" if False in flags else None
    return {
        **_mamba2_options(metadata, block),
        "layer_types": ["full_attention" if has_attention else "linear_attention" for has_attention in flags],
        "attention_bias": f"blk.{flags.index(True)}.attn_q.bias" in metadata.tensors,
    }


def read_pattern(metadata: MetadataReader) -> str:
    """Nemotron-H's layers, as in `hybrid_override_pattern`; compared with the layers' tensors."""
    num_layers, is_moe = read_num_layers(metadata), metadata.architecture == "nemotron_h_moe"
    read_kv_heads(metadata)
    heads, sizes = _read_by_block(metadata, KV_HEADS), _read_by_block(metadata, FEED_FORWARD)
    if len({*sizes} - {0}) > 1:
        raise metadata.error(FEED_FORWARD, "must be equal in all layers that have an MLP or experts")
    pattern = ""
    for layer, (count, size) in enumerate(zip(heads, sizes, strict=True)):
        pattern += "*" if count else ("-E"[is_moe] if size else "M")
        tensor = f"blk.{layer}.{PATTERN_TENSORS[pattern[-1]]}.weight"
        if layer < num_layers and tensor not in metadata.tensors:
            raise metadata.error(KV_HEADS, f"and {FEED_FORWARD} need tensor `{tensor}`, which is missing")
    if "*" not in pattern[:num_layers]:
        raise metadata.error(KV_HEADS, f"leaves none of {num_layers} layers with attention")
    return pattern[:num_layers]


def _read_by_block(metadata: MetadataReader, key: str) -> list[int]:
    value, blocks = metadata.get(key), metadata.get_int("block_count")
    values = value if isinstance(value, list) else [value] * blocks  # equal ones are collapsed
    if len(values) != blocks or not all(type(each) is int and 0 <= each <= MAX_INT for each in values):
        raise metadata.error(key, f"must be {blocks} whole numbers, got {value!s:.60}")
    return values


def nemotron_h_options(metadata: MetadataReader) -> dict[str, Any]:
    """Layers, the shape of states, and biases by the first tensor of their kind."""
    pattern = read_pattern(metadata)
    block = {kind: f"blk.{pattern.find(kind)}" for kind in "M-"}
    shape = _read_ssm_shape(metadata, block["M"] if "M" in pattern else None)
    names = ("conv_kernel", "n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim")
    biases = {
        "use_conv_bias": f"{block['M']}.ssm_conv1d.bias",
        "use_bias": f"{block['M']}.ssm_in.bias",
        "mlp_bias": f"{block['-']}.ffn_up.bias",
    }
    return {
        **dict(zip(names, shape, strict=True)),
        **{option: tensor in metadata.tensors for option, tensor in biases.items()},
        "hybrid_override_pattern": pattern,
        "intermediate_size": max(1, *_read_by_block(metadata, FEED_FORWARD)),
        "mlp_hidden_act": "relu2",
    }


def nemotron_h_expert_options(metadata: MetadataReader) -> dict[str, Any]:
    """Sizes of experts are compared with their tensors."""
    if metadata.architecture != "nemotron_h_moe":
        return {}
    metadata.require_value("expert_gating_func", SIGMOID_GATING)
    metadata.require_value("expert_group_count", 1)
    metadata.require_value("expert_group_used_count", 1)
    metadata.ignore("expert_shared_count")
    count, pattern = metadata.get_int("expert_count"), read_pattern(metadata)
    used, shared_size = metadata.get_int("expert_used_count"), metadata.get_int(SHARED_SIZE)
    if used > count:
        raise metadata.error("expert_used_count", f"must be at most expert_count, {count}, got {used}")
    if "E" in pattern:
        shared = f"blk.{pattern.index('E')}.ffn_up_shexp.weight"
        metadata.check_dimension(SHARED_SIZE, shared, 0, shared_size)
        experts = f"blk.{pattern.index('E')}.ffn_up_exps.weight"
        metadata.check_dimension("expert_count", experts, 0, count, 3)
        size = metadata.get_int("expert_feed_forward_length")
        metadata.check_dimension("expert_feed_forward_length", experts, 1, size, 3)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": shared_size,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": metadata.get_float("expert_weights_scale", 1.0),
    }


def falcon_h1_options(metadata: MetadataReader) -> dict[str, Any]:
    """Options of layers with attention and a state; multipliers are those of the weights in the file."""
    return {
        **_mamba2_options(metadata, "blk.0"),
        "mamba_d_ssm": metadata.get_int("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in metadata.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in metadata.tensors,
    }


def _mamba2_options(metadata: MetadataReader, block: str | None) -> dict[str, Any]:
    """block  that tells which biases there are"""
    kernel_size, groups, heads, state_dim, head_dim = _read_ssm_shape(metadata, block)
    return {
        "hidden_act": "silu",
        "mamba_d_conv": kernel_size,
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_state": state_dim,
        "mamba_d_head": head_dim,
        "mamba_conv_bias": f"{block}.ssm_conv1d.bias" in metadata.tensors,
        "mamba_proj_bias": f"{block}.ssm_in.bias" in metadata.tensors,
    }


def _read_ssm_shape(metadata: MetadataReader, block: str | None) -> tuple[int, int, int, int, int]:
    """Kernel size, groups, value heads, sizes of a key and of a value, compared with a block's tensors."""
    key_heads, value_heads = metadata.get_int("ssm.group_count"), metadata.get_int("ssm.time_step_rank")
    key_dim, inner = metadata.get_int("ssm.state_size"), metadata.get_int("ssm.inner_size")
    kernel_size = metadata.get_int("ssm.conv_kernel")
    if inner % value_heads:
        raise metadata.error("ssm.inner_size", f"must be a multiple of ssm.time_step_rank, {value_heads}")
    if value_heads % key_heads:
        raise metadata.error("ssm.time_step_rank", f"must be a multiple of ssm.group_count, {key_heads}")
    if block is not None:
        convolution = f"{block}.ssm_conv1d.weight"
        decays, num_dims = f"{block}.ssm_a", 2 - (metadata.architecture in DELTA_NET_ARCHITECTURES)
        metadata.check_dimension("ssm.time_step_rank", decays, 0, value_heads, num_dims)
        metadata.check_dimension("ssm.inner_size", f"{block}.ssm_out.weight", 1, inner)
        metadata.check_dimension("ssm.group_count", convolution, 0, 2 * key_heads * key_dim + inner)
        metadata.check_dimension("ssm.conv_kernel", convolution, 1, kernel_size)
    return kernel_size, key_heads, value_heads, key_dim, inner // value_heads


def _delta_net_options(metadata: MetadataReader, flags: list[bool]) -> dict[str, Any]:
    _check_mrope_sections(metadata)
    kernel_size, key_heads, value_heads, key_dim, value_dim = _read_ssm_shape(
        metadata, f"blk.{flags.index(False)}" if False in flags else None
    )
    return {
        "hidden_act": "silu",
        "layer_types": ["full_attention" if has_attention else "linear_attention" for has_attention in flags],
        "linear_conv_kernel_dim": kernel_size,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_dim,
    }


def _check_mrope_sections(metadata: MetadataReader) -> None:
    """Sections have no effect on text, whose positions are equal on all axes."""
    sections = metadata.get("rope.dimension_sections", 0)
    values = sections if isinstance(sections, list) else [sections]
    is_valid = all(type(size) is int and 0 <= size <= MAX_INT for size in values)
    if not is_valid or len(values) > MAX_MROPE_SECTIONS:
        reason = f"must be at most {MAX_MROPE_SECTIONS} whole numbers, got {sections!s:.60}"
        raise metadata.error("rope.dimension_sections", reason)
