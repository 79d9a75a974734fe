"""RoBERTa, XLM-RoBERTa, CamemBERT, and what shares their shape: multilingual E5, BGE-M3's dense vectors, ..."""

from __future__ import annotations

from types import MappingProxyType

import torch

from foreword.encoders.base import EncoderConfig, Head
from foreword.encoders.bert import Bert
from foreword.encoders.options import read_shape
from foreword.encoders.parts import Dense, ScoreHead
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["Roberta"]


class Roberta(Bert):
    """BERT whose positions begin behind the id of padding, with a head of its own."""

    prefix = "roberta."
    unused = MappingProxyType(
        {
            "lm_head.": "head of pre-training",
            "pooler.": "neither vectors nor scores read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `roberta`, `xlm-roberta` or `camembert`"""
        pad_id = config.whole("pad_token_id", 1, low=0)
        return read_shape(config, str(config.raw("model_type")), first_position=pad_id + 1)

    def load_head(self, body: Weights, whole: Weights) -> Head:
        """Two layers."""
        hidden = self.config.hidden
        dense = Dense(self.ops, whole, hidden, {"classifier.dense": hidden})
        return ScoreHead(dense, torch.tanh, Dense(self.ops, whole, hidden, {"classifier.out_proj": 1}))
