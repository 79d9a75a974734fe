"""Everything around the loaded models that an engine computes with, for one size of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cache.blocks import BlockPool
from foreword.cache.features import EncoderCache
from foreword.cache.storage import KVStorage
from foreword.config import Config
from foreword.drafting.base import Drafter, ModelBasedDrafter
from foreword.drafting.drafting import Proposer
from foreword.drafting.grammar import GrammarDrafter
from foreword.drafting.model import ModelDrafter
from foreword.drafting.ngram import NgramDrafter
from foreword.drafting.policy import FixedLength
from foreword.drafting.prediction import PredictionDrafter
from foreword.drafting.replay import ReplayWithDraftModel, ReplayDrafter, read_recording
from foreword.drafting.suffix import SuffixDrafter
from foreword.engine.assemble import BatchBuilder
from foreword.engine.encoding import VisionEncoderRunner
from foreword.engine.largest import ProfileRun, max_graph_rows
from foreword.engine.runner import ModelRunner
from foreword.engine.stages import StepTimer
from foreword.grammar.grammars import GrammarManager
from foreword.kernels.cpu.library import load_library
from foreword.kernels.device_rounds import DeviceDecodeLoop
from foreword.kernels.recorded import GraphRunner
from foreword.models.base import Model, Precision
from foreword.resolve import ModelInfo, ResolvedConfig
from foreword.sampling.sampler import Sampler

__all__ = ["LoadedModels", "EngineComponents"]

VISION_FLOP_RATIO = 2  # a multiply-add of a tower's linear layers takes as long as so many of a prompt (benchmarks/encoding.py)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models; `drafter` guesses, if there is one, and is used for contexts of `drafter_len` tokens at most."""

    target: Model
    draft_model: Model | None = None
    draft_model_len: int = 0

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.target,) if self.draft_model is None else (self.target, self.draft_model)


class EngineComponents:
    """What reads and writes tensors. `guide` shows pictures to the draft model, where both models see."""

    def __init__(self, config: Config, resolved: ResolvedConfig, never_sampled_ids: Sequence[int], loaded: LoadedModels) -> None:
        self._config = config
        self._resolved = resolved
        self._never_sampled_ids = never_sampled_ids
        self._loaded = loaded
        self._model_drafters: list[ModelDrafter] = []
        model = loaded.target
        self.timer = StepTimer()
        self.grammars = GrammarManager(model.vocab_size)
        sampler = Sampler(model.ops, model.vocab_size, never_sampled_ids, resolved.test_mode)
        self.proposer = self._make_proposer()
        self.model_runner = ModelRunner(model, self._make_kv_storage(model), sampler, self.grammars, self.timer)
        self.encoder = self._make_encoder()
        self.draft_encoder = self._make_draft_encoder()
        tile, features = model.ops.row_tile, self.encoder.features
        self.batch_builder = BatchBuilder(resolved.block_size, tile, resolved.device, model.uses_mrope, features, model.ops.supports_graphs)

    def profile_steps(self) -> ProfileRun:
        """The largest steps that there can be."""
        towers = [model.vision_encoder for model in self._loaded.models if model.vision_encoder is not None]
        return ProfileRun(self._resolved, self.batch_builder, self.model_runner, self.proposer.model_drafters, towers)

    def reserve_graphs(self, capture: bool = True) -> list[GraphRunner]:
        """Set aside what passes in graphs are computed in; they are returned, if the backend has such. captures: see there."""
        resolved, target = self._resolved, self._loaded.target
        passes = [(self.model_runner.forward, target, resolved.max_model_len)]
        passes += [(drafter.forward, drafter.model, self._loaded.draft_model_len) for drafter in self._model_drafters]
        recorded = []
        for forward, model, length in passes:
            if isinstance(forward, GraphRunner):
                blocks = -(-length // resolved.block_size)
                forward.reserve(max_graph_rows(resolved), blocks, model.uses_mrope, resolved.device, resolved.block_size, capture)
                recorded.append(forward)
        return recorded

    def decode_loops(self) -> list[tuple[DeviceDecodeLoop, int]]:
        """Those that the engine will run ahead in, if the backend has such, and how many guesses a draft model makes in each."""
        forward, sampler, resolved = self.model_runner.decode_loop_forward, self.model_runner.sampler, self._resolved
        if not isinstance(forward, GraphRunner) or not resolved.overlap or self._config.trace is not None:
            return []
        lender = self.proposer.device_drafter if resolved.draft_length == "fixed" else None
        drafted = [] if lender is None else [(lender.decode_loop_forward, resolved.num_speculative_tokens)]
        options = (resolved.block_size, sampler.never_sampled_ids)
        return [(forward.get_decode_loop(*options, drafter, sampler.with_hashes), guesses) for drafter, guesses in [(None, 0), *drafted]]

    def _make_kv_storage(self, model: Model) -> KVStorage:
        resolved = self._resolved
        return KVStorage(resolved.num_blocks, resolved.block_size, model.kv_layer_shapes, resolved.kv_cache_dtype, resolved.device)

    def _make_encoder(self) -> VisionEncoderRunner:
        resolved, model = self._resolved, self._loaded.target
        value_bytes = Precision.from_dtypes(resolved.dtype).dtype.itemsize
        cache = EncoderCache(resolved.image_cache_bytes)
        rows = resolved.max_num_batched_tokens
        return VisionEncoderRunner(model.vision_encoder, cache, _row_cost(model.info), rows, value_bytes, self.timer)

    def _make_draft_encoder(self) -> VisionEncoderRunner | None:
        for drafter in self.proposer.model_drafters:
            if isinstance(drafter, ModelDrafter) and drafter.model.vision_encoder is not None and self.encoder.enabled:
                guide = self.encoder.for_draft_model(drafter.model.vision_encoder, drafter.num_computed)
                drafter.set_image_source(guide, _row_cost(drafter.model.info))
                return guide
        return None

    def _make_proposer(self) -> Proposer:
        """Every drafter that was asked for; those that run a model apart."""
        lookups: list[Drafter] = []
        passes: list[ModelBasedDrafter] = []
        for name in self._resolved.drafters:
            drafter = self.make_drafter(name)
            if isinstance(drafter, ModelBasedDrafter):
                passes.append(drafter)
            else:
                lookups.append(drafter)
        policy = FixedLength(self._resolved.num_speculative_tokens)
        return Proposer(lookups, self._loaded.target.vocab_size, policy, passes, frozenset(self._never_sampled_ids))

    def make_drafter(self, name: str) -> Drafter:
        """The one place that knows every drafter's constructor."""
        resolved = self._resolved
        if name == "grammar":
            return GrammarDrafter()
        if name == "prediction":
            return PredictionDrafter(frozenset(self._never_sampled_ids))
        if name == "suffix":
            return SuffixDrafter(resolved.suffix_corpus_bytes, self._never_sampled_ids, load_library()[0])
        if name == "ngram":
            return NgramDrafter(resolved.prompt_lookup_min, resolved.prompt_lookup_max, frozenset(self._never_sampled_ids))
        if name == "replay":
            return self._make_replay_drafter()
        assert name == "draft"
        return self._make_model_drafter()

    def _make_replay_drafter(self) -> Drafter:
        config = self._config
        assert config.replay_file is not None
        replay = ReplayDrafter(read_recording(config.replay_file), config.replay_error_rate, self._loaded.target.vocab_size)
        return ReplayWithDraftModel(replay, self._make_model_drafter()) if config.replay_cost else replay

    def _make_model_drafter(self) -> ModelDrafter:
        resolved, model = self._resolved, self._loaded.draft_model
        assert model is not None, "a drafter without its model"
        # The two vocabularies may be padded differently: what the target cannot say is not guessed.
        unused = [i for i in self._never_sampled_ids if i < model.vocab_size]
        unused += range(self._loaded.target.vocab_size, model.vocab_size)
        drafter = ModelDrafter(
            model,
            self._make_kv_storage(model),
            Sampler(model.ops, model.vocab_size, unused),
            BlockPool(resolved.num_blocks),
            resolved.block_size,
            max_rows=resolved.max_num_batched_tokens,
            max_len=self._loaded.draft_model_len,
        )
        self._model_drafters.append(drafter)
        return drafter


def _row_cost(facts: ModelInfo) -> int:
    """Multiply-adds of a tower that take as long as a row of a prompt."""
    return (facts.parameters - facts.vision_parameters - facts.embedding_parameters) // VISION_FLOP_RATIO
