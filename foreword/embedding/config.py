"""Options of config.json that all encoders here call by the same names."""

from __future__ import annotations

from types import MappingProxyType

from foreword.embedding.base import EncoderConfig
from foreword.embedding.layers import ACTIVATIONS
from foreword.models.common import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.models.config import ConfigReader

__all__ = ["read_activation", "read_bert_config", "read_score_activation"]

RANKER_SUFFIX = "ForSequenceClassification"
SCORE_ACTIVATIONS = MappingProxyType(
    {
        "torch.nn.modules.activation.Sigmoid": "sigmoid",
        "torch.nn.modules.linear.Identity": "identity",
    }
)
TRAINING_OPTIONS = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dropout",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "matryoshka_dimensions",
)
UNUSED_HEAD_OPTIONS = (  # options of heads that nothing here computes
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "tie_word_embeddings",
)


def read_bert_config(
    config: ConfigReader, architecture: str, *, num_types: int | None = None, first_position: int = 0
) -> EncoderConfig:
    """The shape of a checkpoint whose options are called as BERT's.

    types           rows of the type table, if the config does not say
    first_position  in the position table, whose last rows are for the longest text
    """
    ignore_unused(config)
    hidden, heads = config.get_int("hidden_size", high=MAX_HIDDEN_SIZE), config.get_int("num_attention_heads")
    if hidden % heads:
        raise config.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    config.require_value("position_embedding_type", "absolute")
    config.require_value("is_decoder", False)
    config.require_value("add_cross_attention", False)
    positions = config.get_int("max_position_embeddings", low=first_position + 1)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=config.get_int("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE),
        num_layers=config.get_int("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        eps=config.get_float("layer_norm_eps", 1e-12),
        activation=read_activation(config, "hidden_act"),
        max_tokens=positions - first_position,
        num_positions=positions,
        score_activation=read_score_activation(config),
        first_position=first_position,
        pad_id=first_position - 1 if first_position else None,
        num_types=config.get_int("type_vocab_size", 2) if num_types is None else num_types,
    )


def ignore_unused(config: ConfigReader) -> None:
    """Options that are read for no other purpose than that they are known."""
    for key in (*TRAINING_OPTIONS, *UNUSED_HEAD_OPTIONS):
        config.get(key, None)


def read_activation(config: ConfigReader, key: str) -> str:
    """The name of an activation."""
    return config.get_choice(key, {name: name for name in ACTIVATIONS}, "gelu")


def read_score_activation(config: ConfigReader) -> str | None:
    """What becomes of the logit of a ranker; None if the checkpoint has no such head.

    As sentence-transformers and vLLM have it: a sigmoid, unless the checkpoint names something else.
    """
    named = config.get("sbert_ce_default_activation_function", None)
    nested = config.get_section("sentence_transformers")
    if nested is not None:
        nested.get("version", None)
        named = nested.get("activation_fn", named)
        nested.check_all_read()
    architectures = config.get("architectures", None) or []
    if not any(str(name).endswith(RANKER_SUFFIX) for name in architectures):
        return None
    labels = len(config.get("id2label", {})) or config.get_int("num_labels", 2)
    if labels != 1:
        raise config.error("id2label", f"names {labels} labels; a checkpoint that ranks has one")
    if named is not None and named not in SCORE_ACTIVATIONS:
        raise config.error(
            "sentence_transformers",
            f"activation_fn must be one of {', '.join(SCORE_ACTIVATIONS)}, got {named!r:.80}",
        )
    return SCORE_ACTIVATIONS[named] if named else "sigmoid"
