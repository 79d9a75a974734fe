"""Everything around the loaded models that an engine computes with, for one size of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cache.blocks import BlockPool
from foreword.cache.features import FeatureCache
from foreword.cache.storage import KVStorage
from foreword.config import Config
from foreword.drafting.base import Drafter, PassDrafter
from foreword.drafting.drafting import Drafting
from foreword.drafting.grammar import GrammarDrafter
from foreword.drafting.model import ModelDrafter
from foreword.drafting.ngram import NgramDrafter
from foreword.drafting.policy import FixedLength
from foreword.drafting.prediction import PredictionDrafter
from foreword.drafting.replay import PaidReplay, ReplayDrafter, read_recording
from foreword.drafting.suffix import SuffixDrafter
from foreword.engine.assemble import Assembler
from foreword.engine.encoding import Encoder
from foreword.engine.largest import LargestSteps, graph_rows
from foreword.engine.runner import Runner
from foreword.engine.stages import Stages
from foreword.grammar.grammars import Grammars
from foreword.kernels.cpu.library import load_library
from foreword.kernels.device_rounds import DeviceRounds
from foreword.kernels.recorded import RecordedForward
from foreword.models.base import Model, Precision
from foreword.resolve import ModelFacts, Resolved
from foreword.sampling.sampler import Sampler

__all__ = ["Loaded", "Parts"]

TOWER_PACE = 2  # a multiply-add of a tower's linear layers takes as long as so many of a prompt (benchmarks/encoding.py)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models; `drafter` guesses, if there is one, and is used for contexts of `drafter_len` tokens at most."""

    target: Model
    drafter: Model | None = None
    drafter_len: int = 0

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.target,) if self.drafter is None else (self.target, self.drafter)


class Parts:
    """What reads and writes tensors. `guide` shows pictures to the draft model, where both models see."""

    def __init__(self, config: Config, resolved: Resolved, unused_ids: Sequence[int], loaded: Loaded) -> None:
        self._config = config
        self._resolved = resolved
        self._unused_ids = unused_ids
        self._loaded = loaded
        self._model_drafters: list[ModelDrafter] = []
        model = loaded.target
        self.stages = Stages()
        self.grammars = Grammars(model.vocab_size)
        sampler = Sampler(model.ops, model.vocab_size, unused_ids, resolved.test_mode)
        self.drafting = self._drafting()
        self.runner = Runner(model, self._storage(model), sampler, self.grammars, self.stages)
        self.encoder = self._encoder()
        self.guide = self._guide()
        tile, features = model.ops.row_tile, self.encoder.features
        self.assembler = Assembler(resolved.block_size, tile, resolved.device, model.directions, features, model.ops.recordable)

    def largest(self) -> LargestSteps:
        """The largest steps that there can be."""
        towers = [model.tower for model in self._loaded.models if model.tower is not None]
        return LargestSteps(self._resolved, self.assembler, self.runner, self.drafting.passes, towers)

    def reserve(self, captures: bool = True) -> list[RecordedForward]:
        """Set aside what passes in graphs are computed in; they are returned, if the backend has such. captures: see there."""
        resolved, target = self._resolved, self._loaded.target
        passes = [(self.runner.forward, target, resolved.max_model_len)]
        passes += [(drafter.forward, drafter.model, self._loaded.drafter_len) for drafter in self._model_drafters]
        recorded = []
        for forward, model, length in passes:
            if isinstance(forward, RecordedForward):
                blocks = -(-length // resolved.block_size)
                forward.reserve(graph_rows(resolved), blocks, model.directions, resolved.device, resolved.block_size, captures)
                recorded.append(forward)
        return recorded

    def rounds(self) -> list[tuple[DeviceRounds, int]]:
        """Those that the engine will run ahead in, if the backend has such, and how many guesses a draft model makes in each."""
        forward, sampler, resolved = self.runner.ahead, self.runner.sampler, self._resolved
        if not isinstance(forward, RecordedForward) or not resolved.overlap or self._config.trace is not None:
            return []
        lender = self.drafting.lender if resolved.draft_length == "fixed" else None
        drafted = [] if lender is None else [(lender.ahead, resolved.num_speculative_tokens)]
        options = (resolved.block_size, sampler.unused_ids)
        return [(forward.rounds(*options, drafter, sampler.hashing), guesses) for drafter, guesses in [(None, 0), *drafted]]

    def _storage(self, model: Model) -> KVStorage:
        resolved = self._resolved
        return KVStorage(resolved.num_blocks, resolved.block_size, model.kv_layers, resolved.kv_cache_dtype, resolved.device)

    def _encoder(self) -> Encoder:
        resolved, model = self._resolved, self._loaded.target
        value_bytes = Precision.of(resolved.dtype).dtype.itemsize
        cache = FeatureCache(resolved.image_cache_bytes)
        rows = resolved.max_num_batched_tokens
        return Encoder(model.tower, cache, _row_cost(model.facts), rows, value_bytes, self.stages)

    def _guide(self) -> Encoder | None:
        for drafter in self.drafting.passes:
            if isinstance(drafter, ModelDrafter) and drafter.model.tower is not None and self.encoder.sees:
                guide = self.encoder.beside(drafter.model.tower, drafter.known)
                drafter.see_with(guide, _row_cost(drafter.model.facts))
                return guide
        return None

    def _drafting(self) -> Drafting:
        """Every drafter that was asked for; those that run a model apart."""
        lookups: list[Drafter] = []
        passes: list[PassDrafter] = []
        for name in self._resolved.drafters:
            drafter = self.drafter(name)
            if isinstance(drafter, PassDrafter):
                passes.append(drafter)
            else:
                lookups.append(drafter)
        policy = FixedLength(self._resolved.num_speculative_tokens)
        return Drafting(lookups, self._loaded.target.vocab_size, policy, passes, frozenset(self._unused_ids))

    def drafter(self, name: str) -> Drafter:
        """The one place that knows every drafter's constructor."""
        resolved = self._resolved
        if name == "grammar":
            return GrammarDrafter()
        if name == "prediction":
            return PredictionDrafter(frozenset(self._unused_ids))
        if name == "suffix":
            return SuffixDrafter(resolved.suffix_corpus_bytes, self._unused_ids, load_library()[0])
        if name == "ngram":
            return NgramDrafter(resolved.prompt_lookup_min, resolved.prompt_lookup_max, frozenset(self._unused_ids))
        if name == "replay":
            return self._replay_drafter()
        assert name == "draft"
        return self._model_drafter()

    def _replay_drafter(self) -> Drafter:
        config = self._config
        assert config.replay_file is not None
        replay = ReplayDrafter(read_recording(config.replay_file), config.replay_error_rate, self._loaded.target.vocab_size)
        return PaidReplay(replay, self._model_drafter()) if config.replay_cost else replay

    def _model_drafter(self) -> ModelDrafter:
        resolved, model = self._resolved, self._loaded.drafter
        assert model is not None, "a drafter without its model"
        # The two vocabularies may be padded differently: what the target cannot say is not guessed.
        unused = [i for i in self._unused_ids if i < model.vocab_size]
        unused += range(self._loaded.target.vocab_size, model.vocab_size)
        drafter = ModelDrafter(
            model,
            self._storage(model),
            Sampler(model.ops, model.vocab_size, unused),
            BlockPool(resolved.num_blocks),
            resolved.block_size,
            max_rows=resolved.max_num_batched_tokens,
            max_len=self._loaded.drafter_len,
        )
        self._model_drafters.append(drafter)
        return drafter


def _row_cost(facts: ModelFacts) -> int:
    """Multiply-adds of a tower that take as long as a row of a prompt."""
    return (facts.parameters - facts.tower_parameters - facts.embedding_parameters) // TOWER_PACE
