"""Reads the options of config.json that encoders share."""

from __future__ import annotations

from types import MappingProxyType

from foreword.embedding.encoder import EncoderConfig
from foreword.embedding.encoder_layers import ACTIVATIONS
from foreword.errors import shown
from foreword.models.decoder_config import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.weights.config_reader import ConfigReader, read_vocab_size

RANKER_SUFFIX = "ForSequenceClassification"
SCORE_ACTIVATIONS = MappingProxyType(
    {"torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.linear.Identity": "identity"}
)
TRAINING_OPTIONS = (
    *("attention_probs_dropout_prob", "classifier_dropout", "dropout", "gradient_checkpointing"),
    *("hidden_dropout_prob", "matryoshka_dimensions"),
)
UNUSED_HEAD_OPTIONS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "tie_word_embeddings"),
)


def read_bert_config(
    config: ConfigReader, architecture: str, *, num_types: int | None = None, first_position: int = 0
) -> EncoderConfig:
    """The config of a checkpoint with BERT's option names.

    `num_types` overrides type_vocab_size; `first_position` is the position of a text's first token.
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
        vocab_size=read_vocab_size(config),
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
    """Mark options without effect on inference as read."""
    for key in (*TRAINING_OPTIONS, *UNUSED_HEAD_OPTIONS):
        config.get(key, None)


def read_activation(config: ConfigReader, key: str) -> str:
    """The name of an activation in `layers.ACTIVATIONS`."""
    return config.get_choice(key, {name: name for name in ACTIVATIONS}, "gelu")


def read_score_activation(config: ConfigReader) -> str | None:
    """The activation of a ranker's logit; None for a checkpoint without a ranking head.

    Default is a sigmoid, as in sentence-transformers and vLLM.
    """
    named = config.get("sbert_ce_default_activation_function", None)
    nested = config.get_section("sentence_transformers")
    if nested is not None:
        nested.get("version", None)
        named = nested.get("activation_fn", named)
        nested.check_all_read()
    architectures = config.get("architectures", None)
    names = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith(RANKER_SUFFIX) for name in names):
        return None
    id2label = config.get_section("id2label")
    labels = config.get_int("num_labels", 2) if id2label is None else len(id2label.keys)
    if labels != 1:
        raise config.error("id2label", f"names {labels} labels; a ranker has one")
    if named is not None and named not in SCORE_ACTIVATIONS:
        raise config.error(
            "sentence_transformers",
            f"activation_fn must be one of {', '.join(SCORE_ACTIVATIONS)}, got {shown(named)}",
        )
    return SCORE_ACTIVATIONS[named] if named else "sigmoid"
