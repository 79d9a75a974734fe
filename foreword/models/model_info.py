"""Properties of a decoder that plans of memory need."""

from __future__ import annotations

from foreword.models.decoder_config import DecoderConfig
from foreword.models.expert_weights import MoEConfig
from foreword.planning.memory import ModelInfo


def describe_model(config: DecoderConfig, num_parameters: int, lora_values_per_rank: int) -> ModelInfo:
    kv_shapes = config.kv_shapes
    projected = max((config.num_heads + 2 * shape.heads) * shape.head_dim for shape in kv_shapes)
    embedding_sizes = config.hidden_size * (2 - config.tie_word_embeddings)
    per_layer = len(config.layer_types) * config.per_layer_size
    inner, moe = 3 * config.intermediate_size * (1 + config.double_wide_mlp), config.moe
    if moe is not None:
        inner = max(inner, moe.experts.top_k * (3 * moe.intermediate_size + config.hidden_size))
    return ModelInfo(
        architecture=config.architecture,
        context_len=config.context_length,
        dtype=config.dtype,
        parameters=num_parameters,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        kv_values_per_token=sum(shape.values_per_token for shape in kv_shapes),
        kv_vectors_per_token=sum(shape.vectors_per_token for shape in kv_shapes),
        state_shapes=config.state_shapes,
        embedding_parameters=config.vocab_size * (embedding_sizes + per_layer),
        activation_values_per_row=3 * config.hidden_size
        + per_layer
        + max(inner, 2 * projected, 2 * per_layer),
        num_experts=moe.experts.num_experts if moe else 0,
        experts_per_token=moe.experts.top_k if moe else 0,
        expert_parameters=_expert_parameters(moe, config.hidden_size) if moe else 0,
        lora_values_per_rank=lora_values_per_rank,
    )


def _expert_parameters(moe: MoEConfig, hidden_size: int) -> int:
    """Parameters of all experts but the shared ones."""
    of_one = (2 + moe.experts.gated) * moe.intermediate_size * hidden_size
    of_one += (2 * moe.intermediate_size + hidden_size) * moe.bias
    return sum(moe.has_experts) * moe.experts.num_experts * of_one
