"""RoBERTa, XLM-RoBERTa, CamemBERT, and what shares their shape: multilingual E5, BGE-M3's dense vectors, ..."""

from __future__ import annotations

from types import MappingProxyType

import torch

from foreword.embedding.base import EncoderConfig, RankerHead
from foreword.embedding.bert import Bert
from foreword.embedding.config import read_bert_config
from foreword.embedding.layers import ClassificationHead, EncoderLinear
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["Roberta"]


class Roberta(Bert):
    """BERT whose positions begin behind the id of padding, with a head of its own."""

    prefix = "roberta."
    unused_prefixes = MappingProxyType(
        {
            "lm_head.": "head of pre-training",
            "pooler.": "neither vectors nor scores read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `roberta`, `xlm-roberta` or `camembert`"""
        pad_id = config.get_int("pad_token_id", 1, low=0)
        return read_bert_config(config, str(config.get("model_type")), first_position=pad_id + 1)

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Two layers."""
        hidden = self.config.hidden_size
        dense = EncoderLinear(self.ops, checkpoint, hidden, {"classifier.dense": hidden})
        return ClassificationHead(
            dense, torch.tanh, EncoderLinear(self.ops, checkpoint, hidden, {"classifier.out_proj": 1})
        )
