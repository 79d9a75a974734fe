"""Options of config.json that all encoders here call by the same names."""

from __future__ import annotations

from types import MappingProxyType

from foreword.encoders.base import EncoderConfig
from foreword.encoders.parts import ACTIVATIONS
from foreword.models.common import MAX_LAYERS, MAX_WIDTH
from foreword.models.config import ConfigReader

__all__ = ["read_activation", "read_score", "read_shape"]

RANKING = "ForSequenceClassification"
SCORES = MappingProxyType(
    {
        "torch.nn.modules.activation.Sigmoid": "sigmoid",
        "torch.nn.modules.linear.Identity": "identity",
    }
)
TRAINING = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dropout",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "matryoshka_dimensions",
)
BERT_LEFTOVERS = (  # options of heads that nothing here computes
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "tie_word_embeddings",
)


def read_shape(config: ConfigReader, architecture: str, *, types: int | None = None, first_position: int = 0) -> EncoderConfig:
    """The shape of a checkpoint whose options are called as BERT's.

    types           rows of the type table, if the config does not say
    first_position  in the position table, whose last rows are for the longest text
    """
    skip_without_influence(config)
    hidden, heads = config.whole("hidden_size", high=MAX_WIDTH), config.whole("num_attention_heads")
    if hidden % heads:
        raise config.refuse("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    positions = config.whole("max_position_embeddings", low=first_position + 1)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=config.whole("vocab_size"),
        hidden=hidden,
        intermediate=config.whole("intermediate_size", high=MAX_WIDTH),
        layers=config.whole("num_hidden_layers", high=MAX_LAYERS),
        heads=heads,
        eps=config.number("layer_norm_eps", 1e-12),
        activation=read_activation(config, "hidden_act"),
        max_tokens=positions - first_position,
        positions=positions,
        score=read_score(config),
        first_position=first_position,
        pad_id=first_position - 1 if first_position else None,
        types=config.whole("type_vocab_size", 2) if types is None else types,
    )


def skip_without_influence(config: ConfigReader) -> None:
    """Options that are read for no other purpose than that they are known."""
    for key in (*TRAINING, *BERT_LEFTOVERS):
        config.raw(key, None)


def read_activation(config: ConfigReader, key: str) -> str:
    """The name of an activation."""
    return config.choice(key, {name: name for name in ACTIVATIONS}, "gelu")


def read_score(config: ConfigReader) -> str | None:
    """What becomes of the logit of a ranker; None if the checkpoint has no such head.

    As sentence-transformers and vLLM have it: a sigmoid, unless the checkpoint names something else.
    """
    named = config.raw("sbert_ce_default_activation_function", None)
    nested = config.table("sentence_transformers")
    if nested is not None:
        nested.raw("version", None)
        named = nested.raw("activation_fn", named)
        nested.finish()
    architectures = config.raw("architectures", None) or []
    if not any(str(name).endswith(RANKING) for name in architectures):
        return None
    labels = len(config.raw("id2label", {})) or config.whole("num_labels", 2)
    if labels != 1:
        raise config.refuse("id2label", f"names {labels} labels; a checkpoint that ranks has one")
    if named is not None and named not in SCORES:
        raise config.refuse("sentence_transformers", f"activation_fn must be one of {', '.join(SCORES)}, got {named!r:.80}")
    return SCORES[named] if named else "sigmoid"
