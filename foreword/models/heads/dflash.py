"""DFlash heads: layers that draft a block of tokens in one pass. Source: arXiv 2602.06036.

DSpark heads are DFlash heads with a Markov head: logits depend on the draft's tokens before. It is
that of SpecForge and DeepSpec (`markov_head.py`, `AcceptRatePredictor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch, HeadCache, HeadShape
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.weights import Weights
from foreword.models.architectures import read_decoder
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.heads.aux_head import AuxHead, AuxHeadConfig, DraftLogits, head_mismatch
from foreword.models.interfaces import KVCache, MarkovStep, ParallelDraft, Precision
from foreword.models.layer_builder import LayerBuilder, build_norm
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

MARKOV_KINDS = ("vanilla", "gated", "rnn")
CONFIDENCE = "confidence_head.proj"
BLOCK_SIZE = 16
UNUSED_KEYS = ("has_no_defaults_at_init", "speculators_config", "speculators_version")
# Methods with DFlash's layers that are refused, and what they add
EXTENSIONS = {"dflash2": "a candidate selector and convolutions (DFlash2)"}
# Options of DSpark's training
UNUSED_DSPARK_KEYS = (
    *("attention_mode", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"),
    *("num_anchors", "projector_type"),
)
# A confidence head that is disabled, or has no Markov head beside it
UNUSED_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")
# DeepSpec's config has no `dflash_config`, and these beside the options of the layers
DEEPSPEC_KEYS = (
    *("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "proposal_hidden_offset"),
    *("confidence_head_with_markov", "enable_confidence_head", "verification_block_size"),
    *UNUSED_DSPARK_KEYS,
)
OPTIONS_KEY = "dflash_config"
ANCHOR_KEYS = ("sample_from_anchor", "query_zero_predicts_next")
OWN_KEYS = (
    *ANCHOR_KEYS,
    *(OPTIONS_KEY, "block_size", "is_causal", "is_neox_style", "add_swa_attention_sink_bias"),
    *("draft_vocab_size", "target_hidden_size", "num_target_layers"),
)


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """kind: what a token's bias is made of.

    vanilla  the token before, through two tables of low rank
    gated    the same, times a gate of the hidden state and the token before
    rnn      a state over all tokens of the draft, the token before and the hidden state
    """

    rank: int = 0  # 0: no Markov head
    kind: str = "vanilla"
    uses_confidence: bool = False  # the checkpoint may have no confidence head all the same
    # The confidence head reads the token before, not only the hidden state
    confidence_reads_token: bool = True


NO_MARKOV_HEAD = MarkovConfig()


@dataclass(frozen=True, slots=True)
class DFlashConfig(AuxHeadConfig):
    """Options of a head."""

    parallel: ParallelDraft
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_target_layers: int | None = None  # None: the config does not say
    markov: MarkovConfig = NO_MARKOV_HEAD

    @classmethod
    def read(cls, config: ConfigReader) -> DFlashConfig:
        """config.json in the original's or speculators' format. Raises CheckpointError."""
        _refuse_extensions(config)
        if "transformer_layer_config" in config:
            return cls._read_speculators(config.without(UNUSED_KEYS))
        return cls._read_original(config)

    @classmethod
    def _read_original(cls, config: ConfigReader) -> DFlashConfig:
        """`target_layer_ids` name layers by their output, which is the next one's input."""
        own, is_dspark = config.get_section(OPTIONS_KEY), _is_dspark(config)
        if own is None:
            if not is_dspark:
                raise config.error(OPTIONS_KEY, "is missing")
            own = ConfigReader({key: config.get(key, None) for key in DEEPSPEC_KEYS}, config.source)
            config = config.without(DEEPSPEC_KEYS)
            own.require_value("verification_block_size", config.get("block_size"))
            own.require_value("proposal_hidden_offset", 0)
        markov = _read_markov(own, reads_token=OPTIONS_KEY not in config) if is_dspark else NO_MARKOV_HEAD
        samples_last = _samples_last_token(own, config, is_dspark)
        aux_layers = tuple(each + 1 for each in _read_layers(own, "target_layer_ids"))
        size = own.get_int("block_size", config.get_int("block_size", BLOCK_SIZE, low=2), low=2)
        parallel = ParallelDraft(_read_mask(own), size - (not samples_last), samples_last, False)
        causal = config.get("is_causal", own.get("causal", None))
        if causal not in (None, True, False):
            raise config.error("is_causal", f"must be true or false, got {causal!r:.60}")
        for key, reader in (("attention_sink_bias", own), ("add_swa_attention_sink_bias", config)):
            reader.require_value(key, False)
        own.require_value("use_aux_hidden_state", True)
        config.require_value("is_neox_style", True)
        layer = _read_layers_config(_with_windows(config, own), causal, parallel)
        head = cls(
            layer,
            aux_layers,
            parallel,
            *_read_sizes(config, layer),
            own.get_float("input_embedding_scale", 1.0),
            own.get_float("output_multiplier", 1.0),
            own.get_optional_float("final_logit_softcapping"),
            config.get_optional_int("num_target_layers"),
            markov,
        )
        own.check_all_read()
        return head

    @classmethod
    def _read_speculators(cls, config: ConfigReader) -> DFlashConfig:
        """`aux_hidden_state_layer_ids` name layers by their input."""
        section = config.get_section("transformer_layer_config")
        assert section is not None
        config.get("speculators_model_type", None)
        config.require_value("tie_word_embeddings", False)
        aux_layers = _read_layers(config, "aux_hidden_state_layer_ids")
        size = config.get_int("block_size", 8, low=2)
        samples_last = config.get_bool("sample_from_anchor", False)
        markov = _read_markov(config) if _is_dspark(config) else NO_MARKOV_HEAD
        parallel = ParallelDraft(_read_mask(config), size - (not samples_last), samples_last, False)
        # Windows see what comes later in the block only with this option
        causal = False if config.get_bool("sliding_window_non_causal", False) else None
        layer = _read_layers_config(section.with_defaults({"dtype": config.get_dtype()}), causal, parallel)
        head = cls(layer, aux_layers, parallel, *_read_sizes(config, layer), markov=markov)
        config.check_all_read()
        return head


class DFlash(AuxHead):
    """See Head. It keeps K and V of each layer, of the fused auxiliary hidden states at known tokens.

    A draft is one pass over the last token and masks behind it, which see each other.
    """

    NAME = "DFlash"
    FIRST_POSITION = 0
    method = "dflash"

    def __init__(
        self,
        config: DFlashConfig,
        target: Decoder,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
        vocab_ids: Tensor | None,
    ) -> None:
        """See AuxHead."""
        num_layers = len(target.config.layer_types)
        if config.num_target_layers not in (None, num_layers):
            counts = f"{config.num_target_layers} layers, this one has {num_layers}"
            raise head_mismatch(self.NAME, f"is made for a model of {counts}")
        options = (target, ops, precision, weights, device, max_model_len, vocab_ids)
        super().__init__(
            config, *options, embedding_scale=config.embedding_scale, softcap=config.logit_softcap
        )
        layers, size = config.layer, config.layer.hidden_size
        self._config = config
        self._hidden_norm = build_norm(ops, layers, weights, "hidden_norm")
        builders = [
            LayerBuilder(
                ops,
                layers,
                precision,
                index,
                weights.prefixed(f"layers.{index}."),
                head_inputs=size,
                first_position=self.FIRST_POSITION,
            )
            for index in range(len(layers.layer_types))
        ]
        self._attentions = [builder.attention("self_attn") for builder in builders]
        self._layers = [LlamaLayer(b, mixer) for b, mixer in zip(builders, self._attentions, strict=True)]
        self._norm = build_norm(ops, layers, weights, "norm")
        self.cache_shape = HeadShape(layers.kv_shapes, 0)
        vocab_sizes = target.vocab_size, config.draft_vocab_size
        markov = None
        if config.markov.rank:
            markov_options = (config.markov, ops, precision, weights, size, vocab_sizes, vocab_ids)
            markov = DSparkMarkovHead(*markov_options, self._scaled_logits)
        self.parallel = replace(config.parallel, markov=markov)
        self.info = self._describe(config.markov.rank * sum(vocab_sizes))

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """See Head."""
        x = self._hidden_norm(self._fc(self._ops.concat(aux_hidden_states)))
        contexts = self._contexts(batch)
        for attention, context, memory in zip(self._attentions, contexts, cache.layers, strict=True):
            attention.write_kv(x, context, memory)

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """See Head. With a Markov head the result is hidden states, of which it makes logits."""
        cache = kv_cache.head
        assert cache is not None
        norm, has_markov = self._norm.scaled(self._config.logit_scale), self._config.markov.rank > 0

        def output(x: Tensor) -> Tensor:
            return self._logits(norm(x)) if not has_markov else self._norm(x)

        def draft(batch: Batch) -> Tensor:
            ops = self._ops
            x = self._embedding(batch.token_ids)
            contexts = self._contexts(batch)
            for layer, context, memory in zip(self._layers, contexts, cache.layers, strict=True):
                x = layer(x, context, memory)
            return output(ops.index_rows(x, batch.sample_rows))

        return self._ops.compile(draft)

    def _scaled_logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden * self._config.logit_scale)


class DSparkMarkovHead:
    """See interfaces.MarkovHead."""

    def __init__(
        self,
        config: MarkovConfig,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        hidden_size: int,
        vocab_sizes: tuple[int, int],
        vocab_ids: Tensor | None,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """vocab_sizes  of the target and of the draft
        vocab_ids  as in DraftLogits
        logits  of hidden states without the bias
        """
        self.logits = logits
        self._config = config
        self._ops = ops
        self._dtype = precision.dtype
        rank, body = config.rank, weights.prefixed("markov_head.")
        tables = (ops, body, precision.embedding_format, rank)
        embedding = load_linear(*tables, {"markov_w1": vocab_sizes[0]})
        output = Linear(ops, load_linear(*tables, {"markov_w2": vocab_sizes[1]}), torch.float32)
        self._embedding = Embedding(ops, embedding, precision.dtype)
        self._output = DraftLogits(ops, output, vocab_sizes[0], vocab_ids)
        name, width, size = {
            "vanilla": ("", 0, 0),
            "gated": ("gate_proj", hidden_size + rank, rank),
            "rnn": ("joint_proj", hidden_size + 2 * rank, 3 * rank),
        }[config.kind]
        self._proj = self._load_linear(body, precision, name, width, size) if name else None
        self._confidence: Linear | None = None
        if config.uses_confidence and weights.has(f"{CONFIDENCE}.weight"):
            width = hidden_size + rank * config.confidence_reads_token
            self._confidence = self._load_linear(weights, precision, CONFIDENCE, width, 1)

    def initial_state(self, num_drafts: int) -> Tensor:
        """See interfaces.MarkovHead."""
        return torch.zeros(num_drafts, self._config.rank, dtype=self._dtype)

    def step(self, hidden: Tensor, token_ids: Tensor, state: Tensor) -> MarkovStep:
        """See interfaces.MarkovHead."""
        token = self._embedding(token_ids)
        latent, logprobs = token, None
        if self._config.kind == "gated":
            latent = token * self._project((hidden, token)).sigmoid().to(token.dtype)
        elif self._config.kind == "rnn":
            gate, candidate, value = self._project((state.to(token.device), token, hidden)).chunk(3, -1)
            gate = gate.sigmoid()
            state = (gate * state + (1 - gate) * candidate.tanh()).to(token.dtype)
            latent = value.tanh().to(token.dtype)
        if self._confidence is not None:
            parts = (hidden, token) if self._config.confidence_reads_token else (hidden,)
            score = self._confidence(self._ops.concat(parts))[:, 0]
            logprobs = F.logsigmoid(score).nan_to_num(nan=-torch.inf)
        return MarkovStep(self._output(latent), state, logprobs)

    def _load_linear(
        self, weights: Weights, precision: Precision, name: str, width: int, size: int
    ) -> Linear:
        weight = load_linear(self._ops, weights, precision.linear_format, width, {name: size}, bias=True)
        return Linear(self._ops, weight, torch.float32)

    def _project(self, parts: tuple[Tensor, ...]) -> Tensor:
        assert self._proj is not None
        return self._proj(self._ops.concat(parts))


def _kinds(config: ConfigReader) -> str:
    names = [config.get("speculators_model_type", None), *(config.get_strs("architectures") or ())]
    return " ".join(map(str, names)).lower()


def _is_dspark(config: ConfigReader) -> bool:
    return "dspark" in _kinds(config)


def _read_sizes(config: ConfigReader, layer: DecoderConfig) -> tuple[int, int]:
    """Sizes of the draft vocabulary and of the target's hidden states."""
    draft_vocab_size = config.get_optional_int("draft_vocab_size") or layer.vocab_size
    return draft_vocab_size, config.get_optional_int("target_hidden_size") or layer.hidden_size


def _read_markov(config: ConfigReader, reads_token: bool = True) -> MarkovConfig:
    """reads_token: whether the confidence head reads the token before, if the config does not say."""
    kind = config.get("markov_head_type", "vanilla")
    if kind not in MARKOV_KINDS:
        raise config.error("markov_head_type", f"must be one of {', '.join(MARKOV_KINDS)}, got {kind!r:.60}")
    for key in UNUSED_DSPARK_KEYS:
        config.get(key, None)
    return MarkovConfig(
        config.get_int("markov_rank", 0, low=0),
        kind,
        config.get_bool("enable_confidence_head", True),
        config.get_bool("confidence_head_with_markov", reads_token),
    )


def _samples_last_token(own: ConfigReader, config: ConfigReader, default: bool) -> bool:
    """Whether the last token's row drafts: DSpark is trained so where its config does not say."""
    given = [reader.get_bool(key, False) for reader in (own, config) for key in ANCHOR_KEYS if key in reader]
    return any(given) if given else default


def _refuse_extensions(config: ConfigReader) -> None:
    kinds = _kinds(config)
    for name, parts in EXTENSIONS.items():
        if name in kinds:
            raise CheckpointError(f"{config.source}: the head has {parts}, which are not supported here")


def _read_layers(config: ConfigReader, key: str) -> tuple[int, ...]:
    values: Any = config.get(key)
    if not isinstance(values, list) or not values or not all(type(each) is int for each in values):
        raise config.error(key, f"must be a list of layers, got {values!r:.60}")
    return tuple(values)


def _read_mask(config: ConfigReader) -> int:
    if "mask_token_id" not in config:
        raise config.error("mask_token_id", "is missing: a block of masks is what the head drafts from")
    return config.get_int("mask_token_id", low=0)


def _with_windows(config: ConfigReader, own: ConfigReader) -> ConfigReader:
    """`use_swa`: all layers have a window, if `layer_types` gives none of them one."""
    types = config.get_strs("layer_types") or ()
    window = own.get_optional_int("swa_window_size", config.get_optional_int("sliding_window", low=0))
    uses_window = own.get_bool("use_swa", False)
    if not uses_window or "sliding_attention" in types:
        return config.without(OWN_KEYS)
    if not window:
        raise own.error("use_swa", "needs swa_window_size or sliding_window")
    sliding = ["sliding_attention"] * config.get_int("num_hidden_layers")
    options = {"use_sliding_window": True, "sliding_window": window, "layer_types": sliding}
    return config.without((*OWN_KEYS, *options)).with_defaults(options)


def _read_layers_config(config: ConfigReader, causal: bool | None, parallel: ParallelDraft) -> DecoderConfig:
    """causal: of all layers; None: layers with a window are, others see the whole block.

    A window counts from the block's end where rows see all of it, so it is longer by the block.
    """
    config.require_value("model_type", "qwen3")
    layers = read_decoder(config, "qwen3")[1]
    types = []
    for each in layers.layer_types:
        is_causal = each.window is not None if causal is None else causal
        window = each.window
        if window is not None and not is_causal:
            window += parallel.max_rows
        types.append(replace(each, window=window, causal=is_causal))
    return replace(layers, layer_types=tuple(types), takes_lora=False)
